"""The planner's arithmetic, against exact counts and against what XLA:TPU assigned."""

import itertools
import json
import pathlib
import re

import pytest

from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.model import qwen2
from dapo_jax.plan import constants, cost, planner as plan
from dapo_jax.pods import slices as pods

ROOT = pathlib.Path(__file__).parent.parent


def big(size="32B", **changes):
    c = config.paper()
    c.model.path = f"Qwen/Qwen2.5-{size}"
    c.data.train, c.eval.files = "a.parquet", "b=b.parquet"
    c.mesh.tensor, c.optim.micro_batch_rows = 8, 16
    for name, value in changes.items():
        c.update_from_flattened_dict({name.replace("__", "."): value})
    return c


def sizes(data, fsdp, tensor):
    return dict(data=data, fsdp=fsdp, tensor=tensor)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
        ("14B", 14_770_033_664),
        ("32B", 32_763_876_352),
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
        assert plan.weight_count(shape, rules, sizes(1, 1, 1)) == whole
    split = plan.weight_count(shape, c.sharding.train, sizes(2, 16, 8))  # replicas do not help
    assert whole / 128 <= split <= whole / 128 * 1.001  # norms and biases are split less
    # In decoding over `tensor` only.
    assert plan.weight_count(shape, c.sharding.decode, sizes(1, 16, 8)) >= whole / 8


def test_cache_of_32b_is_256_kib_a_token():
    c, shape = big(), plan.network(big())
    assert plan.token_bytes(c, shape, sizes(1, 1, 1)) == 256 * 1024
    assert plan.token_bytes(c, shape, sizes(1, 16, 8)) == 32 * 1024
    assert plan.cache(c, shape, sizes(1, 16, 8)).tokens == 1024 * 22528
    half = big(rollout__cache_fraction=0.5)
    assert plan.cache(half, shape, sizes(1, 16, 8)).tokens == 512 * 22528
    int8 = big(rollout__cache_dtype="int8")
    assert plan.token_bytes(int8, shape, sizes(1, 16, 8)) == 16 * 1024 * 33 / 32
    small = plan.network(big("0.5B"))  # heads of 64 are stored as 128
    assert plan.token_bytes(c, small, sizes(1, 1, 1)) == 2 * 24 * 2 * 128 * 2


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
    got = plan.peaks(table)["updating"] / plan.GB
    assert got == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    ("mesh", "slots", "peak"),
    [((1, 16, 8), 1024, 55.44), ((1, 16, 4), 512, 64.4), ((1, 32, 8), 352, 16.4)],
)
def test_sampling_lies_within_3_percent_of_the_compiler(mesh, slots, peak):
    c = big(rollout__slots=slots)
    table = plan.memory(c, plan.network(c), sizes(*mesh))
    got = table["always"]["cache"] + sum(table["sampling"].values())
    assert got / plan.GB == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("size", ["0.5B", "32B"])  # tied, and not
def test_a_float32_head_is_counted(size):
    """Its copy for decoding and its gradients have four bytes, it needs no copy for training, and
    its products take six times as long."""
    many, pod = sizes(1, 16, 8 if size == "32B" else 2), pods.parse("v5p-256")
    of = lambda **fields: big(size, mesh__tensor=many["tensor"], **fields)
    c, wide = of(), of(model__float32_head=True)
    shape, wider = plan.network(c), plan.network(wide)
    head = shape.vocab_size * shape.hidden_size
    parts = head / many["tensor"], head / many["tensor"] / 16  # of decoding, of training
    before, after = plan.memory(c, shape, many), plan.memory(wide, wider, many)
    more = lambda phase, item: after[phase][item] - before[phase][item]
    assert more("sampling", "decode weights") == pytest.approx(2 * parts[0])
    assert more("updating", "compute copy of the weights") == pytest.approx(-2 * parts[1])
    assert more("updating", "gradients of a pass") == pytest.approx(2 * parts[1])
    assert before["always"] == after["always"]
    a, b = plan.scene(c, shape, many, pod), plan.scene(wide, wider, many, pod)
    assert (a.read_bytes, a.multiplied) == (2 * a.read, a.read)
    assert b.read_bytes == a.read_bytes + 2 * head and b.multiplied == a.read + 5 * head
    few, full, known = 1, 10**6, constants.values()  # rows: bound by reading, by multiplying
    ratio = lambda rows: cost.products(b, rows, known) / cost.products(a, rows, known)
    assert ratio(few) == pytest.approx(b.read_bytes / a.read_bytes)
    assert ratio(full) == pytest.approx(b.multiplied / a.multiplied)
    whole = of(model__float32_head=True, model__dtype="float32")  # as it is there anyway
    assert plan.wide_count(whole, plan.network(whole)) == 0


def test_a_float32_head_lies_within_15_percent_of_the_compiler():
    """One layer and two tables of 151,936 rows, on v5e-1: `plan --compile`'s programs (2026-11-22,
    jax 0.10.2, libtpu 0.0.42.1, default optimization level)."""
    c = presets.one_chip()
    c.model.path = ""
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 151936, 512, 512
    c.model.num_layers, c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 1, 4, 2, 128
    c.model.tie_embeddings, c.model.float32_head = False, True
    c.rollout.slots, c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = 64, 256, 64
    got = plan.peaks(plan.memory(c, plan.network(c), sizes(1, 1, 1)))
    assert got["updating"] / plan.GB == pytest.approx(3.488, rel=0.15)
    assert got["sampling"] / plan.GB == pytest.approx(2.391, rel=0.15)
    # The copy of the head that a bfloat16 one needs beside the master weights is not there.
    c.model.float32_head = False
    assert plan.peaks(plan.memory(c, plan.network(c), sizes(1, 1, 1)))["updating"] > got["updating"]


def test_waves():
    c, mesh = big(), sizes(1, 16, 8)
    shape = plan.network(c)
    assert plan.waves(c, shape, mesh, 22528) == {"sequences": 1024, "waves": 8}
    assert plan.waves(c, shape, mesh, 100) == {"sequences": 1024, "waves": 8}
    c.rollout.cache_fraction = 0.5
    assert plan.waves(c, shape, mesh, 22528) == {"sequences": 512, "waves": 16}
    assert plan.waves(c, shape, mesh, 22528 // 2) == {"sequences": 1024, "waves": 8}
    assert plan.waves(c, shape, mesh, 10**6) == {"sequences": 0, "waves": 0}


def test_bounds_by_hand():
    """32B on 128 v5p chips, no prompt to speak of."""
    c, pod = big(), pods.parse("v5p-256")
    shape, mesh, r = plan.network(c), sizes(1, 16, 8), 10_000
    got = plan.bounds(c, shape, mesh, pod, plan.Traffic(1, r))
    n, read = 8192, 32_763_876_352 - 152064 * 5120
    seconds = 8 * r * read / 8 * 2 / 2765e9  # weights, every step of eight waves
    seconds += n * r * r / 2 * 256 * 1024 / 128 / 2765e9  # cache
    assert got["decode"] == pytest.approx(seconds, rel=0.01)
    forward = (n * r * 2 * read + n * 64 * 2 * 40 * 128 * r * r) / 128 / 459e12
    assert got["old log-probs"] == pytest.approx(forward, rel=0.01)
    assert got["update"] == pytest.approx(4 * forward, rel=0.01)
    reuse = big(loss__old_logprobs="reuse", loss__kl_coef=0.1, model__remat="none")
    got = plan.bounds(reuse, plan.network(reuse), mesh, pod, plan.Traffic(1, r))
    assert got["old log-probs"] == pytest.approx(forward, rel=0.01)  # the reference alone
    assert got["update"] == pytest.approx(3 * forward, rel=0.01)


def test_what_is_suggested_fits_and_runs():
    c, pod = big(), pods.parse("v6e-256")
    shape, traffic = plan.network(c), plan.Traffic(256, 5120)
    every = list(plan.fitting(c, shape, pod, traffic, room=0.1))
    assert len({x.slots for x, _ in every}) > 2 and len({x.micro_rows for x, _ in every}) > 2
    for x, t in every:
        flat = dict(re.findall(r"--config\.([\w.]+)=(\S+)", x.flags()))
        again = big(rollout__cache_fraction=float(flat.pop("rollout.cache_fraction")))
        text = ("sharding.", "model.")
        again.update_from_flattened_dict(
            {k: v if k.startswith(text) else int(v) for k, v in flat.items()}
        )
        assert again == t
        assert not plan.mistakes(again, shape, pod)
        peak = max(plan.peaks(plan.memory(again, plan.network(again), x.mesh)).values())
        assert peak == pytest.approx(x.peak) and peak <= 0.9 * pod.chip.hbm
        assert plan.waves(again, shape, x.mesh, 22528)["sequences"] > 0


@pytest.fixture(scope="module")
def planned():
    """A quarter of the paper's batch, so that its simulation is quick."""
    c = big(rollout__groups=128, optim__minibatches=4, rollout__slots=1024)
    return plan.plan(
        c, pods.parse("v5p-256"), plan.Traffic(200, 2000), 0.1, plan.Money(2.0, 30, 6.0)
    )


@pytest.mark.slow
def test_suggestions_go_by_the_expected_step(planned):
    """Within 2% of each other the order is another."""
    first, *others = planned["suggestions"]
    assert others and first["step"] <= 1.03 * min(x["step"] for x in others)
    assert first["step"] < planned["step"]["expected_s"]  # 16 x 8 and a full cache do worse
    c, pod = big(rollout__groups=128, optim__minibatches=4), pods.parse("v5p-256")
    found = plan.search(c, plan.network(c), pod, plan.Traffic(200, 2000), 0.1)
    steps = [x.step for x in found]
    assert all(b >= 0.96 * a for a, b in itertools.pairwise(steps))


def test_the_step_and_what_it_costs(planned):
    step, run = planned["step"], planned["run"]
    assert step["low_s"] < step["expected_s"] < step["high_s"] <= 1.6 * step["low_s"]
    assert sum(step["parts"].values()) == pytest.approx(step["expected_s"])
    assert set(step["parts"]) == {
        "prefill", "decode", "tail", "host", "grading", "old log-probs", "update", "evaluation",
        "checkpoint",
    }  # fmt: skip
    below = sum(planned["lower_bounds_s"].values())
    assert below < step["expected_s"]
    assert step["chip_hours"] == pytest.approx(128 * step["expected_s"] / 3600)
    assert step["price"] == pytest.approx(2.0 * step["chip_hours"])
    assert run["price"] == pytest.approx(100 * step["price"])
    assert run["checkpoint_bytes"] == pytest.approx(12 * 32.76e9, rel=0.001)
    assert run["host_disk_bytes"] == pytest.approx(2 * 32.76e9, rel=0.001)
    assert json.dumps(planned, default=float)
    taken = run["preempted"]
    assert 0 < taken["goodput"] < taken["goodput_undisturbed"] < 1
    without = taken["instead"]["checkpoint.journal_gb=0"]
    assert without["goodput"] < taken["goodput"] and without["lost_s"]["leaving"] == 8
    text = "\n".join(plan.report(planned))
    assert f"a preemption every 6 h: goodput {taken['goodput']:.1%}" in text
    assert "EXPECTED step: " in text and "at $2 a chip-hour" in text and "most uncertain" in text


def test_a_value_model_is_counted(planned):
    """Of the policy's size, without its output weights; and of another one."""
    many, pod = sizes(1, 16, 8), pods.parse("v5p-256")
    plain, c = big(), big(critic__enabled=True)
    shape = plan.network(c)
    value, D, V = plan.value_model(c, shape), shape.hidden_size, shape.vocab_size
    assert qwen2.param_count(value) == 32_763_876_352 - V * D + D
    before, after = (plan.memory(x, shape, many) for x in (plain, c))
    of_value = plan.weight_count(value, c.sharding.train, many)
    more = {k: n for k, n in after["always"].items() if k not in before["always"]}
    assert more == {
        "value model's weights (float32)": 4 * of_value,
        "value model's moments (float32)": 8 * of_value,
    }
    assert after["sampling"] == before["sampling"]
    of_values = plan.update_memory(c, value, many)
    made = {"values, advantages, returns": of_values["packed rows"] * 3 / 10}  # of ten arrays
    both = [before["updating"], of_values | made]
    assert after["updating"] in both and plan.peaks(after)["updating"] == pytest.approx(
        sum(after["always"].values()) + max(sum(x.values()) for x in both)
    )
    a, b = (plan.scene(x, shape, many, pod) for x in (plain, c))
    assert a == b._replace(value=None) and b.value.read == b.read - V * D + D
    assert cost.checkpoint_bytes(c, b) == 12 * (b.parameters + b.value.parameters)
    other = big("7B", critic__enabled=True, critic__init_from="Qwen/Qwen2.5-72B-Instruct")
    shape, of_72b = plan.network(other), plan.network(big("72B"))
    value = plan.value_model(other, shape)
    assert value == of_72b._replace(value_head=True)
    larger, own = plan.update_memory(other, value, many), plan.memory(other, shape, many)
    assert larger.items() <= own["updating"].items() and len(own["updating"]) == len(larger) + 1
    other.critic.init_from = "Qwen/Qwen2.5-1.5B"  # of two key/value heads, where the policy has 4
    other.mesh.tensor, other.optim.micro_batch_rows = 4, 32
    assert plan.mistakes(other, shape, pod).startswith("the value model: ")


def test_the_step_with_a_value_model(planned):
    """A forward pass and an update more; its own steps, without those of the policy, in the run's
    total; the same output as before for a run without one."""
    c = big(rollout__groups=128, optim__minibatches=4, rollout__slots=1024, steps=60)
    c.critic.enabled = True
    shape, pod, traffic = plan.network(c), pods.parse("v5p-256"), plan.Traffic(200, 2000)
    got = plan.expected(c, shape, planned["mesh"], pod, traffic, plan.Money(2.0, 30, 6.0))
    step, run, of = got["step"], got["run"], planned["step"]["parts"]
    parts = step["parts"]
    saved = [x.pop("checkpoint") for x in (parts, of)]
    assert saved[0] / saved[1] == pytest.approx(2 - 152064 * 5120 / 32_763_876_352, rel=1e-5)
    assert {k: s for k, s in parts.items() if k in of} == of
    assert list(parts)[-3:] == ["values", "update of values", "evaluation"]
    for value, policy in (("values", "old log-probs"), ("update of values", "update")):
        assert 0.93 * parts[policy] < parts[value] < parts[policy]
    assert step["expected_s"] == pytest.approx(sum(parts.values()) + saved[0])
    alone = step["expected_s"] - parts["update"] - parts["old log-probs"]
    assert run["expected_s"] == pytest.approx(50 * alone + 10 * step["expected_s"])
    assert run["price"] == pytest.approx(run["expected_s"] * 128 / 3600 * 2)
    text = "\n".join(plan.time_lines(got | {"assumed": planned["assumed"]}))
    assert "a run of 60 steps, the first 50 of them the value model's alone: " in text
    bounds = plan.bounds(c, shape, planned["mesh"], pod, traffic)
    assert {k: s for k, s in bounds.items() if k in planned["lower_bounds_s"]} == (
        planned["lower_bounds_s"]
    )
    assert 0.93 * bounds["update"] < bounds["update of values"] == 4 * bounds["values"]
    before = json.dumps(planned, default=float) + "\n".join(plan.report(planned))
    assert "values" not in before and "value model" not in before and "pretrain" not in before


def test_what_is_off_by_default_is_priced_as_its_own_config_is(planned):
    step = planned["step"]
    saved = step["expected_s"] - step["options"]["loss.old_logprobs=reuse"]
    assert saved == pytest.approx(step["parts"]["old log-probs"])
    c = big(rollout__groups=128, optim__minibatches=4, rollout__slots=1024)
    c.rollout.cache_dtype, c.loss.importance_cap = "int8", 2.0
    shape, pod, traffic = plan.network(c), pods.parse("v5p-256"), plan.Traffic(200, 2000)
    whole = plan.expected(c, shape, planned["mesh"], pod, traffic, plan.Money(2.0))
    int8 = whole["step"]
    assert "preempted" not in whole["run"]  # what nobody asks for is not simulated
    assert step["options"]["rollout.cache_dtype=int8"] == pytest.approx(int8["expected_s"])
    assert int8["decoding"]["attention"] < 0.85 * step["decoding"]["attention"]
    *before, (last, seconds) = int8["changes"]
    assert before == step["changes"]
    assert last == "rollout.cache_dtype: int8" and seconds == int8["expected_s"]
    assert "rollout.cache_dtype=int8" in "\n".join(plan.report(planned))


def test_too_big_names_what_is_big_enough():
    c = big()
    out = plan.plan(c, pods.parse("v6e-16"), plan.Traffic(256, 5120), 0.1)
    assert not out["fits"] and not out["suggestions"]
    pod = pods.parse(out["smallest_that_fits"])
    assert pod.family == "v6e" and pod.chips > 16
    assert "DOES NOT FIT" in plan.report(out)
    assert any(out["smallest_that_fits"] in line for line in plan.report(out))


def test_a_value_model_that_is_not_to_be_had_here_is_a_doubt(monkeypatch):
    """As the policy's own: the hosts may have it."""

    def offline(*_):
        raise OSError

    monkeypatch.setattr(plan.huggingface_hub, "hf_hub_download", offline)
    c = big(critic__enabled=True, critic__init_from="somebody/reward")
    assert plan.check(c, pods.parse("v5p-256")).startswith("somebody/reward: its config.json is")


def test_absurd_sizes_are_said_at_once():
    """No search runs over two thousand million heads."""
    c, pod = big("0.5B", model__num_kv_heads=2**31 - 1), pods.parse("v5litepod-4")
    shape = plan.network(c)
    assert "num_kv_heads: 2147483647 is too large" in plan.mistakes(c, shape, pod)
    assert not any(plan.fitting(c, shape, pod, plan.Traffic(256, 512), 0.1))


def test_a_mesh_that_cannot_be_is_said_and_replaced():
    c = big(mesh__tensor=16, rollout__groups=64)
    out = plan.plan(c, pods.parse("v5p-256"), plan.Traffic(256, 5120), 0.1)
    assert out["mistakes"] and not out["fits"] and out["suggestions"]
    assert any("tensor" in line for line in plan.report(out) if line.startswith("cannot run"))


def test_command_line(shell, tmp_path):
    command = ("-m", "dapo_jax.plan", f"--config={ROOT}/configs/quickstart.py")
    with pytest.raises(ValueError):
        pods.parse("v5litepod-3")
    done = shell.python(*command, "--topology=v5litepod-1", f"--json={tmp_path}/plan.json")
    assert done.returncode == 0, done.stderr
    assert "FITS, by arithmetic" in done.stdout and "LOWER bounds" in done.stdout
    assert "EXPECTED step" in done.stdout
    assert "What this cannot know:" in done.stdout
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["parameters"] == 101_952 and saved["fits"] is True
    done = shell.python(*command, "--topology=v5litepod-3")
    assert done.returncode == 1 and done.stderr.startswith("error: 'v5litepod-3': no TPU slice")
