"""The pages of docs/, done as they say on a user's files; of docs/first_week.md row by row, in the
lines that it says and no more."""

import hashlib
import json
import pathlib
import re
import shutil
import sys

import hub
import numpy as np
import pages
import pytest
from scripts import ROOT, bash, executable

from dapo_jax.data import published
from dapo_jax.log import metrics
from dapo_jax.model import hf


@pytest.fixture(scope="module")
def served():
    """(address, SHA-256 of each published set) of a hub with openai/gsm8k and with those sets."""
    asked = [{"question": f"f {i} g + 2 ?", "answer": f"so\n#### {i + 2}"} for i in range(7)]
    files = {"README.md": b"", "main/train-00000-of-00001.parquet": pages.parquet(asked)}
    with hub.serving() as (address, found):
        hub.put(found, "openai/gsm8k", files)
        sets = pages.published_sets()
        found |= {f"/{published.SETS[name].source}": body for name, body in sets.items()}
        pins = {name: hashlib.sha256(body).hexdigest() for name, body in sets.items()}
        yield address, pins


@pytest.fixture(scope="module")
def typed(shell, tmp_path_factory, served) -> pages.Type:
    address, pins = served
    env = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path_factory.mktemp("hub"))}
    env |= {"DAPO_JAX_DATA_HOST": address, "PINS": json.dumps(pins)}

    def line(folder: pathlib.Path, text: str) -> str:
        arguments = pages.words(text)
        if arguments[1] in ("dapo_jax.data", "dapo_jax.evaluate"):  # by the stand-ins' hashes
            arguments = [ROOT / "tests" / "pinned.py", *arguments[1:]]
        done = shell.python(*arguments, cwd=folder, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return line


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("files")
    pages.stand_ins(folder, tmp_path_factory.mktemp("made"))
    return folder


@pytest.fixture
def desk(files, tmp_path) -> pathlib.Path:
    """A folder of the test's own with the same files in it."""
    for file in files.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def last(folder, run="mine") -> dict:
    return metrics.read(folder / "runs" / run / "metrics.jsonl")[-1]


def own_data(said, desk) -> None:
    inspected, trained, asked, integers, prepared = said
    assert re.search(r"^rows +22\n.*^duplicates +2 .*^tokens +", inspected, re.S | re.M)
    assert re.search(r"^gold +\d+ of 28 answers .*^others .*^--- problem ", asked, re.S | re.M)
    assert {"eval/aime24/avg@k", "eval/mine/avg@k"} <= last(desk).keys() and "done: 2" in trained
    assert "20 problems, of 0 the answer was transformed; 0 left out" in integers
    assert len((desk / "integers.jsonl").read_text().splitlines()) == 20
    assert len(list((desk / "data").iterdir())) == 2 and "aime24" in prepared


def own_reward(said, desk) -> None:
    """By the command, by the program, and with three parts."""
    assert all("done: 2 steps" in text for text in said) and len(said) == 3
    assert last(desk)["reward/mean"] == last(desk, "program")["reward/mean"]
    parts = {t.partition("/")[2] for t in last(desk, "0_flags") if t.startswith("reward_part/")}
    assert parts == {"boxed", "format", "short"}


def warm_start(said, desk) -> None:
    assert "warm-up: 40 of 40 rows; 1 steps of 64" in said[0]
    before = hf.load(desk / "Qwen/Qwen2.5-0.5B").params["embed"]
    after = hf.load(desk / "hf").params["embed"]
    assert 0 < np.abs(after - before).max() < 1e-4


def staleness(said, desk) -> None:
    assert "done: 2 steps" in said[0] and last(desk, "stale")["optim/updates"] > 0


def evaluation(said, desk) -> None:
    named = re.findall(r"--data=(\S+)", (pages.DOCS / "evaluation.md").read_text())
    scored = [text for text in said if "95% interval" in text]
    for names, text in zip(named, scored, strict=True):
        for name in names.split(","):
            assert re.search(rf"^{name.partition('=')[0]} +[24] +\d+ ", text, re.M), text
    assert re.search(r"^math500 +2 +16 +0.6 +0.95 ", scored[-1], re.M)
    assert list(json.loads((desk / "scores.json").read_text())["sets"]) == ["aime24", "mine"]


def on_a_gpu(said, desk) -> None:
    _, inspected, planned, compiled, trained, scored, _, eight = said
    assert re.search(r"^rows +7$", inspected, re.M) and "on h100-1 = h100:1: 1 GPU " in planned
    assert "on rtx4090-1 = " in compiled  # by arithmetic at least
    assert "done: 2 steps" in trained and "done: 2 steps" in eight
    assert re.search(r"^gsm8k +2 +1 +0 ", scored, re.M) and (desk / "runs/gsm8k_hf").is_dir()


# page -> what is to be seen; and what is typed before its own lines, or after them
PAGES = {"own_data.md": own_data, "own_reward.md": own_reward, "evaluation.md": evaluation}
PAGES |= {"warm_start.md": warm_start, "staleness.md": staleness, "on_a_gpu.md": on_a_gpu}
MINE = "python -m dapo_jax.train --workdir=runs/mine --config="
FIRST_TYPED = {"evaluation.md": [MINE + "configs/quickstart.py"]}
LAST_TYPED = {"warm_start.md": [
    MINE + "mine.py --config.steps=0 --config.data.max_prompt_tokens=256",
    "python -m dapo_jax.convert to-hf runs/mine hf --dtype=float32",
]}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_page_works_as_it_stands(page, desk, typed):
    for line in FIRST_TYPED.get(page, []):
        typed(desk, line)
    said = pages.follow(page, desk, typed)
    PAGES[page](said + [typed(desk, line) for line in LAST_TYPED.get(page, [])], desk)


WEEK_PAGE = (pages.DOCS / "first_week.md").read_text()
((_, FRAME),) = pages.blocks("first_week.md")
(TRAIN,) = re.findall(r"`TRAIN` is `(.*?)`", WEEK_PAGE)
ROWS = re.findall(r"^\| (?!task )([^|`]+?) \| [\w, ]+ \| ([^|]*)\| ([^|]*)\|$", WEEK_PAGE, re.M)
# task -> (lines of mine.py, lines typed)
WEEK = {
    task: [[x.replace("TRAIN", TRAIN) for x in re.findall(r"`(.*?)`", cell)] for cell in cells]
    for task, *cells in ROWS
}
FIRST, POD = next(iter(WEEK)), "weeks on a pod, watched from afar"


def mine(folder: pathlib.Path, task: str = FIRST) -> None:
    """Write mine.py for a task, on the first one's model and files where it names none."""
    asked = WEEK[task][0]
    top = [x for x in asked if x.startswith(("def ", "from "))]
    body = [*WEEK[FIRST][0], *(x for x in asked if x not in top), "return c"]
    inside = "".join(f"    {x}\n" for x in body)
    text = "\n".join(top) + "\n" + pages.small(FRAME).replace("    return c\n", inside)
    (folder / "mine.py").write_text(text)


def samples(folder) -> list[dict]:
    """The responses that a run has kept."""
    found = sorted((folder / "runs" / "mine" / "rollouts").glob("step_*.jsonl"))
    return [json.loads(x) for file in found for x in file.open()]


def fields(folder) -> dict:
    return json.loads((folder / "runs" / "mine" / "config.json").read_text())


def yes_or_no(desk, records) -> bool:
    kept = samples(desk)
    right = [r["answer"] in r["response"].split() for r in kept]
    return {*right} == {True, False} and [r["correct"] for r in kept] == right


def graded(desk, records) -> bool:
    found = records[-1]
    parts = found["reward_part/score"], found["reward_part/format"]
    mean = found["reward/mean"] - found["reward/overlong_penalty"]
    several = mean == pytest.approx(parts[0] + 0.2 * parts[1])
    return several and 0 < parts[0] < 1 and "reward/accuracy" not in found


def loss(objective, scale):
    found = {"loss.objective": objective, "advantage.scale": scale}
    return lambda desk, records: found.items() <= fields(desk).items()


def cosine(desk, records) -> bool:
    first, second = (r["optim/lr"] for r in records[1:])
    return second / first == pytest.approx((1 + np.cos(np.pi / 400)) / 2, rel=1e-5)


# A run of two steps by the task's config and command, and whether it is what the task says. The
# tokenizer has no words but those of the problems, and shows others as a sign.
RUNS = {
    "CSV, and a data set of the hub": lambda desk, _: (
        len({r["problem"] for r in samples(desk)}) > 1
    ),
    "a system prompt, another template": lambda desk, _: all(
        re.fullmatch(r" ⁇ +[\w +-]+ \? Answer:", r["prompt"]) for r in samples(desk)
    ),
    "a reward of yes or no": yes_or_no,
    "a graded reward, several rewards": graded,
    "CISPO": loss("cispo", "group"),
    "GSPO": loss("gspo", "group"),
    "Dr. GRPO": loss("ppo", "none"),
    "a cosine learning rate": cosine,
    "Qwen3-0.6B": lambda desk, _: fields(desk)["model.path"] == "Qwen/Qwen3-0.6B",
}
AFTER = (  # what is done with a run that is there, or without one: the tests below
    FIRST, "the scores of a trained run on other problems", "a branch from step 1, with the"
    " optimizer", "a model for transformers or vLLM", "from a cell of a notebook",
    "a sweep of three learning rates, compared", POD, "why a sample of a step is what it is",
    "a run as one file to be sent",
)  # fmt: skip


def test_each_takes_at_most_ten_lines_and_is_tested():
    frame = len([x for x in FRAME.splitlines() if x.strip()])
    assert all(frame + len(inside) <= 10 for inside, _ in WEEK.values())
    assert sorted([*RUNS, *AFTER]) == sorted(WEEK)


@pytest.mark.slow
@pytest.mark.parametrize("task", RUNS)
def test_a_run_of_the_task(task, desk, typed):
    (desk / "train.csv").write_text('question,answer\n"f 4 g + 2 ?",6\n')
    mine(desk, task)
    (line,) = WEEK[task][1]
    typed(desk, line)
    records = metrics.read(desk / "runs" / "mine" / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2] and records[-1]["optim/updates"] > 0
    assert RUNS[task](desk, records)


@pytest.mark.slow
def test_what_is_done_with_a_run(desk, typed):
    """Scores on its own problems and on others, a branch, an export."""
    mine(desk)
    done = lambda task: typed(desk, *WEEK[task][1])  # of a task of one line
    train, evaluate = WEEK[FIRST][1]
    typed(desk, train)
    found = last(desk)
    assert found["optim/updates"] > 0 and "eval/test/avg@k" in found
    # By the settings of mine.py.
    assert re.search(r"^test +4 +2 +1 +0.7 ", typed(desk, evaluate), re.M)
    (line,) = WEEK["the scores of a trained run on other problems"][1]
    assert "--config" not in line and re.search(r"^other +4 +2 +1 +0.7 ", typed(desk, line), re.M)
    branched = done("a branch from step 1, with the optimizer")
    assert "a branch of runs/mine/checkpoints step 1" in branched
    clock = re.compile("time/|perf/|sampling/evicted")
    branch = {k: v for k, v in last(desk, "branch").items() if not clock.match(k)}
    assert found["optim/grad_norm"] > 0 and branch.items() <= found.items()  # step 2, optimizer too
    why = done("why a sample of a step is what it is")
    assert "\nas recorded: " in why and "\nsample 0:\n" in why
    assert "mine.html" in done("a run as one file to be sent")
    assert "<svg" in (desk / "mine.html").read_text()
    done("a model for transformers or vLLM")
    about = json.loads((desk / "hf" / "config.json").read_text())
    assert about["architectures"] == ["Qwen2ForCausalLM"]
    assert (desk / "hf" / "tokenizer.model").exists()
    before, after = hf.load(desk / "model").params, hf.load(desk / "hf").params
    assert not np.array_equal(before["embed"], after["embed"])


@pytest.mark.slow
def test_a_cell_and_a_sweep(typed, desk):
    mine(desk)
    (desk / "cell.py").write_text("\n".join(WEEK["from a cell of a notebook"][1]))
    typed(desk, "python -m cell")
    assert last(desk, "cell")["step"] == 1
    (line,) = WEEK["a sweep of three learning rates, compared"][1]
    line = line.replace(",1e-6,", ",") + " --config.steps=1"  # two are a sweep, too
    assert "optim.lr" in typed(desk, line)
    runs = json.loads((desk / "runs" / "sweep" / "compare.json").read_text())["runs"]
    assert [r["fields"] for r in runs] == [{"optim.lr": lr} for lr in (5e-7, 2e-6)]


@pytest.mark.slow
def test_a_pod(desk):
    """As far as it goes without a cloud: the config and its files are checked, the slice is not."""
    mine(desk, POD)
    shutil.copytree(ROOT / "launch", desk / "launch")
    (desk / "dapo_jax").symlink_to(ROOT / "dapo_jax")
    executable(desk / ".venv" / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"')
    script, *flags = WEEK[POD][1][0].replace(" -- ", " --dry-run -- ").split()
    done = bash(desk / script, *flags, cwd=desk)
    assert done.returncode == 0 and "queued-resources create mine" in done.stderr, done.stderr
    (desk / "train.jsonl").unlink()
    assert "train.jsonl: no such file" in bash(desk / script, *flags, cwd=desk).stderr
