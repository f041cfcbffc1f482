"""Whatever a command line, a problem file or a checkpoint's JSON holds, the user sees one line that
says what is wrong, never a traceback: only the errors that `cli.run` turns into such a line come
out of the functions that read them."""

import json
import string
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from dapo_jax import config
from dapo_jax.checkpoint import checkpoint, resume, seal, workdir
from dapo_jax.config import cli
from dapo_jax.dapo.state import Counters, State
from dapo_jax.data import problems
from dapo_jax.log import metrics

SHOWN = (ValueError, OSError)  # `cli._guarded`; ConfigError and Damaged are ValueErrors
SETTINGS = config.base()

# Text that parsers stumble over, beside what hypothesis finds.
NASTY = [
    "",
    "nan",
    "inf",
    "-1",
    "1e999",
    "0x10",
    "1_0",
    "[",
    "{}",
    "None",
    "True",
    "a=b",
    "é",
    "\x00",
]
# A shell would run these. Nothing here is given to one.
NASTY += [
    "$(touch owned)",
    "`touch owned`",
    "; touch owned",
    "../../etc",
    "--help",
    "{c.seed}",
    "%s",
]

texts = st.sampled_from(NASTY) | st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def one_line_each(message: str) -> None:
    assert message and "Traceback" not in message
    assert all(line.strip() for line in message.splitlines())


# ------------------------------------------------------------------------------------------------
# Command lines
# ------------------------------------------------------------------------------------------------

names = (
    st.sampled_from(list(config.SCHEMA))
    | st.text(string.ascii_lowercase + "._", max_size=20)
    | st.sampled_from(["seed.x", "optim", "__class__", "optim.__dict__", "optim.lr.", "..", ""])
)


@hypothesis.given(st.lists(st.tuples(names, texts), max_size=3))
@hypothesis.settings(max_examples=150)
def test_overrides(overrides):
    argv, given = cli._split(["train", *(f"--config.{name}={text}" for name, text in overrides)])
    assert argv == ["train"] or any("=" in name for name, _ in overrides)
    told, made = [], config.base()
    cli.apply(made, cli.overrides(given, told))
    try:
        config.validate(made, 1)
    except config.ConfigError as error:
        told.append(str(error))
    for message in told:
        one_line_each(message)


@pytest.mark.slow
def test_a_few_generated_commands():
    """tests/fuzz_commands.py makes thousands by hand."""
    program = [sys.executable, str(Path(__file__).parent / "fuzz_commands.py")]
    done = subprocess.run(
        [*program, "--cases=25", "--seed=1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


def refuses_or_reads(read, *arguments):
    try:
        read(*arguments)
    except SHOWN as error:
        one_line_each(str(error))


fields = st.sampled_from(["prompt", "reward_model", "question", "answer", "problem", "solution"])
content = st.sampled_from(["role", "content", "ground_truth"])
rows = st.dictionaries(
    fields | st.just("verl_row"),
    values | st.dictionaries(content, values) | st.lists(st.dictionaries(content, values)),
)


@hypothesis.given(st.lists(rows | values, max_size=4), st.sampled_from(["refuse", "skip"]))
@hypothesis.settings(max_examples=150)
def test_problem_rows(tmp_path_factory, lines, on_bad):
    file = tmp_path_factory.getbasetemp() / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refuses_or_reads(problems.read, file, on_bad)


@hypothesis.given(st.binary(max_size=200), st.sampled_from(problems.SUFFIXES))
@hypothesis.settings(max_examples=100)
def test_problem_bytes(tmp_path_factory, data, suffix):
    file = tmp_path_factory.getbasetemp() / f"bytes{suffix}"
    file.write_bytes(data)
    refuses_or_reads(problems.read, file, "skip")


@hypothesis.given(st.lists(values.map(json.dumps) | texts, max_size=4))
def test_metrics_lines(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="replace")
    metrics.Writer(folder, 3, SETTINGS).close()
    assert all(r["step"] <= 3 for r in metrics.read(folder / "metrics.jsonl"))


@hypothesis.given(values)
def test_config_json_of_a_workdir(tmp_path_factory, value):
    folder = tmp_path_factory.getbasetemp() / "workdir"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(value))
    with pytest.raises(ValueError) as error, workdir.hold(folder):
        pass
    one_line_each(str(error.value))


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, the text of its state, like, shardings) of a small checkpoint."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = {"w": jax.numpy.arange(3.0)}
    state = State(arrays, {"m": arrays["w"]}).count(step=4)
    with checkpoint.manager(directory, keep=2) as m:
        checkpoint.save(m, state, config.leaves(config.base()), {"data": "data"})
    like = State({"w": arrays["w"]}, {"m": arrays["w"]})
    shardings = jax.tree.map(lambda _: one, like)
    return directory, (directory / "4" / "state" / "metadata").read_text(), like, shardings


def restore(saved):
    directory, _, like, shardings = saved
    inputs = {"data": "data", "reward": ""}
    accept = lambda was: resume.check(was, config.base(), inputs, False, lambda _: None)
    return resume.newest(directory, like, shardings, accept, lambda _: None)


def put(path, value):
    """A function of JSON that sets one place of it."""

    def change(state):
        node = state
        for key in path[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[path[-1]] = value
        return state

    return change


places = st.sampled_from(
    [(k,) for k in Counters._fields]
    + [("config",), ("versions",), ("content",), ("data",), ("config", "seed"), ("versions", "jax")]
    + [("content", "arrays"), ("content", "carried"), ("content", "arrays", "params.w"), ("new",)]
)
changes = st.builds(put, places, values) | values.map(lambda value: lambda state: value)


@hypothesis.given(st.lists(changes, min_size=1, max_size=2))
@hypothesis.settings(max_examples=60)
def test_state_json_by_someone_who_seals_it(saved, changes):
    """Not damage but intent: the seal fits what was written."""
    directory, text, *_ = saved
    state = json.loads(text)
    for change in changes:
        state = change(state)
    step_dir = checkpoint._absolute(directory) / "4"
    (step_dir / "state" / "metadata").write_text(json.dumps(state))
    (step_dir / seal.SEAL).unlink()
    seal.write(step_dir)
    try:
        restored = restore(saved)
    except SHOWN as error:
        one_line_each(str(error))
    else:
        for name in Counters._fields:
            assert type(getattr(restored.counters, name)) is type(Counters._field_defaults[name])
    assert (directory / "4").exists()  # the only one stays where it is


@hypothesis.given(st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()))
@hypothesis.settings(max_examples=60)
def test_seal_and_metadata_of_any_bytes(saved, data):
    directory, text, *_ = saved
    (directory / "4" / "state" / "metadata").write_text(text)
    for name in (seal.SEAL, "_CHECKPOINT_METADATA", "commit_success.txt"):
        file = directory / "4" / name
        before = file.read_bytes()
        file.write_bytes(data)
        refuses_or_reads(restore, saved)
        file.write_bytes(before)
