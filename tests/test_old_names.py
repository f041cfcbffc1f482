"""Config files, command lines and saved configs from before fields were renamed still work."""

from pathlib import Path

import pytest

from dapo_jax import config
from dapo_jax.checkpoint import resume
from dapo_jax.config import cli, presets, schema

ROOT = Path(__file__).parent.parent

# As the shipped files were, each a body of get_config.
QUICKSTART = """
from dapo_jax import config
def get_config():
    c = config.base()
    c.steps = 60
    c.warmup.skill_steps, c.warmup.habit_steps = 900, 160
    c.checkpoint.every = 20
    return c
"""
TINY = """
from dapo_jax import config
def get_config():
    c = config.grpo()
    c.sampling.max_rounds, c.sampling.max_empty_steps = 3, 2
    c.optim.minibatches, c.optim.micro_rows = 2, 2
    c.sampling.dynamic = not c.sampling.dynamic
    c.update_from_flattened_dict({"reward.mode": "integer", "eval.problems": 7, "seed": 5})
    c.update({"checkpoint": {"best": "eval/a/avg@k"}, "warmup": {"batch": 3}})
    return c
"""
DAPO_MATH = """
from dapo_jax import recipes
def get_config():
    return recipes.dapo_math("0.5B")
"""
VERL = """
from dapo_jax import config, recipes
def get_config():
    return config.verl(recipes.dapo_math("7B"))
"""
GSM8K = """
from dapo_jax import config, recipes
def get_config():
    c = config.paper()
    c.rollout.groups, c.rollout.group_size, c.rollout.max_response_tokens = 256, 4, 4096
    c.loss.importance_cap = 5.0
    return recipes.place(c, recipes.Place("v6e-8", 2, 4, 1024, 1.0))
"""
LADDER = """
from dapo_jax import recipes
def get_config(argument: str = recipes.CUMULATIVE[-1]):
    name, _, size = argument.partition("@")
    if size not in ("", *recipes.PLACES):
        raise ValueError(f"no size {size!r} of Qwen2.5; there are {', '.join(recipes.PLACES)}")
    return recipes.rung(recipes.dapo_math(size) if size else recipes.ladder_task(), name)
"""


def quickstart():
    c = config.base()
    c.steps, c.checkpoint.every = 60, 20
    c.supervised_warmup.skill_steps, c.supervised_warmup.habit_steps = 900, 160
    return c


def tiny():
    c = config.grpo()
    c.dynamic_sampling.max_rounds, c.dynamic_sampling.max_empty_steps = 3, 2
    c.optim.minibatches, c.optim.micro_batch_rows = 2, 2
    c.dynamic_sampling.enabled = True
    c.reward.verifier, c.eval.max_problems, c.seed = "integer", 7, 5
    c.checkpoint.best_metric, c.supervised_warmup.batch = "eval/a/avg@k", 3
    return c


def gsm8k():
    c = config.paper()
    c.rollout.groups, c.rollout.group_size, c.rollout.max_response_tokens = 256, 4, 4096
    c.loss.importance_cap = 5.0
    return presets.place(c, presets.Slice("v6e-8", 2, 4, 1024, 1.0))


FILES = {
    "quickstart": (QUICKSTART, "", quickstart, ["warmup.skill_steps", "warmup.habit_steps"]),
    "tiny": (
        TINY,
        "",
        tiny,
        [
            "sampling.max_rounds",
            "sampling.max_empty_steps",
            "optim.micro_rows",
            "sampling.dynamic",
            "reward.mode",
            "eval.problems",
            "checkpoint.best",
            "warmup.batch",
        ],
    ),
    "dapo_math": (DAPO_MATH, "", lambda: presets.dapo_math("0.5B"), []),
    "verl": (VERL, "", lambda: config.verl(presets.dapo_math("7B")), []),
    "gsm8k": (GSM8K, "", gsm8k, []),
    "ladder": (
        LADDER,
        ":+clip_higher",
        lambda: presets.rung(presets.ladder_task(), "+clip_higher"),
        [],
    ),
}


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch):
    monkeypatch.setattr(schema, "_warned", set())


@pytest.mark.parametrize("kind", FILES)
def test_an_old_config_file_gives_the_same_config_and_one_warning_per_field(kind, tmp_path, capsys):
    text, argument, made, used = FILES[kind]
    file = tmp_path / "old.py"
    file.write_text(text)
    got = cli.load(f"{file}{argument}")
    assert got == made()
    assert got.copy_and_resolve_references() == got
    told = capsys.readouterr().err.splitlines()
    assert sorted(told) == sorted(
        f"warning: config.{name} is now config.{schema.RENAMED[name]}" for name in used
    )


def test_every_renamed_field_leads_to_one_of_today():
    assert set(schema.RENAMED.values()) <= set(config.SCHEMA)
    assert not set(schema.RENAMED) & set(config.SCHEMA)
    c = config.base()
    for old, new in schema.RENAMED.items():
        section, leaf = old.split(".")
        assert getattr(c[section], leaf) == config.leaves(c)[new]


def test_a_typo_behind_an_old_section_is_told_with_todays_name():
    c = config.base()
    with pytest.raises(AttributeError, match="dynamic_sampling.max_round: no such field; did you"):
        c.sampling.max_round = 3


def test_the_command_line(shell):
    done = shell.python(
        *("-m", "dapo_jax.plan", f"--config={ROOT}/configs/quickstart.py", "--topology=v5e-8"),
        *("--config.optim.micro_rows=8", "--config.sampling.dynamic=False"),
        *("--config.optim.micro_rows=1", "--noconfig.nope"),
    )
    assert done.stderr.splitlines() == [
        "warning: config.optim.micro_rows is now config.optim.micro_batch_rows",
        "warning: config.sampling.dynamic is now config.dynamic_sampling.enabled",
        "error: config.nope: no such field",
    ]
    given = [("sampling.dynamic", "0"), ("warmup.batch", "5")]
    made = cli.overrides(given, bad := [])
    assert not bad and made == {"dynamic_sampling.enabled": False, "supervised_warmup.batch": 5}


def test_an_old_run_resumes():
    """Its checkpoint has the old names; only what really differs is a change."""
    back = {new: old for old, new in schema.RENAMED.items()}
    new = config.leaves(config.base())
    old = {back.get(name, name): value for name, value in new.items()}
    assert "sampling.dynamic" in old and resume.differences(old, new) == ([], [])
    old["sampling.dynamic"] = False
    assert resume.differences(old, new) == (
        [],
        ["config.dynamic_sampling.enabled: False -> True"],
    )
