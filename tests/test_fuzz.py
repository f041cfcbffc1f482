"""Whatever a command line, a file, a reward or a checkpoint's JSON holds, the user sees lines that
say what is wrong: never a stack, a library's panic, or a process that does not end; and what is
accepted makes sense.

`KINDS` are read in this process: only the errors that `cli.run` turns into such lines come out.
`COMMANDS` each run in a process of their own. More cases of each kind, and of the commands:

    FUZZ_CASES=200 python -m pytest tests/test_fuzz.py -k kind
    FUZZ_CASES=2000 python -m pytest -m slow tests/test_fuzz.py -k command
"""

import contextlib
import gzip
import io
import json
import math
import os
import re
import string
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from scripts import LAUNCH, ROOT
from test_journal import opened
from test_rewards import TOKENS as CHARACTERS, problem, response, rewarded

from dapo_jax import config, gate
from dapo_jax.checkpoint import checkpoint, resume, seal
from dapo_jax.config import cli, schema
from dapo_jax.dapo.state import Counters, State
from dapo_jax.data import __main__ as data_main, answers, problems, worked
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.lab import compare, sweep
from dapo_jax.lab.dynamics import browse, logs
from dapo_jax.log import alarm_command, goodput, metrics, report
from dapo_jax.model import hf, hf_format
from dapo_jax.model.qwen2 import Shape
from dapo_jax.pods import slices
from dapo_jax.reward import grading
from dapo_jax.run import policy

SHOWN = (ValueError, OSError)  # `cli.mistake`; ConfigError and Damaged are ValueErrors
# What a terminal would act upon, but for a progress bar's carriage return.
STEERS = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e\ud800-\udfff]"
CASES = int(os.environ.get("FUZZ_CASES", "0"))


def one_line_each(message: str) -> None:
    assert message and "Traceback" not in message
    assert all(line.strip() for line in gate.visible(message).splitlines())


def refuses_or_reads(read, *arguments):
    try:
        return read(*arguments)
    except SHOWN as error:
        one_line_each(str(error) or type(error).__name__)


def verdict(name: str, code: int, said: str) -> str:
    """'' or what is wrong with how a command ended."""
    if not 0 <= code < 126:
        return f"ends by signal or with status {code}"
    if found := re.search(r"Traceback \(most recent call last\)|panicked at", said):
        return found[0]
    if found := re.search(STEERS, said):
        return f"prints {found[0]!a}"
    told = re.search("^error: .", said, re.MULTILINE)
    unfit = name == "plan" and re.search("^(cannot run: |DOES NOT FIT)", said, re.MULTILINE)
    return "" if code == 0 or told or unfit else f"exit code {code} and no error line"


def runs(name: str, main: Callable[[Sequence[str]], int], *argv) -> None:
    """A command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            code = main([*map(str, argv)])
        except SystemExit as end:
            code = end.code
    wrong = verdict(name, code, said.getvalue())
    assert not wrong, f"{wrong}: {name} {argv}\n{said.getvalue()[-3000:]}"


# What cases are put together from. A shell would run some texts; nothing here is given to one.
PIECES = json.loads((ROOT / "tests/data/hostile_pieces.json").read_text())
TEXTS = [*PIECES["texts"], "x" * 5000, "9" * 400]
texts = st.sampled_from(TEXTS) | st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
scalars |= st.sampled_from([10**400, "a" * 3000, "{{ x }}", "qwen2"])
keys = st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
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


def joined(name: str, most: int = 4) -> st.SearchStrategy[str]:
    """Some of the pieces of this name, or of any texts, one after the other."""
    piece = st.sampled_from(PIECES[name])
    return st.lists(st.one_of(piece, piece, piece, texts), max_size=most).map("".join)


@st.composite
def bent(draw, data: bytes):
    """Rarely: bytes with a piece cut, turned or put in, any bytes, or JSON nested too deeply."""
    if not draw(rarely):
        return data
    start = draw(st.integers(0, len(data)))
    length = draw(st.sampled_from([0, 1, 4, 100, len(data)]))
    cut = data[:start] + draw(st.binary(max_size=8)) + data[start + length :]
    some = draw(st.binary(max_size=200))
    return draw(st.sampled_from([cut, cut, cut, some, b"[" * 90000, b'{"a":' * 90000]))


@st.composite
def written(draw, tree):
    """The bytes of a JSON file, rarely changed, rarely bent."""
    made = draw(changed(tree)) if draw(rarely) else tree
    return draw(bent(json.dumps(made).encode()))


def likely(name: str, field: schema.Field) -> st.SearchStrategy:
    """What the type, the bounds and the choices of a field make likely."""
    if name == "model.num_layers":
        return st.integers(0, 2)  # more would only compile
    numbers = {int: st.integers(-1, 1000), float: st.floats() | st.sampled_from([1e-6, 0.5, 2.0])}
    some = st.sampled_from([field.default, *field.choices, field.low, field.high, True, False])
    return some | numbers.get(type(field.default), some)


@st.composite
def overrides(draw):
    """An override of a field by a likely value or by any text, or of no field."""
    name = draw(st.sampled_from(list(config.SCHEMA)))
    if draw(rarely):
        wrong = ["seed.x", "optim", "__class__", "optim.__dict__", "optim.lr.", *schema.PEERS]
        name = draw(st.sampled_from(wrong) | st.text(string.ascii_lowercase + "._", max_size=20))
    field = config.SCHEMA.get(name)
    value = draw(likely(name, field) if field and not draw(rarely) else texts)
    forms = [f"--config.{name}={value}"] * 8
    return draw(st.sampled_from([*forms, f"--noconfig.{name}", f"--config.{name}"]))


def given_overrides(folder: Path, argv) -> None:
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


body = st.lists(st.sampled_from(PIECES["python"]), min_size=1, max_size=3).map("\n    ".join)


def program(name: str, above: str) -> st.SearchStrategy[str]:
    """A user's file that defines, or not, a function of this name."""
    define = st.sampled_from([text.format(name) for text in PIECES["defined"]])
    start = rarely.flatmap(lambda odd: st.sampled_from(PIECES["starts"]) if odd else st.just(""))
    return st.builds(lambda s, d, b: f"{s}\n{above}\n{d}{b}\n", start, define, body)


def config_files(folder: Path, text: str) -> None:
    (folder / "c.py").write_text(text, errors="surrogatepass")
    with contextlib.redirect_stdout(io.StringIO()):
        refuses_or_reads(cli.load, str(folder / "c.py"))


def sweeps(folder: Path, over: list[str]) -> None:
    for setting in (made := refuses_or_reads(sweep.settings, over) or []):
        assert len(sweep.folder(setting).encode()) < 256 and "/" not in sweep.folder(setting)
    assert len({sweep.folder(setting) for setting in made}) == len(made)


ROWS = PIECES["rows"]
rows = st.sampled_from(ROWS) | st.sampled_from(ROWS).flatmap(changed) | values
kinds = st.sampled_from(["int64", "double", "duration[s]", "timestamp[us]", "time64[us]"])
columns = st.builds(
    lambda bits, kind: pa.array([bits, 1]).view(kind), st.integers(-(2**63), 2**63 - 1), kinds
) | st.sampled_from([*map(pa.array, ([b"\xff", b"2"], [[1], None], ["2", "3"])), pa.nulls(2)])


@st.composite
def problem_file(draw):
    """(suffix, bytes) of a problem file."""
    suffix = draw(st.sampled_from([".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv"]))
    if suffix == ".parquet":
        texts = draw(columns) if draw(rarely) else pa.array(["a", "b"])
        pq.write_table(pa.table({"problem": texts, "answer": draw(columns)}), held := io.BytesIO())
        return suffix, draw(bent(held.getvalue()))
    lines = draw(st.lists(rows, min_size=1, max_size=3))
    data = draw(bent("\n".join(map(json.dumps, lines)).encode()))
    return suffix, gzip.compress(data) if suffix.endswith("gz") else data


ALPHABET = Tokenizer(
    300, frozenset({0}), "", {}, lambda text: [ord(c) % 300 for c in text], lambda ids, _: "", chr
)
on_bad = st.sampled_from(["refuse", "skip"])
any_answer = st.sampled_from([[], ["--any"]])
reading = st.tuples(joined("columns") | st.just(""), joined("wording"), any_answer)


def data_files(folder: Path, case) -> None:
    (suffix, data), (columns, template, any_answer), on_bad = case
    file, out = folder / f"rows{suffix}", folder / "out.jsonl"
    file.write_bytes(data)
    flags = [f"--columns={columns}", f"--template={template}", *any_answer]
    runs("data", data_main.main, "inspect", file, *flags)
    runs("data", data_main.main, "integers", file, out)
    if out.exists():  # what is written can be read, every row of it
        problems.read(out)
        assert "\\u00e9" not in out.read_text()
    refuses_or_reads(problems.read, file, on_bad)
    made = config.base()
    made.data.on_bad = on_bad
    refuses_or_reads(worked.read, str(file), ALPHABET, False, made.data, 99, problems.Reading())


GRADE = "from dapo_jax.reward.functions import Grade"
named, said = joined("rewards", 6), joined("responses")
settings = st.fixed_dictionaries(
    {"function": st.just("reward.py:score") | named},
    optional={
        "by_source": named, "format_tags": joined("columns"), "wrong": st.floats(-9, 9),
        "verifier": st.sampled_from([m for m in answers.MODES if m != "math"]),
        "on_error": st.sampled_from(["stop", "miss"]),
    },
)  # fmt: skip
source = texts.filter(lambda text: "\udc80" not in text)  # files with such are refused
rewards = st.tuples(
    settings, program("score", GRADE), st.tuples(said, source, said), st.lists(said, min_size=1)
)


def graded(folder: Path, case) -> None:
    fields, text, (answer, source, prompt), responses = case
    (folder / "reward.py").write_text(text, errors="surrogatepass")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        judge = refuses_or_reads(grading.judge, rewarded(**fields))
        asked = problem(answer, source, prompt), [*map(response, responses)]
        grade = lambda problem, said: grading.grade(CHARACTERS, judge, said, problem)
        with contextlib.redirect_stderr(io.StringIO()) as warned:
            if judge and (got := refuses_or_reads(grade, *asked)):
                columns = [got.score_G, *got.parts_G.values()]
                assert got.missed or all(np.isfinite(x).all() for x in columns)
                assert got.right_G is None or got.right_G.dtype == bool
                json.dumps(grading._plain(got), ensure_ascii=False).encode()
        assert not re.search(STEERS, warned.getvalue())
        assert all(x.startswith("warning: ") for x in warned.getvalue().splitlines())


def lines(*of: dict) -> st.SearchStrategy[bytes]:
    row = st.sampled_from(of)
    row = st.one_of(row, row, row.flatmap(changed), values).map(json.dumps)
    return st.lists(row, min_size=1, max_size=6).map("\n".join).map(str.encode).flatmap(bent)


foreign = [b"", b"step,a\n", b'{"step": 1}\n', b"step:1 - a:1 - "]
workdirs = st.fixed_dictionaries({
    "metrics.jsonl": lines(PIECES["record"], PIECES["record"] | {"step": 2}),
    "events.jsonl": lines(*PIECES["events"]),
    "rollouts/step_000001.jsonl": lines(PIECES["sample"]),
    "config.json": written(config.leaves(config.base())),
    "trackers.json": written({"wandb": "x"}),
    "../log": st.builds(bytes.__add__, st.sampled_from(foreign), st.just(b"") | st.binary()),
})  # fmt: skip


def run_s_files(folder: Path, files: dict[str, bytes]) -> None:
    (folder / "rollouts").mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    runs("compare", compare.main, folder, folder / "../log", "--json", folder / "out.json")
    refuses_or_reads(logs.read, str(folder / "../log"))
    for read in (logs.alarms, logs.histograms, policy.config_of_run):
        refuses_or_reads(read, str(folder))
    samples = refuses_or_reads(browse.read, str(folder))
    assert "<script" not in browse.page(samples or [])
    ledger = goodput.read(folder / "events.jsonl")  # damage costs its line, not the run
    assert all(map(math.isfinite, ledger.shares().values())) and goodput.summary(ledger)
    c, file = config.base(), folder / "metrics.jsonl"
    with contextlib.closing(metrics.Writer(folder, 1, c, lambda _: None)):
        report.summary(c, "w", Counters(), "", "", metrics.read(file))


PUT = [(bytes([i]) * 16, b"payload" * i) for i in range(4)]


def journals(folder: Path, case: tuple[int, bytes, int]) -> None:
    """What comes out of a damaged journal was put into it."""
    at, piece, more = case
    for put in (PUT, []):
        with opened(folder, lambda _: None) as journal:
            journal.open(np.zeros(1, np.float32))
            assert all(journal.get(key) in (None, payload) for key, payload in PUT)
            for key, payload in put:
                journal.put(key, payload)
        for file in (folder / "journal").iterdir():
            data = file.read_bytes()
            file.write_bytes(data[:at] + piece + data[at + more :])


def alarms(folder: Path, text: str) -> None:
    refuses_or_reads(alarm_command.words, text)
    if refuses_or_reads(alarm_command.words, command := f"true {text}"):
        running = alarm_command.AlarmCommand(command, "w", one_line_each)
        running.start(1, 1, [text])
        running._running.join()


def launched(folder: Path, case: tuple[str, list[str]]) -> None:
    """Nothing is done: where a script accepts the line, it prints what it would do."""
    script, flags = case
    flags = [a.replace("\0", "").encode("utf-8", "surrogateescape") for a in flags]
    command = ["bash", LAUNCH / script, "--dry-run", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    told = done.stderr.splitlines()
    assert not done.returncode or (done.returncode < 3 and told[-1].startswith(b"error: ")), told
    assert not re.search(rb"\.sh: line \d+:", done.stderr) and not list(folder.iterdir())


DOUBLE = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
DOUBLED = {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}}
TEMPLATE = [*PIECES["template"], "{{ " + "(" * 3000]  # parts of a chat template
SHAPE = Shape(64, 8, 16, 1, 2, 1, 4, 1e4, 1e-6, True)


@st.composite
def folder(draw):
    """File -> bytes: a tokenizer, its templates and a model, each of which may be damaged."""
    made = {"model": draw(st.sampled_from(PIECES["tokenizers"])), "added_tokens": []}
    about = hf_format.config_json(SHAPE, "float32")
    extra = [{}, {}, {"layer_types": ["full_attention"]}, {"rope_scaling": {}}]
    tensors = {
        name: np.ones(w.hf_shape, np.float32) for w in hf_format.weights(SHAPE) for name in w.names
    }
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    if draw(rarely):
        some = st.sampled_from(sorted(tensors))
        tensors[draw(some)].flat[0] = draw(st.sampled_from([np.nan, np.inf, 1e38]))
        del tensors[draw(some)]
    files = {
        "tokenizer.json": written(made | draw(st.sampled_from([DOUBLED, *PIECES["parts"]]))),
        "tokenizer_config.json": written({"eos_token": "</s>", "chat_template": TEMPLATE[1]}),
        "chat.jinja": st.lists(st.sampled_from(TEMPLATE), min_size=1, max_size=4).map(
            lambda parts: "".join(parts).encode()
        ),
        "model/config.json": written(about | draw(st.sampled_from(extra))),
        "model/model.safetensors": bent(safetensors.numpy.save(tensors)),
    }
    if draw(rarely):
        files["model/model.safetensors.index.json"] = changed(index).map(json.dumps).map(str.encode)
    return {name: draw(data) for name, data in files.items()}


def models(folder: Path, files: dict[str, bytes]) -> None:
    """Directories of a policy, and of a value model."""
    (folder / "model").mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    refuses_or_reads(hf.load, folder / "model")
    refuses_or_reads(hf_format.has_value_head, folder / "model")


flag = st.sampled_from(PIECES["flags"])
flag = st.one_of(flag, flag, st.builds(str.__add__, flag, texts))
sizes = st.integers(0, 150)
script = st.sampled_from(["gke.sh", "tpu_vm.sh", "slurm.sh", "local.sh", "quickstart.sh"])
# Name -> what reads a case, in a folder of the kind, and the cases.
KINDS = {
    "overrides": (given_overrides, st.lists(overrides(), max_size=3)),
    "config_files": (config_files, program("get_config", "from dapo_jax.config import base")),
    "sweeps": (sweeps, st.lists(joined("over", 2), max_size=3)),
    "data_files": (data_files, st.tuples(problem_file(), reading, on_bad)),
    "rewards": (graded, rewards),
    "workdirs": (run_s_files, workdirs),
    "journals": (journals, st.tuples(sizes, st.binary(max_size=8), sizes)),
    "models": (models, folder()),
    "alarm_commands": (alarms, joined("alarms")),
    "slices": (lambda _, text: refuses_or_reads(slices.parse, text), joined("slices", 2)),
    "launchers": (launched, st.tuples(script, st.lists(flag, max_size=6))),
}


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=CASES or 25)
def test_kind(tmp_path_factory, kind, data):
    read, cases = KINDS[kind]
    folder = tmp_path_factory.mktemp(kind) / "w"
    folder.mkdir()
    read(folder, data.draw(cases))


# FILE: the problem file. Small enough that a case in which nothing is wrong ends in seconds.
COMMANDS = [
    [w for word in command.split() for w in PIECES["words"].get(word, [word])]
    for command in PIECES["commands"]
]


@st.composite
def commands(draw):
    """(module, arguments, files of the folder that it runs in)."""
    module, *argv = draw(st.sampled_from(COMMANDS))
    suffix, data = draw(problem_file())
    argv = [part.replace("FILE", f"./problems{suffix}") for part in argv]
    if draw(rarely):
        at = draw(st.integers(0, len(argv) - 1))
        flag, equals, _ = argv[at].rpartition("=")
        argv[at] = flag + equals + draw(texts)
    if module not in ("convert", "data", "lab"):
        argv = draw(st.lists(overrides(), max_size=2)) + argv
    own = draw(program("score", GRADE)).encode(errors="surrogatepass")
    files = {f"problems{suffix}": data, "reward.py": own}
    return module, argv, draw(folder()) | files


@pytest.mark.slow
@hypothesis.given(case=commands())
@hypothesis.settings(max_examples=CASES or 25, phases=[hypothesis.Phase.generate])
def test_a_generated_command(shell, tmp_path_factory, case):
    folder, (name, argv, files) = tmp_path_factory.mktemp("case"), case
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
        process.communicate(timeout=500)
    finally:
        process.kill()
    said = "".join(log.read_text(errors="replace") for log in logs)
    wrong = verdict(name, process.returncode, said)
    assert not wrong, f"{wrong}: {name} {argv}\n{said[-3000:]}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, the text of its state, restore) of a small checkpoint."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    w = jax.numpy.arange(3.0)
    like = State({"w": w}, {"m": w})
    with checkpoint.manager(directory, keep=2) as m:
        checkpoint.save(m, like.count(step=4), config.leaves(config.base()), {"data": "data"})
    shardings = jax.tree.map(lambda _: one, like)
    inputs, say = {"data": "data", "reward": ""}, lambda _: None
    accept = lambda was: resume.check(was, config.base(), inputs, False, say)
    restore = lambda: resume.newest(directory, like, shardings, accept, say)
    return directory, (directory / "4" / "state" / "metadata").read_text(), restore


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=80)
def test_state_json_by_someone_who_seals_it(saved, data):
    """Not damage but intent: the seal fits what was written."""
    directory, text, restore = saved
    state = json.loads(text)
    wrong = [changed(state), changed({k: v for k, v in state.items() if k != "config"}), values]
    counters = {k: values for k in Counters._fields} | {"new": values}
    some = st.fixed_dictionaries({}, optional=counters).map(lambda new: state | new)
    state = data.draw(st.one_of(*wrong, some))
    step_dir = checkpoint.absolute(directory) / "4"
    (step_dir / "state" / "metadata").write_text(json.dumps(state))
    (step_dir / seal.SEAL).unlink()
    seal.write(step_dir)
    try:
        restored = restore()
    except SHOWN as error:
        one_line_each(str(error))
    else:
        for name in Counters._fields:
            assert type(getattr(restored.counters, name)) is type(Counters._field_defaults[name])
    assert (directory / "4").exists()  # the only one stays where it is


@hypothesis.given(st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()))
@hypothesis.settings(max_examples=60)
def test_seal_and_metadata_of_any_bytes(saved, data):
    directory, text, restore = saved
    (directory / "4" / "state" / "metadata").write_text(text)
    for name in (seal.SEAL, "_CHECKPOINT_METADATA", "commit_success.txt"):
        file = directory / "4" / name
        before = file.read_bytes()
        file.write_bytes(data)
        refuses_or_reads(restore)
        file.write_bytes(before)
