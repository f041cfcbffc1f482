"""Scores of a policy from k samples per problem, reports, and the files that keep the samples."""

import collections
import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.dapo.reward import reads_answers
from dapo_jax.data import files
from dapo_jax.data.problems import Encoded

RESAMPLES = 10_000  # of the bootstrap: two runs' interval ends then differ by about 1% of its width


class Scores(NamedTuple):
    """The graded samples of a set. Arrays are in the order of the problems."""

    value_PxK: np.ndarray  # bool, right or wrong; float64 scores if the reward says no such thing
    answers: list[list[str | None]]  # [P][K] extracted, None = no answer line
    golds: list[str]
    truncated_PxK: np.ndarray  # bool
    lengths_PxK: np.ndarray  # response tokens
    responses: list[list]  # [P][K] engine Responses, or texts if read from files

    @property
    def judged(self) -> bool:
        """Whether there is right and wrong."""
        return self.value_PxK.dtype == bool

    @property
    def voted(self) -> bool:
        """Whether answers can be counted."""
        answers = itertools.chain.from_iterable(self.answers)
        return self.judged and reads_answers(answers, self.value_PxK.flat)

    def headline(self) -> dict[str, float]:
        """avg@k: mean accuracy, which is pass@1 with less variance, or mean score; if `voted` also
        maj@k, the share of problems whose most frequent answer is right; if `judged` pass@k."""
        found = {"avg@k": float(self.value_PxK.mean())}
        if self.voted:
            found["maj@k"] = float(np.mean(self.majority_P()))
        if self.judged:
            found["pass@k"] = float(np.mean(self.pass_P(self.value_PxK.shape[1])))
        return found

    def majority_P(self) -> list[float]:
        return [majority(c, a) for c, a in zip(self.value_PxK, self.answers, strict=True)]

    def pass_P(self, k: int) -> list[float]:
        return [pass_at_k(self.value_PxK.shape[1], int(c), k) for c in self.value_PxK.sum(1)]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate from n samples, `correct` of them right: 1 - C(n-c, k) / C(n, k) (Chen et
    al. 2021, arXiv 2107.03374, Eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(correct_K: Sequence[bool], answers_K: Sequence[str | None]) -> float:
    """1 if the most frequent answer is right; a tie counts by its right share. None is no vote."""
    winners = most_frequent(answers_K)
    right = {a for a, ok in zip(answers_K, correct_K, strict=True) if ok}
    return sum(a in right for a in winners) / len(winners) if winners else 0.0


def most_frequent(answers_K: Sequence[str | None]) -> list[str]:
    """The extracted answers with the most votes, several in a tie; [] if none was extracted."""
    votes = collections.Counter(a for a in answers_K if a is not None)
    return [a for a, n in votes.items() if n == max(votes.values())]


def interval(values_P: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% interval of the mean over problems, by a bootstrap that draws whole problems, since
    samples of one problem are not independent. The same seed draws the same problems, so the
    intervals of several scores of one set compare."""
    values, rng = np.asarray(values_P, float), np.random.default_rng(seed)
    n = len(values)
    means = [values[rng.integers(n, size=n)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summary(s: Scores, ids: Sequence[str], seed: int = 0) -> dict:
    """Everything about one set as plain JSON values; `pass@` has an entry for each of 1..k. Without
    right and wrong, pass@k is left out, and maj@k if not `voted`."""
    P, K = s.value_PxK.shape
    head = s.headline()
    out = {"problems": P, "k": K, "avg@k": head["avg@k"]}
    out |= {"avg@k_interval95": interval(s.value_PxK.mean(1), seed)}
    if s.voted:
        out |= {"maj@k": head["maj@k"], "maj@k_interval95": interval(s.majority_P(), seed)}
    if s.judged:
        out |= {
            "pass@": {str(k): float(np.mean(s.pass_P(k))) for k in range(1, K + 1)},
            "pass@k_interval95": interval(s.pass_P(K), seed),
        }
    problems = zip(ids, s.value_PxK, s.answers, s.golds, s.lengths_PxK, strict=True)
    return out | {
        "truncated_frac": float(s.truncated_PxK.mean()),
        "unparsed_frac": float(np.mean([[a is None for a in row] for row in s.answers])),
        "length_mean": float(s.lengths_PxK.mean()),
        "per_problem": [
            {
                "id": name,
                **({"correct": int(value.sum())} if s.judged else {"score": float(value.mean())}),
                "majority": most_frequent(answers),
                "gold": gold,
                "length_mean": float(lengths.mean()),
            }
            for name, value, answers, gold, lengths in problems
        ],
    }


def lines(name: str, r: dict, rows: bool = False) -> Iterator[str]:
    """What a `summary` has beside its row of the `table`, and with `rows` a line per problem."""
    k = r["k"]
    unread = f"no answer found in {r['unparsed_frac']:.1%}"
    yield f"{name}: {r['problems']} problems x {k} samples, {unread}; samples: {r['samples']}"
    if "pass@" in r:
        shown = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= k]
        yield "  pass@n  " + "  ".join(f"{n}: {r['pass@'][str(n)]:.4f}" for n in shown)
    if not rows:
        return
    right = "correct" if "pass@" in r else "score"
    yield f"  {'problem':16s} {right:>8s} {'majority':>12s} {'gold':>12s} {'mean length':>12s}"
    for row in r["per_problem"]:
        value = f"{row['correct']:>4d}/{k:<3d}" if "correct" in row else f"{row['score']:>8.3f}"
        answer, gold = _short(" or ".join(row["majority"]) or "-"), _short(row["gold"])
        yield f"  {row['id']:16s} {value} {answer:>12s} {gold:>12s} {row['length_mean']:>12.1f}"


def table(sets: Mapping[str, dict]) -> Iterator[str]:
    """A table, a row per set. sets: name -> `summary` with `settings`. Lengths in TOKENS."""
    wide = max(map(len, ("set", *sets)))
    yield (
        f"{'set':{wide}s} {'problems':>8s} {'k':>4s} {'T':>4s} {'top-p':>5s} {'avg@k':>6s}"
        f"  {'95% interval':16s} {'maj@k':>6s} {'pass@k':>6s} {'length':>8s} {'limit':>6s}"
        f" {'truncated':>9s}"
    )
    for name, r in sets.items():
        how, (low, high) = r["settings"], r["avg@k_interval95"]
        voted = f"{r['maj@k']:.4f}" if "maj@k" in r else "-"
        solved = f"{r['pass@'][str(r['k'])]:.4f}" if "pass@" in r else "-"
        yield (
            f"{name:{wide}s} {r['problems']:8d} {r['k']:4d} {how['temperature']:4g}"
            f" {how['top_p']:5g} {r['avg@k']:6.4f}  {f'{low:.4f} to {high:.4f}':16s}"
            f" {voted:>6s} {solved:>6s} {r['length_mean']:8.1f}"
            f" {how['max_response_tokens']:6d} {r['truncated_frac']:9.1%}"
        )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 12 else text[:11] + "…"


def _verdict(scores: Scores, *index) -> dict:
    """{'correct': ...}, or {'score': ...} if there is no right and wrong."""
    return {"correct" if scores.judged else "score": scores.value_PxK[index].tolist()}


def rows(data: Encoded, scores: Scores, tokenizer) -> Iterator[dict]:
    for p, problem in enumerate(data.problems):
        for g, response in enumerate(scores.responses[p]):
            yield {
                "problem": problem.id,
                "sample": g,
                **_verdict(scores, p, g),
                "extracted": scores.answers[p][g],
                "gold": problem.answer,
                "tokens": len(response.tokens),
                "truncated": bool(response.truncated),
                "response": tokenizer.decode(response.tokens.tolist()),
            }


def verdicts(data: Encoded, scores: Scores) -> Iterator[dict]:
    """A row per problem, without texts: the answers of its k samples, and which are right."""
    for p, problem in enumerate(data.problems):
        yield {
            "problem": problem.id,
            "gold": problem.answer,
            "extracted": scores.answers[p],
            **_verdict(scores, p, slice(None)),
            "tokens": scores.lengths_PxK[p].tolist(),
            "truncated": scores.truncated_PxK[p].tolist(),
        }


def from_rows(rows_PxK: list[list[dict]]) -> Scores:
    """The Scores that `rows` were written from, with texts for responses."""
    table = lambda field: [[row[field] for row in rows_K] for rows_K in rows_PxK]
    judged = "correct" in rows_PxK[0][0]
    return Scores(
        np.array(table("correct"), bool) if judged else np.array(table("score"), np.float64),
        table("extracted"),
        [rows_K[0]["gold"] for rows_K in rows_PxK],
        np.array(table("truncated"), bool),
        np.array(table("tokens")),
        table("response"),
    )


def finished(folder: pathlib.Path, k: int) -> dict[str, list[dict]]:
    """Problem id -> its k rows in sample order, from all batches. ValueError: one is not whole."""
    found = {}
    for path in sorted(folder.glob("batch_*.jsonl")):
        by_problem = collections.defaultdict(list)
        remedy = "remove the file: the same command then samples its problems again"
        for number, row in files.json_lines(path):
            if row is None or "problem" not in row:
                raise ValueError(f"{path}: line {number} is damaged; {remedy}")
            by_problem[row["problem"]].append(row)
        if any(len(rows_K) != k for rows_K in by_problem.values()):
            raise ValueError(f"{path}: does not hold {k} samples of each problem; {remedy}")
        found |= by_problem
    return found
