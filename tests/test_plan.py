"""The planner's arithmetic, against exact counts and against what XLA:TPU assigned; its figures."""

import collections
import itertools
import json
import re
from unittest.mock import Mock

import jax
import pytest
from scripts import ROOT

from dapo_jax import config, plan
from dapo_jax.config import presets
from dapo_jax.model import hf, qwen2
from dapo_jax.plan import constants, footprint, layouts, planner, report, step
from dapo_jax.pods import slices

V5P, V6E = slices.parse("v5p-256"), slices.parse("v6e-256")
N_32B = 32_763_876_352
TRAFFIC = plan.Traffic(256, 5120)


def big(size="32B", **changes):
    c = config.paper()
    c.model.path = f"Qwen/Qwen2.5-{size}"
    c.data.train, c.eval.files = "a.parquet", "b=b.parquet"
    c.mesh.tensor, c.optim.micro_batch_rows = 8, 16
    c.update({name.replace("__", "."): value for name, value in changes.items()})
    return c


def sizes(data, fsdp, tensor):
    return dict(data=data, fsdp=fsdp, tensor=tensor)


MANY = sizes(1, 16, 8)


def test_weights_of_a_device_are_counted_by_the_rules():
    c, shape = big(), plan.network(big())
    whole = qwen2.param_count(shape)
    for rules in (c.sharding.train, c.sharding.decode):
        assert footprint.weight_count(shape, rules, sizes(1, 1, 1)) == whole
    split = footprint.weight_count(shape, c.sharding.train, sizes(2, 16, 8))  # replicas do not help
    assert whole / 128 <= split <= whole / 128 * 1.001  # norms and biases are split less
    thirds = footprint.weight_count(shape, c.sharding.train, sizes(1, 3, 1))
    assert 3 * thirds > 1.0001 * whole  # 5,120 columns in parts of 1,707
    # In decoding over `tensor` only.
    assert footprint.weight_count(shape, c.sharding.decode, MANY) >= whole / 8


@pytest.mark.parametrize(
    ("size", "changes", "mesh", "token", "tokens"),
    [
        ("32B", dict(rollout__cache_fraction=0.5), (1, 16, 8), 32 * 1024, 512 * 22528),
        ("32B", dict(rollout__cache_dtype="int8"), (1, 16, 8), 16 * 1024 * 33 / 32, 1024 * 22528),
        ("32B", dict(eval__max_response_tokens=21504), (1, 1, 1), 256 * 1024, 1024 * 23552),
        ("0.5B", {}, (1, 1, 1), 2 * 24 * 2 * 128 * 2, 1024 * 22528),  # heads of 64, stored as 128
    ],
)
def test_cache(size, changes, mesh, token, tokens):
    c = big(size, **changes)
    assert footprint.token_bytes(c, plan.network(c), sizes(*mesh)) == token
    assert footprint.cache(c, plan.network(c), sizes(*mesh)).tokens == tokens


# What XLA:TPU's memory assignment gave a training step of the same shapes (bfloat16, full
# rematerialisation, residual split over `tensor`, splash attention; libtpu 0.0.50): decimal GB.
@pytest.mark.parametrize(
    ("size", "mesh", "length", "peak"),
    [("32B", (1, 16, 8), 22528, 9.61), ("32B", (1, 32, 8), 22528, 6.81),
     ("7B", (1, 16, 4), 22528, 6.40), ("1.5B", (1, 8, 2), 4096, 3.05),
     ("0.5B", (1, 8, 2), 4096, 1.44)],
)  # fmt: skip
def test_update_lies_within_15_percent_of_the_compiler(size, mesh, length, peak):
    mesh = sizes(*mesh)
    c = big(size, optim__micro_batch_rows=mesh["fsdp"], optim__row_tokens=length)
    table = plan.memory(c, plan.network(c), mesh)
    table["updating"].pop("packed rows")  # of other batches than this config's
    assert plan.peaks(table)["updating"] / plan.GB == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    ("mesh", "slots", "peak"),
    [((1, 16, 8), 1024, 55.44), ((1, 16, 4), 512, 64.4), ((1, 32, 8), 352, 16.4)],
)
def test_sampling_lies_within_3_percent_of_the_compiler(mesh, slots, peak):
    c = big(rollout__slots=slots)
    table = plan.memory(c, plan.network(c), sizes(*mesh))
    got = sum(table["sampling"].values())
    assert got / plan.GB == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(("tied", "peak"), [(True, 1.34), (False, 1.61)])
def test_a_head_that_stays_as_it_is_lies_within_10_percent_of_the_compiler(tied, peak):
    """Adapters on v5e-1 (2026-11-27, jax 0.10.2, libtpu 0.0.42.1, default optimization level)."""
    c = presets.one_chip()
    c.model.update(dict(path="", vocab_size=131072, hidden_size=1024, intermediate_size=2816))
    c.model.update(dict(num_layers=8, num_heads=8, num_kv_heads=2, head_dim=128))
    c.model.tie_embeddings, c.model.lora.rank = tied, 16
    got = plan.peaks(plan.memory(c, plan.network(c), sizes(1, 1, 1)))["updating"]
    assert got / plan.GB == pytest.approx(peak, rel=0.1)


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
    """It has the policy's size, without its output weights; or the size of another model."""
    c = big(critic__enabled=True)
    shape = plan.network(c)
    value, D, V = plan.value_model(c, shape), shape.hidden_size, shape.vocab_size
    assert qwen2.param_count(value) == N_32B - V * D + D
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
    shape = plan.network(c)
    every = list(layouts.fitting(c, shape, V6E, TRAFFIC, room=0.1))
    assert len({x.slots for x, _ in every}) > 2 and len({x.micro_rows for x, _ in every}) > 2
    for x, t in every:
        flat = dict(re.findall(r"--config\.([\w.]+)=(\S+)", x.flags()))
        again = big(rollout__cache_fraction=float(flat.pop("rollout.cache_fraction")))
        text = ("sharding.", "model.")
        again.update({k: v if k.startswith(text) else int(v) for k, v in flat.items()})
        assert again == t
        assert not plan.mistakes(again, shape, V6E)
        peak = max(plan.peaks(plan.memory(again, plan.network(again), x.mesh)).values())
        assert peak == pytest.approx(x.peak) and peak <= 0.9 * V6E.chip.hbm
        assert plan.waves(again, shape, x.mesh, 22528)["sequences"] > 0


def test_a_cache_takes_what_as_many_slots_leave():
    """What else grows with the slots, as logits do, comes off before: each number of slots fits."""
    c, pod = big("7B", model__lora__rank=32), slices.parse("v5e-8")
    every = [x for x, _ in layouts.fitting(c, plan.network(c), pod, TRAFFIC, room=0.1)]
    tried = collections.Counter((str(x.mesh), x.micro_rows, str(x.fields)) for x in every)
    assert tried and min(tried.values()) > 1
    assert all(x.peak > 0.895 * pod.chip.hbm for x in every if x.cache_fraction < 1)


def test_places_of_guesses_are_counted_and_kept_to():
    """Logits are made for all of them, and no more slots than places are suggested."""
    c, pod = big("7B", mesh__tensor=4), slices.parse("v6e-16")
    c.rollout.slots, c.optim.micro_batch_rows, c.rollout.cache_fraction = 64, 4, 0.2
    logits = lambda: plan.memory(c, plan.network(c), sizes(1, 4, 4))["sampling"]["logits"]
    before, c.rollout.draft_tokens, c.rollout.draft_places = logits(), 4, 128
    assert logits() == 2 * before
    every = list(layouts.fitting(c, plan.network(c), pod, TRAFFIC, room=0.1))
    assert every and not any(plan.mistakes(t, plan.network(t), pod) for _, t in every)


def test_too_big_names_what_is_big_enough():
    out = plan.plan(big(), slices.parse("v6e-16"), TRAFFIC, 0.1)
    assert not out["fits"] and not out["suggestions"]
    pod = slices.parse(out["smallest_that_fits"])
    assert pod.family == "v6e" and pod.chips > 16
    text = "\n".join(report.report(out))
    assert "DOES NOT FIT" in text and out["smallest_that_fits"] in text


def test_a_mesh_that_cannot_be_is_said_and_replaced():
    """The suggestions go by the expected step; within 2% of each other the order is another."""
    out = plan.plan(big(mesh__tensor=16, rollout__groups=64), V5P, TRAFFIC, 0.1)
    assert out["mistakes"] and not out["fits"]
    assert any("tensor" in line for line in report.report(out) if line.startswith("cannot run"))
    seconds = [x["step"] for x in out["suggestions"]]
    assert len(seconds) > 1 and all(b >= 0.96 * a for a, b in itertools.pairwise(seconds))


def test_absurd_sizes_are_said_at_once():
    """No search runs over two thousand million heads."""
    c, pod = big("0.5B", model__num_kv_heads=2**31 - 1), slices.parse("v5litepod-4")
    shape = plan.network(c)
    assert "num_kv_heads: 2147483647 is too large" in plan.mistakes(c, shape, pod)
    assert not any(layouts.fitting(c, shape, pod, TRAFFIC, 0.1))


def test_a_value_model_that_is_not_to_be_had_here_is_a_doubt(monkeypatch):
    """As the policy's own: the hosts may have it."""
    monkeypatch.setattr(hf.huggingface_hub, "hf_hub_download", Mock(side_effect=OSError))
    c = big(critic__enabled=True, critic__init_from="somebody/reward")
    assert plan.check(c, V5P).startswith("somebody/reward: no such directory here, and no config")


@pytest.mark.parametrize("pod", ["v5p-256", "v5p-512", "2xv5p-256", "v6e-256", "tpu7x-128"])
def test_the_shipped_32b_runs_on_several_slices(pod):
    place = "32B-v6e" if "v6e" in pod else "32B"
    assert plan.check(presets.dapo_math(place), slices.parse(pod)) == ""


def test_caches_that_their_kernels_cannot_read():
    """The page numbers of 1,464 rows of 176 pages fit a v5p's scalar memory, of 1,472 not (libtpu
    0.0.42.1). On a GPU 2 x 176 pages of 64 x 128 numbers a layer and head, of 4 heads: 738 M."""
    c = big(rollout__cache_fraction=0.1, rollout__slots=16 * 1449)
    pool = footprint.cache(c, plan.network(c), MANY)
    assert config.validation.check_cache(c, pool, MANY) == []
    c.rollout.slots += 16
    assert "set at most 23184" in plan.mistakes(c, plan.network(c), V5P)
    pool = pool._replace(reader="triton", quantized=True, kv_heads=2, shards=1, pages=1024)
    two = dict(data=1, fsdp=1, tensor=2)  # 64 layers x 128 x 128 x 1,024 pages: 2^30 numbers
    refused = lambda pages: config.validation.check_cache(c, pool._replace(pages=pages), two)
    assert [len(refused(n)) for n in (1024, 2048, 2049, 4096, 4097)] == [0, 0, 1, 1, 0]
    assert "reads wrong pages" in refused(4096)[0]


def test_other_constants(monkeypatch):
    monkeypatch.setattr(constants, "VALUES", {"a": 1.0})
    monkeypatch.setattr(constants, "CONSTANTS", {"a": constants.Constant(1, 1, 2, "", "")})
    constants.override(["a=.25e-6"])
    assert constants.VALUES["a"] == constants.CONSTANTS["a"].value == 0.25e-6
    constants.override(["a=1.0"])
    assert constants.VALUES["a"] == 1
    for text in ("b=1", "a=0.0", "a", "a=x", "a=-1", "a=1.2.3", "a=inf", "a=nan"):
        with pytest.raises(ValueError, match=f"--constants: '{text}': wants NAME=NUMBER"):
            constants.override([text])


def test_what_does_not_fit_is_refused_or_doubted():
    c, pod = big(mesh__fsdp=2), slices.parse("v6e-16")
    with pytest.raises(ValueError, match=r"by arithmetic this needs .* GB of a chip's 33.5"):
        plan.check(c, pod)
    assert "ask python -m dapo_jax.plan --topology=v6e-16" in plan.check(c, pod, with_memory=False)
    with pytest.raises(ValueError, match="a.parquet: no such file or folder here"):
        plan.check(big(), V5P, with_files=True)
    with pytest.raises(ValueError, match="data = 1 is no multiple of 2"):
        plan.check(big(mesh__fsdp=32), slices.parse("2xv5p-256"))


SMALL = dict(
    rollout__groups=16, rollout__group_size=4, rollout__max_response_tokens=400, steps=60,
    reward__overlong_buffer_tokens=64, rollout__slots=64, optim__minibatches=4,
)  # fmt: skip
FEW = dict(rollout__slots=16, model__remat="none", eval__max_problems=7, checkpoint__every=0)
WIDE = dict(model__float32_head=True, eval__every=0)
INT8 = FEW | WIDE | dict(rollout__cache_dtype="int8", eval__every=5)
# Name -> (model, slice, mesh, what is changed).
CASES = {
    "plain": ("0.5B", "v6e-8", (1, 4, 2), {}),
    "value model": ("0.5B", "v6e-8", (1, 4, 2), dict(critic__enabled=True, loss__kl_coef=0.1)),
    "adapters": ("7B", "v5e-16", (2, 2, 4), dict(model__lora__rank=32)),
    "int8": ("1.5B", "v4-8", (2, 1, 2), INT8),
    "wide": ("32B", "v5p-256", (1, 16, 8), WIDE | dict(loss__old_logprobs="reuse")),
}
DATA = ROOT / "tests/data"


def figures(name):
    """What the planner says of a case, but for its table of constants: nine digits."""
    size, pod, mesh, changes = CASES[name]
    c = big(size, **SMALL | changes, mesh__tensor=mesh[2])
    given = plan.network(c), sizes(*mesh), slices.parse(pod), plan.Traffic(20, 100, sigma=1.2)
    out = planner.expected(c, *given, with_staleness=True)
    assert out.pop("constants") and out.pop("anchors")
    out["bytes"] = plan.memory(c, *given[:2])
    short = lambda x: float(f"{float(x):.9g}")
    return json.loads(json.dumps(out, default=float), parse_float=short)


@pytest.mark.parametrize("name", CASES)
def test_the_figures_are_the_recorded_ones(name):
    """Recorded at 8e5a067; where they are meant to change:
    python tests/test_plan.py >tests/data/plan_figures.jsonl"""
    lines = (DATA / "plan_figures.jsonl").read_text().splitlines()
    got = figures(name)
    want = {x.pop("case"): x for x in map(json.loads, lines)}[name]
    same = jax.tree.map(lambda a, b: a == pytest.approx(b, rel=1e-6), got, want)
    assert all(jax.tree.leaves(same)), same
    for constant, (low, high) in got["step"]["uncertain"].items():  # 'low' makes a step short
        assert low <= 1e-6 and high >= -1e-6, constant


def test_room_for_the_checkpoints_that_are_kept():
    c = big("0.5B", checkpoint__every=10, checkpoint__keep=2, checkpoint__keep_best=1, steps=100)
    s = plan.Scene(c, plan.network(c), sizes(1, 1, 1), slices.parse("v6e-1"))
    for c.checkpoint.keep_every, n in ((0, 4), (25, 4 + 2), (5, 4 + 10)):
        run = planner._run(c, s, step.Expected({"update": 1.0, "old log-probs": 0.0}, {}))
        assert run["checkpoints_bytes"] == n * run["checkpoint_bytes"]


def test_command_line(shell, tmp_path):
    command = ("-m", "dapo_jax.plan", f"--config={ROOT}/configs/quickstart.py")
    more = ("--config.critic.enabled", "--config.optim.share_prompts=False", "--staleness")
    saved = tmp_path / "plan.json"
    done = shell.python(*command, *more, "--topology=v5litepod-1", f"--json={saved}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (DATA / "plan_quickstart.txt").read_text()
    saved = json.loads(saved.read_text())
    assert saved["parameters"] == 101_952 and saved["fits"] is True
    done = shell.python(*command, "--topology=v5litepod-1", "--json=s9://x")
    assert done.stderr == "error: --json=s9://x: wants a file on this machine; no folder s9:\n"
    done = shell.python(*command, "--topology=v5litepod-1", f"--json={tmp_path}")
    assert done.stderr.endswith("wants a file on this machine; is a folder\n")
    done = shell.python(*command, "--topology=v5litepod-3")
    assert done.returncode == 1 and done.stderr.startswith("error: 'v5litepod-3': no TPU slice")


if __name__ == "__main__":
    print(*(json.dumps({"case": name} | figures(name)) for name in CASES), sep="\n")
