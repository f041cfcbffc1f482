"""Budget to score: longer runs on the task of the rungs, predicted from the short ones.

    python -m benchmarks score             what the kept runs of `benchmarks rungs` predict, and
                                           beside it what is kept of longer ones
    python -m benchmarks score --full      the longer runs, on seeds that it has not seen

ScaleRL's sigmoid (lab/dynamics/scaling.py) goes through the held-out accuracy of full DAPO over its
updates, all seeds together. What stands beside it is a prediction interval for the mean of so many
new runs, each from a base model of its own: the fit is made again on seeds drawn with replacement,
and how single seeds lie about their curve at its end is drawn as well. The sigmoid is assumed,
and so is that new seeds are of the kinds that were seen.
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks import harness, paired, rungs
from benchmarks.harness import Flag
from dapo_jax.lab.dynamics import scaling
from dapo_jax.lab.experiments import figures, pool, stats

FLAGS = {
    "first_seed": Flag(16, 16, "of the longer runs; those of `rungs` are 0 to 15"),
    "seeds": Flag(8, 8, "longer runs that are predicted, and made with --full"),
    "steps": Flag(0, 34, "rollout steps of the longer runs; 0: those that are kept"),
    "draws": Flag(100, 1000, "fits on seeds drawn with replacement"),
    "out": Flag("", "", "folder of the runs; runs/rungs without it"),
    "jobs": Flag(0, 0, "runs at a time; 0: one per core"),
}
KEPT = harness.RESULTS / "score.jsonl.gz"  # of the longer runs
TIMES = (1.5, 2, 3)  # the updates of the short runs, at which the longer ones are predicted


def predicted(
    updates_E, score_SxE, at: Sequence[float], runs: int, draws: int, seed: int = 0
) -> tuple[scaling.Fit, list[scaling.Estimate]]:
    """(the curve through all seeds, for each of `at` updates the mean score of `runs` new ones).

    updates_E, score_SxE: evaluations of S seeds. The estimates' intervals are the middle 95% of
    `draws`. ValueError: no curve fits.
    """
    rng, seeds = np.random.default_rng(seed), len(score_SxE)
    curve = lambda some: scaling.fit(np.tile(updates_E, len(some)), np.ravel(some))
    whole = curve(score_SxE)
    apart_S = score_SxE[:, -1] - score_SxE[:, -1].mean()
    found = []
    for _ in range(draws):
        fit = curve(score_SxE[rng.integers(seeds, size=seeds)])
        found.append(fit.curve(at).value + apart_S[rng.integers(seeds, size=runs)].mean())
    low, high = np.clip(np.quantile(found, [0.025, 0.975], axis=0), 0, scaling.MOST)
    value = whole.curve(at).value
    return whole, [scaling.Estimate(*x) for x in zip(value, low, high, strict=True)]


def curves(runs: Sequence[Sequence[dict]], tag: str) -> tuple[np.ndarray, np.ndarray]:
    """(updates [E], score [S, E]) of runs that were evaluated at the same updates."""
    each = [figures.curve(records, tag, rungs.UPDATES) for records in runs]
    assert all(np.array_equal(at, each[0][0]) for at, _ in each)
    return each[0][0], np.stack([score for _, score in each])


def compared(short, longer, updates: float, runs: int, draws: int) -> harness.Table:
    """One row per accuracy and budget, measured where all of the longer runs come to it. short,
    longer: records of the runs; longer may be empty. updates: of the short ones."""
    table = harness.Table(
        "accuracy", "updates", "predicted", "95% of means", "measured", "within", name="score"
    )
    at = [times * updates for times in TIMES]
    for what, tag in rungs.PLACES.items():
        fit, guesses = predicted(*curves(short, tag), at, runs, draws)
        for x, guess in zip(at, guesses, strict=True):
            cells = [
                what,
                f"{x:,.0f}",
                f"{guess.value:.3f}",
                f"{guess.low:.3f} to {guess.high:.3f}",
            ]
            measured, within = "-", "-"
            if longer and all(r[-1][rungs.UPDATES] >= x for r in longer):
                scores = [np.interp(x, *figures.curve(r, tag, rungs.UPDATES)) for r in longer]
                measured = stats.interval(scores)
                within = "yes" if guess.low <= measured.mean <= guess.high else "no"
            table.row(*cells, measured, within)
        table.note(f"{what}: {fit.start} at the start, ceiling {fit.ceiling}, exponent "
                   f"{fit.exponent}, half of the way after {fit.midpoint} updates.")  # fmt: skip
    return table


def measure(args) -> list[harness.Table]:
    out = pathlib.Path(args.out or harness.ROOT / rungs.TASK["HOME"])
    short = paired.by_arm(harness.kept(rungs.KEPT), [rungs.WHOLE])[rungs.WHOLE]
    c, longer = rungs.TASK["get_config"](), harness.kept(KEPT) if KEPT.exists() else {}
    if args.steps:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        where = "longer/seed_{}".format
        tasks = [rungs.task(rungs.WHOLE, s, s, out, where(s), steps=args.steps) for s in seeds]
        pool.run_all([*map(rungs.of_base, seeds), *tasks], out, args.jobs)
        longer = {of.folder: rungs.records(out / of.folder) for of in tasks}
        if args.write:
            harness.keep(KEPT, longer, rungs.TAGS)
    updates = c.steps * c.optim.minibatches
    return [compared(short, [*longer.values()], updates, args.seeds, args.draws)]
