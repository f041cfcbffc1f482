"""A task for telling the rungs of DAPO's ladder apart: its base, and the ladder on it.

    python -m benchmarks rungs             a base, and its properties that docs/rungs.md tells of
    python -m benchmarks rungs --full      and every rung, once per seed, from the seed's own base
    python -m benchmarks rungs --kept      the comparison alone, from the records that are kept

What is in the folder of the runs is not made again, so that the same command goes on. The task is
configs/rungs.py; what is compared, and how, stands in docs/rungs.md.

The base comes in three phases of imitation. It learns to work problems out with care (`Wait f 4 g 6
Wait g 6 ...`, arithmetic.Style.careful), then to answer at once, or to work out and repeat every
step again and again, and last that it mostly answers at once: a response's first token decides.
"""

import functools
import itertools
import json
import pathlib
import runpy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from benchmarks import harness, paired
from benchmarks.harness import Flag
from dapo_jax import build, config
from dapo_jax.config import presets
from dapo_jax.data import arithmetic
from dapo_jax.data.arithmetic import Style
from dapo_jax.evaluation import sampling
from dapo_jax.lab.experiments import bases, figures, ink, ladder, pool, stats, training
from dapo_jax.log import metrics
from dapo_jax.run import warmup

TASK = runpy.run_path(str(harness.ROOT / "configs" / "rungs.py"))
LEVELS, LIMIT = TASK["LEVELS"], TASK["LIMIT"]
ROOM = 192  # longest response of the base in TOKENS, when it is measured
TAG, UPDATES, TOKENS = "eval/heldout/avg@k", "optim/updates", "spent/tokens"
SAMPLES, FIRST = 32, 5  # responses to a problem of the base; first rollout steps that are looked at
AT = (0, 1, 8, 16, 24)  # tokens written, of which is asked what they tell of the outcome


def habit(worked: float) -> list[tuple[Style, Sequence[int]]]:
    """Examples of which this share is worked out, with many repeats, and the rest at once."""
    return [(Style(careful=worked, direct=1 - worked, ramble=0.8), LEVELS)]


PHASES = {  # name -> steps, rate of Muon, examples, tokens of the longest
    "skill": (500, 1e-2, [(bases.SKILL, LEVELS)], 56),
    "repeats": (350, 3e-3, habit(0.15), 112),
    "rare": (100, 1.5e-3, habit(0.04), 112),
}


class Samples(NamedTuple):
    """Responses of the base with room to write, [P][K]; k_P: operations of each problem."""

    k_P: np.ndarray
    right_PxK: np.ndarray  # bool
    length_PxK: np.ndarray  # TOKENS, end-of-text included
    worked_PxK: np.ndarray  # bool: the first token says that it will be worked out
    mistake_PxK: np.ndarray  # tokens written when the first wrong result was; ROOM where none is
    steps_PxKxT: np.ndarray  # results that it has come to within each of AT


def values(prompt: str) -> dict[str, int]:
    """Letter -> its value, of a problem of data/arithmetic.py."""
    first, value, *rest, _ = prompt.split()
    found = {first: int(value)}
    for name, sign, operand in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        change = int(operand) if sign == arithmetic.PLUS else -int(operand)
        found[name] = next(reversed(found.values())) + change
    return found


def written(words: Sequence[str], right: Mapping[str, int]) -> Iterator[tuple[int, str, bool]]:
    """(tokens written with it, letter, whether it is right) of every result in a response."""
    for at, (name, value) in enumerate(itertools.pairwise(words)):
        if name in right and value.isdecimal():
            yield at + 2, name, int(value) == right[name]


def samples(problems, words_PxK: Sequence[Sequence[list[str]]], scores) -> Samples:
    """problems: encoded ones; words: a text for each token of each response."""
    asked = [p.messages[-1][1] for p in problems.problems]
    mistake = np.full(scores.lengths_PxK.shape, ROOM)
    steps = np.zeros((*mistake.shape, len(AT)), int)
    for p, prompt in enumerate(asked):
        right = values(prompt)
        for k, words in enumerate(words_PxK[p]):
            found = list(written(words, right))
            mistake[p, k] = min((at for at, _, ok in found if not ok), default=ROOM)
            steps[p, k] = [len({name for at, name, _ in found if at <= t}) for t in AT]
    worked = np.array([[words[0] == arithmetic.WAIT for words in row] for row in words_PxK])
    k_P = np.array([len(values(prompt)) - 1 for prompt in asked])
    return Samples(k_P, scores.value_PxK, scores.lengths_PxK, worked, mistake, steps)


def fits(s: Samples) -> np.ndarray:
    """Right within the limit of training: bool [P, K]."""
    return s.right_PxK & (s.length_PxK <= LIMIT)


def known(s: Samples, t: int) -> float:
    """Share of the variance of the outcome (`fits`) that is known after AT[t] tokens, among the
    responses that have more: by the problem's length and, once something is written, by the way
    taken, the results it has come to and whether one is wrong. Adjusted R^2 of these cells."""
    on = s.length_PxK > AT[t]
    level = np.broadcast_to(s.k_P[:, None], on.shape)
    wrong, began = s.mistake_PxK <= AT[t], AT[t] > 0
    columns = (level, s.worked_PxK * began, s.steps_PxKxT[..., t], wrong)
    cells = np.stack([column[on] for column in columns], 1)
    _, cell, count = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    outcome, n = fits(s)[on].astype(float), int(on.sum())
    means = np.bincount(cell.ravel(), outcome) / count
    rest = np.sum((outcome - means[cell.ravel()]) ** 2) / (n - len(count))
    every = outcome.var(ddof=1)
    return float(1.0 - rest / every) if every else np.nan  # all alike: nothing to know


def groups(s: Samples, size: int) -> np.ndarray:
    """Shares of groups of `size` responses that are all wrong, mixed, all right. float64 [3]"""
    right = fits(s).reshape(len(s.k_P), -1, size).sum(-1)
    return np.array([np.mean(right == 0), np.mean((right > 0) & (right < size)),
                     np.mean(right == size)])  # fmt: skip


def machine_of(c, where: pathlib.Path):
    text = build.load_text(c, where, None)
    return text, build.build_machine(c, text.tokenizer.vocab_size, text.tokenizer.stop_ids, None)


def make_base(where: pathlib.Path, seed: int, drawn: int = 0) -> dict:
    """A task of the pool: the problems, if they are not there, the three phases, a checkpoint.
    drawn: responses to a problem of the base, of which `described` is returned; 0: SAMPLES."""
    logging.set_verbosity(logging.WARNING)
    started = time.process_time()
    write_problems(where.parent / "data")
    c = TASK["get_config"]("grpo", where.parent)
    c.seed, c.init_from, c.supervised_warmup.optimizer = seed, "", "muon"
    c.eval.max_response_tokens = ROOM
    text, machine = machine_of(c, where)
    params = build.initial_params(c, machine)
    phases = [
        warmup.Phase(name, steps, lr, mix, len(PHASES) * seed + i, cap)
        for i, (name, (steps, lr, mix, cap)) in enumerate(PHASES.items())
    ]
    params = warmup.warm_up(c, machine, text.tokenizer, params, phases)
    bases.save(where, c, machine, params)
    weights, draw = machine.engine.decode_params(params), build.evaluation_draw(c, top_p=1.0)
    evaluator = sampling.Evaluator(machine, weights, text, drawn or SAMPLES)
    problems = text.evals["heldout"]
    scores = sampling.evaluate(evaluator, [(problems, draw)])[0]
    word = functools.cache(lambda token: text.tokenizer.decode([token]).strip())
    words = [[[word(int(t)) for t in r.tokens] for r in row] for row in scores.responses]
    return described(samples(problems, words, scores)) | {"cpu_s": time.process_time() - started}


def write_problems(directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, count, part in (("train", 4096, "train"), ("heldout", 28 * len(LEVELS), "heldout")):
        made = arithmetic.problems(count, LEVELS, 0, part)
        arithmetic.write_problems(directory / f"{name}.jsonl", made)
    arithmetic.write_tokenizer(directory / "tokenizer.model")


def described(s: Samples) -> dict:
    """Plain JSON values: a row for each level and for all, and the rows of `PROPERTIES`."""
    fit, cut = fits(s), s.length_PxK > LIMIT
    share = lambda x, of: float(x[of].mean()) if of.any() else None
    rows = {}
    for k in (*sorted(set(s.k_P.tolist())), 0):
        of = np.broadcast_to((s.k_P == k)[:, None] | (k == 0), fit.shape)
        worked, some = of & s.worked_PxK, s._replace(k_P=s.k_P[of[:, 0]])
        some = some._replace(right_PxK=s.right_PxK[of[:, 0]], length_PxK=s.length_PxK[of[:, 0]])
        rows[str(k)] = {
            "right": share(fit, of),
            "right with room": share(s.right_PxK, of),
            "at once, right": share(fit, of & ~s.worked_PxK),
            "worked out, share": share(s.worked_PxK, of),
            "worked out, right": share(fit, worked),
            "worked out, right with room": share(s.right_PxK, worked),
            "its length": share(s.length_PxK, worked),
            **dict(zip(("all wrong", "mixed", "all right"), groups(some, 8).tolist(), strict=True)),
        }
    shortest = 5 * np.broadcast_to(s.k_P[:, None], fit.shape) + 6  # of careful working, TOKENS
    long = s.worked_PxK
    return {
        "levels": rows,
        "cut": share(cut, np.ones_like(cut)),
        "cut, worked out": share(cut, long),
        "cut, right with room": share(s.right_PxK, cut),
        "lengths": np.percentile(s.length_PxK[long], [10, 50, 90]).tolist(),
        "times the shortest": float(np.mean(s.length_PxK[long] / shortest[long])),
        "known": [known(s, t) for t in range(len(AT))],
        "more than": [int((s.length_PxK > at).sum()) for at in AT],
    }


def property_rows(found: Mapping[str, Any], first: Mapping[str, Sequence[Mapping]]) -> list[list]:
    """(property, the technique it is for, what was measured). first: rung -> records."""
    every, share = found["levels"]["0"], "{:.0%}".format
    of = lambda rung, tag: np.mean([r[tag] for r in first[rung] if 0 < r["step"] <= FIRST])
    clipped = lambda rung: "; ".join(
        f"{side} {of(rung, f'policy/clip_{side}_frac'):.2%}" for side in ("high", "low")
    )
    values = [r for r in first["vapo"] if "critic/explained_variance" in r][-1]
    at = "; ".join(
        f"{t} tokens {x:.2f} ({n:,})"
        for t, x, n in zip(AT, found["known"], found["more than"], strict=True)
    )
    low, mid, high = found["lengths"]
    return [
        ["the base, right within the limit", "room to learn", share(every["right"])],
        ["right with room", "overlong filtering", share(every["right with room"])],
        ["cut off by the limit: of all; of those worked out", "overlong filtering",
         f"{share(found['cut'])}; {share(found['cut, worked out'])}"],
        ["of those cut off, right where they may end", "overlong filtering",
         share(found["cut, right with room"])],
        ["probability of the first token of working out", "Clip-Higher",
         f"{every['worked out, share']:.3f}"],
        ["right within the limit: worked out; at once", "Clip-Higher, overlong filtering",
         f"{share(every['worked out, right'])}; {share(every['at once, right'])}"],
        [f"tokens clipped in steps 1-{FIRST}, naive GRPO", "Clip-Higher", clipped("grpo")],
        ["the same, full DAPO", "Clip-Higher", clipped("+dynamic_sampling")],
        ["length of what is worked out: 10%, half, 90%", "token-level loss, soft punishment",
         f"{low:.0f}, {mid:.0f}, {high:.0f} tokens"],
        ["its length over that of the shortest careful working", "soft punishment",
         f"{found['times the shortest']:.1f}"],
        ["groups of 8: all wrong; mixed; all right", "Dynamic Sampling",
         "; ".join(share(every[x]) for x in ("all wrong", "mixed", "all right"))],
        ["variance of the outcome known after (responses still running)", "a value model", at],
        ["of it explained by a value model after its pre-training", "a value model",
         f"{values['critic/explained_variance']:.2f}"],
    ]  # fmt: skip


DAPO = presets.LADDERS["dapo"]
BARE, WHOLE = DAPO.cumulative[0], DAPO.cumulative[-1]
PAIRS = [*zip(DAPO.cumulative[1:], DAPO.cumulative, strict=False), (WHOLE, BARE)]
LONGER = 4  # times the steps of the others, of naive GRPO, for the comparison at equal tokens
PLACES = {"with room": TAG, "within the limit": "right/limit"}
BESIDE = {  # name of a column -> tag, how it is written, its unit
    "length": ("response/length_mean", "{:.1f}", 1),
    "cut off": ("response/truncated_frac", "{:.3f}", 1),
    "M tokens": (TOKENS, "{:.3f}", 1e6),
}
FIGURES = harness.ROOT / "benchmarks" / "figures"
KEPT = harness.RESULTS / "rungs.jsonl.gz"  # what the comparison reads, of every run
PANELS = [  # of the picture: tag, what it is, over which
    (TAG, "right with room (share)", UPDATES),
    (PLACES["within the limit"], "right within the limit (share)", UPDATES),
    (TAG, "right with room (share)", TOKENS),
    ("response/length_mean", "mean response length (tokens)", UPDATES),
    ("policy/entropy", "entropy of sampled tokens (nats)", UPDATES),
    ("policy/clip_high_frac", "tokens clipped above (share)", UPDATES),
]
TAGS = {"step", TOKENS, UPDATES, *(tag for tag, *_ in (*BESIDE.values(), *PANELS))}


def of_base(seed: int) -> pool.Task:
    return pool.Task(f"base_{seed}", make_base, (seed,))


def task(rung: str, seed: int, base: int, out: pathlib.Path, where: str = "", **changes):
    """The run of a rung from a base, for the pool. where: its folder."""
    begin = of_base(base).folder
    fields = config.leaves(TASK["get_config"](rung, out.absolute())) | {"seed": seed}
    fields["steps"] *= LONGER if rung == BARE else 1
    fields["init_from"] = str((out / begin / "checkpoints").absolute())
    where = where or f"{rung}/seed_{seed}"
    return pool.Task(where, training.run, (fields | changes,), (begin,))


def base_tables(base: int, out: pathlib.Path, jobs: int) -> list[harness.Table]:
    """The base, and three short runs from it: naive GRPO, full DAPO and a value model."""
    steps = {BARE: FIRST, WHOLE: FIRST, "vapo": TASK["VALUE_STEPS"] + 1}
    short = {"eval.every": 0, "eval.max_problems": 8}
    first = {
        rung: task(rung, base, base, out, f"first/{rung}_{base}", steps=n, **short)
        for rung, n in steps.items()
    }
    found = pool.run_all([of_base(base), *first.values()], out, jobs)[of_base(base).folder]
    read = lambda task: metrics.read(out / task.folder / "metrics.jsonl")
    measured = harness.Table("property", "for", f"base of seed {base}", name="rungs_base")
    for row in property_rows(found, {rung: read(of) for rung, of in first.items()}):
        measured.row(*row)
    levels = harness.Table("operations", *found["levels"]["0"], name="rungs_levels")
    for k, row in found["levels"].items():
        cells = ("-" if x is None else f"{x:.1f}" if x > 1 else f"{x:.3f}" for x in row.values())
        levels.row("all" if k == "0" else k, *cells)
    return [measured, levels]


def records(run: pathlib.Path) -> list[dict]:
    """Those of a run, the evaluated ones with the accuracy of what ends within LIMIT as well."""
    found = metrics.read(run / "metrics.jsonl")
    for record in (r for r in found if TAG in r):
        lines = (run / "eval" / f"step_{record['step']:06d}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        fit = [np.logical_and(r["correct"], np.less_equal(r["tokens"], LIMIT)) for r in rows]
        record[PLACES["within the limit"]] = float(np.mean(fit))
    return found


def accuracies(runs: Mapping[str, Sequence[Sequence[dict]]], tag: str, x: str, end: float):
    """Rung -> accuracy [seeds]."""
    return {name: [ladder.accuracy(run, tag, x, end) for run in of] for name, of in runs.items()}


def compared(runs: Mapping[str, Sequence[Sequence[dict]]], updates: float) -> harness.Table:
    """One row per rung. runs: rung -> seed -> `records`, in the paper's order."""
    places = {what: accuracies(runs, tag, UPDATES, updates) for what, tag in PLACES.items()}
    told = paired.told(places, PAIRS)
    heads = [head for what in places for head in (f"right {what}", "change", "verdict")]
    table = harness.Table("rung", "paper", *heads, *BESIDE, name="rungs")
    for name, below in zip(runs, (None, *runs), strict=False):
        cells = [name, DAPO.paper[name]]
        for what, of in places.items():
            change = told[what, name, below].cells() if below else ["-", "-"]
            cells += [stats.interval(of[name]), *change]
        for tag, form, scale in BESIDE.values():
            curves = (figures.curve(run, tag, UPDATES) for run in runs[name])
            cells.append(form.format(np.mean([np.interp(updates, *c) for c in curves]) / scale))
        table.row(*cells)
    for what in places:
        table.note(f"{WHOLE} less {BARE}, {what}: {told[what, WHOLE, BARE]}.")
    budget = min(run[-1][TOKENS] for name in (BARE, WHOLE) for run in runs[name])
    for what, tag in PLACES.items():
        of = accuracies(runs, tag, TOKENS, budget)
        change = stats.paired(of[WHOLE], of[BARE])
        table.note(f"The same after {budget / 1e6:.2f} M tokens, {what}: {change:+.3f} "
                   f"({stats.interval(of[WHOLE])} and {stats.interval(of[BARE])}).")  # fmt: skip
    return table


def draw(runs: Mapping[str, Sequence[Sequence[dict]]], updates: float, steps: int) -> None:
    """The rungs beside the paper's, and `PANELS`, in benchmarks/figures/. steps: those compared."""
    places = {what: accuracies(runs, tag, UPDATES, updates) for what, tag in PLACES.items()}
    figure, axes = ink.panels(2, 3, *figures.SIZE)
    colors = figures.rung_colors(DAPO)
    for ax, (tag, what, over) in zip(axes, PANELS, strict=True):
        longest = steps if over == UPDATES else np.inf
        figures.panel(ax, runs, colors, tag, what, over, longest)
    for name, made in (("rungs", figures.bars(places, DAPO)), ("rungs_curves", figure)):
        made.savefig(FIGURES / f"{name}.png", dpi=75)


FLAGS = {
    "base": Flag(100, 100, "seed of the base model that is measured"),
    "seeds": Flag(0, 16, "runs of each rung, each from a base of its seed; 0: none"),
    "kept": Flag(False, False, "the comparison alone, from the records that are kept"),
    "out": Flag("", "", "folder of the runs; runs/rungs without it"),
    "jobs": Flag(0, 0, "runs at a time; 0: one per core"),
}


def measure(args) -> list[harness.Table]:
    c = TASK["get_config"]()
    updates = c.steps * c.optim.minibatches
    if args.kept:
        return [compared(paired.by_arm(harness.kept(KEPT), DAPO.cumulative), updates)]
    out = pathlib.Path(args.out or harness.ROOT / TASK["HOME"])
    tables = base_tables(args.base, out, args.jobs)
    seeds = range(args.seeds)
    if seeds:
        tasks = [task(rung, s, s, out) for s in seeds for rung in DAPO.cumulative]
        pool.run_all([*map(of_base, seeds), *tasks], out, args.jobs)
        found = {of.folder: records(out / of.folder) for of in tasks}
        runs = paired.by_arm(found, DAPO.cumulative)
        if args.write:
            harness.keep(KEPT, found, TAGS)
            draw(runs, updates, c.steps)
        tables.append(compared(runs, updates))
    return tables
