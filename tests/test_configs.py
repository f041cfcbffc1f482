"""The shipped configs: valid on their slices, the paper's numbers, commands in the docstrings."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from dapo_jax import config, plan
from dapo_jax.config import presets
from dapo_jax.plan import gpus
from dapo_jax.pods import slices as pods

FOLDER = Path(__file__).parent.parent / "configs"
SIZES = ("0.5B", "1.5B", "7B", "32B")
# Four files are other names of dapo_qwen2_5.py:SIZE.
DOORS = {f"dapo_qwen2_5_{size.lower().replace('.', '_')}": size for size in SIZES}
FILES = sorted(f for f in FOLDER.glob("*.py") if f.stem not in DOORS)
GSM8K = "gsm8k_dapo_qwen2_5_1_5b"
ON_PODS = [("dapo_qwen2_5", size + reading) for size in SIZES for reading in ("", ",verl")]
ON_PODS += [(GSM8K, "")]
ON_PODS += [
    ("dapo_qwen3" if "Qwen3" in name else "dapo_qwen2_5", name.removeprefix("Qwen3-"))
    for name in presets.PLACES
    if name not in SIZES
]


def load(name: str, argument: str = ""):
    make = runpy.run_path(str(FOLDER / f"{name}.py"))["get_config"]
    return make(*filter(None, [argument]))


def doc(name: str) -> str:
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))


def said(name: str, argument: str) -> tuple[pods.Pod, list[float]]:
    """What the docstring says of a config: its slice, and GB: arithmetic, limit of a chip and,
    where it was compiled, while sampling and while updating."""
    if name != GSM8K:
        size = re.escape(argument.partition(",")[0])
        row = re.search(
            rf"^ +{size} +(\S+) +\d+ x \d+ +(\S+) +(\S+) .* (\S+) +(\S+)$", doc(name), re.M
        )
    else:
        row = re.search(
            r"topology=(\S+)`: ([\d.]+) GB of ([\d.]+) a chip.*default optimization level; nothing"
            r" run\): ([\d.]+) GB of [\d.]+ a chip while sampling, ([\d.]+) while updating",
            " ".join(doc(name).split()),
        )
    return pods.parse(row[1]), [float(x) for x in row.groups()[1:] if x != "-"]


def test_a_file_names_its_command_and_an_old_name_is_the_same_config():
    for file in FILES:
        named = rf"(--config=configs/{file.name}|quickstart\.sh)"
        assert re.search(named, doc(file.stem)), file
    for name, size in DOORS.items():
        assert load(name) == load("dapo_qwen2_5", size)
        assert f"configs/dapo_qwen2_5.py:{size}, where" in doc(name)
    assert load("dapo_qwen2_5") == load("dapo_qwen2_5", "32B")
    assert load("dapo_qwen3") == load("dapo_qwen3", "8B")


def test_an_unknown_size_or_reading_is_one_line():
    with pytest.raises(ValueError, match="no size '7B' of Qwen3; there are 0.6B, .*, 32B$"):
        load("dapo_qwen3", "7B")
    with pytest.raises(ValueError, match="no reading 'paper'; there is SIZE"):
        load("dapo_qwen2_5", "7B,paper")


@pytest.mark.parametrize("name, argument", ON_PODS)
def test_it_fits_its_slice_as_its_docstring_says_and_is_the_papers_setting(name, argument):
    """The docstring has the limit of memory, the planner's number and its compiler's near that."""
    c, (pod, (memory, limit, *compiled)) = load(name, argument), said(name, argument)
    shape, sizes = plan.network(c), config.resolve_mesh(c, pod.chips)
    assert plan.mistakes(c, shape, pod) == "" == plan.check(c, pod)
    prompt, response = c.data.max_prompt_tokens, c.rollout.max_response_tokens
    flight = lambda length: plan.waves(c, shape, sizes, length)["sequences"]
    assert flight(prompt + response) >= 0.98 * c.rollout.slots * c.rollout.cache_fraction
    assert flight(prompt // 8 + response // 4) >= 0.8 * c.rollout.slots  # if all ended at once
    assert c.rollout.groups * c.rollout.group_size / flight(prompt + response) <= 64
    assert limit == pytest.approx(pod.chip.hbm / plan.GB, abs=0.05)
    got = peaks(c, sizes)
    assert not compiled or got == pytest.approx(compiled, rel=0.2)
    assert max(got) == pytest.approx(memory, abs=0.6)
    if name != GSM8K:  # the numbers that no model changes: test_presets
        buffer = 409 if "Math" in argument else 4096
        assert (prompt, response) == (2048, 2048 if "Math" in argument else 20480)
        assert c.reward.overlong_buffer_tokens == buffer
        assert c.optim.warmup_steps == (10 if "verl" in argument else 20)


def peaks(c, sizes) -> list[float]:
    """GB of a chip while sampling and while updating."""
    return [x / plan.GB for x in plan.peaks(plan.memory(c, plan.network(c), sizes)).values()]


def one_chip() -> list[float]:
    """What its docstring says: GB of the chip's, while sampling and while updating."""
    words = r"run\): ([\d.]+) GB of ([\d.]+) while sampling, ([\d.]+) while updating"
    sampling, limit, updating = re.search(words, " ".join(doc("one_chip").split())).groups()
    return [float(x) for x in (limit, sampling, updating)]


def test_the_config_for_one_chip_leaves_room_on_it():
    c, pod = load("one_chip"), pods.parse("v5e:1x1")
    out = plan.plan(c, pod, plan.Traffic(128, 256), room=0.1)
    assert out["mistakes"] == [] and out["fits"]
    limit, sampling, updating = one_chip()
    assert limit == pytest.approx(pod.chip.hbm / plan.GB, abs=0.05)
    assert peaks(c, config.resolve_mesh(c, 1)) == pytest.approx([sampling, updating], rel=0.15)
    assert c.dynamic_sampling.enabled and (c.loss.clip_low, c.loss.clip_high) == (0.2, 0.28)


@pytest.mark.parametrize("n", ["1", "8"])
def test_the_config_for_gpus_takes_what_its_docstring_says(n):
    """With all responses in flight at once, and rows that are three quarters full; an A100
    has room for it too."""
    row = re.search(rf"gpus\.py:{n} +([\d.]+) +([\d.]+) +([\d.]+)", doc("gpus"))
    page = (FOLDER.parent / "docs/on_a_gpu.md").read_text()
    assert f"on h100-{n} | {' | '.join(row.groups())} |" in page
    sampling, updating, seconds = map(float, row.groups())
    c = load("gpus", n)
    found = plan.plan(c, gpus.parse(f"h100-{n}"), plan.Traffic(32, 128), 0.1)
    assert [x / plan.GB for x in found["peaks"].values()] == pytest.approx(
        [sampling, updating], abs=0.1
    )
    assert found["step"]["expected_s"] == pytest.approx(seconds, abs=0.1)
    assert found["step"]["filled_cells"] >= 0.75
    assert c.model.head_chunk >= config.row_tokens(c)  # so that logits are kept
    assert found["in_flight"]["longest"]["waves"] == 1
    assert plan.check(c, gpus.parse(f"a100-{n}")) == ""
    with pytest.raises(ValueError, match=r"configs/gpus.py:3: wants 1, 2, 4 or 8 GPUs"):
        load("gpus", "3")


def test_two_models_fit_the_slice_of_one():
    """With what the docstring says, beside what DAPO takes there."""
    pod = pods.parse("v5p-256")
    said = r"102.8 GB a chip it takes ([\d.]+) while sampling and ([\d.]+) while .*, ([\d.]+) more"
    *numbers, more = map(float, re.search(said, " ".join(doc("vapo").split())).groups())
    one, two = load("dapo_qwen2_5", "32B"), load("vapo", "32B")
    assert plan.check(two, pod) == "" and two.steps == one.steps + two.critic.pretrain_steps
    alone, both = (peaks(c, config.resolve_mesh(c, pod.chips)) for c in (one, two))
    assert both == pytest.approx(numbers, abs=0.05)
    assert [b - a for a, b in zip(alone, both, strict=True)] == pytest.approx([more] * 2, abs=0.05)


@pytest.mark.parametrize("name", presets.PLACES)
def test_every_model_with_a_place_is_one_whose_shape_is_known(name):
    """`launch` checks it against the slice without a network; and the ladder takes it."""
    place = presets.PLACES[name]
    shape = plan.published(place.model)
    assert place.slice.tensor * place.slice.shards == pods.parse(place.slice.pod).chips
    assert place.model.removesuffix("-Base").endswith(name.removeprefix("R1-").removesuffix("-v6e"))
    c = load("ladder", f"+clip_higher@{name}")
    assert c.model.path == place.model and c.rollout.slots == place.slice.slots
    assert shape.num_kv_heads % place.slice.tensor == 0
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    assert longest <= place.context
