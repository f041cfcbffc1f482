"""The planner's arithmetic, against exact counts and against what XLA:TPU assigned."""

import itertools
import json
import pathlib
import re

import pytest

from dapo_jax import config, plan
from dapo_jax.config import presets
from dapo_jax.model import qwen2
from dapo_jax.plan import constants, decoding, footprint, layouts, planner, report, shapes, step
from dapo_jax.pods import slices

ROOT = pathlib.Path(__file__).parent.parent
V5P, V6E = slices.parse("v5p-256"), slices.parse("v6e-256")
N_32B = 32_763_876_352


def big(size="32B", **changes):
    c = config.paper()
    c.model.path = f"Qwen/Qwen2.5-{size}"
    c.data.train, c.eval.files = "a.parquet", "b=b.parquet"
    c.mesh.tensor, c.optim.micro_batch_rows = 8, 16
    for name, value in changes.items():
        c.update({name.replace("__", "."): value})
    return c


def sizes(data, fsdp, tensor):
    return dict(data=data, fsdp=fsdp, tensor=tensor)


MANY = sizes(1, 16, 8)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
        ("14B", 14_770_033_664),
        ("32B", N_32B),
        ("72B", 72_706_203_648),
    ],
)
def test_published_shapes_have_the_published_parameters(size, count):
    assert qwen2.param_count(plan.network(big(size))) == count
    assert plan.network(big(size + "-Instruct")) == plan.network(big(size))


def test_weights_of_a_device_are_counted_by_the_rules():
    c, shape = big(), plan.network(big())
    whole = qwen2.param_count(shape)
    for rules in (c.sharding.train, c.sharding.decode):
        assert footprint.weight_count(shape, rules, sizes(1, 1, 1)) == whole
    split = footprint.weight_count(shape, c.sharding.train, sizes(2, 16, 8))  # replicas do not help
    assert whole / 128 <= split <= whole / 128 * 1.001  # norms and biases are split less
    # In decoding over `tensor` only.
    assert footprint.weight_count(shape, c.sharding.decode, MANY) >= whole / 8


@pytest.mark.parametrize(
    ("size", "changes", "mesh", "token", "tokens"),
    [
        ("32B", {}, (1, 1, 1), 256 * 1024, 1024 * 22528),
        ("32B", {}, (1, 16, 8), 32 * 1024, 1024 * 22528),
        ("32B", dict(rollout__cache_fraction=0.5), (1, 16, 8), 32 * 1024, 512 * 22528),
        ("32B", dict(rollout__cache_dtype="int8"), (1, 16, 8), 16 * 1024 * 33 / 32, 1024 * 22528),
        ("0.5B", {}, (1, 1, 1), 2 * 24 * 2 * 128 * 2, 1024 * 22528),  # heads of 64, stored as 128
    ],
)
def test_cache(size, changes, mesh, token, tokens):
    c = big(size, **changes)
    assert footprint.token_bytes(c, plan.network(c), sizes(*mesh)) == token
    assert footprint.cache(c, plan.network(c), sizes(*mesh)).tokens == tokens


@pytest.mark.parametrize(
    ("fraction", "length", "sequences", "waves"),
    [
        (1.0, 22528, 1024, 8),
        (1.0, 100, 1024, 8),
        (0.5, 22528, 512, 16),
        (0.5, 22528 // 2, 1024, 8),
        (0.5, 10**6, 0, 0),
    ],
)
def test_waves(fraction, length, sequences, waves):
    c = big(rollout__cache_fraction=fraction)
    got = plan.waves(c, plan.network(c), MANY, length)
    assert got == {"sequences": sequences, "waves": waves}


# What XLA:TPU's memory assignment gave a training step of the same shapes (bfloat16, full
# rematerialisation, residual split over `tensor`, splash attention; libtpu 0.0.50): decimal GB.
COMPILED = [
    ("32B", (1, 16, 8), 22528, 9.61),
    ("32B", (1, 32, 8), 22528, 6.81),
    ("7B", (1, 16, 4), 22528, 6.40),
    ("1.5B", (1, 8, 2), 4096, 3.05),
    ("0.5B", (1, 8, 2), 4096, 1.44),
]


@pytest.mark.parametrize(("size", "mesh", "length", "peak"), COMPILED)
def test_update_lies_within_15_percent_of_the_compiler(size, mesh, length, peak):
    mesh = sizes(*mesh)
    c = big(size, optim__micro_batch_rows=mesh["fsdp"], optim__row_tokens=length)
    table = plan.memory(c, plan.network(c), mesh)
    table["always"].pop("cache")
    table["updating"].pop("packed rows")  # of other batches than this config's
    assert plan.peaks(table)["updating"] / plan.GB == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    ("mesh", "slots", "peak"),
    [((1, 16, 8), 1024, 55.44), ((1, 16, 4), 512, 64.4), ((1, 32, 8), 352, 16.4)],
)
def test_sampling_lies_within_3_percent_of_the_compiler(mesh, slots, peak):
    c = big(rollout__slots=slots)
    table = plan.memory(c, plan.network(c), sizes(*mesh))
    got = table["always"]["cache"] + sum(table["sampling"].values())
    assert got / plan.GB == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(("size", "tensor"), [("0.5B", 2), ("32B", 8)])  # tied, and not
def test_a_float32_head_is_counted(size, tensor):
    """Its copy for decoding and its gradients have four bytes, it needs no copy for training, and
    its products take six times as long."""
    many = sizes(1, 16, tensor)
    of = lambda **fields: big(size, mesh__tensor=tensor, **fields)
    c, wide = of(), of(model__float32_head=True)
    shape, wider = plan.network(c), plan.network(wide)
    head = shape.vocab_size * shape.hidden_size
    before, after = plan.memory(c, shape, many), plan.memory(wide, wider, many)
    more = lambda phase, item: after[phase][item] - before[phase][item]
    assert more("sampling", "decode weights") == pytest.approx(2 * head / tensor)
    trained = 2 * head / tensor / 16
    assert more("updating", "compute copy of the weights") == pytest.approx(-trained)
    assert more("updating", "gradients of a pass") == pytest.approx(trained)
    assert before["always"] == after["always"]
    a, b = plan.scene(c, shape, many, V5P), plan.scene(wide, wider, many, V5P)
    assert (a.read_bytes, a.multiplied) == (2 * a.read, a.read)
    assert b.read_bytes == a.read_bytes + 2 * head and b.multiplied == a.read + 5 * head
    few, full, known = 1, 10**6, constants.values()  # rows: bound by reading, by multiplying
    ratio = lambda rows: decoding.products(b, rows, known) / decoding.products(a, rows, known)
    assert ratio(few) == pytest.approx(b.read_bytes / a.read_bytes)
    assert ratio(full) == pytest.approx(b.multiplied / a.multiplied)
    whole = of(model__float32_head=True, model__dtype="float32")  # as it is there anyway
    assert footprint.wide_count(whole, plan.network(whole)) == 0


def test_a_float32_head_lies_within_15_percent_of_the_compiler():
    """One layer and two tables of 151,936 rows, on v5e-1: `plan --compile`'s programs (2026-11-22,
    jax 0.10.2, libtpu 0.0.42.1, default optimization level)."""
    c = presets.one_chip()
    c.model.path = ""
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 151936, 512, 512
    c.model.num_layers, c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 1, 4, 2, 128
    c.model.tie_embeddings, c.model.float32_head = False, True
    c.rollout.slots, c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = 64, 256, 64
    peaks = lambda: plan.peaks(plan.memory(c, plan.network(c), sizes(1, 1, 1)))
    got = peaks()
    assert got["updating"] / plan.GB == pytest.approx(3.488, rel=0.15)
    assert got["sampling"] / plan.GB == pytest.approx(2.391, rel=0.15)
    # The copy of the head that a bfloat16 one needs beside the master weights is not there.
    c.model.float32_head = False
    assert peaks()["updating"] > got["updating"]


def test_a_value_model_is_counted():
    """Of the policy's size, without its output weights; and of another one."""
    plain, c = big(), big(critic__enabled=True)
    shape = plan.network(c)
    value, D, V = plan.value_model(c, shape), shape.hidden_size, shape.vocab_size
    assert qwen2.param_count(value) == N_32B - V * D + D
    before, after = (plan.memory(x, shape, MANY) for x in (plain, c))
    of_value = footprint.weight_count(value, c.sharding.train, MANY)
    more = {k: n for k, n in after["always"].items() if k not in before["always"]}
    assert more == {
        "value model's weights (float32)": 4 * of_value,
        "value model's moments (float32)": 8 * of_value,
    }
    assert after["sampling"] == before["sampling"]
    of_values = footprint.update_memory(c, value, MANY)
    made = {"values, advantages, returns": of_values["packed rows"] * 3 / 10}  # of ten arrays
    both = [before["updating"], of_values | made]
    assert after["updating"] in both and plan.peaks(after)["updating"] == pytest.approx(
        sum(after["always"].values()) + max(sum(x.values()) for x in both)
    )
    a, b = (plan.scene(x, shape, MANY, V5P) for x in (plain, c))
    assert a == b._replace(value=None) and b.value.read == b.read - V * D + D
    assert step.checkpoint_bytes(c, b) == 12 * (b.parameters + b.value.parameters)
    other = big("7B", critic__enabled=True, critic__init_from="Qwen/Qwen2.5-72B-Instruct")
    shape, of_72b = plan.network(other), plan.network(big("72B"))
    value = plan.value_model(other, shape)
    assert value == of_72b._replace(value_head=True)
    larger = footprint.update_memory(other, value, MANY)
    own = plan.memory(other, shape, MANY)["updating"]
    assert larger.items() <= own.items() and len(own) == len(larger) + 1
    other.critic.init_from = "Qwen/Qwen2.5-1.5B"  # of two key/value heads, where the policy has 4
    other.mesh.tensor, other.optim.micro_batch_rows = 4, 32
    assert plan.mistakes(other, shape, V5P).startswith("the value model: ")


def test_what_is_suggested_fits_and_runs():
    c = big()
    shape, traffic = plan.network(c), plan.Traffic(256, 5120)
    every = list(layouts.fitting(c, shape, V6E, traffic, room=0.1))
    assert len({x.slots for x, _ in every}) > 2 and len({x.micro_rows for x, _ in every}) > 2
    for x, t in every:
        flat = dict(re.findall(r"--config\.([\w.]+)=(\S+)", x.flags()))
        again = big(rollout__cache_fraction=float(flat.pop("rollout.cache_fraction")))
        text = ("sharding.", "model.")
        again.update({k: v if k.startswith(text) else int(v) for k, v in flat.items()})
        assert again == t == layouts.changed(c, x.settings())
        assert not plan.mistakes(again, shape, V6E)
        peak = max(plan.peaks(plan.memory(again, plan.network(again), x.mesh)).values())
        assert peak == pytest.approx(x.peak) and peak <= 0.9 * V6E.chip.hbm
        assert plan.waves(again, shape, x.mesh, 22528)["sequences"] > 0


def test_too_big_names_what_is_big_enough():
    out = plan.plan(big(), slices.parse("v6e-16"), plan.Traffic(256, 5120), 0.1)
    assert not out["fits"] and not out["suggestions"]
    pod = slices.parse(out["smallest_that_fits"])
    assert pod.family == "v6e" and pod.chips > 16
    text = "\n".join(report.report(out))
    assert "DOES NOT FIT" in text and out["smallest_that_fits"] in text


def test_a_mesh_that_cannot_be_is_said_and_replaced():
    c = big(mesh__tensor=16, rollout__groups=64)
    out = plan.plan(c, V5P, plan.Traffic(256, 5120), 0.1)
    assert out["mistakes"] and not out["fits"] and out["suggestions"]
    lines = report.report(out)
    assert any("tensor" in line for line in lines if line.startswith("cannot run"))


def test_absurd_sizes_are_said_at_once():
    """No search runs over two thousand million heads."""
    c, pod = big("0.5B", model__num_kv_heads=2**31 - 1), slices.parse("v5litepod-4")
    shape = plan.network(c)
    assert "num_kv_heads: 2147483647 is too large" in plan.mistakes(c, shape, pod)
    assert not any(layouts.fitting(c, shape, pod, plan.Traffic(256, 512), 0.1))


def test_a_value_model_that_is_not_to_be_had_here_is_a_doubt(monkeypatch):
    """As the policy's own: the hosts may have it."""

    def offline(*_):
        raise OSError

    monkeypatch.setattr(shapes.huggingface_hub, "hf_hub_download", offline)
    c = big(critic__enabled=True, critic__init_from="somebody/reward")
    assert plan.check(c, V5P).startswith("somebody/reward: its config.json is")


def test_what_does_not_fit_is_refused_or_doubted():
    c, pod = big(mesh__fsdp=2), slices.parse("v6e-16")
    with pytest.raises(ValueError, match=r"by arithmetic this needs .* GB of a chip's 33.5"):
        plan.check(c, pod)
    assert "ask python -m dapo_jax.plan --topology=v6e-16" in plan.check(c, pod, with_memory=False)
    with pytest.raises(ValueError, match="a.parquet: no such file or folder here"):
        plan.check(big(), V5P, with_files=True)
    with pytest.raises(ValueError, match="data = 1 is no multiple of 2"):
        plan.check(big(mesh__fsdp=32), slices.parse("2xv5p-256"))


# A quarter of the paper's batch, so that its simulation is quick.
QUARTER = dict(rollout__groups=128, optim__minibatches=4, rollout__slots=1024)
SHORT = plan.Traffic(200, 2000)


@pytest.fixture(scope="module")
def planned():
    return plan.plan(big(**QUARTER), V5P, SHORT, 0.1)


def expected(c):
    return planner.expected(c, plan.network(c), MANY, V5P, SHORT)


def test_bounds_by_hand():
    """32B on 128 v5p chips, no prompt to speak of."""
    r, n, read = 10_000, 8192, N_32B - 152064 * 5120
    of = lambda c: planner.bounds(c, plan.network(c), MANY, V5P, plan.Traffic(1, r))
    got = of(big())
    seconds = 8 * r * read / 8 * 2 / 2765e9  # weights, every step of eight waves
    seconds += n * r * r / 2 * 256 * 1024 / 128 / 2765e9  # cache
    assert got["decode"] == pytest.approx(seconds, rel=0.01)
    forward = (n * r * 2 * read + n * 64 * 2 * 40 * 128 * r * r) / 128 / 459e12
    assert got["old log-probs"] == pytest.approx(forward, rel=0.01)
    assert got["update"] == pytest.approx(4 * forward, rel=0.01)
    got = of(big(loss__old_logprobs="reuse", loss__kl_coef=0.1, model__remat="none"))
    assert got["old log-probs"] == pytest.approx(forward, rel=0.01)  # the reference alone
    assert got["update"] == pytest.approx(3 * forward, rel=0.01)


@pytest.mark.slow
def test_suggestions_go_by_the_expected_step(planned):
    """Within 2% of each other the order is another."""
    first, *others = planned["suggestions"]
    assert others and first["step"] <= 1.03 * min(x["step"] for x in others)
    assert first["step"] < planned["step"]["expected_s"]  # 16 x 8 and a full cache do worse
    c = big(rollout__groups=128, optim__minibatches=4)
    found = layouts.search(c, plan.network(c), V5P, SHORT, 0.1)
    assert all(b >= 0.96 * a for a, b in itertools.pairwise(x.step for x in found))


def test_the_step_and_the_run(planned):
    step, run = planned["step"], planned["run"]
    assert step["low_s"] < step["expected_s"] < step["high_s"] <= 1.6 * step["low_s"]
    assert sum(step["parts"].values()) == pytest.approx(step["expected_s"])
    assert set(step["parts"]) == {
        "prefill", "decode", "tail", "host", "grading", "old log-probs", "update", "evaluation",
        "checkpoint",
    }  # fmt: skip
    assert sum(planned["lower_bounds_s"].values()) < step["expected_s"]
    assert step["chip_hours"] == pytest.approx(128 * step["expected_s"] / 3600)
    assert run["chip_hours"] == pytest.approx(100 * step["chip_hours"])
    assert run["checkpoint_bytes"] == pytest.approx(12 * N_32B, rel=0.001)
    assert run["host_disk_bytes"] == pytest.approx(2 * N_32B, rel=0.001)
    saved = step["expected_s"] - step["options"]["loss.old_logprobs=reuse"]
    assert saved == pytest.approx(step["parts"]["old log-probs"])
    written = json.dumps(planned, default=float) + "\n".join(report.report(planned))
    assert "EXPECTED step: " in written and "most uncertain" in written
    assert not re.search("value model|values|pretrain", written)


def test_the_step_with_a_value_model(planned):
    """A forward pass and an update more; its own steps, without those of the policy, in the run's
    total."""
    c = big(**QUARTER, steps=60, critic__enabled=True)
    got, of = expected(c), dict(planned["step"]["parts"])
    step, run, parts = got["step"], got["run"], dict(got["step"]["parts"])
    saved = [x.pop("checkpoint") for x in (parts, of)]
    assert saved[0] / saved[1] == pytest.approx(2 - 152064 * 5120 / N_32B, rel=1e-5)
    assert {k: s for k, s in parts.items() if k in of} == of
    assert list(parts)[-3:] == ["values", "update of values", "evaluation"]
    for value, policy in (("values", "old log-probs"), ("update of values", "update")):
        assert 0.93 * parts[policy] < parts[value] < parts[policy]
    assert step["expected_s"] == pytest.approx(sum(parts.values()) + saved[0])
    alone = step["expected_s"] - parts["update"] - parts["old log-probs"]
    assert run["expected_s"] == pytest.approx(50 * alone + 10 * step["expected_s"])
    text = "\n".join(report.report(planned | got))
    assert "a run of 60 steps, the first 50 of them the value model's alone: " in text
    bounds = planner.bounds(c, plan.network(c), MANY, V5P, SHORT)
    assert planned["lower_bounds_s"].items() <= bounds.items()
    assert 0.93 * bounds["update"] < bounds["update of values"] == 4 * bounds["values"]


def test_an_int8_cache_is_timed_as_its_own_config_is(planned):
    step = planned["step"]
    c = big(**QUARTER, rollout__cache_dtype="int8", loss__importance_cap=2.0)
    int8 = expected(c)["step"]
    assert step["options"]["rollout.cache_dtype=int8"] == pytest.approx(int8["expected_s"])
    assert int8["decoding"]["attention"] < 0.85 * step["decoding"]["attention"]


def test_command_line(shell, tmp_path):
    command = ("-m", "dapo_jax.plan", f"--config={ROOT}/configs/quickstart.py")
    done = shell.python(*command, "--topology=v5litepod-1", f"--json={tmp_path}/plan.json")
    assert done.returncode == 0, done.stderr
    for words in ("FITS, by arithmetic", "LOWER bounds", "EXPECTED step", "What this cannot know:"):
        assert words in done.stdout
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["parameters"] == 101_952 and saved["fits"] is True
    done = shell.python(*command, "--topology=v5litepod-3")
    assert done.returncode == 1 and done.stderr.startswith("error: 'v5litepod-3': no TPU slice")
