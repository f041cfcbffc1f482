"""Every tag of metrics.jsonl, in one table: what it is, its unit, its formula, what is healthy,
what a bad value means, and where it comes from.

    python -m dapo_jax.log.tags      # as Markdown

TensorBoard has the same tags, with the definition on each card. A number is a scalar, a list of
numbers the counts of a histogram (`edges`), a list of strings text. A record has only the tags that
apply to its step.

"drawn": everything sampled in the step, before the filter. "batch": the groups trained on, after
it. "paper": arXiv 2503.14476.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.variants import choose


class Tag(NamedTuple):
    unit: str
    definition: str
    formula: str
    healthy: str  # range, or course over a run
    bad: str  # what another value means
    source: str
    when: str = "step"  # which records have it; see WHEN


WHEN = {
    "record": "every record",
    "step": "every rollout step",
    "drawn": "steps that drew responses",
    "judged": "steps that drew responses, where the reward says right or wrong",
    "scored": "steps that drew responses, where the reward is a score alone",
    "parts": "steps that drew responses, where the reward names its parts",
    "missed": "steps that drew responses, with reward.on_error='miss'",
    "shadow": "steps that drew responses, where a verifier is the reward",
    "trained": "steps with an update",
    "mixed": "steps whose batch has a group, where the reward says right or wrong",
    "some": "steps with such responses",
    "reference": "with loss.kl_coef",
    "start": "the first record of each start",
    "weighted": "with loss.importance_cap",
    "mask": "with another loss.importance than 'token'",
    "evaluation": "evaluated steps (the first and the last among them)",
    "majority": "evaluated steps, where the reward says right or wrong",
    "alarm": "steps with an alarm",
    "device": "every rollout step, on TPUs and GPUs that are known",
}

# fmt: off
TAGS: dict[str, Tag] = {
    # --- reward ---------------------------------------------------------------------------------
    "reward/mean": Tag("reward", "shaped reward of drawn responses", "mean(R + P), P the length penalty", "rises; within [wrong - penalty, correct]", "falls while accuracy does not: responses grow into the penalty", "paper Eq. 7 and 13, Fig. 7b", "drawn"),
    "reward/accuracy": Tag("share", "correct ones of drawn responses, BEFORE the filter", "mean(correct)", "rises", "flat from the start: too hard, or lr too low; falls: look at entropy and length", "paper Fig. 7b", "judged"),
    "reward/score": Tag("reward", "score of drawn responses, before the length penalty and BEFORE the filter", "mean(R)", "rises", "flat from the start: no response scores better than its neighbours; rises while the samples get worse: the reward is being gamed", "a reward of one's own", "scored"),
    "reward_part/<name>": Tag("as the reward has it", "one named part of the reward of drawn responses", "mean of Grade.parts[name]", "the parts that are meant to rise do", "one rises and the others fall: the reward is won by that part alone", "a reward of one's own", "parts"),
    "reward/missed_frac": Tag("share", "drawn responses that the reward failed on or took too long for; they score reward.wrong", "mean[no grade]", "0", "above 0.01: raise reward.timeout_s or mend the function", "grading.py", "missed"),
    "reward/batch_accuracy": Tag("share", "correct ones of the responses trained on, AFTER the filter", "mean(correct) over the batch", "near 1/2 with Dynamic Sampling, whatever the policy", "below 0.1 or above 0.9: most groups hold one exception; the gradient is noisy", "paper section 3.2", "mixed"),
    "reward/overlong_penalty": Tag("reward", "length penalty of drawn responses", "mean(P) <= 0", "0 to -0.1", "below -0.3: length runs into the limit", "paper Eq. 13", "drawn"),
    "source/<data_source>/accuracy": Tag("share", "correct ones of drawn responses to problems of this data_source", "mean(correct) within the source", "all rise", "one stays at 0: its answers cannot be parsed, or are wrong", "data_source of the problem files", "judged"),
    "source/<data_source>/score": Tag("reward", "score of drawn responses to problems of this data_source", "mean(R) within the source", "all rise", "one stays where it began: its problems are too hard, or the reward does not fit them", "data_source of the problem files", "scored"),
    # --- response -------------------------------------------------------------------------------
    "response/length_mean": Tag("tokens", "length of drawn responses, end-of-text token included", "mean(|o|)", "steady, or rising slowly as reasoning grows", "doubles in ten steps without more accuracy: run-away; falls to a few tokens: the policy guesses", "paper Fig. 7a", "drawn"),
    "response/length_max": Tag("tokens", "longest drawn response", "max(|o|)", "up to rollout.max_response_tokens", "far below the limit: the limit can be lowered", "paper section 3.4", "drawn"),
    "response/length_p50": Tag("tokens", "half of all drawn responses are no longer", "50th percentile of |o|, linear between lengths", "moves with length_mean", "far below length_mean: a few long responses make the mean", "code", "drawn"),
    "response/length_p90": Tag("tokens", "nine of ten drawn responses are no longer", "90th percentile of |o|", "below the limit less the soft penalty's buffer", "in the buffer: one in ten is punished for its length", "code", "drawn"),
    "response/length_p99": Tag("tokens", "all but one in a hundred drawn responses are no longer", "99th percentile of |o|", "below the limit", "at the limit while length_p90 is not: a few loops without an end", "code", "drawn"),
    "response/length_correct": Tag("tokens", "length of correct drawn responses", "mean(|o|) where correct", "close to length_mean", "falls while length_wrong rises: only short solutions survive the limit", "code", "some"),
    "response/length_wrong": Tag("tokens", "length of wrong drawn responses", "mean(|o|) where not correct", "up to twice length_correct", "at the limit: wrong means truncated; give more tokens or the soft penalty", "code", "some"),
    "response/length_hist": Tag("responses", "drawn responses by length", "counts; equal bins from 0 to rollout.max_response_tokens", "one hump below the limit", "a spike in the last bin: truncation", "code", "drawn"),
    "response/truncated_frac": Tag("share", "drawn responses that the length limit ended", "mean(truncated)", "below 0.1", "above 0.5: the reward measures length, not reasoning", "paper section 3.4", "drawn"),
    # --- policy ---------------------------------------------------------------------------------
    "policy/entropy": Tag("nats per token", "entropy of the policy where it drew a token, at the sampling temperature, over all of the vocabulary", "mean over drawn tokens of -sum_v p_v ln p_v", "falls slowly, or rises slowly with Clip-Higher", "near 0 while accuracy stands still: collapse; growing without accuracy: noise", "paper section 3.1, Fig. 2b and 7c", "drawn"),
    "policy/entropy_hist": Tag("tokens", "drawn tokens by entropy", "counts; bins in `ENTROPY_EDGES`, nats", "most near 0, a tail of forking tokens", "no tail: nothing is explored", "code", "drawn"),
    "policy/mean_prob": Tag("probability", "probability that drawn tokens had", "mean over drawn tokens of pi(o_t)", "rises slowly", "near 1: collapse (the mirror of entropy)", "paper Fig. 3a and 7d", "drawn"),
    "policy/batch_entropy": Tag("nats per token", "entropy over TRAINED tokens, by the trainer, as the updates go", "mean over trained tokens of -sum_v p_v ln p_v", "close to policy/entropy", "far from it: the filter picks unusual problems", "code", "trained"),
    "policy/batch_mean_prob": Tag("probability", "probability of TRAINED tokens, by the trainer", "mean over trained tokens of pi_theta(o_t)", "close to policy/mean_prob", "as policy/batch_entropy", "code", "trained"),
    "policy/loss": Tag("1", "the objective, negated; its size says little, advantages being normalised", "mean over updates of -J(theta)", "around 0", "large: a few tokens with a high ratio dominate", "paper Eq. 8", "trained"),
    "policy/clip_low_frac": Tag("share", "trained tokens whose gradient the LOWER clip stops (cispo: whose weight it bounds)", "mean[A < 0 and r < 1 - clip_low]", "below 0.01", "above 0.1: updates are too large; lower optim.lr", "paper Eq. 8", "trained"),
    "policy/clip_high_frac": Tag("share", "trained tokens whose gradient the UPPER clip stops (cispo: whose weight it bounds)", "mean[A > 0 and r > 1 + clip_high]", "below 0.01", "above 0.1: as above; more than clip_low_frac by far: exploration is held back, raise clip_high", "paper section 3.1, Eq. 8", "trained"),
    "policy/dual_clip_frac": Tag("share", "trained tokens whose gradient the dual clip stops", "mean[A < 0 and r > dual_clip]", "0", "above 0.001: sampler and trainer disagree", "verl clip_ratio_c", "trained"),
    "policy/approx_kl": Tag("nats per token", "how far the updates of the step moved the policy", "mean(ln pi_old - ln pi_theta)", "within +-0.02", "growing: lower optim.lr or optim.minibatches", "verl ppo_kl", "trained"),
    "policy/ratio_max": Tag("1", "largest probability ratio of the step", "max(pi_theta / pi_old)", "1 to 10", "above 100: a token's probability exploded", "paper Eq. 8", "trained"),
    "policy/ref_kl": Tag("nats per token", "distance from the start of the run", "mean k3 estimate of KL(pi_theta || pi_start)", "grows slowly", "leaps: the policy left what the base model knows", "arXiv 2402.03300 Eq. 4", "reference"),
    "policy/importance_mean": Tag("1", "importance weight of trained tokens", "mean(w), w of pi_trainer / pi_sampler by loss.importance", "0.95 to 1.05", "far from 1: sampler and trainer disagree, or a mask zeroes much", "arXiv 2510.18855", "weighted"),
    "policy/importance_capped_frac": Tag("share", "trained tokens whose importance weight lies at its bound", "mean[w >= loss.importance_cap]", "below 0.01", "above 0.1: sampler and trainer disagree; with 'sequence' also long responses", "arXiv 2510.18855", "weighted"),
    "policy/importance_zeroed_frac": Tag("share", "trained tokens whose importance weight a mask zeroes", "mean[w = 0]", "below 0.01", "above 0.1: sampler and trainer disagree; with sequence_mask also long responses", "arXiv 2510.18855", "mask"),
    "policy/sampler_trainer_logprob_gap": Tag("nats", "largest difference of a token's log-probability between sampler and trainer, first update of the step", "max|ln pi_sampler - ln pi_trainer|", "below 1e-4 in float32 on CPU, below 0.5 in bfloat16 (groups carried over are older: more)", "large: two different policies; gradients are biased", "code: one forward for both", "trained"),
    # --- value model ----------------------------------------------------------------------------
    # --- sampling -------------------------------------------------------------------------------
    "sampling/rounds": Tag("rounds", "generation rounds of the step", "count", "1 to 4", "at dynamic_sampling.max_rounds: the problems no longer fit the policy", "paper Algorithm 1"),
    "sampling/batch_groups": Tag("groups", "groups trained on", "count", "rollout.groups", "fewer: Dynamic Sampling ran out of rounds", "paper Algorithm 1"),
    "sampling/accept_frac": Tag("share", "drawn groups with right AND wrong responses; where the reward is a score alone, with scores that differ", "mean[0 < correct < G], or mean[max(R) - min(R) > 1e-6]", "0.2 to 0.9", "near 0: nothing to learn from; see the next two", "paper Eq. 11", "drawn"),
    "sampling/all_correct_frac": Tag("share", "drawn groups that are all right", "mean[correct = G]", "rises over a run", "near 1: the problems are learned; give harder ones", "paper Fig. 3b", "judged"),
    "sampling/all_wrong_frac": Tag("share", "drawn groups that are all wrong", "mean[correct = 0]", "falls", "near 1: too hard, or answers are not parsed", "paper section 3.2", "judged"),
    "sampling/groups_by_correct": Tag("groups", "drawn groups by how many of their responses are right", "counts for 0..G", "moves from left to right", "two spikes at 0 and G: few problems teach", "paper section 3.2", "judged"),
    "sampling/parse_fail_frac": Tag("share", "drawn responses without an answer that the verifier finds", "mean[no answer]", "near response/truncated_frac", "higher: the answer format is not learned", "data/verifier.py", "judged"),
    "sampling/shadow_gain": Tag("share", "accuracy by the OTHER verifier minus accuracy", "mean(shadow) - mean(correct)", "within +-0.01", "above 0.05: right answers are marked wrong", "data/verifier.py", "shadow"),
    "sampling/evicted": Tag("responses", "responses that gave their cache pages away and were made again", "count", "0, or few", "many: raise rollout.cache_fraction or lower rollout.slots", "rollout/engine.py"),
    # --- responses of several steps ----------------------------------------------------------------
    # --- optimizer ------------------------------------------------------------------------------
    "optim/lr": Tag("1", "learning rate of the step", "warm-up, then optim.schedule", "as configured", "0 after warm-up: a mistake in the config", "paper section 4.1"),
    "optim/grad_norm": Tag("1", "global gradient norm before clipping", "mean over updates of ||g||", "steady", "grows tenfold: instability; nan: see optim/skipped", "code", "trained"),
    "optim/updates": Tag("updates", "gradient updates of the run so far", "count", "grows by optim.minibatches a step", "stands still: nothing to learn from", "paper section 4.1"),
    "optim/skipped": Tag("updates", "updates of the step left out because a gradient or its result is not finite", "count", "0", "above 0 in a row: lower optim.lr", "code"),
    # --- cost -----------------------------------------------------------------------------------
    "spent/tokens": Tag("tokens", "response tokens drawn since the start, the rejected ones included", "sum", "grows steadily", "leaps a step: many rounds", "code"),
    "spent/samples": Tag("responses", "responses drawn since the start", "sum", "grows steadily", "as above", "code"),
    "data/epochs": Tag("passes", "how often the run has gone through the training set", "problems drawn for, or left out / problems in the set", "grows steadily", "above 10: the problems may be learned by heart; compare eval/*", "code"),
    "data/problems_seen": Tag("problems", "different problems of the training set that the run has drawn responses to", "min(problems drawn for, problems in the set)", "grows to the size of the set", "stands still below it: see sampling/rounds", "code"),
    "time/rollout_s": Tag("s", "sampling and verifying", "wall time", "steady", "grows: longer responses or more rounds", "code"),
    "time/update_s": Tag("s", "old log-probs and updates", "wall time", "steady", "grows: longer rows", "code"),
    "time/step_s": Tag("s", "the step without evaluation and saving", "time/rollout_s + time/update_s", "steady after the first steps, which compile", "leaps: a compilation, or a slow neighbour", "code"),
    "time/eval_s": Tag("s", "evaluation", "wall time", "steady", "large: lower eval.k or eval.max_problems", "code", "evaluation"),
    "time/first_token_s": Tag("s", "from the start of process 0 to the first chunk of tokens: imports, meeting, weights or checkpoint, compilation", "wall time", "as at the last start, or less: programs are kept in WORKDIR/xla", "grows: look which of these it is; a cache that is not shared compiles on every host", "hosts/start.py", "start"),
    "time/wall": Tag("s", "when the record was made", "seconds since 1970-01-01 UTC; the wall time of TensorBoard's points, also after a restart", "grows", "leaps: the run was away in between", "code", "record"),
    "time/goodput": Tag("share", "wall time since the run's first start that went into steps which count, their evaluations, and into sampling of them that was cut off and kept", "seconds of rollout, update and evaluation of steps not done again, without compilation, and of earlier sampling as far as its tokens were kept / all seconds", "rises towards 0.9 and more", "low: read time/lost/<what>", "events.jsonl"),
    "time/lost/<what>": Tag("share", "of that wall time, what went to: restart (steps cut off or done again), away (no process), start (start-up), compile, evaluation, save (writing checkpoints and records)", "seconds / all seconds", "below 0.05 each", "restart: save more often; away: more slices, or not Spot; evaluation: lower eval.k, raise eval.every", "events.jsonl"),
    "perf/tokens_per_s": Tag("tokens/s", "response tokens drawn a second of the step, updates included", "tokens / time/step_s", "steady", "falls: see time/*", "code"),
    "perf/slot_occupancy": Tag("share", "decoding slots in use, over the chunks of the step", "mean", "above 0.7", "low: a few long responses keep all waiting; fewer slots", "rollout/engine.py"),
    "perf/cache_peak": Tag("share", "most of the cache that was in use", "max(pages used / pages)", "below 1", "1: see sampling/evicted", "rollout/engine.py"),
    "perf/mfu_rollout": Tag("share", "model FLOPs of sampling over the peak of all devices", "(2 N tokens + attention) / (time/rollout_s x devices x peak)", "0.01 to 0.2: decoding waits for memory", "falls: fewer sequences in flight; see perf/slot_occupancy", "log/hardware.py", "device"),
    "perf/mfu_update": Tag("share", "model FLOPs of old log-probs and updates over the peak of all devices; nothing counts twice that is computed again", "(forward passes + 3 for an update) / (time/update_s x devices x peak)", "0.3 to 0.6", "below 0.2: rows are badly filled, or collectives wait; trace it by --profile=STEP", "log/hardware.py", "device"),
    "perf/hbm_used": Tag("share", "device memory in use at the end of the step, of what programs may have; the fullest device of process 0", "bytes_in_use / bytes_limit", "steady", "grows from step to step: a leak", "log/hardware.py", "device"),
    "perf/hbm_peak": Tag("share", "most device memory in use since the process began", "peak_bytes_in_use / bytes_limit", "below 0.95", "near 1: the next longer batch may be refused; lower rollout.cache_fraction or optim.micro_batch_rows", "log/hardware.py", "device"),
    # --- evaluation: <set>, and <set>_top_p0.7 where eval.top_p is below 1 --------------------------
    "eval/<set>/avg@k": Tag("share", "accuracy over eval.k samples per problem; where the reward is a score alone, their mean score", "mean(correct), or mean(R)", "rises", "falls while reward/accuracy rises: overfitting", "paper section 4.1 (avg@32)", "evaluation"),
    "eval/<set>/maj@k": Tag("share", "problems whose most frequent answer is right, ties by their share", "mean over problems", "above avg@k", "below it: wrong answers agree", "verl maj@k", "majority"),
    "eval/<set>/pass@k": Tag("share", "problems with a right sample among k", "mean of 1 - C(n-c,k)/C(n,k)", "above avg@k", "falls while avg@k rises: diversity is lost", "arXiv 2107.03374 Eq. 1", "majority"),
    "eval/<set>/length_mean": Tag("tokens", "length of evaluation samples at top_p=1", "mean(|o|)", "close to response/length_mean", "far from it: the sets differ", "code", "evaluation"),
    "eval/<set>/truncated_frac": Tag("share", "evaluation samples at top_p=1 that the limit ended", "mean(truncated)", "below 0.1", "higher: raise eval.max_response_tokens", "code", "evaluation"),
    # --- words ----------------------------------------------------------------------------------
    "alarms": Tag("text", "what is out of bounds, and what to try", "log/guards.py", "absent", "read it", "config guard.*", "alarm"),
}
# fmt: on

TAGS |= {name: Tag(*row) for name, row in choose.TAGS.items()}
WHEN |= choose.WHEN

# Of policy/entropy_hist, nats. Half of all tokens are nearly certain; ln(152,064) = 11.93.
ENTROPY_EDGES = (0, 0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12)
LENGTH_BINS = 32  # of response/length_hist, at most

_FAMILIES = {t: re.compile(re.sub(r"<\w+>", ".+", t)) for t in TAGS if "<" in t}


def family(tag: str) -> str:
    """The row of TAGS that describes a tag: itself, or 'eval/<set>/avg@k' for 'eval/aime24/avg@k'.
    KeyError: there is none."""
    if tag in TAGS:
        return tag
    for name, pattern in _FAMILIES.items():
        if pattern.fullmatch(tag):
            return name
    raise KeyError(f"{tag}: not in dapo_jax/log/tags.py")


def describe(tag: str) -> str:
    """One paragraph for a card; '' for a tag of another version."""
    try:
        t = TAGS[family(tag)]
    except KeyError:
        return ""
    return (
        f"{t.definition} [{t.unit}]: {t.formula}. Healthy: {t.healthy}. Else: {t.bad}. ({t.source})"
    )


def edges(tag: str, bins: int, longest: int) -> Sequence[float]:
    """The bins + 1 edges of a histogram's counts. longest: rollout.max_response_tokens."""
    if tag == "policy/entropy_hist":
        return ENTROPY_EDGES
    if tag in choose.EDGES:
        return choose.EDGES[tag]
    if tag == "response/length_hist":
        return np.linspace(0, longest, bins + 1).tolist()
    return (np.arange(bins + 1) - 0.5).tolist()  # one bin a whole number


def markdown() -> str:
    rows = [
        "| tag | unit | definition | formula | healthy | else | source | in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, t in TAGS.items():
        cells = (f"`{name}`", *t[:-1], WHEN[t.when])
        rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
