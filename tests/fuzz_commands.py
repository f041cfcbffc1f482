"""Generated command lines and files for the five commands: each ends with exit code 0, or with
lines that begin with `error: `, and never with a stack, a library's panic, or not at all.

    python tests/fuzz_commands.py --cases=2000 [--seed=0] [--jobs=2] [--only=17]

Everything is imported once; each case is a forked process of its own in a folder of its own. A case
is a function of (seed, number), so that `--only` makes one again and shows what it says.
"""

import argparse
import collections
import gzip
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import flags
from safetensors.numpy import save_file

from dapo_jax import convert, evaluate, sample, train
from dapo_jax.config import cli, schema
from dapo_jax.data import problems
from dapo_jax.model import hf_format
from dapo_jax.model.qwen2 import Shape
from dapo_jax.plan import command as plan

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 500  # of the clock, for one case

TEXTS = [
    *(
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "1e999",
        "-0.0",
        "0x10",
        "1_0",
        "True",
        "None",
        "[",
        "{}",
        "a=b",
    ),
    *(
        "é",
        "\udc80",
        "../../etc",
        "--help",
        "{c.seed}",
        "%s",
        "a,b",
        ",",
        "~",
        "~/nope",
        "gs://",
        "|",
    ),
    *("file:///x", "foo://x", "/dev/null", "/proc/nope", ".", "data,data", "fsdp", "x" * 5000),
    *(str(2**31), str(2**63), str(2**64), "9" * 400, "1e-320", "1e300", "99999999999", "7", "3.5"),
]
SCALARS = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        42,
        2**31,
        2**64,
        10**400,
        0.5,
        1e300,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "42", "4.0", "1e5", "qwen2", "é", "a" * 3000, "{{ x }}", "\x00"),
]


def value(rng: random.Random, depth: int = 0):
    """Any JSON."""
    kind = rng.randrange(8) if depth < 4 else 0
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice("abc"): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(SCALARS)


def changed(rng: random.Random, tree):
    """JSON with one place of it replaced, removed or repeated."""
    tree = json.loads(json.dumps(tree))
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return value(rng)
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
            node = node[key]
            continue
        if rng.random() < 0.2:
            del node[key]
        else:
            node[key] = value(rng)
        return tree


def bent(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a piece cut, turned or put in."""
    data = bytearray(data)
    start = rng.randrange(len(data) + 1)
    end = min(start + rng.choice([0, 1, 4, 100, 10**6]), len(data))
    data[start:end] = rng.randbytes(rng.choice([0, 1, 8]))
    return bytes(data)


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------

STATEMENTS = [
    *(
        "1 / 0",
        "assert False",
        "raise SystemExit(2)",
        "raise KeyError('x')",
        "import nothing_there",
    ),
    *(
        "c.optim.lr = 'fast'",
        "c.optim.learning_rate = 1.0",
        "c.nope.x = 1",
        "c.seed = -1",
        "c = None",
    ),
    *(
        "c.sampling.dynamic = False",
        "c.warmup.skill = 1",
        "c.eval = 3",
        "del c.seed",
        "return c.optim",
    ),
    *(
        "c.rollout.groups = 2**70",
        "c.model.num_layers = 0",
        "open('/nope')",
        "c.loss.clip_low = None",
    ),
    *("return get_config()", "c.update({'a': 1})", "c.update({'optim': {'micro_rows': 3}})", "c.("),
    *(
        "c.update_from_flattened_dict({'reward.mode': 5})",
        "c.mesh.data = 3",
        "exit()",
        "c.unlock()",
    ),
    *(
        "c.unlock().loop = c",
        "c.reward.mode = 'dapo'",
        "raise RecursionError",
        "def f(:",
        "\x00",
        "é",
    ),
    *(
        "c.optim = None",
        "x = " + "-" * 5000 + "1",
        "c.optim.lr = float('nan')",
        "c['optim.lr'] = 3",
    ),
    *("raise MemoryError", "c.rollout = c.optim", "c.steps = True", "return {}"),
]


def config_file(rng, folder) -> list[str]:
    lines = ["from dapo_jax import config", "def get_config():", "    c = config.base()"]
    lines += [f"    {rng.choice(STATEMENTS)}" for _ in range(rng.randrange(1, 3))]
    (folder / "config.py").write_text("\n".join([*lines, "    return c", ""]))
    return [f"--config={folder}/config.py{rng.choice(['', '', '', ':x'])}"]


ROWS = [
    {"question": "1 + 1", "answer": "2"},
    {"problem": "1 + 1", "solution": "so \\boxed{2}"},
    {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}},
]
COLUMNS = [
    lambda: pa.array([2**31 - 1, 0], pa.int32()).view(pa.date32()),
    lambda: pa.array([2**62, 1], pa.int64()).view(pa.duration("s")),
    lambda: pa.array([2**62, 1], pa.int64()).view(pa.timestamp("us")),
    lambda: pa.array([2**62, 1], pa.int64()).view(pa.time64("us")),
    lambda: pa.array([2.5, float("nan")]),
    lambda: pa.array([2.0, 1e300]),
    lambda: pa.array([b"\xff", b"2"]),
    lambda: pa.array([[1], None]),
    lambda: pa.array([{"a": 1}, {"a": 2}]),
    lambda: pa.array([True, False]),
    lambda: pa.array(["2", "3"]).dictionary_encode(),
    lambda: pa.nulls(2),
]


def problem_file(rng, folder) -> pathlib.Path:
    kind = rng.choice(["jsonl", "jsonl.gz", "parquet", "parquet", "csv"])
    file = folder / f"problems.{kind}"
    if kind == "parquet":
        columns = {"problem": pa.array(["a", "b"]), "answer": rng.choice(COLUMNS)()}
        if rng.random() < 0.2:
            columns["problem"] = rng.choice(COLUMNS)()
        pq.write_table(pa.table(columns), file)
    else:
        rows = [changed(rng, row) if rng.random() < 0.6 else row for row in rng.choices(ROWS, k=3)]
        text = "\n".join(map(json.dumps, rows)).encode()
        text = rng.choice([text, text, b"[" * 90000, b'{"a":' * 90000, bent(rng, text)])
        file.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    if rng.random() < 0.25:
        file.write_bytes(bent(rng, file.read_bytes()))
    return file


_LETTERS = {c: i + 2 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz0123456789 +*?\\")}
_VOCABULARY = {"</s>": 0, "[UNK]": 1, **_LETTERS}
_WORDS = {"type": "WordLevel", "vocab": _VOCABULARY, "unk_token": "[UNK]"}
_PIECE = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
_DOUBLE = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
TOKENIZERS = [
    {"model": _WORDS, "added_tokens": []},
    {"model": _WORDS, "pre_tokenizer": {"type": "Whitespace"}, "decoder": {"type": "Fuse"}},
    {"model": {**_WORDS, "type": "BPE", "merges": []}},
    {"model": {**_WORDS, "type": "WordPiece", **_PIECE}},
    {"model": {"type": "Unigram", "vocab": [["</s>", 0.0], ["1", -1.0]], "unk_id": 0}},
]
PARTS = [
    *({"normalizer": {"type": t}} for t in ("NFKC", "Lowercase", "Nope", "StripAccents")),
    *({"pre_tokenizer": {"type": "FixedLength", "length": n}} for n in (0, 1, -1)),
    *({"decoder": {"type": "Strip", "content": " ", "start": n, "stop": n}} for n in (0, 5)),
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}},
    {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLE] * 40}},
    *(
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r},
                "behavior": "Isolated",
                "invert": False,
            }
        }
        for r in ("(a+)+$", "^(a|aa)+$", "(", "\\p{L}+", "")
    ),
]
TEMPLATE = [
    *(
        "{{ messages }}",
        "{{ messages[0].content }}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{{",
    ),
    *("{% if x %}", "{% endif %}", "{% break %}", "{{ 'a' * 10**10 }}", "{{ 1/0 }}", "{{ x.y.z }}"),
    *("{{ lipsum(n=10**7) }}", "{{ '%0999999999d'|format(1) }}", "{{ [1]|slice(10**9)|list }}"),
    *("{{ messages|tojson(indent=10**9) }}", "{{ raise_exception('no') }}", "{% macro f() %}"),
    *(
        "{% endmacro %}",
        "{{ f() }}",
        "{{ ''.__class__ }}",
        "{{ " + "(" * 3000,
        "{{ " + "not " * 5000,
    ),
    *("{% include 'x' %}", "text", "{{ messages|sum }}", "{{ range(10**9)|list }}", "{# "),
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
]


def tokenizer_folder(rng, folder) -> pathlib.Path:
    made = dict(rng.choice(TOKENIZERS))
    if rng.random() < 0.3:
        made |= rng.choice(PARTS)
    if rng.random() < 0.3:
        made = changed(rng, made)
    text = json.dumps(made).encode()
    (folder / "tokenizer.json").write_bytes(bent(rng, text) if rng.random() < 0.1 else text)
    config = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    if rng.random() < 0.2:
        config = changed(rng, config)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def template(rng, folder) -> pathlib.Path:
    file = folder / "chat.jinja"
    file.write_text("".join(rng.choices(TEMPLATE, k=rng.randrange(1, 5))))
    return file


def model_folder(rng, folder) -> pathlib.Path:
    shape = Shape(64, 8, 16, 1, 2, 1, 4, 1e4, 1e-6, True)
    config = hf_format.config_json(shape, "float32")
    config |= rng.choice([{}, {}, {"layer_types": ["full_attention"]}, {"rope_scaling": {}}])
    if rng.random() < 0.5:
        config = changed(rng, config)
    text = json.dumps(config)
    text = rng.choice([*[text] * 12, "[" * 90000, '{"a":' * 90000, text[:-9]])
    (folder / "config.json").write_text(text)
    tensors = {
        name: np.ones(w.hf_shape, np.float32) for w in hf_format.weights(shape) for name in w.names
    }
    if rng.random() < 0.2:
        tensors[rng.choice(list(tensors))].flat[0] = rng.choice([np.nan, np.inf, 1e38])
    if rng.random() < 0.1:
        tensors.pop(rng.choice(list(tensors)))
    file = folder / "model.safetensors"
    save_file(tensors, file)
    if rng.random() < 0.25:
        file.write_bytes(bent(rng, file.read_bytes()))
    if rng.random() < 0.1:
        names = dict.fromkeys(tensors, "model.safetensors")
        index = changed(rng, {"metadata": {}, "weight_map": names})
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        file.rename(folder / rng.choice(["model.safetensors", "other.safetensors"]))
    return folder


# ------------------------------------------------------------------------------------------------
# Command lines
# ------------------------------------------------------------------------------------------------

FIELDS = [*schema.SCHEMA, *schema.RENAMED, *schema._OF_PEERS, "optim", "", "..", "__class__", "a.b"]
# Small enough that a case in which nothing is wrong ends in seconds.
_SMALL = {
    "steps": 0,
    "supervised_warmup.skill_steps": 0,
    "supervised_warmup.habit_steps": 0,
    "data.embedded_problems": 8,
    "eval.max_problems": 1,
    "eval.k": 1,
    "eval.top_p": 1,
    "log.tensorboard": False,
    "model.num_layers": 1,
    "rollout.slots": 8,
}
SMALL = [f"--config.{name}={small}" for name, small in _SMALL.items()]


def override(rng) -> str:
    name = rng.choice(FIELDS if rng.random() < 0.2 else list(schema.SCHEMA))
    field = schema.SCHEMA.get(name)
    likely = [*field.choices, field.default, field.low, field.high] if field else []
    if name == "model.num_layers":
        likely = [0, 1, 2]  # more would only compile
    likely += {
        int: [0, 1, 2, 3, 8, 64, 1000, -1, 2**22, 2**31 - 1],
        float: [0.0, 1e-30, 1e-6, 0.5, 1.0, 2.0, 1e3, 1e6, 1e12, -1.0],
        bool: [True, False],
    }.get(type(field.default) if field and name != "model.num_layers" else None, [])
    text = rng.choice(TEXTS if rng.random() < 0.2 or not likely else likely)
    return rng.choice([f"--config.{name}={text}"] * 8 + [f"--noconfig.{name}", f"--config.{name}"])


SLICES = ["v5e-8", "v5p-16", "v5litepod-4", "2xv6e-16"]
NUMBERS = ["0", "1", "2", "0.5", "-1", "1e300", "9" * 30, "nan", "x", ""]


def of_train(rng, folder) -> list[str]:
    argv = [f"--workdir={folder}/run", *SMALL]
    kind = rng.randrange(4)
    if kind == 0:
        argv += config_file(rng, folder)
    elif kind == 1:
        argv += [f"--config.data.train={problem_file(rng, folder)}"]
        argv += [f"--config.tokenizer.path={tokenizer_folder(rng, folder)}"]
        argv += [f"--config.eval.files={rng.choice(TEXTS)}"] * rng.randrange(2)
    elif kind == 2:
        argv += [f"--config.model.path={model_folder(rng, folder)}"]
    argv += [override(rng) for _ in range(rng.randrange(kind == 3, 3))]
    if rng.random() < 0.1:
        flag = rng.choice(
            ["workdir", "config", "coordinator", "num_processes", "nope", "verbosity"]
        )
        argv += [f"--{flag}={rng.choice(TEXTS)}"]
    return argv


def of_plan(rng, folder) -> list[str]:
    argv = [f"--topology={rng.choice([*SLICES * 12, *TEXTS])}"]
    argv += config_file(rng, folder) if rng.random() < 0.4 else []
    argv += [override(rng) for _ in range(rng.randrange(3))]
    if rng.random() < 0.3:
        argv += [f"--{rng.choice(['mean_response', 'room', 'mean_prompt'])}={rng.choice(NUMBERS)}"]
    if rng.random() < 0.1:
        argv += [f"--json={rng.choice(TEXTS)}"]
    return argv


def of_evaluate(rng, folder) -> list[str]:
    argv = [f"--workdir={folder}/run", *SMALL]
    argv += [
        f"--{rng.choice(['k', 'top_p', 'temperature', 'json', 'checkpoint'])}={rng.choice(TEXTS)}"
    ]
    if rng.random() < 0.5:
        argv += [f"--data={rng.choice([str(problem_file(rng, folder)), *TEXTS[:20]])}"]
        argv += [f"--config.tokenizer.path={tokenizer_folder(rng, folder)}"]
    if rng.random() < 0.7:
        argv += [f"--config.model.path={model_folder(rng, folder)}"]
        argv += [f"--config.tokenizer.path={tokenizer_folder(rng, folder)}"]
    return argv + [override(rng) for _ in range(rng.randrange(2))]


def of_sample(rng, folder) -> list[str]:
    argv = [f"--workdir={folder}/run", *SMALL, f"--config.model.path={model_folder(rng, folder)}"]
    argv += [f"--config.tokenizer.path={tokenizer_folder(rng, folder)}"]
    if rng.random() < 0.5:
        argv += ["--chat", f"--config.tokenizer.chat_template={template(rng, folder)}"]
    name = rng.choice(["n", "max_tokens", "seed", "temperature", "top_p"])
    argv += [f"--{name}={rng.choice(NUMBERS)}"] * rng.randrange(2)
    return [*argv, rng.choice(["1+1?", *TEXTS])]


def of_convert(rng, folder) -> list[str]:
    argv = [rng.choice(["to-orbax"] * 8 + ["to-hf", "nope"])]
    argv += [rng.choice([*[str(model_folder(rng, folder))] * 9, *TEXTS[:12]]), f"{folder}/out"]
    return argv + [f"--dtype={rng.choice(['float32'] * 9 + ['bfloat16', ''])}"] * rng.randrange(2)


def of_inspect(rng, folder) -> list[str]:
    argv = ["inspect", str(problem_file(rng, folder))]
    if rng.random() < 0.4:
        argv += [f"--tokenizer={tokenizer_folder(rng, folder)}"]
        argv += [f"--chat_template={template(rng, folder)}"] * rng.randrange(2)
    return argv


# Command -> (its arguments, share of the cases, how it is run).
COMMANDS = {
    "train": (of_train, 5, lambda argv: cli.run(train.main)),
    "plan": (of_plan, 5, lambda argv: (plan.define_flags(), cli.run(plan.main))),
    "evaluate": (of_evaluate, 2, lambda argv: (evaluate.define_flags(), cli.run(evaluate.main))),
    "sample": (of_sample, 2, lambda argv: (sample.define_flags(), cli.run(sample.main, "prompt"))),
    "convert": (of_convert, 3, lambda argv: sys.exit(convert.main(argv))),
    "inspect": (of_inspect, 4, lambda argv: sys.exit(problems.main(argv))),
}


def case(seed: int, number: int, folder: pathlib.Path) -> tuple[str, list[str]]:
    """(command, its arguments); the files are written to `folder`."""
    rng = random.Random(f"{seed}/{number}")
    names = list(COMMANDS)
    command = rng.choices(names, [COMMANDS[n][1] for n in names])[0]
    argv = COMMANDS[command][0](rng, folder)
    return command, [a.replace("\x00", "\\0") for a in argv]  # no shell hands on a NUL


# ------------------------------------------------------------------------------------------------
# Running them
# ------------------------------------------------------------------------------------------------


def child(command: str, argv: list[str], folder: pathlib.Path):
    """Never returns."""
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((null, 0), (log, 1), (log, 2)):
        os.dup2(here, there)
    os.chdir(folder)
    (folder / "configs").symlink_to(ROOT / "configs")
    sys.argv = [command, *argv]
    code = 1
    try:
        COMMANDS[command][2](argv)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def verdict(command: str, status: int | None, said: str) -> str:
    """'' or what is wrong."""
    if status is None:
        return f"still runs after {SECONDS} s"
    if status < 0:
        return f"ends by signal {-status}"
    if "Traceback (most recent call last)" in said:
        return "a traceback"
    if "panicked at" in said:
        return "a panic"
    told = re.search(r"^(.*: )?error: .", said, re.MULTILINE)
    unfit = command == "plan" and re.search("^(cannot run: |DOES NOT FIT)", said, re.MULTILINE)
    return "" if status == 0 or told or unfit else f"exit code {status} and no error line"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="what each case said last")
    parser.add_argument("--only", type=int, help="this case alone, and what it says")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["HF_HUB_OFFLINE"] = "1"
    flags.FLAGS.unparse_flags()
    print(f"--seed={args.seed}", flush=True)
    numbers = [args.only] if args.only is not None else range(args.cases)
    root = pathlib.Path(tempfile.mkdtemp(prefix="fuzz-"))
    left, running = collections.deque(numbers), {}
    counts, wrong = collections.Counter(), 0
    while left or running:
        while left and len(running) < args.jobs:
            number = left.popleft()
            folder = root / str(number)
            folder.mkdir()
            command, argv = case(args.seed, number, folder)
            pid = os.fork() or child(command, argv, folder)
            running[pid] = number, command, argv, folder, time.monotonic()
        for pid, (number, command, argv, folder, started) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() - started < SECONDS:
                continue
            if not done:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            code = os.waitstatus_to_exitcode(status) if done else None
            said = (folder / "log").read_text(errors="replace")
            bad = verdict(command, code, said)
            counts[command, code] += 1
            wrong += bool(bad)
            if bad or args.only is not None:
                print(f"case {number}: {bad or 'as it should'}: {command} {argv}"[:1500])
                print(
                    "\n".join(f"    {line[:300]}" for line in said.splitlines()[-12:]), flush=True
                )
            elif args.all:
                print(f"{number} {command} {code}: {said.strip().splitlines()[-1:]}"[:300])
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)
    shutil.rmtree(root, ignore_errors=True)
    for (command, code), n in sorted(counts.items(), key=str):
        print(f"{command:9s} exit code {code}: {n}")
    print(f"{sum(counts.values())} cases, {wrong} of them wrong, --seed={args.seed}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
