"""Does `lab diagnose` name the cause? Runs broken on purpose, and healthy ones, of the tiny model.

    python -m benchmarks diagnose --full --write [--out=runs/diagnose] [--jobs=1]

A run has 16 steps of 8 groups of 8 responses and 4 updates, from a base model as the quickstart's.
Each is broken in one way (BREAKS; rewards and machine of broken.py), on a task in turn. The first
rules were made on runs with --first below 1000, whose tasks are SEEN, and measured on other seeds,
another base and the tasks NEW (1000 and 2000). Looking at these made the rules of today, which are
measured from 3000 on, on the tasks LATER. With --out the same command goes on where it was cut off.
A run is found if its first cause is the one that it was broken by; a healthy one, if nothing is.
"""

import contextlib
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import broken, harness
from benchmarks.harness import Flag
from dapo_jax import config
from dapo_jax.data import arithmetic
from dapo_jax.lab import diagnose
from dapo_jax.lab.experiments import pool, training

FLAGS = {
    "first": Flag(0, 3000, "seed of the base, and of the first run"),
    "only": Flag("limit", "", "regular expression: runs whose name has it"),
    "jobs": Flag(1, 2, "processes, each of which makes runs one after the other"),
    "out": Flag("", "", "folder that keeps the runs; '' = none is kept"),
}
NO_FIELDS: dict[str, Any] = {}


class Task(NamedTuple):
    levels: tuple[int, ...]  # operations of a problem
    fields: dict[str, Any] = NO_FIELDS


OLD = {"loss.importance_cap": 5.0, "rollout.slots": 512}
GRPO = {"dynamic_sampling.enabled": False, "loss.clip_high": 0.2, "reward.overlong_penalty": 0.0}
SEEN = {
    "2-6": Task((2, 3, 4, 5, 6)),
    "2-4": Task((2, 3, 4)),
    "4-7": Task((4, 5, 6, 7)),
    "2-5, GRPO": Task((2, 3, 4, 5), GRPO),
    "2-5, curriculum": Task((2, 3, 4, 5), {"curriculum.pass_rate_cap": 0.9}),
}
NEW = {
    "3-5": Task((3, 4, 5)),
    "2-3": Task((2, 3)),
    "3-7, GRPO": Task((3, 4, 5, 6, 7), GRPO),
    "3-6, filter": Task((3, 4, 5, 6), {"loss.overlong_filter": "group"}),
    "2-7, half the rate": Task((2, 3, 4, 5, 6, 7), {"optim.lr": 3e-4}),
}
LATER = {
    "4-6": Task((4, 5, 6)),
    "2-4, GRPO": Task((2, 3, 4), GRPO),
    "2-6, half the rate": Task((2, 3, 4, 5, 6), {"optim.lr": 3e-4}),
    "3-5, filter": Task((3, 4, 5), {"loss.overlong_filter": "group"}),
    "2-5": Task((2, 3, 4, 5)),
}
HEALTHY = NEW | {  # further tasks of healthy runs; each has two seeds
    "3-6, CISPO": Task((3, 4, 5, 6), {
        "loss.objective": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 4.0,
    }),
    "2-4, staleness": Task((2, 3, 4), OLD | {"rollout.staleness": 1}),
    "3-6, revisits": Task((3, 4, 5, 6), {
        "curriculum.pass_rate_cap": 0.9, "curriculum.revisit_epochs": 1,
    }),
    "2-5, Dr. GRPO": Task((2, 3, 4, 5), GRPO | {
        "advantage.scale": "none", "loss.normalizer": "constant",
    }),
    "3-4, band": Task((3, 4), {"curriculum.band_low": 0.1, "curriculum.band_high": 0.9}),
}  # fmt: skip
HEALTHY_LATER = LATER | {
    name.replace(was, now): HEALTHY[name]._replace(levels=levels)
    for name, was, now, levels in (
        ("3-6, CISPO", "3-6", "3-5", (3, 4, 5)),
        ("2-4, staleness", "2-4", "2-5", (2, 3, 4, 5)),
        ("3-6, revisits", "3-6", "2-4", (2, 3, 4)),
        ("2-5, Dr. GRPO", "2-5", "3-6", (3, 4, 5, 6)),
        ("3-4, band", "3-4", "2-6", (2, 3, 4, 5, 6)),
    )
}


class Break(NamedTuple):
    """cause: key of `lab/diagnose.py: CAUSES`. runs: how many, each on the next task."""

    cause: str
    how: str
    fields: dict[str, Any] = NO_FIELDS
    runs: int = 2
    machine: Callable = contextlib.nullcontext
    gold: str = ""  # what becomes of the training set's gold answers
    problems: int = 2048
    levels: tuple[int, ...] = ()


def rewarded(name: str) -> dict[str, Any]:
    return {"reward.function": f"{broken.__file__}:{name}"}


LIMIT = {"rollout.max_response_tokens": 9, "reward.overlong_buffer_tokens": 2}
BREAKS = (
    Break("length", "limit of 9 tokens", LIMIT),
    Break("length", "words are paid", rewarded("lengthy") | {"reward.overlong_penalty": 0.0}),
    Break("entropy", "temperature .03", {"rollout.temperature": 0.03}),
    Break("entropy", "temperature falls", {
        "curriculum.temperature_schedule": "linear", "curriculum.temperature_steps": 4,
        "curriculum.temperature_end": 0.02,
    }),
    Break("verifier", "reads another form", {"reward.verifier": "boxed"}, 1),
    Break("verifier", "gold has a unit", rewarded("text"), 1, gold="unit"),
    Break("verifier", "reads one digit", rewarded("one_digit"), 1),
    Break("verifier", "fails", rewarded("failing") | {"reward.on_error": "miss"}, 1),
    Break("verifier", "gold is wrong", runs=1, gold="any"),
    Break("hacked", "any smaller number", rewarded("at_most"), 1),
    Break("hacked", "the same, evaluated well", rewarded("at_most") | {
        "reward.by_source": "heldout=dapo",
    }, 1),
    Break("hacked", "gold anywhere", rewarded("anywhere"), 1),
    Break("hacked", "form is paid", rewarded("form"), 1),
    Break("hacked", "few words are paid", rewarded("brief"), 1),
    Break("lr high", "x10", {"optim.lr": 6e-3}),
    Break("lr high", "x50", {"optim.lr": 3e-2}),
    Break("lr low", "1e-7", {"optim.lr": 1e-7}),
    Break("lr low", "gone after a step", {
        "optim.schedule": "linear", "optim.decay_steps": 1, "optim.warmup_steps": 1,
    }),
    Break("staleness", "8 steps", OLD | {"rollout.staleness": 8, "optim.lr": 2e-3}),
    Break("staleness", "4 steps, larger ones", OLD | {"rollout.staleness": 4, "optim.lr": 4e-3}),
    Break("data", "8 problems", problems=8),
    Break("data", "16, each left out", {"curriculum.pass_rate_cap": 0.7}, problems=16),
    Break("signal", "11 operations", levels=(11, 12)),
    Break("signal", "9 operations", levels=(9, 10)),
    Break("apart", "rounded weights", machine=broken.noisy),
    Break("apart", "weights not sent", machine=broken.unsent),
    Break("template", "unknown words", {"data.template": "Question: {problem} Think."}, 1),
    Break("template", "no stop token", machine=lambda: broken.stopped_by("")),
    Break("template", "an early stop token", machine=lambda: broken.stopped_by(arithmetic.ANSWER)),
)  # fmt: skip


class Job(NamedTuple):
    name: str
    task: str
    breaks: int  # index of BREAKS; -1: healthy
    seed: int


def jobs(first: int) -> Iterator[Job]:
    """Those of a bench. From 4000 on each thousand moves the breaks on by a task."""
    tasks, healthy = ([*SEEN], [*SEEN]) if first < 1000 else ([*NEW], [*HEALTHY])
    if first >= 3000:
        tasks, healthy = [*LATER], [*HEALTHY_LATER]
    n, turn = 0, max(first // 1000 - 3, 0)
    for i, b in enumerate(BREAKS):
        stale = "rollout.staleness" in b.fields  # no curriculum can choose then
        fit = [t for t in tasks if not (stale and "curriculum" in t)]
        for k in range(b.runs):
            yield Job(f"{b.cause}, {b.how}, {k}", fit[(i + 2 * k + turn) % len(fit)], i, first + n)
            n += 1
    for i, task in enumerate(healthy * 2):
        yield Job(f"healthy, {task}, {i // len(healthy)}", task, -1, first + n + i)


def base_config(seed: int):
    """What all runs share."""
    c = config.base()
    c.seed, c.steps = seed, 16
    c.rollout.groups, c.rollout.slots, c.rollout.chunk = 8, 64, 16
    c.optim.minibatches, c.optim.lr = 4, 6e-4
    c.optim.share_prompts, c.optim.micro_batch_rows = True, 4
    c.data.max_prompt_tokens, c.dynamic_sampling.max_rounds = 48, 5
    c.eval.top_p, c.eval.k, c.eval.max_problems, c.eval.every = 1.0, 2, 32, 8
    c.log.tensorboard, c.checkpoint.every, c.checkpoint.journal_gb = False, 0, 0
    return c


def of_base(seed: int) -> pool.Task:
    """A base model, as the quickstart's warm-up makes it."""
    c = base_config(seed)
    c.steps = 0
    c.supervised_warmup.update({
        "optimizer": "muon", "skill_steps": 350, "skill_lr": 1e-2,
        "habit_steps": 60, "habit_lr": 3e-3,
    })  # fmt: skip
    return pool.Task(f"base_{seed}", training.run, (config.leaves(c),))


def write_problems(folder: pathlib.Path, levels, seed: int, how: Break | None) -> None:
    """A training and a held-out set, of a data source each, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    arithmetic.write_tokenizer(folder / "tokenizer.model")
    rng = np.random.default_rng(seed)
    for name, count, split in (
        ("train", how.problems if how else 2048, "train"),
        ("heldout", 32, "heldout"),
    ):
        path = folder / f"{name}.jsonl"
        arithmetic.write_problems(path, arithmetic.problems(count, levels, seed, split))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["data_source"] = name
            gold = row["reward_model"]
            if how and how.gold and name == "train":
                other = (
                    f"{gold['ground_truth']} apples",
                    str(rng.integers(arithmetic.MAX_VALUE + 1)),
                )
                gold["ground_truth"] = other[how.gold == "any"]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_job(job: Job, base: str) -> pool.Task:
    name = job.name.replace(", ", "_").replace(" ", "_")
    return pool.Task(name, made, (job.task, job.breaks, job.seed, base), (base,))


def made(where: pathlib.Path, task: str, breaks: int, seed: int, base: str) -> dict:
    """Make a run and diagnose it. base: the folder of its base, beside its own."""
    began, how = time.process_time(), BREAKS[breaks] if breaks >= 0 else None
    levels, fields = (SEEN | HEALTHY | HEALTHY_LATER)[task]
    c, data = base_config(seed), where / "problems"
    write_problems(data, (how and how.levels) or levels, seed, how)
    c.data.train, c.tokenizer.path = str(data / "train.jsonl"), str(data / "tokenizer.model")
    c.eval.files = f"heldout={data / 'heldout.jsonl'}"
    c.init_from = str(where.with_name(base) / "checkpoints")
    c.update(fields)
    c.update(how.fields if how else {})
    error = ""
    with how.machine() if how else contextlib.nullcontext():
        try:
            training.trained(c, where)
        except ValueError as why:  # some mistakes end a run
            error = str(why)
    found = diagnose.as_json(diagnose.diagnose(diagnose.read(str(where))))
    return found | {"error": error, "cpu_s": round(time.process_time() - began, 1)}


def measure(args) -> list[harness.Table]:
    wanted = [job for job in jobs(args.first) if re.search(args.only, job.name)]
    truths = [*diagnose.CAUSES, "healthy"]
    runs = harness.Table("run", "task", "first cause", "figure", "others", name="diagnose_runs")
    seconds, counts = 0.0, {t: dict.fromkeys([*diagnose.CAUSES, "nothing"], 0) for t in truths}
    with contextlib.ExitStack() as stack:
        out = args.out or stack.enter_context(tempfile.TemporaryDirectory())
        out = pathlib.Path(out).absolute()
        jax.config.update("jax_compilation_cache_dir", str(out / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        base = of_base(args.first)
        tasks = [of_job(job, base.folder) for job in wanted]
        known = pool.run_all([base, *tasks], out, args.jobs)
        for job, task in zip(wanted, tasks, strict=True):
            found = known[task.folder]
            first, suspects = found["first"] or "nothing", found["suspects"]
            counts[job.name.split(",")[0]][first] += 1
            f = suspects[0]["figures"][0] if suspects else {}
            shown = f"`{f['tag']}` = {f['value']:.3g}, step {f['step']}" if f else ""
            runs.row(job.name, job.task, first, shown, ", ".join(s["cause"] for s in suspects[1:]))
            seconds += found["cpu_s"]
    runs.note(f"{len(wanted)} runs, {seconds:.0f} CPU-s, seeds from {args.first}.")
    return [confusion(counts), runs]


def confusion(counts: dict[str, dict[str, int]]) -> harness.Table:
    """Truth by row, the first cause named by column."""
    named = [*diagnose.CAUSES, "nothing"]
    table = harness.Table("broken by", *named, "found")
    right = {t: row["nothing" if t == "healthy" else t] for t, row in counts.items()}
    for truth, row in counts.items():
        total = sum(row.values())
        if total:
            cells = [row[n] or "" for n in named]
            table.row(truth, *cells, f"{right[truth]} of {total}")
    sick = [t for t in counts if t != "healthy"]
    total = sum(sum(counts[t].values()) for t in sick)
    well = sum(counts["healthy"].values())
    if total:
        hits = sum(right[t] for t in sick)
        table.note(f"{hits} of {total} broken runs by their first cause: {hits / total:.1%}.")
    if well:
        false = well - right["healthy"]
        table.note(f"{false} false alarms in {well} healthy runs: {false / well:.1%}.")
    return table
