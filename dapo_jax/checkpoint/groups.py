"""Groups as flat arrays: those that wait for the next step, or are in flight."""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.rollout.engine import Response

FIELDS = (
    "position", "prompt_length", "prompt", "correct", "score", "response_length", "tokens", "logps",
    "entropies", "truncated", "versions", "ended",
)  # fmt: skip


def flatten(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Ragged groups -> concatenated arrays and their lengths, by FIELDS. Orbax refuses arrays
    of size 0, so each array ends with one dummy entry."""
    responses = [r for g in groups for r in g.responses]

    def join(parts, dtype):
        return np.concatenate(
            [np.asarray(p, dtype).reshape(-1) for p in parts] + [np.zeros(1, dtype)]
        )

    flat = dict(
        position=join([g.position for g in groups], np.int64),
        prompt_length=join([len(g.prompt) for g in groups], np.int32),
        prompt=join([g.prompt for g in groups], np.int32),
        # -1: the judge knows no right and wrong; -2: not judged yet
        correct=join([_right_or(g, -1) for g in groups], np.int32),
        score=join([_scores(g) for g in groups], np.float64),
        response_length=join([len(r.tokens) for r in responses], np.int32),
        tokens=join([r.tokens for r in responses], np.int32),
        logps=join([r.logps for r in responses], np.float32),
        entropies=join([r.entropies for r in responses], np.float32),
        truncated=join([r.truncated for r in responses], np.int32),
    )
    if any(r.versions is not None for r in responses):  # then all have them
        flat["versions"] = join([r.versions for r in responses], np.int32)
        flat["ended"] = join([r.ended for r in responses], np.int32)
    return flat


def _right_or(group: Group, missing: int) -> np.ndarray:
    if group.grades is None:
        return np.full(len(group.responses), -2)
    right_G = group.grades.right_G
    return np.full(len(group.responses), missing) if right_G is None else right_G


def _scores(group: Group) -> np.ndarray:
    return group.grades.score_G if group.grades else np.zeros(len(group.responses))


def unflatten(flat: Mapping[str, np.ndarray]) -> list[Group]:
    """The groups that `flatten` took apart; other entries of `flat` are passed over."""
    flat = {k: np.asarray(v)[:-1] for k, v in flat.items() if k in FIELDS}
    n = len(flat["position"])
    if not n:
        return []
    split = lambda name, lengths: np.split(flat[name], np.cumsum(flat[lengths])[:-1])
    tokens, logps, entropies = (
        split(k, "response_length") for k in ("tokens", "logps", "entropies")
    )
    responses = [
        Response(t, lp, e, bool(c))
        for t, lp, e, c in zip(tokens, logps, entropies, flat["truncated"], strict=True)
    ]
    if "versions" in flat:
        parts = zip(responses, split("versions", "response_length"), flat["ended"], strict=True)
        responses = [r._replace(versions=v, ended=bool(ended)) for r, v, ended in parts]
    G = len(responses) // n
    correct_NxG = flat["correct"].reshape(n, G)
    score_NxG = flat["score"].reshape(n, G)
    grades = [
        None
        if (correct_G == -2).any()
        else Grades(score_G, None if (correct_G < 0).any() else correct_G.astype(bool))
        for score_G, correct_G in zip(score_NxG, correct_NxG, strict=True)
    ]
    prompts = split("prompt", "prompt_length")
    return [
        Group(int(flat["position"][i]), prompts[i].tolist(), responses[i * G : (i + 1) * G], x)
        for i, x in enumerate(grades)
    ]
