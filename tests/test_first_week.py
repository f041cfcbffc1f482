"""docs/first_week.md, row by row: each task starts from a user's files, and takes what the page
says and no more. What is small here (models, batches, steps) is added by the tests, not counted."""

import io
import json
import os
import pathlib
import re
import shlex
import shutil
import sys

import hub
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_trackers
from test_launch import bash, executable

from dapo_jax import config, train
from dapo_jax.config import cli
from dapo_jax.data import arithmetic
from dapo_jax.log import bell, metrics
from dapo_jax.model import hf, qwen2

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "first_week.md").read_text()
(FRAME,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(TRAIN,) = re.findall(r"`TRAIN` is `(.*?)`", PAGE)
ROWS = re.findall(r"^\| (?!task )([^|`]+?) \| [\w, ]+ \| ([^|]*)\| ([^|]*)\|$", PAGE, re.M)
WEEK = {
    task: [[x.replace("TRAIN", TRAIN) for x in re.findall(r"`(.*?)`", cell)] for cell in cells]
    for task, *cells in ROWS
}

FIRST = next(iter(WEEK))

# What makes a run take seconds and a random model right at times; the lines of the page come last.
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
QWEN3 = {"model.qkv_bias": False, "model.qk_norm": True}


def mine(folder: pathlib.Path, task: str = FIRST) -> None:
    """Write mine.py for a task, on the first one's model and files where it names none."""
    lines = WEEK[task][0]
    top = [x for x in lines if x.startswith(("def ", "from "))]
    small = f"c.update_from_flattened_dict({SMALL!r})"
    body = [small, *WEEK[FIRST][0], *(x for x in lines if x not in top)]
    inside = "".join(f"    {x}\n" for x in [*body, "return c"])
    (folder / "mine.py").write_text("\n".join(top) + "\n" + FRAME.replace("    return c\n", inside))


@pytest.fixture(scope="module")
def gsm8k():
    """The address of a hub with openai/gsm8k, in the form that is published there."""
    asked = {"question": [f"f {i} g + 2 ?" for i in range(7)]}
    asked["answer"] = [f"so\n#### {i + 2}" for i in range(7)]
    pq.write_table(pa.table(asked), body := io.BytesIO())
    files = {"README.md": b"", "main/train-00000-of-00001.parquet": body.getvalue()}
    with hub.serving() as (address, served):
        hub.put(served, "openai/gsm8k", files)
        yield address


@pytest.fixture(scope="module")
def shell(shell, tmp_path_factory, gsm8k):
    """Types a line in a folder; returns what was said."""
    hub = {"HF_ENDPOINT": gsm8k, "HF_HUB_CACHE": str(tmp_path_factory.mktemp("hub"))}

    def typed(folder: pathlib.Path, line: str) -> str:
        python, *arguments = shlex.split(line)
        done = shell.python(*arguments, cwd=folder, **hub)
        assert python == "python" and done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return typed


def model(folder: pathlib.Path, tokenizer: pathlib.Path, **shape) -> None:
    """A directory as those of the hub, of a random model that has seen nothing."""
    folder.mkdir(parents=True)
    c = config.base()
    c.model.hidden_size, c.model.intermediate_size, c.model.num_layers = 32, 32, 1
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 2, 1, 16
    c.update_from_flattened_dict(shape)
    shape = qwen2.shape_from_config(c)
    random = lambda x: np.random.default_rng(x.size).normal(0, 0.2, x.shape).astype(x.dtype)
    params = jax.tree.map(lambda x: jax.numpy.asarray(random(x)), qwen2.abstract(shape))
    hf.save(folder, shape, params, "float32", tokenizer)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """A folder with a model, and problems in GSM8K's form."""
    folder = tmp_path_factory.mktemp("files")
    made = arithmetic.write(tmp_path_factory.mktemp("made"), train=64, heldout=8)
    asked = [json.loads(x) for x in made.train.read_text().splitlines()]
    asked = [(r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in asked]
    rows = [{"question": q, "answer": f"so\n#### {a}"} for q, a in asked]
    for name, part in (("train", rows[:32]), ("test", rows[32:36]), ("other", rows[36:40])):
        text = "".join(json.dumps(r) + "\n" for r in part)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "judge.py").write_text(JUDGE)
    model(folder / "model", made.tokenizer.parent)
    model(folder / "Qwen" / "Qwen3-0.6B", made.tokenizer.parent, **QWEN3)
    return folder


@pytest.fixture(scope="module")
def trained(shell, files) -> pathlib.Path:
    """runs/mine of the first row."""
    mine(files)
    shell(files, WEEK[FIRST][1][0])
    return files / "runs" / "mine"


wandb = test_trackers.wandb


@pytest.fixture
def desk(files, tmp_path) -> pathlib.Path:
    """A folder of the test's own with the same files in it."""
    for file in files.iterdir():
        if file.name not in ("mine.py", "runs"):
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


TESTED = []


def row(*tasks):
    """Marks a test as that of these rows of the page."""
    TESTED.extend(tasks)
    return lambda test: test


def ran(folder, shell, task: str) -> list[dict]:
    """The records of a run by a row's config and command."""
    mine(folder, task)
    (line,) = WEEK[task][1]
    shell(folder, line)
    records = metrics.read(folder / "runs" / "mine" / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2] and records[-1]["optim/updates"] > 0
    return records


def samples(folder) -> list[dict]:
    """The responses that a run has kept."""
    found = sorted((folder / "runs" / "mine" / "rollouts").glob("step_*.jsonl"))
    return [json.loads(x) for file in found for x in file.open()]


def test_each_takes_ten_lines_or_one_command_and_is_tested():
    frame = len([x for x in FRAME.splitlines() if x.strip()])
    for task, (lines, typed) in WEEK.items():
        command = lambda x: x.startswith(("python", "launch"))
        told = []
        if lines or not all(map(command, typed)):
            n = frame + len(lines) if lines else len(typed)
            assert n <= 10, task
            told.append(f"{n} lines")
        if commands := sum(map(command, typed)):
            assert commands == 1 or task == FIRST
            told.append(f"{commands} command" + "s" * (commands > 1))
        assert f"| {task} | {', '.join(told)} |" in PAGE
    assert sorted(TESTED) == sorted(WEEK)


@pytest.mark.slow
@row("train and score on JSONL and a model directory")
def test_train_and_score(shell, trained, files):
    records = metrics.read(trained / "metrics.jsonl")
    assert records[-1]["optim/updates"] > 0 and "eval/test/avg@k" in records[-1]
    said = shell(files, WEEK[FIRST][1][1])
    assert re.search(r"^test +4 +2 +1 +0.7 ", said, re.M)  # by the settings of mine.py


@pytest.mark.slow
@row("the scores of a trained run on other problems")
def test_scores_on_other_problems(shell, trained, files):
    (line,) = WEEK["the scores of a trained run on other problems"][1]
    assert "--config" not in line
    assert re.search(r"^other +4 +2 +1 +0.7 ", shell(files, line), re.M)


@pytest.mark.slow
@row("a branch from step 1, with the optimizer")
def test_a_branch(shell, trained, files):
    mine(files)
    (line,) = WEEK["a branch from step 1, with the optimizer"][1]
    assert "a branch of runs/mine/checkpoints step 1" in shell(files, line)
    a, b = (
        metrics.read(files / "runs" / name / "metrics.jsonl")[-1] for name in ("mine", "branch")
    )
    assert a["optim/grad_norm"] > 0
    clock = re.compile("time/|perf/|sampling/evicted")
    bare = lambda record: {k: v for k, v in record.items() if not clock.match(k)}
    assert bare(a) == bare(b)  # as by its optimizer too: step 2


@row("a model for transformers or vLLM")
def test_export(shell, trained, files):
    (line,) = WEEK["a model for transformers or vLLM"][1]
    shell(files, line)
    assert json.loads((files / "hf" / "config.json").read_text())["architectures"] == [
        "Qwen2ForCausalLM"
    ]
    before, after = hf.load(files / "model").params, hf.load(files / "hf").params
    assert (files / "hf" / "tokenizer.model").exists()
    assert not np.array_equal(before["embed"], after["embed"])


@pytest.mark.slow
@row("CSV, and a data set of the hub")
def test_csv_and_the_hub(shell, desk):
    (desk / "train.csv").write_text('question,answer\n"f 4 g + 2 ?",6\n')
    ran(desk, shell, "CSV, and a data set of the hub")
    assert len({r["problem"] for r in samples(desk)}) > 1


@pytest.mark.slow
@row("a system prompt, another template")
def test_system_and_template(shell, desk):
    ran(desk, shell, "a system prompt, another template")
    # The tokenizer has no words but those of the problems, and shows others as this sign.
    assert all(re.fullmatch(r" ⁇ +[\w +-]+ \? Answer:", r["prompt"]) for r in samples(desk))


@pytest.mark.slow
@row("a reward of yes or no")
def test_yes_or_no(shell, desk):
    ran(desk, shell, "a reward of yes or no")
    kept = samples(desk)
    assert {r["correct"] for r in kept} == {True, False}
    assert all(r["correct"] == (r["answer"] in r["response"].split()) for r in kept)


@pytest.mark.slow
@row("a graded reward, several rewards")
def test_graded_and_several(shell, desk):
    *_, last = ran(desk, shell, "a graded reward, several rewards")
    parts = last["reward_part/score"], last["reward_part/format"]
    assert 0 < parts[0] < 1 and "reward/accuracy" not in last
    want = parts[0] + 0.2 * parts[1]
    assert last["reward/mean"] - last["reward/overlong_penalty"] == pytest.approx(want)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["CISPO", "GSPO", "Dr. GRPO"])
@row("CISPO", "GSPO", "Dr. GRPO")
def test_losses(shell, desk, task):
    ran(desk, shell, task)
    fields = json.loads((desk / "runs" / "mine" / "config.json").read_text())
    found = fields["loss.objective"], fields["advantage.scale"]
    want = {"CISPO": ("cispo", "group"), "GSPO": ("gspo", "group"), "Dr. GRPO": ("ppo", "none")}
    assert found == want[task]


@pytest.mark.slow
@row("a cosine learning rate")
def test_cosine(shell, desk):
    first, second = (r["optim/lr"] for r in ran(desk, shell, "a cosine learning rate")[1:])
    assert second / first == pytest.approx((1 + np.cos(np.pi / 400)) / 2, rel=1e-5)


@pytest.mark.slow
@row("Qwen3-0.6B")
def test_qwen3(shell, desk):
    ran(desk, shell, "Qwen3-0.6B")
    assert json.loads((desk / "Qwen/Qwen3-0.6B/config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.slow
@row("from a cell of a notebook")
def test_a_cell(shell, desk):
    mine(desk)
    (desk / "cell.py").write_text("\n".join(WEEK["from a cell of a notebook"][1]))
    shell(desk, "python -m cell")
    assert metrics.read(desk / "runs" / "cell" / "metrics.jsonl")[-1]["step"] == 1


@pytest.mark.slow
@row("a sweep of three learning rates, compared")
def test_a_sweep(shell, desk):
    mine(desk)
    (line,) = WEEK["a sweep of three learning rates, compared"][1]
    said = shell(desk, line)
    assert "optim.lr" in said
    runs = json.loads((desk / "runs" / "sweep" / "compare.json").read_text())["runs"]
    assert [r["fields"] for r in runs] == [{"optim.lr": lr} for lr in (5e-7, 1e-6, 2e-6)]


POD = "weeks on a pod, watched from afar"


@pytest.mark.slow
@row(POD)
def test_launch(desk):
    """As far as it goes without a cloud: the config and its files are checked, the slice is not."""
    mine(desk, POD)
    shutil.copytree(ROOT / "launch", desk / "launch")
    (desk / "dapo_jax").symlink_to(ROOT / "dapo_jax")
    executable(desk / ".venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    script, *flags = WEEK[POD][1][0].replace(" -- ", " --dry-run -- ").split()
    done = bash(desk / script, *flags, cwd=desk)
    assert done.returncode == 0 and "queued-resources create mine" in done.stderr, done.stderr
    (desk / "train.jsonl").unlink()
    assert "train.jsonl: no such file" in bash(desk / script, *flags, cwd=desk).stderr


@pytest.mark.slow
def test_watched_from_afar(desk, bucket, monkeypatch, wandb):
    """In a bucket, with numbers and alarms where the lines say."""
    mine(desk, POD)
    executable(desk / "bin" / "curl", '#!/bin/sh\necho "$@" >>heard; cat >>heard')
    monkeypatch.chdir(desk)
    monkeypatch.setenv("PATH", f"{desk}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(bell, "CLOSE_S", 60)  # the command may take its time to start
    c = cli.load("mine.py")
    c.steps, c.checkpoint.directory = 1, str(desk / "checkpoints")  # Orbax opens buckets by itself
    c.guard.length_min = 1000.0
    assert train.train(c, "gs://b/mine")
    records = metrics.read(bucket / "mine" / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1] and "time/goodput" in records[-1]
    assert wandb.calls[0][2]["project"] == "my-project"
    assert {"log", "alert"} <= {name for name, *_ in wandb.calls}
    told, alarm = (desk / "heard").read_text().split("\n", 1)
    assert told == "-d @- https://ntfy.sh/mine" and json.loads(alarm)["step"] == 1
