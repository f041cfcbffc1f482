"""k samples of each problem of a set, graded: for the command and for a training's evaluations."""

import itertools
from collections.abc import Sequence

import numpy as np

from dapo_jax import build
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data.problems import Encoded
from dapo_jax.evaluation import scores as scores_lib
from dapo_jax.evaluation.scores import Scores
from dapo_jax.reward import grading
from dapo_jax.rollout.draw import Draw


def evaluate(
    machine: build.Machine,
    decode_params,
    text: build.Text,
    data: Encoded,
    k: int,
    draw: Draw,
) -> Scores:
    """Draw k samples for every problem of `data` and grade them by the judge of `text`."""
    (scores,) = evaluate_together(machine, decode_params, text, [data], k, [draw])
    return scores


def evaluate_together(
    machine: build.Machine,
    decode_params,
    text: build.Text,
    sets: Sequence[Encoded],
    k: int,
    draws: Sequence[Draw],
) -> list[Scores]:
    """`evaluate` for every set, each with its own draw; the draws may differ only in top_p. One
    call of the sampler for all sets, so that it waits only once for the longest responses."""
    # The counter of the draw has 31 bits, so the id is cut.
    prompts = [
        (int(p.id[:8], 16) & 0x7FFFFFFF, ids)
        for data in sets
        for p, ids in zip(data.problems, data.ids, strict=True)
    ]
    top_ps = [draw.top_p for data, draw in zip(sets, draws, strict=True) for _ in data.ids]
    cut = grading.cut_at(text.tokenizer, draws[0].stop_strings)
    groups, _ = machine.sample_groups(decode_params, prompts, k, draws[0], top_ps=top_ps, cut=cut)
    rest = iter(groups)
    return [_graded(text, data, list(itertools.islice(rest, len(data.ids)))) for data in sets]


def _graded(text: build.Text, data: Encoded, groups: list[Group]) -> Scores:
    groups = grading.grade_groups(text.tokenizer, text.judge, groups, data.problems)
    grades, responses = [g.grades for g in groups], [g.responses for g in groups]
    only_scores = any(g.right_G is None for g in grades)
    return Scores(
        correct_PxK=None if only_scores else np.stack([g.right_G for g in grades]),
        answers=[g.answers for g in grades],
        golds=[p.answer for p in data.problems],
        truncated_PxK=np.array([[r.truncated for r in row] for row in responses]),
        lengths_PxK=np.array([[len(r.tokens) for r in row] for row in responses]),
        responses=responses,
        score_PxK=np.stack([g.score_G for g in grades]) if only_scores else None,
    )


def evaluate_sets(
    config, machine, decode_params, text: build.Text
) -> tuple[dict[str, float], list[dict]]:
    """The evaluation of a training run: every set at top_p=1 and, if configured, at `eval.top_p`.
    Returns (values by tag, see log/tags.py; a row per problem and setting)."""
    asked = list(itertools.product(text.evals.items(), build.evaluation_draws(config)))
    if not asked:
        return {}, []
    sets, draws = zip(*((data, draw) for (_, data), draw in asked), strict=True)
    results = evaluate_together(machine, decode_params, text, sets, config.eval.k, draws)
    out, rows = {}, []
    for ((name, data), draw), scores in zip(asked, results, strict=True):
        tag = f"eval/{name}" + ("" if draw.top_p == 1.0 else f"_top_p{draw.top_p:g}")
        out |= {f"{tag}/{key}": value for key, value in scores.headline().items()}
        if draw.top_p == 1.0:
            out[f"{tag}/length_mean"] = float(scores.lengths_PxK.mean())
            out[f"{tag}/truncated_frac"] = float(scores.truncated_PxK.mean())
        about = {"set": name, "top_p": draw.top_p}
        rows += (about | row for row in scores_lib.verdicts(data, scores))
    return out, rows
