"""Whatever a command line, a file or a checkpoint's JSON holds, the user sees one line that says
what is wrong: never a stack, a library's panic, or a process that does not end.

In this process: only the errors that `cli.run` turns into such a line come out of the functions
that read input. As commands, each in a process of its own:

    FUZZ_CASES=2000 python -m pytest -m slow tests/test_fuzz.py -k command
"""

import gzip
import io
import json
import os
import re
import string
from pathlib import Path

import hostile
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from dapo_jax import config
from dapo_jax.checkpoint import checkpoint, resume, seal, workdir
from dapo_jax.config import cli, schema
from dapo_jax.dapo.state import Counters, State
from dapo_jax.data import problems
from dapo_jax.log import metrics
from dapo_jax.model import hf_format
from dapo_jax.model.qwen2 import Shape

ROOT = Path(__file__).parent.parent
SHOWN = (ValueError, OSError)  # `cli._guarded`; ConfigError and Damaged are ValueErrors
SETTINGS = config.base()
SECONDS = 500  # of the clock, for one command

# ------------------------------------------------------------------------------------------------
# Strategies
# ------------------------------------------------------------------------------------------------

texts = st.sampled_from(hostile.TEXTS) | st.text(max_size=20)
scalars = st.sampled_from(hostile.SCALARS) | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
numbers = st.sampled_from(hostile.NUMBERS)
rarely = st.sampled_from([False] * 4 + [True])


@st.composite
def changed(draw, tree):
    """JSON with one place of it replaced or removed."""
    node = tree = json.loads(json.dumps(tree))
    while keys := list(node) if isinstance(node, dict) else list(range(len(node))):
        key = draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and not draw(rarely):
            node = node[key]
        elif draw(rarely):
            del node[key]
            break
        else:
            node[key] = draw(values)
            break
    return tree


@st.composite
def bent(draw, data: bytes):
    """Bytes with a piece cut, turned or put in."""
    start = draw(st.integers(0, len(data)))
    length = draw(st.sampled_from([0, 1, 4, 100, len(data)]))
    return data[:start] + draw(st.binary(max_size=8)) + data[start + length :]


@st.composite
def overrides(draw):
    """An override of a field by what its type, bounds and choices make likely, or by any text."""
    name = draw(st.sampled_from(list(config.SCHEMA)))
    if draw(rarely):
        names = st.text(string.ascii_lowercase + "._", max_size=20)
        name = draw(st.sampled_from([*hostile.NAMES, *schema.peers()]) | names)
    likely = [draw(texts)]
    if (field := config.SCHEMA.get(name)) and not draw(rarely):
        likely = [*field.choices, field.default, field.low, field.high]
        likely += hostile.LIKELY[type(field.default)]
        if name == "model.num_layers":
            likely = [0, 1, 2]  # more would only compile
    forms = [f"--config.{name}={draw(st.sampled_from(likely))}"] * 8
    return draw(st.sampled_from([*forms, f"--noconfig.{name}", f"--config.{name}"]))


@st.composite
def config_file(draw):
    lines = ["from dapo_jax import config", "def get_config():", "    c = config.base()"]
    statements = st.lists(st.sampled_from(hostile.STATEMENTS), min_size=1, max_size=2)
    lines += [f"    {statement}" for statement in draw(statements)]
    argument = draw(st.sampled_from(["", "", "", ":x"]))
    files = {"config.py": "\n".join([*lines, "    return c", ""]).encode()}
    return [f"--config=config.py{argument}"], files


@st.composite
def problem_file(draw):
    kind = draw(st.sampled_from(["jsonl", "jsonl.gz", "parquet", "csv"]))
    columns = st.sampled_from(hostile.COLUMNS).map(lambda make: make())
    if kind == "parquet":
        table = {"problem": pa.array(["a", "b"]), "answer": draw(columns)}
        if draw(rarely):
            table["problem"] = draw(columns)
        pq.write_table(pa.table(table), held := io.BytesIO())
        data = held.getvalue()
    else:
        row = st.sampled_from(hostile.ROWS)
        rows = draw(st.lists(row | row.flatmap(changed), min_size=1, max_size=3))
        data = "\n".join(map(json.dumps, rows)).encode()
        data = draw(st.sampled_from(hostile.DEEP)) if draw(rarely) else data
        data = gzip.compress(data) if kind.endswith("gz") else data
    name = f"./problems.{kind}"
    return name, {name: draw(bent(data)) if draw(rarely) else data}


@st.composite
def tokenizer(draw):
    made = dict(draw(st.sampled_from(hostile.TOKENIZERS)))
    made |= draw(st.sampled_from([{}, {}, *hostile.PARTS]))
    made = draw(changed(made)) if draw(rarely) else made
    text = json.dumps(made).encode()
    about = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    about = draw(changed(about)) if draw(rarely) else about
    template = "".join(draw(st.lists(st.sampled_from(hostile.TEMPLATE), min_size=1, max_size=4)))
    return {
        "tokenizer.json": draw(bent(text)) if draw(rarely) else text,
        "tokenizer_config.json": json.dumps(about).encode(),
        "chat.jinja": template.encode(),
    }


SHAPE = Shape(64, 8, 16, 1, 2, 1, 4, 1e4, 1e-6, True)


@st.composite
def model(draw):
    about = hf_format.config_json(SHAPE, "float32")
    extra = [{}, {}, {"layer_types": ["full_attention"]}, {"rope_scaling": {}}]
    about |= draw(st.sampled_from(extra))
    about = json.dumps(draw(changed(about)) if draw(st.booleans()) else about).encode()
    if draw(rarely):
        about = draw(st.sampled_from([*hostile.DEEP, about[:-9]]))
    tensors = {
        name: np.ones(w.hf_shape, np.float32) for w in hf_format.weights(SHAPE) for name in w.names
    }
    if draw(rarely):
        some = st.sampled_from(sorted(tensors))
        tensors[draw(some)].flat[0] = draw(st.sampled_from([np.nan, np.inf, 1e38]))
        del tensors[draw(some)]
    data = safetensors.numpy.save(tensors)
    data = draw(bent(data)) if draw(rarely) else data
    files = {"model/config.json": about, "model/model.safetensors": data}
    if draw(rarely):
        named = dict.fromkeys(tensors, "model.safetensors")
        index = draw(changed({"metadata": {}, "weight_map": named}))
        files["model/model.safetensors.index.json"] = json.dumps(index).encode()
    return files


# Small enough that a case in which nothing is wrong ends in seconds.
SMALL = {
    "steps": 0, "supervised_warmup.skill_steps": 0, "supervised_warmup.habit_steps": 0,
    "data.embedded_problems": 8, "eval.max_problems": 1, "eval.k": 1, "eval.top_p": 1,
    "log.tensorboard": False, "model.num_layers": 1, "rollout.slots": 8,
}  # fmt: skip
RUN = ["--workdir=run", *(f"--config.{name}={small}" for name, small in SMALL.items())]
FLAGS = {  # beside --config.*: names and what they may be
    "train": (["workdir", "config", "coordinator", "num_processes", "nope", "verbosity"], texts),
    "plan": (["mean_response", "room", "mean_prompt", "json"], numbers),
    "evaluate": (["k", "top_p", "temperature", "json", "checkpoint"], texts),
    "sample": (["n", "max_tokens", "seed", "temperature", "top_p"], numbers),
}  # fmt: skip


@st.composite
def commands(draw):
    """(module, arguments, files of the folder that it runs in)."""
    name = draw(st.sampled_from(["train", "plan", "evaluate", "sample", "convert", "data"]))
    problem, files = draw(problem_file())
    files |= draw(tokenizer()) | draw(model())
    written = ["--config.tokenizer.path=."]
    if name == "convert":
        what = draw(st.sampled_from(["to-orbax"] * 8 + ["to-hf", "nope"]))
        source = draw(st.sampled_from(["model"] * 9 + hostile.TEXTS[:12]))
        dtype = draw(st.sampled_from([[], ["--dtype=float32"], ["--dtype=bfloat16"], ["--dtype="]]))
        return name, [what, source, "out", *dtype], files
    if name == "data":
        chat = ["--tokenizer=.", "--chat_template=chat.jinja"]
        return name, ["inspect", problem, *chat[: draw(st.integers(0, 2))]], files
    argv = (
        [f"--topology={draw(st.sampled_from(hostile.SLICES) | texts)}"] if name == "plan" else RUN
    )
    argv = argv + draw(st.lists(overrides(), max_size=2))
    if draw(rarely):
        flags, given = FLAGS[name]
        argv += [f"--{draw(st.sampled_from(flags))}={draw(given)}"]
    if name in ("train", "plan") and draw(st.booleans()):
        more, file = draw(config_file())
        return name, argv + more, files | file
    if name == "train" and draw(st.booleans()):
        argv += [f"--config.data.train={problem}", *written]
        argv += [f"--config.eval.files={draw(texts)}"] * draw(rarely)
    elif name == "evaluate" and draw(st.booleans()):
        argv += [f"--data={draw(st.sampled_from([problem] * 4 + hostile.TEXTS[:20]))}", *written]
    elif name != "plan":
        argv += ["--config.model.path=./model", *written]
    if name == "sample":
        argv += ["--chat", "--config.tokenizer.chat_template=chat.jinja"] * draw(st.booleans())
        argv += [draw(st.just("1+1?") | texts)]
    return name, argv, files


# ------------------------------------------------------------------------------------------------
# Command lines
# ------------------------------------------------------------------------------------------------


def one_line_each(message: str) -> None:
    assert message and "Traceback" not in message
    assert all(line.strip() for line in message.splitlines())


@hypothesis.given(st.lists(overrides(), max_size=3))
@hypothesis.settings(max_examples=150)
def test_overrides(argv):
    rest, given = cli._split(["train", *argv])
    assert rest == ["train"]
    told, made = [], config.base()
    cli.apply(made, cli.overrides(given, told))
    try:
        config.validate(made, 1)
    except config.ConfigError as error:
        told.append(str(error))
    for message in told:
        one_line_each(message)


def verdict(name: str, code: int, said: str) -> str:
    """'' or what is wrong."""
    if code < 0:
        return f"ends by signal {-code}"
    if "Traceback (most recent call last)" in said:
        return "a traceback"
    if "panicked at" in said:
        return "a panic"
    told = re.search(r"^(.*: )?error: .", said, re.MULTILINE)
    unfit = name == "plan" and re.search("^(cannot run: |DOES NOT FIT)", said, re.MULTILINE)
    return "" if code == 0 or told or unfit else f"exit code {code} and no error line"


@pytest.mark.slow
@hypothesis.given(case=commands())
@hypothesis.settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "25")), phases=[hypothesis.Phase.generate]
)
def test_a_generated_command(shell, tmp_path_factory, case):
    name, argv, files = case
    folder = tmp_path_factory.mktemp("case")
    (folder / "model").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    for file, data in files.items():
        (folder / file).write_bytes(data)
    argv = [a.replace("\x00", "\\0") for a in argv]  # no shell hands on a NUL
    logs = [folder / "stdout", folder / "stderr"]
    process = shell.start(
        "-m", f"dapo_jax.{name}", *argv, cwd=folder, logs=logs, env={"HF_HUB_OFFLINE": "1"}
    )
    try:
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    said = "".join(log.read_text(errors="replace") for log in logs)
    wrong = verdict(name, process.returncode, said)
    assert not wrong, f"{wrong}: {name} {argv}\n{said[-3000:]}"


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
