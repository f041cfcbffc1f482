"""`plan --compile`: the run's programs compiled for slices, and what lies in memory beside them."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
import test_config
import test_configs
from levels import needs_libtpu
from scripts import ROOT
from test_qwen2 import mesh_of

from dapo_jax import build, config, parallel, plan
from dapo_jax.model import qwen2
from dapo_jax.plan import compile as plan_compile
from dapo_jax.pods import slices as pods

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_OPTIMIZATION_LEVEL": "O0"}


def plan_command(name, pod, *more):
    command = [sys.executable, "-m", "dapo_jax.plan", f"--config=configs/{name}.py"]
    return [*command, f"--topology={pod}", "--compile", *more]


def small(**changes):
    return test_config.changed(**changes, optim__minibatches=4)


def test_what_lies_beside_the_programs():
    """By hand, on one device: 4 N bytes of weights, 8 N and a counter of AdamW, and the three
    mini-batches that are not being worked on; not the pool, which is released before."""

    def kept(c):
        shape = qwen2.shape_from_config(c)
        calls = build.calls(c, build.assemble(c, mesh_of((1, 1, 1)), shape, stop_ids=(0,)))
        got = plan_compile.beside(c, calls)
        assert list(got) == list(calls)
        return {k: sum(v.values()) for k, v in got.items()}

    N = qwen2.param_count(qwen2.shape_from_config(small()))
    cells = 64 // 8 * 8 * 64  # 8 groups x 8 responses: 8 passes of 8 rows of 64 tokens
    batch = cells * (7 * 4 + 1)
    got = kept(small())
    assert got["decode weights"] == 8 * N + 4
    assert got["prefill"] == got["decode_full"] == got["decode_top_p"] == 12 * N + 4
    assert got["old log-probs"] == 8 * N + 4 + 3 * (batch + 4 * cells)
    assert got["update"] == 3 * (batch + 4 * cells)
    got = kept(small(loss__kl_coef=0.1, loss__old_logprobs="reuse", eval__top_p=1.0))
    assert "decode_top_p" not in got and got["decode_full"] == 16 * N + 4
    assert got["update"] == 4 * N + 3 * (batch + 4 * cells)  # the reference's log-probs
    assert "old log-probs" not in kept(small(loss__old_logprobs="reuse"))
    V = N + 64  # a value model: its 64 x 1 head beside tied embeddings
    got = kept(small(critic__enabled=True))
    others = 3 * (batch + 4 * cells)
    assert got["prefill"] == 12 * N + 4 + 12 * V + 4
    assert got["update"] == others + 12 * V + 4
    assert got["values"] == others + 12 * N + 4 + 8 * V + 4 + (1 + 3) * 4 * cells
    # Old log-probs; advantages of all; values and returns of the three others.
    assert got["update of values"] == others + 12 * N + 4 + (1 + 4 + 3 * 2) * 4 * cells


@pytest.mark.parametrize(
    ("said", "total"),
    [
        ("Ran out of memory in memory space hbm. Used 97.12G of 95.73G hbm.", 97.12),
        ("the total memory required for HLO temporaries (96.00G) exceeds available HBM", 96.0),
        ("something else", None),
    ],
)
def test_memory_named_in_the_compilers_message(said, total):
    assert plan_compile._total(said, 1000) == (total and 1000 + int(total * 2**30))


@pytest.mark.parametrize(("pod", "extra"), [("v5e:2x2", "tpu"), ("h100-4", "cuda13")])
def test_without_a_compiler_the_arithmetic_stands(pod, extra, shell):
    code = (
        "import runpy; from dapo_jax.plan import gpus; from dapo_jax.pods import topology;"
        "topology.available = gpus.compiler = lambda: {};"
        "runpy.run_module('dapo_jax.plan', run_name='__main__')"
    )
    flags = (f"--config={ROOT}/configs/quickstart.py", f"--topology={pod}", "--compile")
    done = shell.python("-c", code, *flags)
    assert done.returncode == 0 and "FITS, by arithmetic" in done.stdout
    assert f"pip install 'dapo_jax[{extra}]'" in done.stderr
    assert "by the compiler" not in done.stdout


@needs_libtpu
def test_out_of_memory_is_a_verdict():
    c, pod = small(mesh__fsdp=4), pods.parse("v5litepod-4")
    m = plan_compile.machine_for(c, plan.network(c), pod)
    x = jax.ShapeDtypeStruct((2**17,), jnp.float32, sharding=parallel.replicated(m.mesh))
    call = parallel.Call(jax.jit(lambda x: jnp.sort(jnp.sin(x[:, None] * x), axis=0)), (x,))
    got = plan_compile.program("update", call, {"state": 10**9}, m, pod)
    assert not got["fits"] and got["total"] > 10**9 + 2**36
    assert "DOES NOT FIT beside 1.00 GB" in plan_compile.line("update", got)
    # Said without compiling: nothing is left beside what is there already.
    got = plan_compile.program("update", call, {"state": got["limit"]}, m, pod)
    assert not got["fits"] and "arguments alone" in got["refused"]


@needs_libtpu
@pytest.mark.slow
def test_command_line(tmp_path):
    out = tmp_path / "plan.json"
    done = subprocess.run(
        plan_command("quickstart", "v5e:2x2", f"--json={out}"), cwd=ROOT, env=ENVIRONMENT,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FITS, by the compiler" in done.stdout and "[8/8] update: " in done.stderr
    got = json.loads(out.read_text())["compiled"]
    assert got["fits"] and got["level"] == "O0" and not got["not_compiled"]
    for x in got["programs"].values():
        assert x["total"] == x["peak"] + sum(x["kept_beside"].values()) <= x["limit"]
        assert not x["rematerialized"]
    update, decode = got["programs"]["update"], got["programs"]["decode_full"]
    assert update["flops"] > 0 and "all-gather" in update["collectives_in_loops"]
    assert update["aliased"] >= 12 * 101_952 // 4  # the whole state, in its place
    assert decode["aliased"] >= 0.9 * decode["arguments"]  # the cache


# Made for a laptop's CPU; of a TPU they take one chip, and there all is fixed overhead.
FOR_CPUS = ("quickstart", "quickstart_grpo", "dapo_math_tiny", "ladder")


def shipped_on(shipped: str):
    """(config, the pod that it names) of 'NAME:ARGUMENT'."""
    name, _, argument = shipped.partition(":")
    one = name in (*FOR_CPUS, "one_chip")
    pod = pods.parse("v5litepod-1") if one else test_configs.said(name, argument)[0]
    return test_configs.load(name, argument), pod


def compiled(shipped: str, *names: str, level: str = "O0") -> dict[str, dict]:
    """{program: what the compiler says}, from a process of its own: XLA:TPU may abort one that has
    compiled for another slice. The lower level takes a third of the time and assigns nearly the
    same memory. names: of programs, or -NAME of those to leave out; none = all."""
    env = ENVIRONMENT | {"JAX_OPTIMIZATION_LEVEL": level}
    command = [sys.executable, __file__, shipped, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def child(shipped: str, *names: str) -> None:
    c, pod = shipped_on(shipped)
    m = plan_compile.machine_for(c, plan.network(c), pod)
    calls = build.calls(c, m)
    kept = plan_compile.beside(c, calls)
    left_out = {n[1:] for n in names if n[0] == "-"}
    asked = [n for n in names if n[0] != "-"] or [n for n in calls if n not in left_out]
    said = {n: plan_compile.program(n, calls[n], kept[n], m, pod) for n in asked}
    print(json.dumps(said))


def pytest_generate_tests(metafunc):
    """By day one, by night two for pods as well; `--all_configs`: every one. The large ones as
    shipped are rows of benchmarks/pod_plan.py as well."""
    if "shipped" in metafunc.fixturenames:
        small = ("dapo_qwen2_5:0.5B", "gsm8k_dapo_qwen2_5_1_5b:")
        every = metafunc.config.option.all_configs
        on_pods = [":".join(of) for of in test_configs.ON_PODS]
        names = [*(f"{name}:" for name in FOR_CPUS), *(x for x in on_pods if every or x in small)]
        marks = lambda name: [pytest.mark.nightly] * (name != "ladder:")
        metafunc.parametrize("shipped", [pytest.param(n, marks=marks(n)) for n in names])


@needs_libtpu
@pytest.mark.slow
def test_arithmetic_lies_within_15_percent_of_the_compiler(shipped):
    """Both phases by their largest programs. A `verl` config samples as the one it is made of."""
    phases = {"sampling": "decode_full", "updating": "update"}
    if shipped.endswith(("verl", "_grpo:")):
        del phases["sampling"]
    level = "UNKNOWN" if shipped == "ladder:" else "O0"  # XLA:TPU aborts on its rows of 56 at O0
    said, (c, pod) = compiled(shipped, *phases.values(), level=level), shipped_on(shipped)
    arithmetic = plan.peaks(plan.memory(c, plan.network(c), config.resolve_mesh(c, pod.chips)))
    for phase, name in phases.items():
        got = said[name]
        assert got["fits"]
        # Arithmetic knows no vector memory: a toy's activations lie there, or copies of its cache.
        most = 1.15 * (got["total"] + got["vector"])
        assert 0.85 * got["total"] <= arithmetic[phase] <= most, phase


@needs_libtpu
@pytest.mark.slow
@pytest.mark.nightly
def test_the_config_for_one_chip_fits_a_free_tpu():
    """v5e-1, 16 GB, with what its docstring says of two programs; the others are 3 GB smaller."""
    limit, sampling, updating = test_configs.one_chip()
    two = ("decode_full", "update")  # libtpu 0.0.42 aborts on this update at O0
    got = compiled("one_chip:", *(f"-{name}" for name in two))
    got |= compiled("one_chip:", *two, level="UNKNOWN")
    assert all(x["fits"] for x in got.values())
    total = {name: x["total"] / plan.GB for name, x in got.items()}
    assert total["decode_full"] == pytest.approx(sampling, abs=0.3)
    assert max(total.values()) == total["update"] == pytest.approx(updating, abs=0.3)
    assert updating < 0.9 * limit


@needs_libtpu
@pytest.mark.slow
def test_sigterm_ends_the_compiler_too_and_says_one_line(tmp_path):
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        running = subprocess.Popen(
            plan_command("quickstart", "v5e:2x2"), cwd=ROOT, env=ENVIRONMENT,
            stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
        )  # fmt: skip
    deadline = time.time() + 1800
    while "prefill: compiling" not in log.read_text() and time.time() < deadline:
        assert running.poll() is None, log.read_text()
        time.sleep(0.1)
    running.terminate()
    assert running.wait(300) == 128 + signal.SIGTERM
    lines = log.read_text().splitlines()
    assert lines[-1].startswith("error: stopped by SIGTERM") and len(lines) < 20, lines
    deadline = time.time() + 120
    with pytest.raises(ProcessLookupError):
        while time.time() < deadline:  # until nothing is left of its group
            os.killpg(running.pid, 0)
            time.sleep(0.1)


if __name__ == "__main__":
    child(*sys.argv[1:])
