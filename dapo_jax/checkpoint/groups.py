"""Groups as flat arrays: those that wait for the next step, or are in flight."""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.rollout.engine import Response

FIELDS = (
    "position", "prompt_length", "prompt", "correct", "score", "response_length", "tokens", "logps",
    "entropies", "truncated", "versions", "ended", "note_length", "note",
)  # fmt: skip


def flatten(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Ragged groups -> concatenated arrays and their lengths, by FIELDS. Each ends with one dummy
    entry, since Orbax refuses arrays of size 0."""
    responses = [r for g in groups for r in g.responses]
    judged = [_marked(g.grades, len(g.responses)) for g in groups]

    def join(parts, dtype):
        parts = [np.asarray(part, dtype).reshape(-1) for part in parts]
        return np.concatenate([*parts, np.zeros(1, dtype)])

    flat = dict(
        position=join([g.position for g in groups], np.int64),
        prompt_length=join([len(g.prompt) for g in groups], np.int32),
        prompt=join([g.prompt for g in groups], np.int32),
        correct=join([grades.right_G for grades in judged], np.int32),
        score=join([grades.score_G for grades in judged], np.float64),
        response_length=join([len(r.tokens) for r in responses], np.int32),
        tokens=join([r.tokens for r in responses], np.int32),
        logps=join([r.logps for r in responses], np.float32),
        entropies=join([r.entropies for r in responses], np.float32),
        truncated=join([r.truncated for r in responses], np.int32),
    )
    if any(r.versions is not None for r in responses):  # then all have them
        flat["versions"] = join([r.versions for r in responses], np.int32)
        flat["ended"] = join([r.ended for r in responses], np.int32)
    if any(r.note for r in responses):
        flat["note_length"] = join([len(r.note) for r in responses], np.int32)
        flat["note"] = join([np.frombuffer(r.note, np.uint8) for r in responses], np.uint8)
    return flat


def _marked(grades: Grades | None, G: int) -> Grades:
    """right_G is -2 if the group is not judged yet, -1 if the judge knows no right and wrong."""
    if grades is None:
        return Grades(np.zeros(G), np.full(G, -2))
    return grades if grades.right_G is not None else grades._replace(right_G=np.full(G, -1))


def unflatten(flat: Mapping[str, np.ndarray]) -> list[Group]:
    """The groups that `flatten` took apart; other entries of `flat` are passed over."""
    flat = {k: np.asarray(v)[:-1] for k, v in flat.items() if k in FIELDS}
    n = len(flat["position"])
    if not n:
        return []
    split = lambda name, lengths: np.split(flat[name], np.cumsum(flat[lengths])[:-1])
    arrays = (split(name, "response_length") for name in ("tokens", "logps", "entropies"))
    rows = zip(*arrays, map(bool, flat["truncated"]), strict=True)
    responses = [Response(*row) for row in rows]
    if "versions" in flat:
        parts = zip(responses, split("versions", "response_length"), flat["ended"], strict=True)
        responses = [r._replace(versions=v, ended=bool(ended)) for r, v, ended in parts]
    if "note" in flat:
        notes = split("note", "note_length")
        responses = [r._replace(note=x.tobytes()) for r, x in zip(responses, notes, strict=True)]
    G = len(responses) // n
    columns = (flat["position"], split("prompt", "prompt_length"))
    columns += (flat["correct"].reshape(n, G), flat["score"].reshape(n, G))
    groups = []
    for i, (position, prompt, right_G, score_G) in enumerate(zip(*columns, strict=True)):
        known = None if (right_G < 0).any() else right_G.astype(bool)
        grades = None if (right_G == -2).any() else Grades(score_G, known)
        groups.append(Group(int(position), prompt.tolist(), responses[i * G : (i + 1) * G], grades))
    return groups
