"""avg@k, maj@k and pass@k of a policy on problem files, from k samples of our own drawing.

Samples are grouped by problem. A sample's random numbers are named by the problem's id and its index,
under a seed of evaluation's own, so scores do not depend on batch, order or mesh.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax import parts
from dapo_jax.data.problems import Encoded

SEED_OFFSET = 1 << 20  # evaluation never shares uniforms with training


class Scores(NamedTuple):
    """What k samples a problem say. Arrays are in the order of the problems."""

    correct_PxK: np.ndarray  # bool
    answers: list[list[str | None]]  # [P][K] extracted, None = no answer line
    golds: list[str]
    truncated_PxK: np.ndarray  # bool
    lengths_PxK: np.ndarray  # response tokens
    responses: list[list]  # [P][K] engine Responses

    @property
    def avg_at_k(self) -> float:
        """Mean accuracy: pass@1 with less variance (the paper's avg@32)."""
        return float(self.correct_PxK.mean())

    @property
    def maj_at_k(self) -> float:
        """Share of problems whose most frequent answer is right; ties count by their share."""
        return float(np.mean([majority(c, a) for c, a in zip(self.correct_PxK, self.answers, strict=True)]))

    def pass_at(self, k: int) -> float:
        n = self.correct_PxK.shape[1]
        return float(np.mean([pass_at_k(n, int(c), k) for c in self.correct_PxK.sum(1)]))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate from n samples, `correct` of them right: 1 - C(n-c, k) / C(n, k), as a
    product so that nothing overflows (Chen et al. 2021, arXiv 2107.03374, Eq. 1)."""
    if n - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def majority(correct_K: Sequence[bool], answers_K: Sequence[str | None]) -> float:
    """1 if the most frequent extracted answer is right; a tie counts by its right share. Samples
    without an answer do not vote."""
    votes = collections.Counter(a for a in answers_K if a is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    right = {a for a, ok in zip(answers_K, correct_K, strict=True) if ok}
    winners = [a for a, n in votes.items() if n == top]
    return sum(a in right for a in winners) / len(winners)


def evaluate(
    machine: parts.Machine,
    decode_params,
    data: Encoded,
    tokenizer,
    *,
    k: int,
    seed: int,
    temperature: float,
    top_p: float,
    mode: str,
    max_response_tokens: int = 0,
    progress=lambda finished: None,
) -> Scores:
    """Draw k samples of every problem and verify them."""
    # The 63-bit id is cut to the 31 bits of the draw's counter.
    names = [int(p.id[:8], 16) & 0x7FFFFFFF for p in data.problems]
    groups, _ = parts.sample_groups(
        machine,
        decode_params,
        list(zip(names, data.ids, strict=True)),
        k,
        seed=seed + SEED_OFFSET,
        temperature=temperature,
        top_p=top_p,
        max_response_tokens=max_response_tokens,
        progress=progress,
    )
    graded = [
        parts.grade(tokenizer, g.responses, p.answer, mode)
        for g, p in zip(groups, data.problems, strict=True)
    ]
    responses = [g.responses for g in groups]
    return Scores(
        np.stack([g.correct for g in graded]),
        [g.answers for g in graded],
        [p.answer for p in data.problems],
        np.array([[r.truncated for r in row] for row in responses]),
        np.array([[len(r.tokens) for r in row] for row in responses]),
        responses,
    )


def evaluate_sets(c, machine, decode_params, text: parts.Text) -> dict[str, float]:
    """The evaluation of a training run: every set at top_p=1 and, where set, at `eval.top_p`.
    Tags as in the README's metrics table."""
    out = {}
    for name, data in text.evals.items():
        for top_p in sorted({1.0, c.eval.top_p}, reverse=True):
            scores = evaluate(
                machine,
                decode_params,
                data,
                text.tokenizer,
                k=c.eval.k,
                seed=c.seed,
                temperature=c.eval.temperature,
                top_p=top_p,
                mode=c.reward.mode,
                max_response_tokens=c.eval.max_response_tokens or c.rollout.max_response_tokens,
            )
            tag = f"eval/{name}" + ("" if top_p == 1.0 else f"_top_p{top_p:g}")
            out[f"{tag}/avg@k"] = scores.avg_at_k
            out[f"{tag}/maj@k"] = scores.maj_at_k
            out[f"{tag}/pass@k"] = scores.pass_at(c.eval.k)
            if top_p == 1.0:
                out[f"{tag}/length_mean"] = float(scores.lengths_PxK.mean())
                out[f"{tag}/truncated_frac"] = float(scores.truncated_PxK.mean())
    return out
