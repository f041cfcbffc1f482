"""Alarms for numbers out of bounds or drifting, and the reasons to stop a run."""

import functools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from dapo_jax import parallel
from dapo_jax.dapo.state import Counters, State
from dapo_jax.variants import choose

_WATCHED = ("reward/accuracy", "policy/entropy", "response/length_mean")
_FIRST, _WINDOW = 5, 10  # steps: the start of a run; the window of a recent mean
_RISE = 0.02  # accuracy: a window that gains less shows no learning
_SCORE = re.compile(r"eval/((?!_top_p).)+/avg@k")  # a set at top_p=1
_NUMBER = re.compile(r"(?<![\w/])-?\d[\d.e+-]*")  # in an alarm, but for those in a set's name
_FEW, _NEARLY_ALL = 0.03, 0.95  # share of responses that the reward failed on
_LEARNED = 0.9  # accuracy above which low entropy is healthy
_OF_WHOLE = " among responses that are not truncated"  # by loss.overlong_filter='group'

# "paper": arXiv 2503.14476.
_TRY = {
    "entropy low": "raise loss.clip_high (Clip-Higher, paper section 3.1), lower optim.lr, or set"
    " loss.entropy_coef with loss.entropy_enough",
    "entropy high": "lower loss.clip_high or optim.lr, or hold on to the start with loss.kl_coef;"
    " entropy that grows without accuracy ends in noise (huggingface/trl#6407)",
    "length low": "check that short responses are not rewarded: reward.overlong_penalty and its"
    " buffer must leave room for a whole solution (paper Eq. 13)",
    "length high": "loss.normalizer='batch_tokens' (paper section 3.3) and reward.overlong_penalty"
    " with a buffer (Eq. 13) restrain length; read the longest samples in rollouts/",
    "truncated": "raise rollout.max_response_tokens, or leave truncated responses out by"
    " loss.overlong_filter='group' and punish length softly (paper section 3.4, Eq. 13)",
    "all wrong": "give easier problems or more responses per problem (rollout.group_size), and read"
    " rollouts/: answers may not be parsed (sampling/parse_fail_frac)",
    "all right": "give harder problems; these are learned (paper section 3.2)",
    "all alike": "let the score differ where responses differ in worth, or draw more responses per"
    " problem (rollout.group_size); read rollouts/",
    "parted": "go back to the best checkpoint (checkpoint.keep_best), give more problems (data/epochs:"
    " how often each was drawn), or hold on to the start with loss.kl_coef",
    "gap": "set model.dtype='float32' to see whether it is rounding; loss.importance_cap=2 weighs"
    " it out; a leap is a bug worth reporting",
}


class History(NamedTuple):
    """The past numbers of a run that alarms compare with, one dict per step. evaluated: for each
    evaluation, avg@k of the sets and the training accuracy of the last `_WINDOW` steps. standing:
    alarm without its numbers -> for how many steps in a row."""

    first: list[dict[str, float]]
    last: list[dict[str, float]]
    evaluated: Sequence[dict[str, float]] = ()
    standing: Mapping[str, int] = {}


def remember(history: History, log: dict) -> History:
    """The history after one more step. NaN and infinity are left out, as in metrics.jsonl."""
    seen = {t: float(log[t]) for t in _WATCHED if log.get(t) is not None}
    seen = {t: v for t, v in seen.items() if math.isfinite(v)}
    first, last, evaluated, standing = history
    last = [*last, seen][-2 * _WINDOW :]
    if scores := {t: log[t] for t in log if _SCORE.fullmatch(t) and log[t] is not None}:
        scores["reward/accuracy"] = _mean(last[-_WINDOW:], "reward/accuracy")
        evaluated = [*evaluated, scores]
    return History([*first, seen][:_FIRST], last, evaluated, standing)


def stand(history: History, broken: Iterable[str]) -> History:
    """The history with the alarms of its last step."""
    kinds = {_NUMBER.sub("", alarm) for alarm in broken}
    return history._replace(standing={k: history.standing.get(k, 0) + 1 for k in kinds})


def recall(records: Iterable[dict]) -> History:
    """The history of the records of metrics.jsonl, for a resumed run. A collective: all processes
    take that of process 0, which may be the only one with the file."""
    steps = (r for r in records if r["step"] > 0)  # 0: the evaluation before the first
    listed = lambda r: r["alarms"] if isinstance(r.get("alarms"), list) else []
    both = lambda history, r: stand(remember(history, r), map(str, listed(r)))
    return History(*parallel.gather_json(functools.reduce(both, steps, History([], [])))[0])


class Bound(NamedTuple):
    """The range of a logged number."""

    tag: str
    name: str  # in the alarm
    low: float  # 0 = no bound
    high: float  # 0 = no bound
    below: str  # advice, or its name in _TRY
    above: str = ""


def bounds(config, log: dict) -> list[Bound]:
    """The bounds for one step. Some depend on what the step was like, or on the machine."""
    right, wrong = (log.get(f"sampling/all_{x}_frac", 0.0) for x in ("correct", "wrong"))
    few = "all right" if right > wrong else "all wrong"
    few = "all alike" if "reward/score" in log else few
    # What an older policy drew has a gap that means nothing.
    gap = 0.0 if choose.older_responses(config) else _gap_max(config)
    # A single response is never right and wrong.
    mixed = config.guard.accept_min if config.rollout.group_size > 1 else 0.0
    # fmt: off
    return [
        Bound("policy/entropy", "entropy", config.guard.entropy_min, config.guard.entropy_max, "entropy low", "entropy high"),
        Bound("response/length_mean", "mean response length", config.guard.length_min, config.guard.length_max, "length low", "length high"),
        Bound("response/truncated_frac", "share of truncated responses", 0.0, config.guard.truncated_max, "", "truncated"),
        Bound("sampling/accept_frac", "share of problems with mixed groups", mixed, 0.0, few, ""),
        *(Bound(*row) for row in choose.bounds(config, log)),
        Bound("policy/sampler_trainer_logprob_gap", "gap of sampler and trainer log-probs", 0.0, gap, "", "gap"),
    ]
    # fmt: on


def alarms(config, log: dict, history: History) -> list[str]:
    """What is wrong with a step, in sentences that say what to try. history: includes this step."""
    out = []
    for b in bounds(config, log):
        if (value := log.get(b.tag)) is None:
            continue
        for out_of, side, bound, advice in (  # NaN is outside of all bounds
            (not value >= b.low, "below", b.low, b.below),
            (not value <= b.high, "above", b.high, b.above),
        ):
            if bound and out_of:
                try_this = _TRY.get(advice, advice)
                out.append(f"{b.name} {value:.3g} is {side} {bound:g}; try: {try_this}")
    return out + _drifts(config.guard, history) + _partings(config.guard, log, history)


def hint(config, log: dict) -> str:
    """What to do if another verifier accepts many responses that the run's calls wrong; else ''."""
    gain = log.get("sampling/shadow_gain") or 0.0
    if gain <= 0.05:
        return ""
    mode = config.reward.verifier
    other = "dapo" if mode == "integer" else "integer"
    wrong = f"calls {gain:.0%} of the responses wrong in which {other!r} finds the right answer"
    look = "look into rollouts/ for how the model writes it"
    ways = f"reward.verifier={other!r}, 'boxed' or 'auto', or a data.template that asks otherwise"
    return f"verifier {mode!r} {wrong}; {look}, and try {ways}"


def _gap_max(config) -> float:
    """Largest healthy gap [nats]. Sampler and trainer share one forward pass, so they differ only
    by rounding: 1e-5 in float32 on CPU and GPU. TPUs multiply float32 less exactly; with bfloat16
    or int8 keys and values the largest gap of millions of tokens is some tenths."""
    if config.guard.gap_max >= 0:
        return config.guard.gap_max
    exact = config.model.dtype == "float32" and config.rollout.cache_dtype == "model"
    return 1e-3 if exact and jax.default_backend() != "tpu" else 1.0


def _drifts(guard, history: History) -> list[str]:
    """Alarms from comparing with the run's own past, only if accuracy has stopped rising: a policy
    that learns may well lose entropy and write longer."""
    before, lately = (
        {t: _mean(steps, t) for t in _WATCHED}
        for steps in (history.last[:-_WINDOW], history.last[-_WINDOW:])
    )
    accuracy = lately["reward/accuracy"]
    if len(history.last) < 2 * _WINDOW or not accuracy < before["reward/accuracy"] + _RISE:
        return []
    out, now = [], history.last[-3:]  # one step is no trend
    start, entropy = _mean(history.first, "policy/entropy"), _mean(now, "policy/entropy")
    standing = f"accuracy stands at {accuracy:.2f}"
    if accuracy < _LEARNED and entropy < guard.entropy_fall * start:
        fell = f"entropy fell from {start:.3g} to {entropy:.3g} and {standing} (collapse)"
        out.append(f"{fell}; try: {_TRY['entropy low']}")
    if guard.entropy_rise and entropy > guard.entropy_rise * start:
        grew = f"entropy grew from {start:.3g} to {entropy:.3g} and {standing} (explosion)"
        out.append(f"{grew}; try: {_TRY['entropy high']}")
    was, length = before["response/length_mean"], _mean(now, "response/length_mean")
    if guard.length_rise and length > guard.length_rise * was:
        grew = f"grew from {was:.3g} to {length:.3g} tokens in {_WINDOW} steps and {standing}"
        out.append(f"mean response length {grew} (run-away); try: {_TRY['length high']}")
    return out


def _partings(guard, log: dict, history: History) -> list[str]:
    """Alarms for sets whose score fell at the last two evaluations while training accuracy rose.
    Two in a row, since a single one of few samples may be low by chance."""
    out = []
    for tag in filter(_SCORE.fullmatch, log) if guard.eval_fall else ():
        scores = [e for e in history.evaluated if tag in e]
        best = max(scores, key=lambda e: e[tag], default={})
        lately = max([e[tag] for e in scores[-2:]], default=math.nan)
        if len(scores) > 2 and lately <= best[tag] - guard.eval_fall:
            was, now = best["reward/accuracy"], scores[-1]["reward/accuracy"]
            if now > was:
                fell = f"{tag} fell from {best[tag]:.3g} to {scores[-1][tag]:.3g}"
                rose = f"training accuracy rose from {was:.3g} to {now:.3g}"
                out.append(f"{fell} while {rose} (they part); try: {_TRY['parted']}")
    return out


def _mean(steps: list[dict[str, float]], tag: str) -> float:
    """The mean of a tag; NaN, for which no comparison holds, if no step has it."""
    return statistics.fmean([s[tag] for s in steps if tag in s] or [math.nan])


def count_alarms(
    config, state: State, log: dict, history: History, say: Callable, tell=lambda *_: None
) -> tuple[State, History, list[str]]:
    """Count steps with alarms in a row, and print each alarm of this step in the 1st, 2nd, 4th, 8th,
    ... step in a row that has it. tell: called with (step, steps in a row, these alarms)."""
    broken = alarms(config, log, history)
    in_row = state.counters.alarms_in_row + 1 if broken else 0
    history = stand(history, broken)
    times = lambda alarm: history.standing[_NUMBER.sub("", alarm)]
    if told := [alarm for alarm in broken if times(alarm) & (times(alarm) - 1) == 0]:
        tell(state.counters.step, in_row, told)
        for alarm in told:
            say(f"alarm: step {state.counters.step} ({in_row} in a row): {alarm}")
    return state.count(alarms_in_row=in_row), history, broken


def shortage(config, log: dict[str, float]) -> str:
    """Warning that dynamic sampling did not fill the batch; '' if it did."""
    found = log["sampling/batch_groups"]
    as_configured = found and not config.dynamic_sampling.refill
    if not config.dynamic_sampling.enabled or as_configured or found >= config.rollout.groups:
        return ""
    consequence = "training on them" if found else "no update"
    if config.dynamic_sampling.on_exhausted == "stop":
        consequence = "stopping"
    if not log["sampling/rounds"]:
        return f"{choose.NONE_LEFT}; {consequence}"
    have, others = "scores that differ", ""
    if "reward/score" not in log:
        have = "right and wrong responses"
        wrong, right = (log.get(f"sampling/all_{x}_frac", 0.0) for x in ("wrong", "correct"))
        others = f" ({wrong:.0%} of the problems all wrong, {right:.0%} all right)"
    have += _OF_WHOLE * (config.loss.overlong_filter == "group") + choose.wants(config)
    if why := choose.ran_out(config, log):
        others += f", {why}"
    rounds = f"{log['sampling/rounds']} rounds{others}"
    return f"{found} of {config.rollout.groups} groups have {have} after {rounds}; {consequence}"


def misses(log: dict[str, float]) -> str:
    """Warning that the reward failed on responses; '' if on few. ValueError: on nearly all."""
    share = log.get("reward/missed_frac", 0.0)
    if share > _NEARLY_ALL:
        why = f"failed on {share:.0%} of the responses of a step, from which nothing can be learned"
        remedy = "mend the function, or raise config.reward.timeout_s"
        raise ValueError(f"reward: {why}; the first causes are printed above; {remedy}")
    return f"the reward failed on {share:.1%} of the responses" if share > _FEW else ""


def why_stop(config, counters: Counters, log: dict[str, float]) -> str:
    """Why the run has to end here; '' = it continues."""
    if counters.empty_steps >= config.dynamic_sampling.max_empty_steps:
        if log.get("sampling/rounds") == 0:
            return choose.NONE_LEFT
        cut = log.get("response/truncated_frac", 0.0) * (config.loss.overlong_filter == "group")
        empty = f"{counters.empty_steps} steps in a row without one group whose grades differ"
        empty += _OF_WHOLE if cut else ""
        drawn = f"{counters.samples} responses drawn in {counters.rounds} rounds"
        remedy = "give easier or harder problems, more responses per problem, or a better start"
        if cut > 0.5:
            remedy = f"raise rollout.max_response_tokens, which cut {cut:.0%} of the responses"
        return f"nothing to learn: {empty} ({drawn}); {remedy}"
    if config.dynamic_sampling.on_exhausted == "stop" and log and shortage(config, log):
        if choose.ran_out(config, log):
            return "dynamic sampling has drawn every problem that is not left out"
        return f"dynamic sampling used up its {config.dynamic_sampling.max_rounds} rounds"
    for in_row, of, rate in (
        (counters.skipped_in_row, "", "optim.lr"),
        (counters.others_skipped_in_row, " of a model beside the policy", "its learning rate"),
    ):
        if in_row >= config.optim.max_skipped:
            skipped = f"{in_row} updates{of} in a row were not finite and have not been applied"
            return f"{skipped}; lower {rate}"
    if config.guard.stop_after and counters.alarms_in_row >= config.guard.stop_after:
        return f"{counters.alarms_in_row} steps in a row with an alarm (config.guard.stop_after)"
    return ""
