"""k samples of each problem of a set, graded: for the command and for a training's evaluations."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax import build
from dapo_jax.config import schema
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data.problems import Encoded
from dapo_jax.evaluation import scores as scores_lib
from dapo_jax.evaluation.scores import Scores
from dapo_jax.reward import grading
from dapo_jax.rollout.draw import Draw


class Evaluator(NamedTuple):
    """What draws k samples of each problem from a policy, and grades them."""

    machine: build.Machine
    decode_params: Any  # the policy, in the layout of `machine.engine`
    text: build.Text  # its tokenizer and judge are used
    k: int


def evaluate(evaluator: Evaluator, asked: Sequence[tuple[Encoded, Draw]]) -> list[Scores]:
    """The scores of every set, each with its own draw; the draws may differ only in top_p. One
    call of the engine for all sets, so that it waits only once for the longest responses."""
    machine, decode_params, text, k = evaluator
    # The counter of the draw has 31 bits, so the id is cut.
    prompts = [
        (int(p.id[:8], 16) & 0x7FFFFFFF, ids)
        for data, _ in asked
        for p, ids in zip(data.problems, data.ids, strict=True)
    ]
    top_ps = [draw.top_p for data, draw in asked for _ in data.ids]
    draw = asked[0][1]
    cut = grading.cut_at(text.tokenizer, draw.stop_strings)
    groups, _ = machine.sample_groups(decode_params, prompts, k, draw, top_ps=top_ps, cut=cut)
    rest = iter(groups)
    return [_graded(text, data, list(itertools.islice(rest, len(data.ids)))) for data, _ in asked]


def _graded(text: build.Text, data: Encoded, groups: list[Group]) -> Scores:
    groups = grading.grade_groups(text.tokenizer, text.judge, groups, data.problems)
    grades, responses = [g.grades for g in groups], [g.responses for g in groups]
    only_scores = any(g.right_G is None for g in grades)
    return Scores(
        np.stack([g.score_G if only_scores else g.right_G for g in grades]),
        answers=[g.answers for g in grades],
        golds=[p.answer for p in data.problems],
        truncated_PxK=np.array([[r.truncated for r in row] for row in responses]),
        lengths_PxK=np.array([[len(r.tokens) for r in row] for row in responses]),
        responses=responses,
    )


def evaluate_sets(config, evaluator: Evaluator) -> tuple[dict[str, float], list[dict]]:
    """The evaluation of a training run: every set at top_p=1 and, if configured, at `eval.top_p`.
    Returns (values by tag, see log/tags.md; a row per problem and setting)."""
    asked = list(itertools.product(evaluator.text.evals.items(), build.evaluation_draws(config)))
    if not asked:
        return {}, []
    results = evaluate(evaluator, [(data, draw) for (_, data), draw in asked])
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


def best_metric(config, sets: Collection[str]) -> str:
    """The metric that `checkpoint.keep_best` ranks by. ConfigError: it is of none of the `sets`."""
    tag = config.checkpoint.best_metric or f"eval/{next(iter(sets), '')}/avg@k"
    of_sets = tuple(f"eval/{name}{end}" for name in sets for end in ("/", "_top_p"))
    if config.checkpoint.keep_best and not tag.startswith(of_sets):
        known = ", ".join(sets) or "none: name one in config.eval.files"
        raise schema.ConfigError(
            f"config.checkpoint.keep_best: {tag!r} is of no evaluation set; there are {known}"
        )
    return tag


def rank(config, sets: Collection[str], evaluation: dict[str, float]) -> float | None:
    """What `checkpoint.keep_best` compares; None on a step without evaluation."""
    tag = best_metric(config, sets)
    if config.checkpoint.keep_best and evaluation and tag not in evaluation:
        known = ", ".join(t for t in evaluation if t.startswith("eval/"))
        raise schema.ConfigError(f"config.checkpoint.best_metric: no {tag!r}; there are {known}")
    return float(evaluation[tag]) if tag in evaluation else None
