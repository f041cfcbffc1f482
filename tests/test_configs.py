"""The shipped configs: valid on their slices, the paper's numbers, commands in the docstrings."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from dapo_jax import config, plan
from dapo_jax.pods import slices as pods

FOLDER = Path(__file__).parent.parent / "configs"
FILES = sorted(FOLDER.glob("*.py"))
ON_PODS = [f for f in FILES if "qwen2_5" in f.name]


def load(file: Path):
    return runpy.run_path(str(file))["get_config"]()


def pod_of(file: Path) -> pods.Pod:
    return pods.parse(re.search(r"--type=(\S+)", ast.get_docstring(ast.parse(file.read_text())))[1])


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_docstring_names_the_command_of_this_file(file):
    doc = ast.get_docstring(ast.parse(file.read_text()))
    assert re.search(rf"(--config=configs/{file.name}|quickstart\.sh)", doc)
    assert doc.count("\n") >= 5


@pytest.mark.parametrize("file", ON_PODS, ids=lambda f: f.stem)
def test_fits_the_slice_that_it_names(file):
    c, pod = load(file), pod_of(file)
    mean = plan.Traffic(c.data.max_prompt_tokens // 8, c.rollout.max_response_tokens // 4)
    out = plan.plan(c, pod, mean, room=0.05)
    assert out["mistakes"] == [] and out["fits"]
    assert out["in_flight"]["longest"]["sequences"] >= c.rollout.slots * c.rollout.cache_fraction
    assert out["in_flight"]["mean"]["sequences"] == c.rollout.slots
    assert pod.cloud in file.read_text()


@pytest.mark.parametrize("file", ON_PODS, ids=lambda f: f.stem)
def test_docstring_says_what_the_planner_says(file):
    """Its command; and what its compiler said, with versions and level, near the arithmetic."""
    c, pod, doc = load(file), pod_of(file), ast.get_docstring(ast.parse(file.read_text()))
    words = " ".join(doc.split())
    assert f"`python -m dapo_jax.plan --topology={pod.cloud}`" in words
    if file.stem.endswith("_verl"):
        return
    said = re.search(
        r"Compiled by `plan --compile` \([\d-]{10}, jax [\d.]+, libtpu [\d.]+, default optimization"
        r" level; nothing run\): ([\d.]+) GB of ([\d.]+) a chip while sampling, ([\d.]+) while upd",
        words,
    )
    sampling, limit, updating = (float(x) for x in said.groups())
    assert limit == pytest.approx(pod.chip.hbm / plan.GB, abs=0.05)
    shape, sizes = plan.network(c), config.resolve_mesh(c, pod.chips)
    got = {k: x / plan.GB for k, x in plan.peaks(plan.memory(c, shape, sizes)).items()}
    assert got == pytest.approx({"sampling": sampling, "updating": updating}, rel=0.15)


@pytest.mark.parametrize("file", ON_PODS, ids=lambda f: f.stem)
def test_is_the_papers_setting(file):
    c = load(file)
    assert (c.loss.clip_low, c.loss.clip_high) == (0.2, 0.28)
    assert c.dynamic_sampling.enabled and c.reward.overlong_penalty == 1.0 and not c.loss.kl_coef
    if "gsm8k" not in file.name:
        assert (c.rollout.groups, c.rollout.group_size) == (512, 16)
        assert (c.data.max_prompt_tokens, c.rollout.max_response_tokens) == (2048, 20480)
        assert (c.reward.overlong_buffer_tokens, c.optim.minibatches, c.optim.lr) == (
            4096,
            16,
            1e-6,
        )
        assert c.optim.warmup_steps == (10 if "verl" in file.name else 20)


@pytest.mark.parametrize("size", ["0_5b", "1_5b", "7b", "32b"])
def test_verl_differs_where_verl_does_and_nowhere_else(size):
    paper, verl = (
        config.leaves(load(FOLDER / f"dapo_qwen2_5_{size}{x}.py")) for x in ("", "_verl")
    )
    assert {k: (paper[k], verl[k]) for k in paper if paper[k] != verl[k]} == {
        "loss.dual_clip": (0.0, 10.0),
        "loss.normalizer": ("batch_tokens", "chunk_tokens"),
        "optim.warmup_steps": (20, 10),
        "optim.warmup_from_zero": (False, True),
        "optim.weight_decay": (0.0, 0.1),
    }
    assert size.replace("_", ".").upper() in paper["model.path"]
