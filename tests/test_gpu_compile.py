"""A run's programs by XLA:GPU, for cards that it is only told of: where its packages are, as
.ci/run has them (`gpus.compiler`)."""

import collections
import re
import subprocess
import sys

import jax
import pytest
from levels import nightly
from scripts import ROOT

from benchmarks import gpu_memory
from benchmarks.gpu_memory import Case
from dapo_jax.plan import gpus, hlo

pytestmark = [
    pytest.mark.skipif(not gpus.compiler(), reason="XLA:GPU is not installed (jax[cuda13])"),
    pytest.mark.slow,
]
NARROW = dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=2)
HEADS = {64: dict(num_heads=8, num_kv_heads=2), 128: dict(num_heads=4, num_kv_heads=2)}


@pytest.fixture(autouse=True)
def _compiled_anew():
    """What was compiled for a card that is only told of cannot be read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize("head_dim", [nightly(64), 128])
@pytest.mark.parametrize("family", gpus.FAMILIES)
def test_a_step_compiles_for_each_family(family, head_dim):
    """ptxas takes the kernels, which have to do with a card's shared memory, and XLA the rest."""
    narrow = NARROW | HEADS[head_dim] | dict(head_dim=head_dim)
    c = gpu_memory.config(Case("", "dots_attention", 4), **narrow)
    found = gpu_memory.compiled(c, gpus.parse(f"{family}-1"))
    for name, x in found.items():
        assert x["fits"], (name, x)
        assert not x["rematerialized"] and not x["collectives_in_loops"]
    assert found["decode_full"]["aliased"] > 0.9 * found["prefill"]["aliased"] > 0


def test_a_gpu_before_ampere_needs_no_triton(monkeypatch):
    """A T4, say, for which XLA compiles no such kernel."""
    monkeypatch.setitem(
        gpus._OWN, "capability.h100", gpus._OWN["capability.h100"]._replace(value=7.5)
    )
    c = gpu_memory.config(Case("", "dots_attention", 4), **NARROW | HEADS[64], head_dim=64)
    assert gpu_memory.compiled(c, gpus.parse("h100-1")).keys() == {*gpu_memory.PROGRAMS}


IN_CI = Case("0.5B", "none", 16, measured=55.11), Case("7B", "full", 2, (1, 8, 1))


@pytest.mark.parametrize(
    "case", [x if x in IN_CI else nightly(x) for x in gpu_memory.CASES], ids=str
)
def test_memory_by_arithmetic_lies_within_10_percent(case):
    """And what was measured within 5 (jax 0.11.2). Of weights that are split among GPUs one layer
    is gathered at a time: unrolled, XLA gathered all of them ahead."""
    for total, ours in gpu_memory.by_both(case).values():
        assert ours == pytest.approx(total, rel=0.1)
    if case.measured:
        assert case.measured * gpu_memory.GIB == pytest.approx(total, rel=0.05)


@pytest.mark.parametrize("slots", ["", ", 16 slots"])
def test_a_token_is_nine_kernels_a_layer_and_copies_nothing(slots):
    """And the head, the draw and what follows them."""
    narrow = NARROW | HEADS[128] | dict(head_dim=128, num_layers=8)
    text = gpu_memory.text(Case("", "full", 4), f"decode_full{slots}", **narrow)
    known, _ = hlo.computations(text)
    loops = [known[name].values() for name in re.findall(r"body=%?([\w.-]+)", text)]
    of_a_token = max(loops, key=len)
    called = re.findall(r" = .*? ([\w-]+)\(", "\n".join(of_a_token))
    counts = collections.Counter(called)
    assert 8 * 8 < counts["fusion"] + counts["custom-call"] <= 8 * 9 + 17
    assert not {"copy", "slice", "dynamic-slice", "send", "recv", "infeed"} & {*counts}


def test_an_update_copies_neither_adapters_into_weights_nor_the_head():
    """XLA would make one product of an adapter's and the base's, which it puts side by side first.
    A chunk of cells reads the head's weights, and does not make them of a float32 copy. Queries lie
    between products and attention as both have them, one token after the other."""
    narrow = NARROW | HEADS[128] | dict(head_dim=128)
    text = gpu_memory.text(Case("", "none", 2, rank=32), "update", **narrow)
    made = {*re.findall(r"= \(?(\w+\[[\d,]*\]).* (?:fusion|copy|custom-call)\(", text)}
    rank, D, F, V = 32, 512, 1536, 8192
    assert f"bf16[4096,{F}]" in made
    assert not {f"bf16[{D},{F + n * rank}]" for n in (1, 2)} & made
    assert f"bf16[{F + rank},{D}]" not in made
    assert not re.search(rf"bf16\[{D},{V}\].* fusion\(.*calls=%wrapped_convert", text)
    assert "bf16[2,2048,4,128]" in made and "bf16[2,4,2048,128]" not in made


def test_of_split_weights_the_next_layers_are_gathered_beside_products():
    """By XLA's schedule, forward and back; and gradients are summed up so."""
    wide = dict(hidden_size=3584, intermediate_size=18944, num_heads=28, num_kv_heads=4)  # 7B's
    wide |= dict(vocab_size=8192, num_layers=4, head_dim=128)
    beside = collections.defaultdict(list)
    text = gpu_memory.text(Case("", "full", 2, (1, 8, 1)), "update", **wide)
    known, entry = hlo.computations(text)
    for lines in ([*body.values()] for name, body in known.items() if name != entry):
        for i, line in enumerate(lines):
            if start := re.match(r"%?(\S+) = .* (all-gather|reduce-scatter)-start\(", line):
                end = next(
                    j for j, x in enumerate(lines) if re.search(rf"-done\(.*{start[1]}\)", x)
                )
                products = sum(bool(re.search("cublas|triton", x)) for x in lines[i:end])
                beside[start[2]].append(products)
    assert sum(n > 1 for n in beside["all-gather"]) >= 2
    assert sum(n > 0 for n in beside["reduce-scatter"]) >= 1


def test_the_command():
    command = [sys.executable, "-m", "dapo_jax.plan", "--config=configs/quickstart.py"]
    command += ["--topology=2xh100-2", "--compile", "--config.mesh.data=4", "--config.mesh.fsdp=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"Compiled by XLA:GPU \(jax [\d.]+, jax-cuda13-plugin [\d.]+;", done.stdout)
    assert "FITS, by the compiler" in done.stdout and "update: " in done.stderr
