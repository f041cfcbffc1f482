"""One controlled experiment a technique: each changes one switch of a run, and nothing else.

    python -m dapo_jax.experiments.mechanisms --seeds=6 --out=runs/mechanisms

Two base models a habit, from warm-ups with seeds of their own (bases.py); RL seed s starts from
base s mod 2, so an interval over seeds has the differences between bases in it. Arms share seeds,
bases and problems and are compared seed by seed. DIR receives mechanisms.md (tables, verdicts),
mechanisms.json (every number a seed) and a figure an effect. The same command goes on where it was
cut off. Two cores: about 20 minutes.

Fixed before the runs: an effect counts as shown if the paired 95% t-interval over seeds of each of
its deciding contrasts excludes zero on the side that the claim names. These decide:

    token_mean        sample mean against token mean, base `rambling`: higher peak response length
                      (largest mean of 5 consecutive steps), higher truncated share in steps 6-10
    overlong_filter   base `careful`, whose working does not fit at k=4,5; accuracy there with room
                      to write: lower after training with -1 for truncation than before; higher with
                      truncated responses out of loss and group statistics than with -1
    soft_punishment   with that filter, base `rambling`, the ramp against no ramp: lower response
                      length and truncated share, means of the last 5 steps
    dynamic_sampling  base `hasty`, problems of k=5..8, on against off: higher held-out accuracy
                      (mean of the evaluations of steps 50-60); higher signal-to-noise of the
                      gradient of an update, mean over the weights of the off-arm after steps 0, 20
                      and 60 (snr.py)
    clip_higher       bandit.py, 2 seeds for each of `--seeds`: fewer rollouts to p = .5 at
                      eps_high .28 than .20, at .40 than .28, and without a bound than at .40

Everything else in the tables is reported as found, with no correction for the number of contrasts.
"""

import argparse
import pathlib
import sys
import time

from dapo_jax.experiments import arms, bandit, bases, effects, mechanism_report, pool, snr
from dapo_jax.experiments.pool import Task

BASES = 2
NEEDS = {  # effect -> arms
    "token_mean": ("mean_sample", "mean_token"),
    "overlong_filter": ("filter_off", "filter_loss", "filter_group"),
    "soft_punishment": (
        "ramble_group",
        "ramble_group_soft",
        "filter_group",
        "filter_group_soft",
    ),
    "dynamic_sampling": ("dynamic_off", "dynamic_on"),
    "clip_higher": (),
}


def base_seeds(seeds: int, first: int) -> dict[int, int]:
    """RL seed -> seed of the base it starts from."""
    return {first + i: first + i % BASES for i in range(seeds)}


def tasks(names, base_of: dict[int, int]) -> list[Task]:
    """Everything that the effects `names` need, bases first."""
    seeds = sorted(set(base_of.values()))
    wanted = dict.fromkeys(arm for name in names for arm in NEEDS[name])
    out = []
    for base in bases.lineage(arms.ARMS[arm].base for arm in wanted):
        parent = bases.HABITS[base].parent
        out += [
            Task(
                bases.folder(base, b),
                bases.make,
                (base, b),
                (bases.folder(parent, b),) if parent else (),
            )
            for b in seeds
        ]
    # The longest first, so that no core idles at the end.
    for arm in sorted(wanted, key=lambda arm: -arms.settings(arm, 0, pathlib.Path(), 0).steps):
        out += [
            Task(
                arms.folder(arm, s), arms.run, (arm, s, b), (bases.folder(arms.ARMS[arm].base, b),)
            )
            for s, b in base_of.items()
        ]
    if "dynamic_sampling" in names:
        out += [
            Task(snr.folder(s), snr.measure, (s, b), (arms.folder("dynamic_off", s),))
            for s, b in base_of.items()
        ]
    if "clip_higher" in names:
        out += [Task(bandit.base_folder(b), bandit.make, (b,)) for b in seeds]
        for b in seeds:
            mine = [s for s in base_of if base_of[s] == b]
            played = [*mine, *(s + len(base_of) for s in mine)]
            out += [
                Task(bandit.folder(e, b), bandit.play, (b, e, played), (bandit.base_folder(b),))
                for e in bandit.CLIP_HIGH
            ]
    return out


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6, help="RL seeds an arm, 2 or more")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory; made if absent")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 = one a core")
    parser.add_argument("--only", default=",".join(NEEDS), help="effects, comma-separated")
    parser.add_argument("--first_seed", type=int, default=0, help="of RL and of the bases")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in NEEDS]:
        parser.error(f"--only: no effect {unknown[0]!r}; there are {', '.join(NEEDS)}")
    if args.seeds < 2:
        parser.error("--seeds: intervals need at least 2")
    started = time.perf_counter()
    base_of = base_seeds(args.seeds, args.first_seed)
    bases.write_problems(args.out / "data")
    results = pool.run_all(tasks(names, base_of), args.out, args.jobs, "mechanisms")
    runs = effects.Runs(results, base_of)
    found = {name: effects.EFFECTS[name](runs) for name in names}
    print(mechanism_report.write(args.out, found, runs, time.perf_counter() - started))


if __name__ == "__main__":
    sys.exit(main())
