"""Arms that share their seeds: the runs of each, and how far one is from another, seed by seed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.lab.experiments import stats

Run = Sequence[dict]  # records of metrics.jsonl


def folder(arm: str, seed: int) -> str:
    return f"{arm.replace(' ', '_')}/seed_{seed}"


def by_arm(found: Mapping[str, Run], arms: Iterable[str]) -> dict[str, list[Run]]:
    """Arm -> its runs, in the order of `arms`, those that have any. found: the records of each run,
    by a path that ends as `folder` says."""
    runs = {arm: [] for arm in arms}
    written = {arm.replace(" ", "_"): arm for arm in runs}
    for path, run in found.items():
        if (name := path.split("/")[-2]) in written:
            runs[written[name]].append(run)
    return {arm: of for arm, of in runs.items() if of}


class Change(NamedTuple):
    """A mean difference and its 95% t-interval; "ahead", "behind" or "not told apart"."""

    by: stats.Interval
    word: str

    def cells(self, better: int = 1) -> list[str]:
        """better: -1 where a smaller score is ahead."""
        other = {"ahead": "behind", "behind": "ahead"} if better < 0 else {}
        return [f"{self.by:+.3f}", other.get(self.word, self.word)]

    def __str__(self) -> str:
        return ", ".join(self.cells())


def told(
    scores: Mapping[str, Mapping[str, Sequence[float]]], pairs: Iterable[tuple[str, str]]
) -> dict[tuple[str, str, str], Change]:
    """(what, a, b) -> how far a is from b. "Ahead" and "behind" are by paired t-tests at 5%,
    corrected by Holm for all that is told. scores: what -> arm -> a number per seed [S]."""
    keys = [(what, a, b) for what in scores for a, b in pairs]
    changes = [np.subtract(scores[what][a], scores[what][b]) for what, a, b in keys]
    means = [stats.interval(change) for change in changes]
    words = [
        ("ahead" if mean.mean > 0 else "behind") if sure else "not told apart"
        for mean, sure in zip(means, stats.differ(changes), strict=True)
    ]
    return {key: Change(*of) for key, *of in zip(keys, means, words, strict=True)}
