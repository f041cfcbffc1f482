"""Which changes of a config may go on from a checkpoint."""

import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.checkpoint import checkpoint, resume, workdir
from dapo_jax.dapo.state import State
from dapo_jax.data.problems import Encoded, Problem

PACKAGES = checkpoint.versions()


def saved(**changes):
    """The JSON of a checkpoint; changes: config fields by name."""
    c = config.leaves(config.base()) | changes
    return {"config": c, "versions": PACKAGES, "data": "same"}


def check(was, allow=False, data="same"):
    said = []
    resume.check(was, config.base(), {"data": data, "reward": ""}, allow, said.append)
    return said


HARMLESS = {
    "steps": 7, "eval.every": 1, "checkpoint.keep": 9, "guard.entropy_min": 0.1, "mesh.fsdp": 4,
    "rollout.slots": 8, "optim.micro_batch_rows": 2, "model.remat": "full",
    "optim.share_prompts": True, "dynamic_sampling.max_empty_steps": 9,
    "dynamic_sampling.on_exhausted": "stop",
}  # fmt: skip
MEANINGFUL = {
    "seed": 1, "data.train": "other.jsonl", "rollout.group_size": 16, "rollout.temperature": 0.5,
    "optim.lr": 1.0, "optim.b1": 0.5, "loss.clip_high": 0.2, "model.num_layers": 9,
    "reward.verifier": "integer",
}  # fmt: skip


def test_harmless_changes_are_shown():
    assert check(saved()) == []
    for name, old in HARMLESS.items():
        (line,) = check(saved(**{name: old}))
        assert line == f"changed: config.{name}: {old!r} -> {config.SCHEMA[name].default!r}"


def test_meaningful_changes_are_refused_unless_allowed():
    for name, old in MEANINGFUL.items():
        with pytest.raises(config.ConfigError) as error:
            check(saved(**{name: old}))
        first, last = str(error.value).splitlines()
        assert first.startswith(f"changed since the checkpoint: config.{name}: ")
        assert "--allow_config_change" in last
        (line,) = check(saved(**{name: old}), allow=True)
        assert line.startswith(f"changed (allowed): config.{name}: ")


def test_every_harmless_name_is_a_field_or_a_section():
    for name in resume.HARMLESS:
        assert any(k == name or (name[-1] == "." and k.startswith(name)) for k in config.SCHEMA)


@pytest.mark.parametrize("before", ["", "away"])
def test_checkpoints_in_another_place_are_named_and_nothing_begins_again(before, tmp_path):
    home = workdir.open_workdir(tmp_path / "run")
    own = str(tmp_path / before) if before else home.checkpoints
    resume.require_own(home, "elsewhere")
    saved = config.leaves(config.base()) | {"checkpoint.directory": own if before else ""}
    (home.local / "config.json").write_text(json.dumps(saved))
    resume.require_own(home, "elsewhere")
    pathlib.Path(own, "3").mkdir(parents=True)
    resume.require_own(home, own)
    with pytest.raises(ValueError, match=f"in elsewhere; this workdir's run has its own in {own};"):
        resume.require_own(home, "elsewhere")


def test_other_problems_under_the_same_names_are_refused(tmp_path):
    """`check` says whether they are the same; `newest` then keeps or drops their pass rates."""
    with pytest.raises(config.ConfigError, match="the training problems: other prompts"):
        check(saved(), data="other")
    inputs, base = {"data": "same", "reward": ""}, config.base()
    assert resume.check(saved(), base, inputs, False, print)
    assert not resume.check(saved(), base, inputs | {"data": "other"}, True, print)
    like = State({"w": jnp.arange(3.0)}, {"m": jnp.zeros(2)}).count(step=1)
    with checkpoint.manager(tmp_path, keep=1) as m:
        checkpoint.save(m, like._replace(by_problem={"rate_P": np.ones(2)}), {})
    places = jax.tree.map(lambda _: like.params["w"].sharding, like)
    found = lambda same: resume.newest(tmp_path, like, places, lambda _: same, print).by_problem
    assert found(True)["rate_P"].tolist() == [1, 1] and not found(False)


@pytest.mark.parametrize("field", ["function", "by_source", "reply"])
def test_a_file_with_other_contents_is_named_by_its_field(field):
    c = config.base()
    c.update({f"reward.{field}": "own.py:f"})
    was, inputs = saved(**config.leaves(c)) | {"reward": "was"}, {"data": "same", "reward": "now"}
    with pytest.raises(config.ConfigError, match=rf"the file of config\.reward\.{field}: it has"):
        resume.check(was, c, inputs, False, print)


def test_other_versions_are_shown():
    was = saved()
    was["versions"] = PACKAGES | {"jax": "0.0.1", "gone": "1"}
    (line,) = check(was)
    assert line.startswith("changed: jax 0.0.1 -> ")


def test_fields_of_another_version_count_with_their_default():
    was = saved(**{"of.the.future": 3})
    was["config"].pop("guard.hang_factor")
    was["config"].pop("loss.clip_low")
    with pytest.raises(config.ConfigError, match=r"config.of.the.future: 3 -> None"):
        check(was)
    was["config"].pop("of.the.future")
    assert check(was) == []


def test_fingerprint_sees_prompts_answers_tokens_and_order():
    def made(*rows):
        problems = [Problem(name, (), answer, "", *row) for name, answer, _, *row in rows]
        return resume.fingerprint(Encoded([row[2] for row in rows], problems, 0))

    a, b = ("a", "1", [1, 2]), ("b", "2", [3])
    others = [made(b, a), made(a), made(a, ("b", "3", [3])), made(a, ("b", "2", [4]))]
    others += [made(a, (*b, {"level": n})) for n in (1, 2)]  # which a reward of the user's sees
    assert len({made(a, b), *others}) == 7 and made(a, b) == made(a, b)


def test_what_the_processes_have_read_is_named():
    """The sets of problems and the rewards' files; of two that differ, which."""
    sets = [Encoded([[n]], [Problem("a", (), "1", "")], 0) for n in range(3)]
    text = lambda train, seen, source: SimpleNamespace(
        train=sets[train], evals={"seen": sets[seen]}, judge=SimpleNamespace(source=source)
    )
    one = resume.identity(text(0, 1, "s"))
    differ = lambda other: [name for name in one if one[name] != other[name]]
    assert differ(resume.identity(text(2, 1, "s"))) == ["the hash of config.data.train"]
    assert differ(resume.identity(text(0, 2, "s"))) == ["the hash of config.eval.files seen"]
    assert differ(resume.identity(text(0, 1, "t"))) == ["the hash of config.reward's own files"]
