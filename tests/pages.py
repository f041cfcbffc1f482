"""The pages of docs/ as a user follows them: `follow` runs a page's fenced blocks in order.

A Python block that makes a config becomes the file mine.py, one that defines `score` my_reward.py;
other lines are typed, in the folder of the test, which holds what they name: a tiny model by every
name, problems of its words. What is small here is set behind the line that makes a config.
"""

import io
import json
import pathlib
import re
import shlex
from collections.abc import Callable

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiny_config

from dapo_jax.data import arithmetic
from dapo_jax.model import hf, qwen2

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"

# A run then takes seconds, and a random model is right at times.
SMALL = {
    "steps": 2, "checkpoint.every": 1, "eval.every": 0, "eval.k": 2, "log.tensorboard": False,
    "data.max_prompt_tokens": 96, "rollout.max_response_tokens": 12,
    "reward.overlong_buffer_tokens": 4, "reward.function": "judge.py:half",
    "rollout.groups": 4, "rollout.group_size": 4, "rollout.slots": 16, "rollout.chunk": 12,
    "rollout.prefill_prompts": 8, "optim.minibatches": 2, "optim.micro_batch_rows": 8,
    "optim.warmup_steps": 0, "model.dtype": "float32", "model.remat": "none",
    "model.scan_layers": False, "tokenizer.chat": False,
}  # fmt: skip
JUDGE = """import zlib
def half(problem, response): return zlib.crc32(response.encode()) % 2 == 0
"""
# In place of any config file of the repository: whatever size is its argument.
CONFIG = """
from dapo_jax import config
def get_config(size=""):
    c = config.paper()
    c.model.path = "Qwen2.5-0.5B"
    c.data.train, c.eval.files = "train.jsonl", "test=test.jsonl"
    return c
"""
PROGRAM = """
from dapo_jax.config import cli
from my_reward import score
config = cli.load("configs/quickstart.py")
"""
BRIEF = """
def brief(problem, response): return 1 / (1 + len(response))
"""
QWEN3 = {"model.qkv_bias": False, "model.qk_norm": True}
Type = Callable[[pathlib.Path, str], str]  # (folder, line typed in it) -> what was said


def small(text: str) -> str:
    """The text of a config file, with SMALL before what it sets itself."""
    made = r"( *c = config\.\w+\(\)\n)"
    assert re.search(made, text), text
    return re.sub(made, rf"\1    c.update({SMALL!r})\n", text)


def model(folder: pathlib.Path, tokenizer: pathlib.Path, **shape) -> None:
    """A directory as those of the hub, of a random model that has seen nothing."""
    folder.mkdir(parents=True)
    c = tiny_config.get_config()
    c.update(shape)
    shape = qwen2.shape_from_config(c)
    random = lambda x: np.random.default_rng(x.size).normal(0, 0.2, x.shape).astype(x.dtype)
    params = jax.tree.map(lambda x: jax.numpy.asarray(random(x)), qwen2.abstract(shape))
    hf.save(folder, shape, params, "float32", tokenizer)
    about = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 280}
    (folder / "config.json").write_text(json.dumps(about))  # published sets allow long responses


def parquet(rows: list[dict]) -> bytes:
    pq.write_table(pa.Table.from_pylist(rows), body := io.BytesIO())
    return body.getvalue()


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def published_sets() -> dict[str, bytes]:
    """Sets in the forms in which they are published, of problems that the models have words for."""
    asked = [(f"f {i} g + 2 ?", i + 2) for i in range(2)]
    verl = [
        {"prompt": [{"role": "user", "content": q}], "reward_model": {"ground_truth": str(a)}}
        for q, a in asked
    ]
    gsm8k = lines([{"question": q, "answer": f"so\n#### {a}"} for q, a in asked])
    return {
        "dapo-math-17k": parquet([{"problem": q, "answer": str(a)} for q, a in asked]),
        "aime24": parquet(verl),
        "aime25": lines([{"problem": q, "answer": a} for q, a in asked]),
        "gsm8k-train": gsm8k,
        "gsm8k-test": gsm8k,
        "math500": lines([{"problem": q, "solution": "s", "answer": str(a)} for q, a in asked]),
        "amc23": lines([{"question": q, "answer": f"{a}.0"} for q, a in asked]),
    }


def stand_ins(folder: pathlib.Path, made_in: pathlib.Path) -> None:
    """What the pages name: models, problems in the forms of GSM8K and verl, worked examples."""
    made = arithmetic.write(made_in, train=64, heldout=8)
    verl = [json.loads(x) for x in made.train.read_text().splitlines()]
    asked = [(r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in verl]
    plain = [{"question": q, "answer": f"so\n#### {a}"} for q, a in asked]
    files = {
        "train.jsonl": plain[:32], "test.jsonl": plain[32:36], "other.jsonl": plain[36:40],
        "problems.jsonl": plain[:32], "mine.jsonl": [*plain[:20], *plain[:2]],
        "worked.jsonl": [{"prompt": q, "response": f"Answer: {a}"} for q, a in asked[:40]],
    }  # fmt: skip
    for name, rows in files.items():
        (folder / name).write_bytes(lines(rows))
    (folder / "more.parquet").write_bytes(parquet(verl[40:48]))
    (folder / "aime-2024.parquet").write_bytes(parquet(verl[48:52]))
    (folder / "judge.py").write_text(JUDGE)
    (folder / "configs").mkdir()
    for name in ("quickstart.py", "dapo_qwen2_5.py", "gpus.py", "one_chip.py"):
        (folder / "configs" / name).write_text(small(CONFIG))
    for name in ("model", "Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"):
        model(folder / name, made.tokenizer.parent)
    model(folder / "Qwen" / "Qwen3-0.6B", made.tokenizer.parent, **QWEN3)


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each fenced block, with the lines that end in a backslash joined."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    return [(language, text.replace("\\\n", " ")) for language, text in found]


def follow(page: str, folder: pathlib.Path, typed: Type) -> list[str]:
    """What each command of the page has said. A line of flags alone goes to the last command of a
    training; that, and a program, gets a workdir of its own."""
    said, train = [], ""
    for language, text in blocks(page):
        if language == "python":
            if "def get_config" in text:
                (folder / "mine.py").write_text(small(text))
            elif "def score" in text:
                (folder / "my_reward.py").write_text(text + BRIEF)
            else:  # of a program that has a config and a score
                text = PROGRAM + text.replace("runs/mine", "runs/program")
                (folder / "program.py").write_text(text)
                said.append(typed(folder, "python -m program"))
            continue
        for number, line in enumerate(text.splitlines()):
            if line.startswith("--"):
                line = (
                    re.sub(r"--workdir=\S+", f"--workdir=runs/{number}_flags", train) + " " + line
                )
            if line.startswith("python -m dapo_jax"):
                train = line if "dapo_jax.train" in line else train
                said.append(typed(folder, line))
    return said


def words(line: str) -> list[str]:
    """The arguments of a line that calls Python."""
    python, *arguments = shlex.split(line)
    assert python == "python", line
    return arguments


def typed(shell, folder: pathlib.Path, line: str, *flags: str) -> str:
    """What a line that ends well says, typed in the folder with these flags behind it."""
    done = shell.python(*words(line.partition("#")[0]), *flags, cwd=folder)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
