"""Why runs go wrong, as rules: each is one function from a run's series to a Finding or None.

A run's first cause is that of the first rule in RULES that fires; docs/diagnose.md has one row a
cause. A bound is a share of the run's own start or of its config wherever there is such a thing. A
rule that lacks a tag, or steps, says nothing, and `lab/diagnose.py` says so.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dapo_jax.lab.evidence import LEARNED, RISE, Curve, Evidence, Finding, follows, share, states


def log_probs_apart(e: Evidence) -> Finding | None:
    """Sampler and trainer give a token different log-probs: more than rounding can."""
    c, set_to = e.curve("policy/sampler_trainer_logprob_gap"), e.config.get("guard.gap_max", -1)
    exact = e.config.get("model.dtype") == "float32"
    exact = exact and e.config.get("rollout.cache_dtype") == "model"
    bound = set_to if set_to > 0 else 0.02 if exact else 1.0
    if e.older or not c.median > bound:
        return None
    why = "rounding alone stays far below; bound: guard.gap_max, or by model.dtype and cache_dtype"
    return Finding(
        "policy/sampler_trainer_logprob_gap", c.since(c.values > bound), c.median, bound, why
    )


def weights_apart(e: Evidence) -> Finding | None:
    """The importance weight of fresh responses is far from 1."""
    c = e.curve("policy/importance_mean")
    off = np.abs(c.values - 1)
    if e.older or not np.median(off) > 0.1:
        return None
    why = "weights of trainer over sampler are 1 where both are one policy"
    return Finding("policy/importance_mean", c.since(off > 0.1), c.median, 1.1, why)


def unknown_words(e: Evidence) -> Finding | None:
    """Prompts hold what the tokenizer has no token for."""
    bad = [bool(set("\u2047\ufffd") & set(s.prompt)) for s in e.samples]
    value = share(bad, 1)
    if not value > 0.2:
        return None
    step = e.samples[bad.index(True)].step
    why = "share of prompts with a mark of an unknown token: the template's words, or the problem's"
    return Finding("samples: prompts with unknown tokens", step, value, 0.2, why)


def never_stops(e: Evidence) -> Finding | None:
    """From the first step on nearly no response ends, though it has given its answer."""
    c = e.curve("response/truncated_frac")
    cut = [s for s in e.rows(late=False) if s.truncated]
    answered = share([s.extracted is not None for s in cut], 4)
    if not c.start >= 0.9 or answered < 0.5:
        return None
    gave = (
        "" if math.isnan(answered) else f"; {answered:.0%} of them have given an answer and go on"
    )
    why = f"share of responses at the limit in the first steps{gave}: no stop token ends them"
    return Finding("response/truncated_frac", int(c.steps[0]), c.start, 0.9, why)


def no_answer_found(e: Evidence) -> Finding | None:
    """Responses end, and from the first step to the last most state no answer."""
    c, cut = e.curve("sampling/parse_fail_frac"), e.curve("response/truncated_frac")
    gain = e.curve("sampling/shadow_gain")
    apart = (c.values[0] - cut.values[0], c.start - cut.start, c.late - cut.late)
    if gain.median > 0.05 or not min(apart) >= 0.4:  # the first is of no update's doing
        return None
    why = "share of responses that end without an answer, beyond those cut off: from the start on"
    return Finding("sampling/parse_fail_frac", int(c.steps[0]), apart[1], 0.4, why)


def reward_fails(e: Evidence) -> Finding | None:
    """The reward has no grade for some responses, which then count as wrong."""
    c = e.curve("reward/missed_frac")
    if not c.median > 0.03:
        return None
    why = "the reward fails on responses or is too slow for them, and they count as wrong"
    return Finding("reward/missed_frac", c.since(c.values > 0.03), c.median, 0.03, why)


def other_verifier(e: Evidence) -> Finding | None:
    """The second verifier finds more right answers than the run's."""
    c = e.curve("sampling/shadow_gain")
    if not max(c.median, c.late) > 0.05:
        return None
    why = "accuracy by the other verifier less accuracy: right answers are marked wrong"
    return Finding(
        "sampling/shadow_gain", c.since(c.values > 0.05), max(c.median, c.late), 0.05, why
    )


def gold_marked_wrong(e: Evidence) -> Finding | None:
    """Responses whose last word is the gold answer are wrong by the reward."""
    wrong = e.judged(right=False)
    last = max((a.step for a in wrong), default=0)
    of = [[states(a) for a in wrong], [states(a) for a in wrong if a.step == last]]
    value = max((x for part in of if (x := share(part, 8)) == x), default=0.0)
    if value <= 0.15:
        return None
    step = next(a.step for a in wrong if states(a))
    why = "of the answers that are wrong by the reward, in rollouts/ and eval/, all or the last"
    why += " step's, the share that are the gold answer"
    return Finding("samples: wrong, and the gold answer", step, value, 0.15, why)


def wrong_marked_right(e: Evidence) -> Finding | None:
    """Responses that are right by the reward do not have the gold answer for their last word."""
    right = [a for a in e.judged(right=True) if states(a) is not None]
    value = share([states(a) for a in right], 32)
    if not value < 0.85:
        return None
    why = f"of {len(right)} answers that are right by the reward, in rollouts/ and eval/, the share"
    why += " that are the gold answer: it is paid for others too"
    step = next(a.step for a in right if not states(a))
    return Finding("samples: right, and the gold answer", step, value, 0.85, why)


def evaluation_ahead(e: Evidence) -> Finding | None:
    """Held-out problems are solved and training problems are not, and stay so."""
    c = e.score
    for tag, held in e.evaluations.items():
        for value, train, of in (
            (float(held.values[0]), max(c.start, c.values[0]), "first evaluation"),
            (float(held.values.mean()), max(c.start, c.median), "mean of the evaluations"),
        ):
            if value > (bound := 2 * train + 0.03) and not e.learns:
                why = (
                    f"{of}; training accuracy is {train:.3g} there and does not rise: gold answers"
                )
                why += " of the training set are wrong, or its problems are far harder"
                return Finding(tag, int(held.steps[0]), value, bound, why)
    return None


def guesses(e: Evidence) -> Finding | None:
    """Training answers are right as often as by guessing, and held-out ones follow their gold."""
    same, bound = follows(e.evaluated), 0.7
    if not same.alike > bound or e.score.median > 1.3 * same.chance or e.learns:
        return None
    if e.curve("response/truncated_frac").start > 0.15:  # what is cut off need not be a guess
        return None
    why = "of two held-out problems, how often the one with the larger gold answer has the larger"
    why += f" answer, .5 by chance; training accuracy is {e.score.median:.3g}, that of guessing"
    why += f" {same.chance:.3g}: gold answers in training are wrong, or problems far harder there"
    step = min(a.step for a in e.evaluated)
    return Finding("eval: answers in the gold answers' order", step, same.alike, bound, why)


def too_old(e: Evidence) -> Finding | None:
    """The weights of older responses are so uneven that few tokens carry an update. Training
    accuracy is that of older weights too: where evaluations fall, it has not risen."""
    if not e.config.get("rollout.staleness"):
        return None
    age = e.curve("staleness/age_mean").late
    old = "" if math.isnan(age) else f"; trained tokens are {age:.1f} steps old in the mean"
    ess, bound = e.curve("policy/importance_ess"), 0.9
    if ess.median < bound and not (e.learns and not e.sinks):
        why = f"effective sample size of the importance weights, 1 of fresh responses{old}"
        return Finding(
            "policy/importance_ess", ess.since(ess.values < bound), ess.median, bound, why
        )
    for tag in ("policy/importance_capped_frac", "policy/importance_zeroed_frac"):
        c = e.curve(tag)
        if c.median > 0.1:
            why = f"share of trained tokens whose weight lies beyond its bound{old}"
            return Finding(tag, c.since(c.values > 0.1), c.median, 0.1, why)
    return None


def not_finite(e: Evidence) -> Finding | None:
    """Updates are left out because they are not finite."""
    c = e.curve("optim/skipped")
    if not (c.values > 0).sum() >= max(2, 0.1 * len(c.values)):
        return None
    why = "updates a step whose gradient or result is not finite; 0 in a healthy run"
    return Finding("optim/skipped", c.since(c.values > 0), float(c.values.max()), 0.0, why)


def moves_too_far(e: Evidence) -> Finding | None:
    """A step's updates move the policy so far that much of the loss is clipped, and the score falls
    or does not rise; or one step's did, and half the score is gone since."""
    if e.learns and not e.fell:
        return None
    low, high = e.curve("policy/clip_low_frac"), e.curve("policy/clip_high_frac")
    clipped, by = e.curve("policy/clip_frac"), "policy/clip_frac"  # verl's, both bounds together
    if len(low.values) and len(low.values) == len(high.values):
        clipped, by = Curve(low.steps, low.values + high.values), "policy/clip_low_frac + high"
    kl = e.curve("policy/approx_kl")
    moved = kl._replace(values=np.abs(kl.values))
    for tag, c, bound, what in (
        (by, clipped, 0.1, "share of trained tokens clipped"),
        ("policy/approx_kl", moved, 0.05, "nats a token that a step's updates move the policy"),
    ):
        often = float(np.quantile(c.values, 0.75)) if len(c.values) > 1 else 0.0
        if often > bound:
            why = f"{what}, in a quarter of all steps; {e.score_tag} does not rise to its end"
            return Finding(tag, c.since(c.values > bound), often, bound, why)
    for step, nats in zip(moved.steps, moved.values, strict=True):
        before = e.score.values[e.score.steps <= step]
        if nats > 0.5 and len(before) and e.score.late < 0.5 * before.mean():
            why = "nats a token that this step's updates moved the policy; up to it"
            why += f" {e.score_tag} was {before.mean():.2f}, at the end {e.score.late:.2f}"
            return Finding("policy/approx_kl", int(step), float(nats), 0.5, why)
    return None


def scatters(e: Evidence) -> Finding | None:
    """Entropy grows many times and the score does not rise, or falls: updates have destroyed the
    policy, which is on its way to tokens at random."""
    tag = next(t for t in ("policy/entropy", "policy/batch_entropy") if t in e.series)
    c = e.curve(tag)
    bound = max(4 * c.start, c.start + 1)
    if not c.late > bound or (e.learns and not e.fell):
        return None
    why = f"nats a token, {c.start:.3g} at the start, while {e.score_tag} goes from"
    why += f" {e.score.start:.2f} to {e.score.late:.2f}; bound: four times the start, or 1 more"
    return Finding(tag, c.since(c.values > bound), c.late, bound, why)


def runs_away(e: Evidence) -> Finding | None:
    """Responses grow into the limit, or far beyond what they were, and are no better for it."""
    c, cut = e.curve("response/length_mean"), e.curve("response/truncated_frac")
    grown = c.late / c.start if c.start else math.nan
    if grown > 1.5 and (cut.late - cut.start > 0.2 or (grown > 2 and not e.right_rises)):
        why = f"mean length as a multiple of its start, {c.start:.3g} tokens; truncated"
        why += f" {cut.start:.0%} at the start, {cut.late:.0%} at the end"
        return Finding("response/length_mean", c.since(c.values > 1.5 * c.start), grown, 1.5, why)
    return None


def limit_too_short(e: Evidence) -> Finding | None:
    """From the start the limit cuts many responses off: to the end, or until they are too short to
    be right."""
    c, length = e.curve("response/truncated_frac"), e.curve("response/length_mean")
    little = e.score.late - e.score.start < 3 * RISE * e.scale
    stays = min(c.start, c.late) > (0.15 if little else 0.4)
    squeezed = c.start > 0.15 and little and length.late < 0.9 * length.start
    if not (stays or squeezed):
        return None
    limit = e.config.get("rollout.max_response_tokens")
    why = "share of responses that the limit cuts off"
    why += f" (rollout.max_response_tokens = {limit})" if limit else ""
    if not stays:
        why += f"; they shrink from {length.start:.3g} to {length.late:.3g} tokens, no better"
    bound = 0.15 if little else 0.4
    return Finding("response/truncated_frac", int(c.steps[0]), c.start, bound, why)


def pays_for_wrong(e: Evidence) -> Finding | None:
    """The score rises, and what the reward pays for is not the gold answer."""
    if not e.score.gained(e.scale):
        return None
    late, first = e.paid(late=True), e.paid(late=False)
    told, before = (share([states(a) for a in of], 6) for of in (late, first))
    if not told < 0.7 or told > before + 0.1:
        return None
    was = "" if math.isnan(before) else f", {before:.0%} at the start"
    why = f"of {len(late)} late answers that the reward pays for, the share that are the gold"
    why += f" answer{was}, while {e.score_tag} rose from {e.score.start:.2f} to {e.score.late:.2f}"
    return Finding("samples: rewarded, and the gold answer", late[0].step, told, 0.7, why)


def pays_for_form(e: Evidence) -> Finding | None:
    """One part of the reward rises, and another falls or stays."""
    parts = {t: e.curve(t) for t in e.series if t.startswith("reward_part/")}
    up = [t for t, c in parts.items() if c.gained(max(np.abs(c.values).max(initial=0), 1e-9))]
    down = [t for t, c in parts.items() if t not in up and c.late < c.start + RISE]
    down = [t for t in down if not parts[t].start >= LEARNED]
    if not up or not down:
        return None
    c = parts[down[0]]
    why = f"{up[0]} rises from {parts[up[0]].start:.2f} to {parts[up[0]].late:.2f} and this part,"
    why += f" {c.start:.2f} at the start, does not: the reward is won without it"
    return Finding(down[0], int(c.steps[-1]), c.late, c.start + RISE, why)


def evaluation_stands(e: Evidence) -> Finding | None:
    """The score rises on training problems that are mostly new, and no evaluation does."""
    epochs = e.curve("data/epochs")
    several = {t: c for t, c in e.evaluations.items() if len(c.values) > 1}
    if not several or not e.score.gained(2 * e.scale) or epochs.late > 3:
        return None
    rises = {t: float(c.values[1:].max() - c.values[0]) for t, c in several.items()}
    tag = max(rises, key=rises.__getitem__)
    c, bound = e.evaluations[tag], 0.25 * (e.score.late - e.score.start) / e.scale
    if not c.values[-1] - c.values[0] < min(bound, RISE):
        return None
    why = f"{e.score_tag} rises from {e.score.start:.2f} to {e.score.late:.2f} on problems that are"
    why += f" mostly new; this began at {c.values[0]:.2f} and should have risen a quarter of that"
    return Finding(tag, int(c.steps[-1]), float(c.values[-1]), float(c.values[0]) + bound, why)


def all_learned(e: Evidence) -> Finding | None:
    """Problems repeat, and most groups are all right."""
    c, epochs = e.curve("sampling/all_correct_frac"), e.curve("data/epochs")
    if not (c.late > 0.5 and epochs.late > 2 and c.late - c.start > 0.2):
        return None
    why = f"share of groups that are all right, after {epochs.late:.1f} passes through the problems"
    return Finding("sampling/all_correct_frac", c.since(c.values > 0.5), c.late, 0.5, why)


def by_heart(e: Evidence) -> Finding | None:
    """Problems repeat, training accuracy rises, and an evaluation has not risen with it, or falls,
    or has less than .6 of that where it no longer rises or problems came ten times."""
    epochs = e.curve("data/epochs")
    if not (epochs.late > 3 and e.score.gained()):
        return None
    new = int((epochs.values <= 1).sum())  # steps whose problems came for the first time
    first = float(e.score.values[: min(max(new, 1), e.score.window)].mean())
    for tag, c in e.evaluations.items():
        n, best, last = len(c.values), float(c.values.max()), float(c.values[-1])
        stands = n > 2 and last < float(c.values[n // 2]) + 0.02
        part = 0.6 if stands or epochs.late > 10 else 0.25
        bound = float(c.values[0]) + part * (e.score.late - first)
        if n > 1 and (last < bound or best - last > 2 * RISE):
            why = f"training accuracy rises from {first:.2f} to {e.score.late:.2f} in"
            why += f" {epochs.late:.1f} passes; this began at {c.values[0]:.2f} and had {best:.2f}"
            return Finding(tag, int(c.steps[-1]), last, bound, why)
    return None


def none_left(e: Evidence) -> Finding | None:
    """The curriculum leaves nearly all problems out, or so many that steps draw no group."""
    c, seen = e.curve("curriculum/left_out"), e.curve("data/problems_seen")
    part, none = c.late / max(seen.late, 1), int((c.steps > e.score.steps.max(initial=0)).sum())
    if not part > (bound := 0.5 if none else 0.8) or e.curve("data/epochs").late <= 1:
        return None
    why = "share of the problems drawn so far that curriculum.pass_rate_cap leaves out"
    why += f"; the last {none} steps have drawn none" if none else ""
    return Finding("curriculum/left_out", int(c.steps[-1]), part, bound, why)


def collapses(e: Evidence) -> Finding | None:
    """Entropy is nearly gone, and the score no longer rises, or groups no longer differ within."""
    tag = next(t for t in ("policy/entropy", "policy/batch_entropy") if t in e.series)
    c, half = e.curve(tag), len(e.score.values) // 2
    rising = Curve(e.score.steps[half:], e.score.values[half:]).gained(e.scale)
    alike = e.mixed.late < 0.15
    bound = (0.05 if rising and alike else 0.15) * c.start
    if e.learned or not c.late < bound or (rising and not alike):
        return None
    why = f"nats a token, {c.start:.3g} at the start, of which the bound is a share; {e.score_tag}"
    why += f" is {e.score.late:.2f} and " + ("groups are alike" if alike else "no longer rises")
    return Finding(tag, c.since(c.values < bound), c.late, bound, why)


def starts_collapsed(e: Evidence) -> Finding | None:
    """From the first step on responses to a problem are all but the same, and what can be learned
    so is soon learned."""
    c, mixed = e.curve("policy/entropy"), e.mixed
    if not (c.start < 0.03 and mixed.median < 0.3) or e.learned:
        return None
    at = e.config.get("rollout.temperature")
    hot = f" at rollout.temperature = {at:g}" if isinstance(at, int | float) else ""
    why = f"nats a token in the first steps{hot}; {mixed.median:.0%} of the groups differ within"
    return Finding("policy/entropy", int(c.steps[0]), c.start, 0.03, why)


def no_signal(e: Evidence) -> Finding | None:
    """Nearly all groups are all wrong or all right from the start on, or most are all wrong and the
    others are right by luck, which the score does not rise from."""
    c, wrong = e.mixed, e.curve("sampling/all_wrong_frac").median
    if e.learns and e.score.start < LEARNED:
        return None
    right = e.curve("sampling/all_correct_frac").median
    shares = "" if math.isnan(wrong) else f"; {wrong:.0%} are all wrong, {right:.0%} all right"
    if c.median < 0.12 and c.start < 0.2:
        why = f"share of groups that teach{shares}"
        return Finding("sampling/accept_frac", int(c.steps[0]), c.median, 0.12, why)
    if wrong > 0.6 and e.score.median < 0.12:
        why = f"share of groups that are all wrong, from start to end; {e.score_tag} stands at"
        why += f" {e.score.median:.2f}, as much as guessing may give"
        return Finding("sampling/all_wrong_frac", int(e.score.steps[0]), wrong, 0.6, why)
    return None


def rate_is_zero(e: Evidence) -> Finding | None:
    """The learning rate is 0 in most steps."""
    c = e.curve("optim/lr")
    zero = c.values <= 1e-3 * max(float(c.values.max(initial=0)), 1e-30)
    zero |= c.values == 0
    if not zero.mean() > 0.5 or e.score.late >= LEARNED:
        return None
    why = f"of {len(zero)} steps {int(zero.sum())} have a rate of 0: see optim.schedule"
    return Finding("optim/lr", c.since(zero), float(c.late), 1e-3 * float(c.values.max()), why)


def does_not_move(e: Evidence) -> Finding | None:
    """Updates leave every token's probability where it was, and nothing is learned."""
    c, mixed = e.curve("policy/ratio_max"), e.mixed
    several = e.config.get("optim.minibatches", 1) > 1  # after a single update the ratio still is 1
    if not several or e.learns or mixed.median < 0.05 or not c.median < 1.05:
        return None
    why = "largest ratio of a token's probabilities after and before a step's updates, 1: no change"
    return Finding("policy/ratio_max", c.since(c.values < 1.05), c.median, 1.05, why)


class Rule(NamedTuple):
    """A rule and what it needs: steps with figures, and with blanks between them these tags (one of
    each `a|b`; `a/`: one that begins so), 'config' and 'samples'."""

    cause: str
    judge: Callable[[Evidence], Finding | None]
    fewest: int
    needs: str


SCORE = "reward/accuracy|reward/score|reward/mean"
RULES = (
    Rule("verifier", reward_fails, 1, "reward/missed_frac"),
    Rule("apart", log_probs_apart, 2, "policy/sampler_trainer_logprob_gap config"),
    Rule("apart", weights_apart, 2, "policy/importance_mean config"),
    Rule("template", unknown_words, 1, "samples"),
    Rule("template", never_stops, 2, "response/truncated_frac"),
    Rule("template", no_answer_found, 2, "sampling/parse_fail_frac response/truncated_frac"),
    Rule("verifier", other_verifier, 2, "sampling/shadow_gain"),
    Rule("verifier", gold_marked_wrong, 1, "samples"),
    Rule("hacked", wrong_marked_right, 1, "samples"),
    Rule("staleness", too_old, 3, "policy/importance_ess|policy/importance_capped_frac config"),
    Rule("lr high", not_finite, 2, "optim/skipped"),
    Rule("lr high", moves_too_far, 1, "policy/clip_low_frac|policy/clip_frac|policy/approx_kl"),
    Rule("lr high", scatters, 6, f"policy/entropy|policy/batch_entropy {SCORE}"),
    Rule("verifier", evaluation_ahead, 3, "reward/accuracy eval/"),
    Rule("verifier", guesses, 3, "reward/accuracy eval/"),
    Rule("hacked", pays_for_form, 4, "reward_part/"),
    Rule("length", runs_away, 4, "response/length_mean response/truncated_frac"),
    Rule("length", limit_too_short, 2, "response/truncated_frac response/length_mean"),
    Rule("hacked", pays_for_wrong, 4, f"samples {SCORE}"),
    Rule("hacked", evaluation_stands, 6, f"eval/ {SCORE}"),
    Rule("data", all_learned, 3, "data/epochs sampling/all_correct_frac"),
    Rule("data", by_heart, 6, "data/epochs eval/ reward/accuracy"),
    Rule("data", none_left, 2, "curriculum/left_out data/problems_seen"),
    Rule("entropy", collapses, 6, "policy/entropy|policy/batch_entropy"),
    Rule("entropy", starts_collapsed, 2, "policy/entropy sampling/accept_frac"),
    Rule("lr low", rate_is_zero, 3, "optim/lr policy/loss"),
    Rule("lr low", does_not_move, 6, "policy/ratio_max config"),
    Rule("signal", no_signal, 2, "sampling/accept_frac"),
)
