"""Memory of a GPU by XLA:GPU, which needs no GPU, by the plan's arithmetic, and as measured.

    python -m benchmarks gpu_memory --full      wants jax[cuda13], or its compiler alone; 12 minutes

The most that an update and the sampler take, of H100s and in the sizes of gpu.py: rows of 2,048
tokens, 256 slots a GPU of 2,304. All weights are trained, of 7B on one GPU adapters of rank 32.
Measured: the allocator's peak on one H100, docs/results/gpu.md, with jax 0.11.2. That of 7B is not
here: XLA merged products of adapters and of the base then, which took 9 GB less, and more time.
"""

import sys
from typing import NamedTuple

import jax

from benchmarks.gpu import Setting
from benchmarks.harness import Flag, Table
from dapo_jax import build, plan
from dapo_jax.config import presets, validation
from dapo_jax.plan import compile as plan_compile, gpus
from dapo_jax.pods.slices import GIB

PROGRAMS = "prefill", "decode_full", "update"


class Case(NamedTuple):
    size: str
    remat: str
    rows: int  # of a pass, on each part of the batch
    mesh: tuple[int, int, int] = (1, 1, 1)
    rank: int = 0
    head_chunk: int = 1024  # tokens; 2,048 = whole rows, whose logits are kept
    measured: float = 0  # GiB of the update

    def __str__(self):
        split = "" if self.mesh == (1, 1, 1) else f", mesh {' x '.join(map(str, self.mesh))}"
        kept = ", logits kept" if self.head_chunk >= Setting().row else ""
        return f"{self.size}, {self.remat}, passes of {self.rows}{kept}{split}"

    @property
    def pod(self) -> gpus.Gpus:
        data, fsdp, tensor = self.mesh
        return gpus.parse(f"h100-{data * fsdp * tensor}")


CASES = (
    Case("0.5B", "dots_attention", 8, measured=27.08), Case("0.5B", "none", 16, measured=55.11),
    Case("0.5B", "full", 32), Case("0.5B", "dots_attention", 8, (8, 1, 1)),
    Case("1.5B", "none", 4, measured=48.82), Case("1.5B", "dots_attention", 8, measured=59.51),
    Case("3B", "full", 4), Case("7B", "none", 2, rank=32),
    Case("7B", "none", 4, rank=32), Case("7B", "dots_attention", 2, rank=32),
    Case("7B", "full", 8, rank=32), Case("7B", "full", 2, (1, 8, 1)),
    Case("7B", "dots_attention", 2, (1, 8, 1)), Case("7B", "full", 2, (1, 4, 2)),
    Case("32B", "full", 1, (1, 8, 1)),
    Case("0.5B", "none", 16, head_chunk=2048), Case("1.5B", "dots_attention", 8, head_chunk=2048),
    Case("7B", "none", 2, rank=32, head_chunk=2048),
)  # fmt: skip
FLAGS = {"cases": Flag(1, len(CASES), "the first ones of the table")}


def config(case: Case, **model):
    """model: in place of the published one."""
    c, s, split = presets.paper(), Setting(), case.mesh[0] * case.mesh[1]
    c.model.path = "" if model else f"Qwen/Qwen2.5-{case.size}"
    how = dict(remat=case.remat, head_chunk=case.head_chunk)
    c.model.update(dict(dtype="bfloat16", scan_layers=True, **how))
    c.model.update(model)
    c.model.lora.rank = case.rank
    c.data.max_prompt_tokens, c.rollout.max_response_tokens = s.prompt, s.cap
    c.eval.max_response_tokens, c.reward.overlong_buffer_tokens = 0, s.cap // 4
    c.rollout.slots, c.rollout.chunk, c.rollout.prefill_prompts = s.slots * split, 64, 32 * split
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 8 * split, 8, 1
    c.optim.row_tokens, c.optim.micro_batch_rows = s.row, case.rows * split
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = case.mesh
    return c


def compiled(c, pod) -> dict[str, dict]:
    """{program: what `plan --compile` says of it}."""
    m = plan_compile.machine_for(c, plan.network(c), pod)
    calls = build.calls(c, m)
    kept = plan_compile.beside(c, calls)
    return {n: plan_compile.program(n, calls[n], kept[n], m, pod) for n in PROGRAMS}


def text(case: Case, program: str, **model) -> str:
    """A program as XLA:GPU has scheduled it."""
    c = config(case, **model)
    call = build.calls(c, plan_compile.machine_for(c, plan.network(c), case.pod))[program]
    return call.program.trace(*call.arguments).lower().compile().as_text()


def by_both(case: Case) -> dict[str, tuple[float, float]]:
    """{'sampling', 'updating': bytes by the compiler and by arithmetic}."""
    c = config(case)
    found = compiled(c, case.pod)
    sizes = validation.resolve_mesh(c, case.pod.devices)
    peaks = plan.peaks(plan.memory(c, plan.network(c), sizes, "gpu"))
    sampling = max(found["prefill"]["total"], found["decode_full"]["total"])
    totals = {"sampling": sampling, "updating": found["update"]["total"]}
    return {what: (total, peaks[what]) for what, total in totals.items()}


def compiler(benchmark: str) -> str:
    """What compiles, for a table's note. SystemExit: XLA:GPU is not installed."""
    if not (versions := gpus.compiler()):
        sys.exit(f"error: python -m benchmarks {benchmark}: no XLA:GPU here (jax[cuda13])")
    jax.config.update("jax_platforms", "cpu")  # which has nothing to do here
    return f"Compiler: {', '.join(f'{name} {x}' for name, x in versions.items())}."


def measure(args) -> list[Table]:
    """SystemExit: XLA:GPU is not installed."""
    said = compiler("gpu_memory")
    table = Table(
        "Qwen2.5", "update, GiB", "by arithmetic", "measured", "sampling, GiB", "by arithmetic"
    )
    for case in CASES[: args.cases]:
        (sampling, of_sampling), (update, of_update) = by_both(case).values()
        share = lambda ours, total: f"{ours / GIB:.1f} ({ours / total:.2f}x)"
        measured = share(case.measured * GIB, update) if case.measured else ""
        cells = f"{update / GIB:.1f}", share(of_update, update), measured
        table.row(case, *cells, f"{sampling / GIB:.1f}", share(of_sampling, sampling))
    table.note(said)
    return [table]
