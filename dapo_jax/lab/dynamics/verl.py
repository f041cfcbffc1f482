"""verl's metric names in ours, so that a run of verl can be laid over one of this project.

`NAMES` and `EVALUATION` are all of it: which of verl's numbers make one of ours. verl logs the
batch that it trains on (with the DAPO recipe: after the filter), from
`verl/trainer/ppo/metric_utils.py` and `recipe/dapo/dapo_ray_trainer.py`.
"""

import re
from collections.abc import Mapping

import numpy as np

Series = tuple[np.ndarray, np.ndarray]  # rollout steps int [n], values float [n]

# Ours -> verl's names: the sum of them, less those with a minus. A name that a step lacks counts as
# 0, but for the first.
NAMES = {
    "policy/batch_entropy": ("actor/entropy",),  # nats per trained token
    "policy/clip_frac": ("actor/pg_clipfrac",),  # both bounds together; ours are apart
    "policy/dual_clip_frac": ("actor/pg_clipfrac_lower",),
    "policy/approx_kl": ("actor/ppo_kl",),  # mean of old - new log-prob
    "policy/loss": ("actor/pg_loss",),
    "policy/ref_kl": ("actor/kl_loss",),
    "optim/grad_norm": ("actor/grad_norm",),  # before clipping, mean over updates; as ours
    "optim/lr": ("actor/lr",),
    "response/length_mean": ("response_length/mean",),
    "response/length_max": ("response_length/max",),
    # At the limit, also where the last token is a stop token.
    "response/truncated_frac": ("response_length/clip_ratio",),
    "sampling/rounds": ("train/num_gen_batches",),
    "time/rollout_s": ("timing_s/gen", "timing_s/reward"),  # ours verifies while it samples
    "time/update_s": ("timing_s/update_actor", "timing_s/old_log_prob", "timing_s/ref"),
    "time/eval_s": ("timing_s/testing",),
    # Ours is without evaluation and saving.
    "time/step_s": ("timing_s/step", "-timing_s/testing", "-timing_s/save_checkpoint"),
}
OLDER = {"actor/entropy_loss": "actor/entropy"}  # until verl 0.4
# Ours describe all that was drawn.
TRAINED = {f"response/{name}": "trained batch" for name in ("length_mean", "length_max")}
TRAINED |= {"response/truncated_frac": "trained batch", "reward/mean": "trained batch"}

# val-core/<data source>/acc/mean@32 and its kin -> eval/<data source>/avg@k. verl estimates best@k
# and maj@k by drawing k of the samples with replacement; ours use each sample once.
EVALUATION = re.compile(r"val-core/(.+)/acc/(mean|best|maj)@\d+(?:/mean)?")
SCORES = {"mean": "avg@k", "best": "pass@k", "maj": "maj@k"}

SCORE = "critic/score/"  # mean, min, max of the reward with the length penalty, before any KL term


def is_verl(names) -> bool:
    known = {name for of in NAMES.values() for name in of} | OLDER.keys()
    return any(n in known or n.startswith(SCORE) or EVALUATION.fullmatch(n) for n in names)


def translate(series: Mapping[str, Series]) -> tuple[dict[str, Series], dict[str, str]]:
    """(series under our tags, tag -> what it describes where ours describes all that was drawn).
    Names without a counterpart here stay as they are."""
    left = {OLDER.get(name, name): points for name, points in series.items()}
    out = _rewards(left)
    for tag, (first, *others) in NAMES.items():
        if first in left:
            steps, values = left[first]
            for name in others:
                sign = -1.0 if name.startswith("-") else 1.0
                values = values + sign * _at(steps, left.get(name.removeprefix("-")))
            out[tag] = steps, values
    for name, points in left.items():
        if match := EVALUATION.fullmatch(name):
            out[f"eval/{match[1]}/{SCORES[match[2]]}"] = points
    used = {name.removeprefix("-") for tag in out for name in NAMES.get(tag, ())}
    used |= {f"{SCORE}mean"} if "reward/mean" in out else set()
    kept = {n: s for n, s in left.items() if n not in used and not EVALUATION.fullmatch(n)}
    return kept | out, {tag: of for tag, of in TRAINED.items() if tag in out}


def _rewards(series: Mapping[str, Series]) -> dict[str, Series]:
    """The mean score in our unit (+1 right, -1 wrong). verl's verifiers give {0, 1} or {-1, 1}; the
    extremes of the steps tell which. Scores that are neither have a length penalty in them, so that
    no accuracy follows; the DAPO recipe's are in our unit then."""
    if f"{SCORE}mean" not in series:
        return {}
    steps, mean = series[f"{SCORE}mean"]
    ends = [series[SCORE + end][1] for end in ("min", "max") if SCORE + end in series]
    seen = {float(x) for values in ends for x in values if np.isfinite(x)}
    if seen and seen <= {0.0, 1.0}:
        return {"reward/mean": (steps, 2 * mean - 1), "reward/batch_accuracy": (steps, mean)}
    if seen and seen <= {-1.0, 1.0}:
        return {"reward/mean": (steps, mean), "reward/batch_accuracy": (steps, (mean + 1) / 2)}
    return {"reward/mean": (steps, mean)} if seen and min(seen) < 0 else {}


def _at(steps: np.ndarray, other: Series | None) -> np.ndarray:
    """The other series at these steps, 0 where it has none."""
    there = dict(zip(*(x.tolist() for x in other), strict=True)) if other else {}
    return np.array([there.get(s, 0.0) for s in steps.tolist()])


def table() -> str:
    """Which of verl's names become which of ours, as text."""
    rows = {tag: " + ".join(of).replace("+ -", "- ") for tag, of in NAMES.items()}
    rows |= {tag: f"{made}  ({TRAINED[tag]})" for tag, made in rows.items() if tag in TRAINED}
    rows["reward/mean, reward/batch_accuracy"] = f"{SCORE}mean, by its min and max"
    for theirs, ours in SCORES.items():
        rows[f"eval/<source>/{ours}"] = f"val-core/<source>/acc/{theirs}@k"
    return "\n".join(f"{tag:{max(map(len, rows))}s}  {made}" for tag, made in rows.items())
