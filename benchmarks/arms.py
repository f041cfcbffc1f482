"""Trains several arms, once per seed each, and compares what they learn: one study at a time.

    python -m benchmarks arms --full --study=recipes [--out=runs/recipes]
    python -m benchmarks arms --study=recipes --kept     the table again, from the records kept

    quickstart            DAPO and naive GRPO, from one base model
    quickstart_own_base   the same, a base model per seed, as the quickstart itself has
    quickstart_lora       adapters of rank 8 in place of all weights, a base model per seed
    recipes               DAPO and each of `presets.RECIPES`; all keep the quickstart's sizes and
                          learning rate, which were chosen for DAPO
    recipes_losses        DAPO, and the same with each of LOSSES in place of PPO's clip
    curricula             tokens to an accuracy of .9 on 512 problems, so that epochs pass
    staleness_quickstart  `rollout.staleness` 0, 1 and 2; those above 0 have the weight of
    staleness_ladder      importance that they need, capped at 5, and slots for all that may be in
                          flight, (S + 1) x groups x group_size: in the 128 slots of S = 0 all that
                          began in one step ends in the next, and S = 2 is S = 1, bit for bit
    vapo                  VAPO, DAPO and naive GRPO on the quickstart: responses of about 13 tokens
    vapo_chains           the same from the base `careful` of lab/experiments/bases.py on problems
                          of 5 to 8 operations: 31 to 46 tokens, of which the first decides
    turns                 configs/calculator.py, and the same without the tool: `rollout.turns=0`
    turns_guess           configs/guess.py

One base model (seed 0), from which every arm is trained once per seed, `--jobs` at a time; the same
command resumes. Held-out accuracy is at T=1, with 4 samples a problem; between evaluations the
curve is a straight line. Intervals are 95% t-intervals over seeds, differences seed by seed; a
verdict is by paired t-tests at 5%, corrected by Holm for all those of the table.
"""

import functools
import pathlib
import runpy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, paired
from benchmarks.harness import Flag
from benchmarks.paired import Run
from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.lab.experiments import bases, figures, ladder, pool, stats, training
from dapo_jax.log import metrics

TAG, UPDATES, TOKENS = "eval/heldout/avg@k", "optim/updates", "spent/tokens"
EXPLAINED, LENGTH, TURNED = "critic/explained_variance", "response/length_mean", "turns/mean"
EPOCHS, LEFT_OUT = "data/epochs", "curriculum/left_out"
AGE, ESS, BUSY = "staleness/age_mean", "policy/importance_ess", "perf/slot_occupancy"
KEPT = {"step", TAG, UPDATES, TOKENS, EXPLAINED, LENGTH, TURNED, EPOCHS, LEFT_OUT, AGE, ESS, BUSY}
Score = Callable[[Run, Mapping[str, float]], float]  # (run, budgets) -> a number


class Column(NamedTuple):
    """cell: (the arm's runs, budgets) -> what is written. head: may name the budgets {updates} and
    {tokens} (millions), the fewest of any run. less: head of a further column, the arm's score less
    the plain arm's, with a verdict; '' = none. better: -1 where a smaller score is ahead."""

    head: str
    cell: Callable[[Sequence[Run], Mapping[str, float]], Any]
    score: Score | None = None
    less: str = ""
    better: int = 1


class Study(NamedTuple):
    """fields: (arm, out, **changes) -> leaves of its config. The first arm is the plain one, whose
    warm-up, with seed 0, makes the base."""

    arms: tuple[str, ...]
    fields: Callable[..., dict[str, Any]]
    columns: tuple[Column, ...]
    own_base: bool = False
    bases: Callable[[pathlib.Path], list[pool.Task]] | None = None  # () -> tasks, the last is it


def file_config(name: str, *argument: str):
    return runpy.run_path(str(harness.ROOT / "configs" / f"{name}.py"))["get_config"](*argument)


def quickstart_fields(arm: str, out: pathlib.Path, **changes) -> dict:
    c = file_config("quickstart_grpo" if arm == "naive GRPO" else "quickstart")
    if arm == "LoRA":
        c.model.lora.rank, c.optim.lr = 8, 3e-3  # ten times the rate of all weights
    return config.leaves(c) | changes


LOSSES = {  # loss.objective -> what its authors set with it (docs/own_loss.md)
    "sapo": {}, "dppo_tv": {"loss.clip_low": 0.15, "loss.clip_high": 0.15, "loss.dual_clip": 20.0},
    "clip_cov": {"loss.clip_low": 1.0, "loss.clip_high": 1.0}, "kl_cov": {}, "high_entropy": {},
    "ess": {},
}  # fmt: skip


def recipe_fields(arm: str, out: pathlib.Path, **changes) -> dict:
    c = config.leaves(file_config("quickstart", arm if arm in presets.RECIPES else ""))
    return c | ({"loss.objective": arm} | LOSSES[arm] if arm in LOSSES else {}) | changes


CURRICULA = {
    "none": {},
    "no_positive": {"pass_rate_cap": 0.9},
    "revisit": {"pass_rate_cap": 0.9, "revisit_epochs": 2},
    "band": {"band_low": 0.2, "band_high": 0.8},
    "temperature": {"temperature_schedule": "linear", "temperature_steps": 24},  # 1.2 to 1
}


def curriculum_fields(arm: str, out: pathlib.Path, **changes) -> dict:
    c = file_config("quickstart")
    c.steps, c.data.embedded_problems = 36, 512
    c.eval.every, c.eval.top_p = 3, 1.0
    if "temperature_schedule" in CURRICULA[arm]:
        c.rollout.temperature = 1.2
    c.curriculum.update(CURRICULA[arm])
    return config.leaves(c) | changes


AGES = {"S=0": 0, "S=1": 1, "S=2": 2}


def staleness_fields(task: str, arm: str, out: pathlib.Path, **changes) -> dict:
    c = file_config(task)
    c.rollout.staleness, c.loss.old_logprobs = AGES[arm], "recompute"
    if AGES[arm]:
        c.loss.importance_cap = 5.0
        c.rollout.slots = (1 + AGES[arm]) * c.rollout.groups * c.rollout.group_size
    return config.leaves(c) | changes


METHODS = {"dapo": lambda c: c, "vapo": presets.vapo, "grpo": presets.grpo}


def vapo_fields(arm: str, out: pathlib.Path, *, chains: bool = False, **changes) -> dict:
    """VAPO's own settings follow runs on seed 100, which is not reported: of alpha .4 and 1.5 and
    of value rates 1e-3 and 3e-3, which nothing told apart, the larger alpha and the smaller rate.
    The paper's .05 makes responses of up to 20 tokens one-step TD. 10 steps of value pre-training
    explained .08 of the variance in chains, the next 10 of both models .6, so that it has 30."""
    if chains:
        c = config.base()
        c.rollout.max_response_tokens = bases.ROOM
        bases.on_files(c, out / "data", bases.HARD_LEVELS, ())
        c.eval.files = f"heldout={out.absolute()}/data/heldout_hard.jsonl"
    else:
        c = file_config("quickstart")
        c.optim.share_prompts = False  # a value model cannot
    c = METHODS[arm](c)
    c.steps, c.eval.every, c.eval.top_p, c.eval.k, c.eval.max_problems = 30, 5, 1.0, 4, 64
    c.checkpoint.every, c.log.tensorboard = 0, False
    if c.critic.enabled:
        c.critic.pretrain_steps = 30 if chains else 10
        c.critic.length_alpha, c.critic.lr = 1.5, 1e-3
        c.steps += c.critic.pretrain_steps
    return config.leaves(c) | changes


def turns_fields(arm: str, out: pathlib.Path, **changes) -> dict:
    c = file_config("guess" if arm == "guess" else "calculator")
    if arm == "no tool":
        c.rollout.turns, c.reward.reply = 0, ""
    return config.leaves(c) | changes


def chain_bases(out: pathlib.Path) -> list[pool.Task]:
    bases.write_problems(out / "data")
    skill, careful = (bases.folder(name, 0) for name in ("skill", "careful"))
    return [
        pool.Task(skill, bases.make, ("skill", 0)),
        pool.Task(careful, bases.make, ("careful", 0), (skill,)),
    ]


def tokens_to(run: Run, level: float) -> tuple[float, bool]:
    """(tokens drawn until the accuracy came to `level`, whether it did)."""
    at, values = figures.curve(run, TAG, TOKENS)
    above = np.flatnonzero(values >= level)
    if not len(above):
        return float(at[-1]), False
    i = max(above[0], 1)
    return float(np.interp(level, values[i - 1 : i + 1], at[i - 1 : i + 1])), True


def scored(head: str, score: Score, less: str = "", better: int = 1) -> Column:
    """The column of a number per run."""
    mean = lambda runs, end: stats.interval([score(run, end) for run in runs])
    return Column(head, mean, score, less, better)


def window(budget: str) -> Score:
    """Mean accuracy at 4/6, 5/6 and 6/6 of a budget."""
    return lambda run, end: ladder.accuracy(run, TAG, budget, end[budget])


def last_within(budget: str) -> Score:
    """Accuracy of the last evaluation within a budget."""

    def score(run, end):
        spent, values = figures.curve(run, TAG, budget)
        return values[spent <= end[budget]][-1]

    return score


def last(head: str, tag: str, form: str = "{:.2f}", scale: float = 1.0, absent=0) -> Column:
    """The mean over seeds of a tag of the last record, `absent` where it has none."""
    mean = lambda runs: np.mean([run[-1].get(tag, absent) for run in runs])
    return Column(head, lambda runs, end: form.format(mean(runs) / scale))


def mean_of(head: str, tag: str, form: str) -> Column:
    """The mean over steps and seeds of a tag, '-' where the last record has none."""

    def cell(runs, end):
        found = [np.mean([r[tag] for r in run if tag in r]) for run in runs if tag in run[-1]]
        return form.format(np.mean(found)) if found else "-"

    return Column(head, cell)


def explained(run: Run) -> float:
    """Explained variance before the policy's first update; NaN without a value model."""
    before = [r for r in run if not r.get(UPDATES)]
    return next((r[EXPLAINED] for r in before[::-1] if EXPLAINED in r), np.nan)


def _explained(runs, end):
    told = stats.interval([explained(run) for run in runs])
    return "" if np.isnan(told.mean) else told


def _evaluations(run: Run, end) -> np.ndarray:
    return figures.curve(run, TAG, "step")[1]


FIRST, SECOND, LAST = (lambda run, end, at=at: _evaluations(run, end)[at] for at in (0, 1, -1))
LEVEL = 0.9  # of curricula
THOUSAND_TO = lambda run, end: tokens_to(run, LEVEL)[0] / 1e3
CAME = lambda runs, end: f"{sum(tokens_to(r, LEVEL)[1] for r in runs)} of {len(runs)}"
EACH_SEED = lambda runs, end: " ".join(f"{LAST(r, end):.3f}" for r in runs)
MILLIONS = last("M tokens", TOKENS, scale=1e6)
AT_BOTH = (
    scored("at {updates:.0f} updates", window(UPDATES), less="less dapo's"),
    scored("at {tokens:.3g} M tokens", window(TOKENS), less="less dapo's"),
)
RECIPES = (*AT_BOTH, last("updates", UPDATES, "{:.0f}"), MILLIONS)
QUICKSTART = scored("at {updates:.0f} updates", last_within(UPDATES), less="less GRPO's")
AGED = (
    scored("accuracy at {updates:.0f} updates", window(UPDATES), less="less that of S=0"),
    last("M tokens", TOKENS, "{:.3f}", scale=1e6),
    mean_of("mean age, steps", AGE, "{:.2f}"),
    mean_of("effective samples", ESS, "{:.3f}"),
    mean_of("slots busy", BUSY, "{:.0%}"),
)
VAPO = (
    *AT_BOTH,
    last("M tokens", TOKENS, "{:.3f}", scale=1e6),
    last("length at the end", LENGTH, "{:.1f}"),
    Column("explained", _explained),
)
TURNS = (
    scored("before", FIRST), scored("after", LAST, less="less that with the tool"),
    last("turns of a response", TURNED, absent=1), MILLIONS,
)  # fmt: skip
STUDIES = {
    "quickstart": Study(
        ("naive GRPO", "DAPO"), quickstart_fields, (
            QUICKSTART,
            scored("mean after the start", lambda run, end: _evaluations(run, end)[1:].mean(),
                    less="less GRPO's"),
            scored("at {tokens:.2f} M tokens", last_within(TOKENS), less="less GRPO's"), MILLIONS,
        ),
    ),
    "quickstart_own_base": Study(
        ("naive GRPO", "DAPO"), quickstart_fields,
        (scored("at the start", FIRST), QUICKSTART, Column("seed by seed", EACH_SEED)),
        own_base=True,
    ),
    "quickstart_lora": Study(
        ("all weights", "LoRA"), quickstart_fields, (
            scored("at the start", FIRST), scored("after 20 steps", SECOND),
            scored("after 60 steps", LAST, less="less that of all weights"),
            Column("seed by seed", EACH_SEED),
        ),
        own_base=True,
    ),
    "recipes": Study(("dapo", *presets.RECIPES), recipe_fields, RECIPES),
    "recipes_losses": Study(("dapo", *LOSSES), recipe_fields, RECIPES),
    "curricula": Study(
        tuple(CURRICULA), curriculum_fields, (
            scored(f"thousand tokens to {LEVEL}", THOUSAND_TO, less="less none's", better=-1),
            Column("came to it", CAME), scored("at the end", LAST),
            last("epochs", EPOCHS, "{:.1f}"), last("left out at the end", LEFT_OUT, "{:.0f}"),
        ),
    ),
    **{f"staleness_{task}": Study(tuple(AGES), functools.partial(staleness_fields, task), AGED)
       for task in ("quickstart", "ladder")},
    "vapo": Study(tuple(METHODS), vapo_fields, VAPO),
    "vapo_chains": Study(
        tuple(METHODS), functools.partial(vapo_fields, chains=True), VAPO, bases=chain_bases
    ),
    "turns": Study(("calculator", "no tool"), turns_fields, TURNS),
    "turns_guess": Study(("guess",), turns_fields, TURNS),
}  # fmt: skip


def train(study: Study, seeds: int, out: pathlib.Path, jobs: int) -> dict[str, Run]:
    """The run of each `paired.folder`; the same call resumes what is in `out`."""
    fields = functools.partial(study.fields, out=out)
    if study.own_base:
        first = []
    elif study.bases:
        first = study.bases(out)
    else:
        first = [pool.Task("base", training.run, (fields(study.arms[0], steps=0),))]
    base = tuple(task.folder for task in first[-1:])
    runs = [
        pool.Task(paired.folder(arm, s), training.run, (fields(arm, seed=s), *base), base)
        for s in range(seeds)
        for arm in study.arms
    ]
    pool.run_all([*first, *runs], out, jobs)
    return {task.folder: metrics.read(out / task.folder / "metrics.jsonl") for task in runs}


def compared(study: Study, runs: Mapping[str, Sequence[Run]], name: str = "") -> harness.Table:
    """One row per arm. The plain arm must be the first."""
    plain, *others = runs
    every = [run for of in runs.values() for run in of]
    end = {budget: min(run[-1][budget] for run in every) for budget in (UPDATES, TOKENS)}
    budgets = {"updates": end[UPDATES], "tokens": end[TOKENS] / 1e6}
    scores = {
        c.head: {arm: [c.score(run, end) for run in of] for arm, of in runs.items()}
        for c in study.columns
        if c.less
    }
    told = paired.told(scores, [(arm, plain) for arm in others])
    heads, rows = ["arm"], {arm: [arm] for arm in runs}
    for c in study.columns:
        heads += [c.head.format(**budgets), *([c.less, "verdict"] if c.less else [])]
        for arm, of in runs.items():
            rows[arm].append(c.cell(of, end))
            if c.less:
                change = told.get((c.head, arm, plain))
                rows[arm] += change.cells(c.better) if change else ["-", "-"]
    table = harness.Table(*heads, name=name)
    for cells in rows.values():
        table.row(*cells)
    return table


FLAGS = {
    "study": Flag("quickstart", "quickstart", choices=tuple(STUDIES)),
    "seeds": Flag(2, 5),
    "out": Flag("", "", "folder of the runs; runs/STUDY without it"),
    "jobs": Flag(0, 0, "runs at a time; 0: one per core"),
    "kept": Flag(False, False, "the table alone, from the records that are kept"),
}


def kept(study: str) -> pathlib.Path:
    return harness.RESULTS / f"{study}.jsonl.gz"


def measure(args) -> list[harness.Table]:
    study = STUDIES[args.study]
    if args.kept:
        found = harness.kept(kept(args.study))
    else:
        out = pathlib.Path(args.out or harness.ROOT / "runs" / args.study)
        found = train(study, args.seeds, out, args.jobs)
        if args.write:
            harness.keep(kept(args.study), found, KEPT)
    return [compared(study, paired.by_arm(found, study.arms), args.study)]
