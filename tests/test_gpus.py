"""`plan --topology=h100-8`: names; memory against programs on simulated devices; figures. And the
one command for what is to be measured on a GPU, as far as it goes without one."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from levels import compiled_soon, nightly
from scripts import executable, on_path

from benchmarks import gpu, gpu_kernels, gpu_parts, harness
from dapo_jax import build, parallel, plan
from dapo_jax.config import presets
from dapo_jax.model import qwen2
from dapo_jax.plan import compile as plan_compile, constants, gpus, report, simulate
from dapo_jax.pods import slices, topology

ROOT = pathlib.Path(__file__).parents[1]
TINY = dict(vocab_size=1024, hidden_size=64, intermediate_size=192, num_layers=2, num_heads=4)
MID = dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=6, num_heads=8)
HEADS = {64: dict(num_kv_heads=2, head_dim=16), 512: dict(num_kv_heads=2, head_dim=64)}


def small(shape, mesh, **more):
    """The config for one chip on a mesh of simulated devices, in float32 and by XLA's attention."""
    c = presets.one_chip()
    c.model.update({"path": ""} | shape | HEADS[shape["hidden_size"]])
    c.model.dtype, c.model.attention, c.rollout.page_tokens = "float32", "chunked", 128
    c.model.head_chunk = 256  # XLA:CPU has whole rows of float32 logits three to five times over
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = mesh
    c.optim.micro_batch_rows = 2 * mesh[0] * mesh[1]
    c.update(more)
    return c


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mesh", "remat"),
    [
        (TINY, (1, 1, 1), "full"),
        nightly(TINY, (1, 8, 1), "none"),
        nightly(MID, (1, 1, 1), "dots_attention"),
        nightly(MID, (1, 8, 1), "full"),
        (MID, (1, 4, 2), "dots_attention"),
    ],
)
def test_memory_lies_within_10_percent_of_compiled_programs(shape, mesh, remat):
    """XLA:CPU's assignment for this many devices, with what lies beside each program."""
    c = small(shape, mesh, **{"model.remat": remat})
    devices = jax.devices()[: np.prod(mesh)]
    laid = parallel.Mesh(parallel.arrange(mesh, devices), parallel.AXES)
    net, sizes = qwen2.shape_from_config(c), dict(zip(parallel.AXES, mesh, strict=True))
    calls = build.calls(c, build.assemble(c, laid, net, stop_ids=(0, 1)))
    beside, found = plan_compile.beside(c, calls), {}
    for name in ("prefill", "decode_full", "update"):
        compiled = calls[name].program.trace(*calls[name].arguments).lower().compile()
        found[name] = topology.memory(compiled).live + sum(beside[name].values())
    peaks = plan.peaks(plan.memory(c, net, sizes, "gpu"))
    assert peaks["updating"] == pytest.approx(found["update"], rel=0.1)
    sampling = max(found["prefill"], found["decode_full"])
    assert peaks["sampling"] == pytest.approx(sampling, rel=0.1)


def test_names():
    pod = gpus.parse("2xh100-8")
    assert (pod.chips, pod.devices, pod.cloud, pod.topology) == (16, 16, "2xh100-8", "h100:8")
    assert gpus.parse("h100-1").cloud == "h100-1" and gpus.parse("v5p-8") == slices.parse("v5p-8")
    names = [x.cloud for x in gpus.parse("h100-2").larger()]
    assert names[:3] == ["h100-4", "h100-8", "2xh100-8"]
    for name in ("h100-3", "h100-16", "0xh100-8"):
        with pytest.raises(ValueError, match=f"'{name}': wants 1, 2, 4 or 8 GPUs a host"):
            gpus.parse(name)
    for name in ("v100-8", "h100", "h100-8x"):
        with pytest.raises(ValueError, match="no TPU slice .* or GPUs, h100-8: a100, h100"):
            gpus.parse(name)


@pytest.mark.parametrize("family", gpus.FAMILIES)
def test_a_gpu_is_the_one_that_mfu_is_measured_against(family):
    chip = gpus.CHIPS[family]
    named = {"b200": "NVIDIA B200", "rtx4090": ""}.get(family, f"NVIDIA {family.upper()}")
    assert slices.peak_flops(named) in (chip.flops, None)
    assert 20e9 < chip.hbm < 180e9 and 1e12 <= chip.bandwidth <= 8e12


TRAFFIC = plan.Traffic(32, 128)


@pytest.fixture(scope="module")
def one():
    return plan.plan(presets.one_chip(), gpus.parse("h100-1"), TRAFFIC, 0.1)


def test_the_model_is_within_11_percent_of_what_one_h100_did(one):
    """docs/results/gpu.md, from which the table is typed off; other GPUs are not measured."""
    page = (ROOT / "docs/results/gpu.md").read_text()
    rows = re.findall(r"^\| ([\d.]+B): .*tokens/s \| ([\d,]+)", page, re.M)
    found = {size: [] for size, _ in rows}
    for size, number in rows:
        found[size].append(int(number.replace(",", "")))
    assert {size: [*x] for size, x in gpus.MEASURED.items()} == found
    for x in one["measured"]:
        assert x["here"] == pytest.approx(x["measured"], rel=0.11), x


@pytest.mark.parametrize(("size", "shares"), [("0.5B", [0.67, 0.79]), ("1.5B", [0.72, 0.81])])
def test_a_long_tail_with_many_slots_by_the_model(size, shares):
    """Its share of the speed of equal lengths: 2,048 responses, as in the benchmark, and 8,192."""
    c, slots, pod = presets.paper(), 1024, gpus.parse("h100-1")
    c.data.max_prompt_tokens, c.rollout.max_response_tokens = 256, 2048
    c.rollout.slots, c.rollout.chunk, c.rollout.prefill_prompts = slots, 64, 32
    shape = plan.published(f"Qwen/Qwen2.5-{size}", scan_layers=True, attention="auto")
    scene = plan.Scene(c, shape, dict(data=1, fsdp=1, tensor=1), pod)
    values = constants.VALUES | {name: x.value for name, x in gpus._OWN.items()}
    rate = lambda lengths_Nx1: gpus.sampling_rate(lengths_Nx1, 256, scene, values)
    equal = rate(np.full((slots, 1), 512))
    drawn = (simulate.lengths(plan.Traffic(256, 512), 2048, n * slots, 1) for n in (2, 8))
    assert [rate(x) / equal for x in drawn] == pytest.approx(shares, abs=0.006)


def test_what_is_said_of_a_gpu(one):
    text = "\n".join(report.report(one))
    assert "1 GPU of 76.97 GB" in text and "nothing but one H100's sampling" in text
    assert (
        "measured on a TPU" not in text and "v6e-4" not in text and "only --compile tells" in text
    )
    for x in one["constants"].values():
        assert x["low"] <= x["value"] <= x["high"] or x["high"] <= x["value"] <= x["low"]


def test_a_plan_leaves_the_constants_of_slices_alone(one, monkeypatch):
    """And takes what the user has set in the place of the table's."""
    kept = dict(constants.VALUES), dict(constants.CONSTANTS)
    eight = plan.plan(presets.one_chip(), gpus.parse("h100-8"), TRAFFIC, 0.1)
    assert eight["step"]["parts"]["update"] < one["step"]["parts"]["update"]
    two = plan.plan(presets.one_chip(), gpus.parse("2xh100-8"), TRAFFIC, 0.1)
    assert "no multiple of 2, the slices (of GPUs: hosts)" in two["mistakes"][0]
    assert (dict(constants.VALUES), dict(constants.CONSTANTS)) == kept
    for table in constants.VALUES, constants.CONSTANTS:
        monkeypatch.setitem(table, "decode_beside", table["decode_beside"])  # to be put back
    constants.override(["decode_beside=2"])
    found = plan.plan(presets.one_chip(), gpus.parse("h100-1"), TRAFFIC, 0.1)["constants"]
    assert found["decode_beside"]["value"] == 2 and found["train_mxu"]["value"] == 0.69


def test_the_command(shell, tmp_path):
    command = ("-m", "dapo_jax.plan", "--config=configs/quickstart.py")
    saved = tmp_path / "plan.json"
    done = shell.python(*command, "--topology=h100-8", "--config.rollout.groups=64",
                        f"--json={saved}", cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(saved.read_text())["pod"]["platform"] == "gpu" and "8 GPUs" in done.stdout
    done = shell.python(*command, "--topology=h100-1", "--kernels", cwd=ROOT)
    assert done.stderr == "error: --kernels: libtpu's bundles; for GPUs there is --compile\n"


def test_without_a_gpu_that_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert harness.commit() == ""  # nor is git there
    args = harness.parse("gpu", gpu, ["--all"])
    with pytest.raises(SystemExit, match="no NVIDIA GPU here .nvidia-smi lists none.$"):
        gpu.measure(args)
    with pytest.raises(SystemExit, match="gpu: give --all, or parts by --only$"):
        gpu.measure(harness.parse("gpu", gpu, []))


def test_what_one_gpu_is_asked_for(monkeypatch, tmp_path):
    """The parts in order, each of its sizes; one that breaks is said; none begins too late."""
    assert tuple(gpu_parts.PARTS) == gpu.PARTS
    card = "NVIDIA H100, 580.1, " + ", ".join("1" * (gpu_parts.QUERY.count(",") - 1))
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{card}'\n")
    monkeypatch.setenv("PATH", on_path(tmp_path))
    asked = []

    def done(part, size, repeats):
        asked.append((part.__name__, size))
        if part.__name__ == "update":
            raise ValueError("out of memory\nmore")
        return {"rate": 2.5}

    monkeypatch.setattr(gpu_parts, "apart", done)
    monkeypatch.setattr(gpu_parts, "PARTS", {"decode": gpu.sample_ours, "update": gpu_parts.update})
    out = tmp_path / "new" / "gpu.json"
    (table,) = gpu.measure(harness.parse("gpu", gpu, ["--all", f"--out={out}"]))
    assert asked == [(f, s) for f in ("sample_ours", "update") for s in ("0.5B", "1.5B", "7B")]
    found = json.loads(out.read_text())
    assert found["card"]["driver_version"] == "580.1" and found["versions"]["jax"]
    assert found["parts"]["decode"]["7B"]["rate"] == 2.5
    assert found["parts"]["decode"]["7B"]["clocks.sm"] == ["1", "1"]
    assert found["parts"]["update"]["0.5B"]["broke"] == "ValueError: out of memory"
    asked.clear()
    gpu.measure(harness.parse("gpu", gpu, ["--all", "--sizes", "0.5B", f"--out={out}"]))
    assert asked == [("sample_ours", "0.5B"), ("update", "0.5B")]
    late = ["--only", "roofline", "decode", "--minutes=-1", f"--out={out}"]
    roofline, table = gpu.measure(harness.parse("gpu", gpu, late))
    assert roofline.name == "gpu_roofline"
    assert len(table.notes) == 4 and "decode, 7B: not begun, -1 minutes are over." in table.notes


def test_a_part_that_cannot_be_measured_says_why(monkeypatch, tmp_path):
    """jax without its plugin would measure the CPU, for hours; tests that are not run are none."""
    monkeypatch.setattr(harness, "apart", lambda *given, **how: how["JAX_PLATFORMS"])
    assert gpu_parts.apart(gpu.sample_ours, "0.5B", 1) == "cuda,cpu"
    executable(tmp_path / "python", "#!/bin/sh\necho python: No module named pytest >&2; exit 1\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = gpu_parts.tried(gpu_parts.kernels, "0.5B", 1)
    assert found == {"broke": "RuntimeError: python: No module named pytest"}


@pytest.mark.slow
@compiled_soon()
@pytest.mark.parametrize(
    "part", [nightly(p) if p in ("step", "peers") else p for p in gpu_parts.PARTS]
)
def test_each_part_for_a_gpu_runs_here_in_a_tiny_size(part, tmp_path):
    command = [sys.executable, "-m", "benchmarks", "gpu", "--only", part, "--sizes", "tiny"]
    command += [f"--out={tmp_path}/gpu.json"]
    done = subprocess.run(command, cwd=harness.ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"][part]["tiny"]
    numbers = {
        "decode": {"equal", "tailed"}, "wide": {"equal", "tailed"},
        "update": {"full, passes of 4 rows: tokens"},
        "step": {"time/step_s", "perf/tokens_per_s"}, "bits": {"samples alike"},
        "kernels": {"skipped"}, "peers": {"skipped"},
    }[part]  # fmt: skip
    assert "broke" not in found and all(found[name] for name in numbers), found


COMPILED = """
%one_layer (p: bf16[3,64,32], i: s32[]) -> bf16[64,32] {
  %p = bf16[3,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %d = bf16[1,64,32]{2,1,0} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,64,32}
}

%into_all (q: f32[3,64], r: f32[1,64], j: s32[]) -> f32[3,64] {
  %q = f32[3,64]{1,0} parameter(0)
  %r = f32[1,64]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %u = f32[3,64]{1,0} dynamic-update-slice(%q, %r, %j, %j)
}

%body (t: STATE) -> STATE {
  %t = STATE parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %w = bf16[3,64,32]{2,1,0} get-tuple-element(%t), index=1
  %x = bf16[16,64]{1,0} get-tuple-element(%t), index=2
  %f = bf16[1,64,32]{2,1,0} fusion(%w, %n), kind=kLoop, calls=%one_layer
  %c = (bf16[16,32]{1,0}, s8[8]{0}) custom-call(%x, %f), custom_call_target="__cublas$lt$matmul"
  %s = f32[3,64]{1,0} get-tuple-element(%t), index=3
  %g = f32[3,64]{1,0} fusion(%s, %s, %n), kind=kLoop, calls=%into_all
  ROOT %o = STATE tuple(%n, %w, %x, %g)
}

%condition (v: STATE) -> pred[] {
  %v = STATE parameter(0)
  ROOT %l = pred[] constant(true)
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %z = STATE tuple()
  %k = STATE while(%z), condition=%condition, body=%body, known={"known_trip_count":{"n":"5"}}
  ROOT %y = f32[100]{0} copy(%a)
}
""".replace("STATE", "(s32[], bf16[3,64,32]{2,1,0}, bf16[16,64]{1,0}, f32[3,64]{1,0})")


def test_kernels_of_a_compiled_update():
    """A slice counts as what it takes, a place in a stack as nothing."""
    inside, around = gpu_kernels.kernels(COMPILED)
    layer, rows, product = 64 * 32 * 2, 16 * 64 * 2, 16 * 32 * 2
    assert [(n, x.name, x.bytes) for n, x in inside] == [
        (5, "f", 2 * layer + 4), (5, "c", layer + rows + product + 8), (5, "g", 0)
    ]  # fmt: skip
    assert [x.flops for _, x in inside] == [0, 2 * 16 * 64 * 32, 0]
    assert [(x.name, x.bytes, x.flops) for x in around] == [("y", 800, 0)]
