"""`plan --compile`: a run's own programs, compiled by XLA:TPU for the slice, or by XLA:GPU for the
GPUs, on this machine, which has neither.

While it runs, more lies in a device's memory than the compiler assigns to it: the trainer's state
beside the sampler. The chip has to hold the sum.
"""

import contextlib
import multiprocessing
import re
import signal
import sys
import time
from concurrent import futures
from typing import Any

import jax

from dapo_jax import build, parallel
from dapo_jax.config import validation
from dapo_jax.model import adapters, qwen2
from dapo_jax.parallel import Call
from dapo_jax.plan import hlo
from dapo_jax.plan.footprint import GB
from dapo_jax.plan.report import filled_in
from dapo_jax.pods import topology
from dapo_jax.pods.slices import Pod

CRASHED = "the compiler broke off with a fault of its own; nothing is known of this program"
WANTED = {  # where there is no compiler
    "tpu": "--compile and --kernels need XLA:TPU's compiler, libtpu (no TPU): pip install"
    " 'dapo_jax[tpu]'; the arithmetic above stands without it",
    "gpu": "--compile needs XLA:GPU's compiler (no GPU): pip install 'dapo_jax[cuda13]'; the"
    " arithmetic above stands without it",
}


def machine_for(config, shape: qwen2.Shape, pod: Pod) -> build.Machine:
    """The config's programs on the described devices of `pod`. ValueError: the mesh cannot be laid
    over them."""
    sizes = validation.resolve_mesh(config, pod.devices)
    mesh = topology.laid(pod.described(), sizes)
    # Which ids end a response changes no size.
    return build.assemble(config, mesh, shape, stop_ids=(0, 1))


def beside(config, calls: dict[str, Call]) -> dict[str, dict[str, int]]:
    """{program: {item: bytes per device}} of what a step keeps in memory while that program runs
    and does not hand to it. What rests in the hosts' memory takes none of the device's."""
    params, opt_state, batch, _ = calls["update"].arguments
    has_old, has_ref = config.loss.old_logprobs == "recompute", bool(config.loss.kl_coef)
    logps = has_old * _bytes(batch.old_logp_AxRxT) + has_ref * _bytes(batch.ref_logp_AxRxT)
    logps += _bytes(batch.terms)
    trained, U, cells = _bytes(adapters.trained(params)), config.optim.minibatches, 0
    weights, value, value_moments = {"master weights (float32)": trained}, {}, {}
    if base := _bytes(params) - trained:
        weights = {f"base ({config.model.dtype})": base, "adapters (float32)": trained}
    if "update of values" in calls:
        value_params, value_state, targets, _ = calls["update of values"].arguments
        value = {"value model's weights (float32)": _bytes(value_params)}
        value_moments = {"value model's optimizer state": _bytes(value_state)}
        cells = _bytes(targets.returns_AxRxT)
    moments = {"optimizer state": _bytes(opt_state)}
    reference = {"reference weights (float32)": trained * has_ref}
    both, of_policy = value | value_moments, weights | moments
    packed = {"the other mini-batches": (_bytes(batch.rows) + logps) * (U - 1)}
    values = {"values": cells * (U - 1) + logps}
    made = {"values, advantages, returns": cells * (3 * U - 2) + logps}
    by_kind = {
        "decode weights": moments | reference | both,
        "old log-probs": moments | reference | both | packed,
        "update": reference | both | packed,
        "values": of_policy | reference | value_moments | packed | values,
        "update of values": of_policy | reference | packed | made,
    }
    sampling = of_policy | reference | both
    kept = {name: by_kind.get(name, sampling) for name in calls}
    return {name: {k: n for k, n in items.items() if n} for name, items in kept.items()}


def _bytes(tree) -> int:
    """Bytes on one device of the arrays that lie in device memory."""
    laid = [x for x in jax.tree.leaves(tree) if getattr(x, "sharding", None) is not None]
    here = [x for x in laid if x.sharding.memory_kind in (None, "device")]
    return parallel.bytes_on_device(here)


def program(
    name: str, call: Call, kept: dict[str, int], m: build.Machine, pod: Pod
) -> dict[str, Any]:
    """Compile one. Plain JSON values; bytes are per device. 'fits' is the verdict; 'refused' is
    what the compiler said where it ran out of memory."""
    traced, started = call.program.trace(*call.arguments), time.perf_counter()
    limit, resident = pod.chip.hbm, sum(kept.values())
    out = {"fits": False, "kept_beside": kept, "resident": resident, "limit": limit}
    if resident + (given := _bytes(call.arguments)) > limit:
        said = f"its arguments alone, {given / GB:.2f} GB, and what lies beside them are too much"
        return out | {"refused": said, "total": resident + given, "seconds": 0.0}
    try:
        compiled, log = topology.compile_watched(traced.lower())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).partition("RESOURCE_EXHAUSTED:")[2].strip().splitlines()[0]
        seconds = time.perf_counter() - started
        return out | {"refused": said, "total": _total(said, resident), "seconds": seconds}
    memory = topology.memory(compiled)
    trips = -(-m.layout.max_items // m.layout.micro_rows) if call.per == "micro-batch" else 1
    moved = hlo.collectives(compiled.as_text())
    return out | {
        **memory._asdict(),
        "total": resident + memory.peak,
        "fits": resident + memory.peak <= limit,
        "flops": topology.matmul_flops(traced.jaxpr.jaxpr, while_trips=trips),
        "collectives_in_loops": {kind: x._asdict() for kind, x in sorted(moved.items())},
        "per": call.per,
        "rematerialized": log.count("Involuntary full rematerialization"),
        "seconds": time.perf_counter() - started,
    }


def _total(message: str, resident: int) -> int | None:
    """Bytes per device: of 'Used 97.12G of 95.73G hbm', or '... (96.00G) exceeds available HBM'."""
    found = re.search(r"(?:Used |\()([\d.]+)([KMG])", message)
    return found and resident + int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[found[2]])


def check(config, shape: qwen2.Shape, pod: Pod) -> dict[str, Any]:
    """Every program of a step, quickest first, up to the first that does not fit."""
    say = lambda text: print(text, file=sys.stderr, flush=True)
    calls = build.calls(config, machine_for(config, shape, pod))
    kept, out = beside(config, calls), {}
    # In a process of its own: a fault of the compiler ends the process.
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, spawn) as child, _ended_together():
        for i, name in enumerate(calls, 1):
            say(f"[{i}/{len(calls)}] {name}: compiling for {pod.cloud} ...")
            try:
                out[name] = child.submit(_program, config, shape, pod, name, kept[name]).result()
            except futures.process.BrokenProcessPool:
                out[name] = {"fits": False, "refused": CRASHED, "total": None, "seconds": 0.0}
                out[name] |= {"kept_beside": kept[name], "resident": sum(kept[name].values())}
            say(f"[{i}/{len(calls)}] {line(name, out[name])}")
            if not out[name]["fits"]:
                break
    level = jax.config.jax_optimization_level
    return {
        "fits": all(x["fits"] for x in out.values()),
        "programs": out,
        "not_compiled": [name for name in calls if name not in out],
        "level": "default" if level == "UNKNOWN" else level,
        "compiler": f"XLA:{pod.platform.upper()}",
        "versions": pod.compiler(),
    }


def _program(config, shape: qwen2.Shape, pod: Pod, name: str, kept: dict[str, int]):
    """`program`, in the child."""
    jax.config.update("jax_platforms", "cpu")
    m = machine_for(config, shape, pod)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libtpu's handler would print its memory map
    return program(name, build.calls(config, m)[name], kept, m, pod)


@contextlib.contextmanager
def _ended_together():
    """Within this scope SIGTERM (and Ctrl-C) ends the compiling child too, which would go on, and
    prints one line, where libtpu's handler prints its memory map."""

    def stop(*_):
        print("error: stopped by SIGTERM while compiling; no verdict", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGTERM)

    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, old or signal.SIG_DFL)  # None: libtpu's, not Python's


def line(name: str, r: dict[str, Any]) -> str:
    """One program in one line."""
    if r.get("refused") == CRASHED:
        return f"{name}: NOT COMPILED: {CRASHED}"
    if "refused" in r:
        return f"{name}: DOES NOT FIT beside {r['resident'] / GB:.2f} GB: {r['refused']}"
    parts = f"{r['peak'] / GB:.2f} GB + {r['resident'] / GB:.2f} beside it"
    fits = f"{'fits' if r['fits'] else 'DOES NOT FIT'} ({r['seconds']:.0f} s)"
    return f"{name}: {parts} = {r['total'] / GB:.2f} of {r['limit'] / GB:.2f} GB: {fits}"


def report(r: dict[str, Any]) -> list[str]:
    """`check` for people."""
    return filled_in("compiled.txt", r=r, line=line)
