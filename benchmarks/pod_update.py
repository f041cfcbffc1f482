"""The gradient update of Qwen2.5-32B at 22,528 tokens a row, compiled for TPU pods without one.

    python -m benchmarks pod_update --full                  all pods; needs pip install 'jax[tpu]'
    python -m benchmarks pod_update --only=v5p:4x4x8        one, quickly

It compiles `dapo_jax.dapo.update`'s own program with the config of `config.paper()`: one row a
data-parallel device, four micro-batches, splash attention, whole blocks recomputed. XLA:TPU then
says what it takes of a chip. At the default level a pod takes 2-7 minutes on two cores, at O0 one.
Work is counted in the program itself and compared with 6N + attention, N all parameters and
attention half the square (what a causal kernel must do), forward and backward.
"""

import time
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import Flag
from dapo_jax import config, plan
from dapo_jax.dapo import update
from dapo_jax.model import learner, qwen2
from dapo_jax.pods import topology

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


FLAGS = {
    "only": Flag(PODS[1].topology, "", "a topology (its first mesh)"),
    "level": Flag("O0", "", "JAX_OPTIMIZATION_LEVEL"),
}


def compiled(pod: Pod) -> dict:
    """Compiles one and describes it, in bytes and seconds."""
    c = config.paper()
    c.model.path = "Qwen/Qwen2.5-32B"
    shape = plan.network(c)
    mesh = topology.make_mesh(pod.topology, dict(data=pod.data, fsdp=pod.fsdp, tensor=pod.tensor))
    o, rules = c.optim, c.sharding.train.to_dict()
    tx = learner.optimizer(o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm)
    setup = learner.Setup(mesh, rules, tx, c.model.dtype, pod.offload)
    trainer = update.Trainer(shape, setup)
    rows, T = pod.data * pod.fsdp, config.row_tokens(c)
    traced = trainer.update.trace(*trainer.abstract(MICRO_BATCHES, rows, T))
    work = topology.matmul_flops(traced.jaxpr.jaxpr, while_trips=MICRO_BATCHES)
    attention = T * shape.num_heads * shape.head_dim * shape.num_layers
    needed = 6 * (qwen2.param_count(shape) + attention)
    started = time.perf_counter()
    program, log = topology.compile_watched(traced.lower())
    on_host = program.memory_analysis().host_argument_size_in_bytes
    return dict(
        topology.memory(program)._asdict(),
        live=topology.memory(program).live,
        on_host=on_host,
        limit=topology.limit(mesh),
        work_ratio=work / (MICRO_BATCHES * rows * T) / needed,
        rematerialized=log.count("Involuntary full rematerialization"),
        splash=program.as_text().count("splash_m"),
        seconds=time.perf_counter() - started,
        row_tokens=T,
        rows=MICRO_BATCHES * rows,
    )


def compiled_apart(pod: Pod, level: str) -> dict:
    """In a process of its own, since a fault of libtpu ends it."""
    # Warnings of the sharding pass are wanted; jax itself has no business with an accelerator.
    environment = dict(JAX_PLATFORMS="cpu", TPU_STDERR_LOG_LEVEL="1")
    environment |= dict(JAX_OPTIMIZATION_LEVEL=level) if level else {}
    return harness.apart(compiled, pod, **environment)


def measure(args) -> list[harness.Table]:
    pods = [p for p in PODS if p.topology == args.only][:1] if args.only else PODS
    if not pods:
        raise SystemExit(f"--only: one of {', '.join(dict.fromkeys(p.topology for p in PODS))}")
    gb = lambda n: f"{n / 1e9:.2f}"
    head = ("pod", "data x fsdp x tensor", "rows an update", "arguments", "peak", "live", "limit")
    table = harness.Table(*head, "work / (6N + attention)", "compile s")
    bad = []
    for pod in pods:
        r = compiled_apart(pod, args.level)
        note = f" (Adam's moments on the host: {gb(r['on_host'])})" if pod.offload else ""
        mesh = f"{pod.data} x {pod.fsdp} x {pod.tensor}"
        rows = f"{r['rows']} x {r['row_tokens']:,}"
        sizes = (gb(r[name]) for name in ("arguments", "peak", "live", "limit"))
        work = f"{r['work_ratio']:.3f}"
        table.row(pod.topology + note, mesh, rows, *sizes, work, f"{r['seconds']:.0f}")
        bad += [pod.topology] * bool(r["rematerialized"])
    table.note(f"Involuntary full rematerialization: {', '.join(bad) or 'none'}.")
    return [table]
