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

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from dapo_jax import config
from dapo_jax.checkpoint import checkpoint, resume, seal
from dapo_jax.config import cli, schema
from dapo_jax.dapo.state import Counters, State
from dapo_jax.data import problems
from dapo_jax.model import hf_format
from dapo_jax.model.qwen2 import Shape

ROOT = Path(__file__).parent.parent
SHOWN = (ValueError, OSError)  # `cli._guarded`; ConfigError and Damaged are ValueErrors


def one_line_each(message: str) -> None:
    assert message and "Traceback" not in message
    assert all(line.strip() for line in message.splitlines())


def refuses_or_reads(read, *arguments):
    try:
        read(*arguments)
    except SHOWN as error:
        one_line_each(str(error))


# --- Values, JSON and bytes ---

# A shell would run some of these; nothing here is given to one.
TEXTS = [
    "", "0", "-1", "nan", "1e999", "0x10", "1_0", "True", "[", "{}", "a=b", "é", "\udc80", "a,b",
    "../../etc", "--help", "{c.seed}", "%s", ",", "~/nope", "gs://", "|", "file:///x", "foo://x",
    "/dev/null", "/proc/nope", ".", "data,data", "x" * 5000, "9" * 400, "\x00", "$(touch owned)",
]  # fmt: skip
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


# --- The config ---


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


# --- Files ---

ROWS = [
    {"question": "1 + 1", "answer": "2"},
    {"problem": "1 + 1", "solution": "so \\boxed{2}"},
    {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}},
]
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


@hypothesis.given(problem_file(), st.sampled_from(["refuse", "skip"]))
@hypothesis.settings(max_examples=250)
def test_problem_files(tmp_path_factory, made, on_bad):
    suffix, data = made
    file = tmp_path_factory.getbasetemp() / f"rows{suffix}"
    file.write_bytes(data)
    refuses_or_reads(problems.read, file, on_bad)


# --- Commands ---

VOCABULARY = {
    c: i for i, c in enumerate(["</s>", "[UNK]", *string.ascii_lowercase, *"0123456789+?"])
}
WORDS = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"}
UNIGRAM = {"type": "Unigram", "vocab": [["</s>", 0.0], ["1", -1.0]], "unk_id": 0}
MODELS = [WORDS, WORDS | {"type": "BPE", "merges": []}, UNIGRAM]
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": "(a+)+$"}}
DOUBLE = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
PARTS = [  # of a tokenizer
    *({}, {"pre_tokenizer": {"type": "Whitespace"}}, {"pre_tokenizer": SPLIT}),
    {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}},
]
TEMPLATE = [  # parts of a chat template
    "{{ messages }}", "{{ messages[0].content }}", "{% for m in messages %}", "{% endfor %}", "{{",
    "{% if x %}", "{% endif %}", "{% break %}", "{{ 1/0 }}", "{{ x.y.z }}", "{% macro f() %}",
    "{% endmacro %}", "{{ f() }}", "{{ ''.__class__ }}", "{{ " + "(" * 3000, "{# ", "text",
    "{{ lipsum(n=10**7) }}", "{{ '%0999999999d'|format(1) }}", "{{ [1]|slice(10**9)|list }}",
    "{{ messages|tojson(indent=10**9) }}", "{{ raise_exception('no') }}", "{{ messages|sum }}",
]  # fmt: skip
SHAPE = Shape(64, 8, 16, 1, 2, 1, 4, 1e4, 1e-6, True)


@st.composite
def folder(draw):
    """File -> bytes: a tokenizer, its templates and a model, each of which may be damaged."""
    made = {"model": draw(st.sampled_from(MODELS)), "added_tokens": []}
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
        "tokenizer.json": written(made | draw(st.sampled_from(PARTS))),
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


# Small enough that a case in which nothing is wrong ends in seconds.
SMALL = {
    "steps": 0, "supervised_warmup.skill_steps": 0, "supervised_warmup.habit_steps": 0,
    "data.embedded_problems": 8, "eval.max_problems": 1, "eval.k": 1, "eval.top_p": 1,
    "log.tensorboard": False, "model.num_layers": 1, "rollout.slots": 8,
}  # fmt: skip
RUN = ["--workdir=run", *(f"--config.{name}={small}" for name, small in SMALL.items())]
TOKENS, MODEL = "--config.tokenizer.path=.", "--config.model.path=./model"
CHAT = ["--chat", "--config.tokenizer.chat_template=chat.jinja"]
COMMANDS = [  # FILE: the problem file
    ["train", *RUN, "--config.data.train=FILE", TOKENS, "--config.eval.files=a=FILE"],
    ["train", *RUN, MODEL, TOKENS, "--coordinator=", "--num_processes=0", "--verbosity=-1"],
    ["plan", "--topology=v5e-8", "--mean_response=2", "--room=0.5", "--json=out"],
    ["evaluate", *RUN, "--data=FILE", TOKENS, "--k=1", "--top_p=1", "--temperature=1"],
    ["evaluate", *RUN, MODEL, TOKENS, "--json=out", "--checkpoint=model"],
    ["sample", *RUN, MODEL, TOKENS, *CHAT, "--n=1", "--max_tokens=2", "--top_p=1", "1+1?"],
    ["convert", "to-orbax", "model", "out", "--dtype=float32"],
    ["convert", "to-hf", "model", "out"],
    ["data", "inspect", "FILE", "--tokenizer=.", "--chat_template=chat.jinja"],
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
    if module not in ("convert", "data"):
        argv = draw(st.lists(overrides(), max_size=2)) + argv
    return module, argv, draw(folder()) | {f"problems{suffix}": data}


def verdict(name: str, code: int, said: str) -> str:
    """'' or what is wrong."""
    if code < 0:
        return f"ends by signal {-code}"
    if found := re.search(r"Traceback \(most recent call last\)|panicked at", said):
        return found[0]
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
        process.communicate(timeout=500)
    finally:
        process.kill()
    said = "".join(log.read_text(errors="replace") for log in logs)
    wrong = verdict(name, process.returncode, said)
    assert not wrong, f"{wrong}: {name} {argv}\n{said[-3000:]}"


# --- Checkpoints ---


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
    step_dir = checkpoint._absolute(directory) / "4"
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
