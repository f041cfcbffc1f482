"""verl's metric names in ours, so that a run of verl can be laid over one of this project.

`TABLE` and `EVALUATION` are all of it: which of verl's numbers make one of ours, and what they
describe where that differs. verl logs the batch that it trains on (with the DAPO recipe: after
the filter), from `verl/trainer/ppo/metric_utils.py` and `recipe/dapo/dapo_ray_trainer.py`.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Series = tuple[np.ndarray, np.ndarray]  # rollout steps int [n], values float [n]


class Rule(NamedTuple):
    """`tag` (ours) = the sum of verl's `plus`, less `minus`; a number that a step lacks
    counts as 0, except the first. `of`: what the number describes, where ours describes another."""

    tag: str
    plus: tuple[str, ...]
    minus: tuple[str, ...] = ()
    of: str = ""


# fmt: off
TABLE = (
    Rule("policy/batch_entropy", ("actor/entropy",)),  # nats per trained token
    Rule("policy/batch_entropy", ("actor/entropy_loss",)),  # its name until verl 0.4
    Rule("policy/clip_frac", ("actor/pg_clipfrac",)),  # both bounds together; ours are apart
    Rule("policy/dual_clip_frac", ("actor/pg_clipfrac_lower",)),
    Rule("policy/approx_kl", ("actor/ppo_kl",)),  # mean of old - new log-prob
    Rule("policy/loss", ("actor/pg_loss",)),
    Rule("policy/ref_kl", ("actor/kl_loss",)),
    Rule("optim/grad_norm", ("actor/grad_norm",)),  # before clipping, mean over updates; as ours
    Rule("optim/lr", ("actor/lr",)),
    Rule("response/length_mean", ("response_length/mean",), of="trained batch"),
    Rule("response/length_max", ("response_length/max",), of="trained batch"),
    # At the limit, also where the last token is a stop token.
    Rule("response/truncated_frac", ("response_length/clip_ratio",), of="trained batch"),
    Rule("sampling/rounds", ("train/num_gen_batches",)),
    Rule("time/rollout_s", ("timing_s/gen", "timing_s/reward")),  # ours verifies while it samples
    Rule("time/update_s", ("timing_s/update_actor", "timing_s/old_log_prob", "timing_s/ref")),
    Rule("time/eval_s", ("timing_s/testing",)),
    # Ours is without evaluation and saving.
    Rule("time/step_s", ("timing_s/step",), ("timing_s/testing", "timing_s/save_checkpoint")),
)
# fmt: on

# val-core/<data source>/acc/mean@32 and its kin -> eval/<data source>/avg@k. verl estimates best@k
# and maj@k by drawing k of the samples with replacement; ours use each sample once.
EVALUATION = re.compile(r"val-core/(.+)/acc/(?:(mean)@\d+|(best|maj)@\d+/mean)")
_SCORES = {"mean": "avg@k", "best": "pass@k", "maj": "maj@k"}

_SCORE = "critic/score"  # the reward with the length penalty, before any KL term


def is_verl(names) -> bool:
    known = {name for rule in TABLE for name in rule.plus}
    return any(n in known or n.startswith(f"{_SCORE}/") or EVALUATION.fullmatch(n) for n in names)


def translate(series: Mapping[str, Series]) -> tuple[dict[str, Series], dict[str, str]]:
    """(series under our tags, tag -> what it describes where ours describes all that was drawn).
    Names without a counterpart here stay as they are."""
    out, of, used = {}, {}, set()
    for rule in TABLE:
        if rule.tag in out or rule.plus[0] not in series:
            continue
        steps, values = series[rule.plus[0]]
        for sign, names in ((1.0, rule.plus[1:]), (-1.0, rule.minus)):
            for name in names:
                values = values + sign * _at(steps, series.get(name))
        out[rule.tag] = steps, values
        used |= {*rule.plus, *rule.minus}
        of |= {rule.tag: rule.of} if rule.of else {}
    for name in series:
        if match := EVALUATION.fullmatch(name):
            out[f"eval/{match[1]}/{_SCORES[match[2] or match[3]]}"] = series[name]
            used.add(name)
    rewards = _rewards(series)
    out |= rewards
    of |= dict.fromkeys(rewards.keys() & {"reward/mean"}, "trained batch")
    used |= {f"{_SCORE}/mean"} if rewards else set()
    return {n: s for n, s in series.items() if n not in used} | out, of


def _rewards(series: Mapping[str, Series]) -> dict[str, Series]:
    """`critic/score/mean` in our unit (+1 right, -1 wrong). verl's verifiers give {0, 1} or
    {-1, 1}; the extremes of the steps tell which. Scores that are neither have a length penalty in
    them, so that no accuracy follows; the DAPO recipe's are in our unit then."""
    if f"{_SCORE}/mean" not in series:
        return {}
    steps, mean = series[f"{_SCORE}/mean"]
    ends = [series[f"{_SCORE}/{end}"][1] for end in ("min", "max") if f"{_SCORE}/{end}" in series]
    seen = {float(x) for values in ends for x in values if np.isfinite(x)}
    if seen and seen <= {0.0, 1.0}:
        return {"reward/mean": (steps, 2 * mean - 1), "reward/batch_accuracy": (steps, mean)}
    if seen and seen <= {-1.0, 1.0}:
        return {"reward/mean": (steps, mean), "reward/batch_accuracy": (steps, (mean + 1) / 2)}
    return {"reward/mean": (steps, mean)} if seen and min(seen) < 0 else {}


def _at(steps: np.ndarray, other: Series | None) -> np.ndarray:
    """The other series at these steps, 0 where it has none."""
    if other is None:
        return np.zeros(len(steps))
    there = dict(zip(other[0].tolist(), other[1].tolist(), strict=True))
    return np.array([there.get(s, 0.0) for s in steps.tolist()])


def table() -> str:
    """Which of verl's names become which of ours, as text."""
    rows = []
    for r in TABLE:
        made = " + ".join(r.plus) + "".join(f" - {name}" for name in r.minus)
        rows.append((r.tag, made + (f"  ({r.of})" if r.of else "")))
    rows.append(("reward/mean, reward/batch_accuracy", f"{_SCORE}/mean, by its min and max"))
    rows += [
        (f"eval/<source>/{ours}", f"val-core/<source>/acc/{verls}")
        for ours, verls in (("avg@k", "mean@k"), ("pass@k", "best@k/mean"), ("maj@k", "maj@k/mean"))
    ]
    width = max(len(tag) for tag, _ in rows)
    return "\n".join(f"{tag:{width}s}  {made}" for tag, made in rows)
