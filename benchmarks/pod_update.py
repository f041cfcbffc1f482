"""The gradient update of Qwen2.5-32B at 22,528 tokens a row, compiled for TPU pods without one.

    python benchmarks/pod_update.py                         all pods; needs pip install 'jax[tpu]'
    python benchmarks/pod_update.py --only=v5p:4x4x8 --level=O0 --json=out.json     one, quickly
    python benchmarks/pod_update.py --write                 and put the table into RESULTS.md

It compiles `dapo_jax.dapo.update`'s own program with the config of `config.paper()`: one row a
data-parallel device, four micro-batches, splash attention, whole blocks recomputed. XLA:TPU then
says what it takes of a chip. At the default level a pod takes 2-7 minutes on two cores, at O0 one.
Work is counted in the program itself and compared with 6N + attention, N all parameters and
attention half the square (what a causal kernel must do), forward and backward.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import results

HEADING = "## Updates of Qwen2.5-32B on pods"
MICRO_BATCHES = 4


class Pod(NamedTuple):
    topology: str
    fsdp: int
    tensor: int
    data: int = 1
    offload: bool = False


PODS = (
    Pod("v5p:4x4x4", 16, 4),
    Pod("v5p:4x4x8", 16, 8),
    Pod("v5p:4x4x8", 8, 8, data=2),
    Pod("v5p:4x4x8", 16, 8, offload=True),
    Pod("v6e:16x16", 32, 8),
    Pod("v5e:16x16", 32, 8),
)


def measure(pod: Pod) -> dict:
    """Compile and describe one; in a process of its own, since a fault of libtpu ends it."""
    import jax

    from dapo_jax import config, plan
    from dapo_jax.dapo import update
    from dapo_jax.model import qwen2
    from dapo_jax.pods import topology

    c = config.paper()
    c.model.path = "Qwen/Qwen2.5-32B"
    shape = plan.network(c)
    mesh = topology.make_mesh(pod.topology, dict(data=pod.data, fsdp=pod.fsdp, tensor=pod.tensor))
    o, rules = c.optim, c.sharding.train.to_dict()
    tx = update.optimizer(o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm)
    trainer = update.Trainer(shape, mesh, rules, tx, c.model.dtype, pod.offload)
    rows, T = pod.data * pod.fsdp, config.row_tokens(c)
    traced = trainer.update.trace(*trainer.abstract(MICRO_BATCHES, rows, T))
    work = topology.matmul_flops(traced.jaxpr.jaxpr, while_trips=MICRO_BATCHES)
    attention = T * shape.num_heads * shape.head_dim * shape.num_layers
    needed = 6 * (qwen2.param_count(shape) + attention)
    started = time.perf_counter()
    compiled, log = topology.compile_watched(traced.lower())
    on_host = compiled.memory_analysis().host_argument_size_in_bytes
    return dict(
        topology.memory(compiled)._asdict(),
        live=topology.memory(compiled).live,
        on_host=on_host,
        limit=topology.limit(mesh),
        work_ratio=work / (MICRO_BATCHES * rows * T) / needed,
        rematerialized=log.count("Involuntary full rematerialization"),
        splash=compiled.as_text().count("splash_m"),
        seconds=time.perf_counter() - started,
        row_tokens=T,
        rows=MICRO_BATCHES * rows,
        jax=jax.__version__,
    )


def measure_apart(pod: Pod, level: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "result.json")
        # Warnings of the sharding pass are wanted; jax itself has no business with an accelerator.
        environment = dict(os.environ, JAX_PLATFORMS="cpu", TPU_STDERR_LOG_LEVEL="1")
        environment |= dict(JAX_OPTIMIZATION_LEVEL=level) if level else {}
        command = [sys.executable, __file__, f"--measure={json.dumps(pod)}", f"--json={out}"]
        subprocess.run(command, env=environment, check=True)
        return json.loads(out.read_text())


def table(measured: list[tuple[Pod, dict]], level: str) -> str:
    gb = lambda n: f"{n / 1e9:.2f}"
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("jax", "libtpu"))
    lines = [
        HEADING,
        "",
        f"`python benchmarks/pod_update.py`, {datetime.date.today()}, {versions}, level"
        f" {level or 'default'}. Decimal GB a chip as XLA:TPU assigns them (nothing was run);"
        " live = arguments + results + temporaries as if all lived at once.",
        "",
        "| pod | data x fsdp x tensor | rows an update | arguments | peak | live | limit |"
        " work / (6N + attention) | compile s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pod, r in measured:
        note = f" (Adam's moments on the host: {gb(r['on_host'])})" if pod.offload else ""
        lines.append(
            f"| {pod.topology}{note} | {pod.data} x {pod.fsdp} x {pod.tensor} | {r['rows']} x"
            f" {r['row_tokens']:,} | {gb(r['arguments'])} | {gb(r['peak'])} | {gb(r['live'])} |"
            f" {gb(r['limit'])} | {r['work_ratio']:.3f} | {r['seconds']:.0f} |"
        )
    bad = [p.topology for p, r in measured if r["rematerialized"]]
    lines += ["", f"Involuntary full rematerialization: {', '.join(bad) or 'in none of them'}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a topology, e.g. v5p:4x4x8 (its first mesh)")
    parser.add_argument("--level", default="", help="JAX_OPTIMIZATION_LEVEL, e.g. O0")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        args.json.write_text(json.dumps(measure(Pod(*json.loads(args.measure)))))
        return
    pods = [p for p in PODS if p.topology == args.only][:1] if args.only else PODS
    if not pods:
        parser.error(f"--only: one of {', '.join(dict.fromkeys(p.topology for p in PODS))}")
    measured = []
    for pod in pods:
        print(f"compiling for {pod} ...", flush=True)
        measured.append((pod, measure_apart(pod, args.level)))
    section = table(measured, args.level)
    print("\n" + section)
    if args.write:
        results.write(HEADING, section)
    if args.json:
        args.json.write_text(json.dumps([dict(p._asdict(), **r) for p, r in measured], indent=1))


if __name__ == "__main__":
    main()
