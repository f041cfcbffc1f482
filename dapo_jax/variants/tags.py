"""Metrics of the methods, as `log/tags.py` has those of DAPO. Columns: `log.tags.Tag`."""
# fmt: off

WHEN = {  # which records have a metric
    "curriculum": "every rollout step, with config.curriculum",
    "again": "with config.curriculum, steps that drew problems a second time",
    "aged": "with rollout.staleness",
    "positive": "with loss.positive_coef",
    "critic": "with config.critic, steps with an update of the value model",
    "differ": "with config.critic, steps whose returns are not all alike",
    "thirds": "as the last two; <third> is short, middle or long, by the lengths of the step's responses, and one may be empty",
    "turns": "every rollout step, with rollout.turns",
}
TAGS = {
    # --- problems by their pass rates: curriculum.py ---
    "curriculum/left_out": ("problems", "problems that the epoch leaves out, their pass rate being at curriculum.pass_rate_cap", "count", "grows as problems are learned, falls where they come back", "near the size of the set: nothing is left to draw; set curriculum.revisit_epochs, or give harder problems", "arXiv 2510.13786", "curriculum"),
    "curriculum/pass_rate": ("share", "pass rate of each problem when it was last drawn, over all that were; where the reward is a score alone, their mean score", "mean of the recorded rates", "rises", "flat: as reward/accuracy", "curriculum.py", "curriculum"),
    "curriculum/known_rate": ("share", "pass rate that the problems drawn had when they were drawn before: how hard the curriculum's choice is", "mean of the recorded rates of the problems drawn", "below curriculum.pass_rate_cap, and below curriculum/pass_rate", "equal to curriculum/pass_rate: the curriculum chooses nothing", "curriculum.py", "again"),
    "curriculum/by_pass_rate": ("problems", "problems that were drawn by their recorded pass rate", "counts: 0, up to .1, up to .2, ..., up to 1", "moves from left to right", "two spikes at 0 and 1: few problems teach", "curriculum.py", "curriculum"),
    "curriculum/temperature": ("1", "temperature that the step sampled at", "curriculum.temperature_schedule", "as configured", "-", "curriculum.py", "curriculum"),
    # --- responses of several steps: staleness.py ---
    "policy/importance_ess": ("share", "effective sample size of the importance weights, of the trained tokens", "mean(w)^2 / mean(w^2)", "above 0.9", "below guard.ess_min: few tokens carry the update; less staleness, or smaller steps", "dapo/update.py", "aged"),
    "staleness/age_mean": ("steps", "age of the trained tokens: steps since the weights that drew them", "mean over trained tokens", "below rollout.staleness", "at rollout.staleness: most of the batch waits for its slowest responses", "variants/clock.py", "aged"),
    "staleness/age_max": ("steps", "age of the oldest trained token", "max", "at most rollout.staleness", "it cannot be above", "variants/clock.py", "aged"),
    "staleness/versions_per_row": ("versions", "different weights that drew a trained response", "mean over trained responses", "1 to 1 + rollout.staleness", "near the upper end: steps are short beside responses", "variants/clock.py", "aged"),
    "staleness/in_flight": ("groups", "groups that stay in flight behind the step", "count", "near rollout.staleness x rollout.groups", "0: a step of its own has drained", "variants/clock.py", "aged"),
    "staleness/parked_tokens": ("tokens", "response tokens of rows that go on in the next step", "count", "steady", "grows: responses grow", "variants/clock.py", "aged"),
    # --- positive examples: positive_lm.py ---
    "policy/positive_loss": ("nats per token", "log-likelihood loss on right responses, times loss.positive_coef", "mean over updates of mu NLL, NLL over tokens of right responses; 0 in an update without one", "falls towards 0", "0: no response is right", "arXiv 2504.05118 Eq. 9-10", "positive"),
    # --- the value model: vapo/update.py ---
    "critic/explained_variance": ("share", "variance of the returns that the values explain, which the step's advantages were made of", "1 - Var(G - V) / Var(G) over trained tokens", "above 0.5 when pre-training ends; falls as accuracy nears 1, where little is left to tell", "below guard.explained_min: advantages are noise; pre-train longer (critic.pretrain_steps), or raise critic.lr; below 0: worse than a constant", "VAPO, arXiv 2504.05118 section 4.1", "differ"),
    "critic/value_loss": ("reward^2", "the value model's loss", "mean over trained tokens of (V - G)^2 / 2, of the step's updates", "falls, fastest in pre-training", "rises: critic.lr is too high, or the policy moves too fast for it", "arXiv 2503.01491", "critic"),
    "critic/clipped_frac": ("share", "trained tokens whose value has moved beyond critic.clip and no longer learns", "mean[clipped loss > loss]", "below 0.2; 0 without critic.clip", "higher: raise critic.clip, or lower critic.lr", "vapo/critic.py", "critic"),
    "critic/grad_norm": ("1", "global gradient norm of the value model before clipping", "mean over updates of ||g||", "steady", "grows tenfold: instability; nan: see critic/skipped", "code", "critic"),
    "critic/skipped": ("updates", "updates of the value model left out because a gradient or its result is not finite", "count", "0", "above 0 in a row: lower critic.lr", "code", "critic"),
    "critic/lambda_mean": ("1", "lambda of the policy's advantages", "mean over trained tokens of 1 - 1 / (alpha l), or critic.lambda_policy", "near 1 for long responses", "0: responses are shorter than 1 / critic.length_alpha tokens, and advantages are one-step differences of values", "arXiv 2504.05118 Eq. 5", "critic"),
    "critic/return_mean": ("reward", "target of a token's value", "mean over trained tokens", "rises with the reward", "as reward/mean", "vapo/gae.py", "critic"),
    "critic/return_std": ("reward", "spread of the targets", "std over trained tokens", "falls as accuracy nears 1", "0: all rewards are alike", "vapo/gae.py", "critic"),
    "critic/advantage_mean": ("reward", "advantage of trained tokens", "mean of GAE with the policy's lambda", "near 0", "far from 0: values are biased; pre-train longer", "vapo/gae.py", "critic"),
    "critic/advantage_std": ("reward", "spread of the advantages", "std over trained tokens", "below critic/return_std", "falls to 0: the policy gets no signal", "vapo/gae.py", "critic"),
    "critic/<third>/explained_variance": ("share", "as critic/explained_variance, of the third of responses by length", "1 - Var(G - V) / Var(G)", "alike", "long far below short: values of long responses are poor", "log/metrics.py", "thirds"),
    "critic/<third>/return_mean": ("reward", "as critic/return_mean, of the third", "mean", "long below short where long responses fail", "-", "log/metrics.py", "thirds"),
    "critic/<third>/return_std": ("reward", "as critic/return_std, of the third", "std", "alike", "0 of long: all long responses are alike, cut off perhaps", "log/metrics.py", "thirds"),
    "critic/<third>/advantage_mean": ("reward", "as critic/advantage_mean, of the third", "mean", "near 0", "apart: values are biased by length", "log/metrics.py", "thirds"),
    "critic/<third>/advantage_std": ("reward", "as critic/advantage_std, of the third", "std", "alike", "long far below short: lambda lets too little through; raise critic.length_alpha", "log/metrics.py", "thirds"),
    # --- responses of several turns: turns.py ---
    "turns/mean": ("turns", "turns of a response: 1 and its replies", "mean over responses", "as the task wants it", "1: the policy never calls; at 1 + rollout.turns: it calls without end", "variants/turns.py", "turns"),
    "turns/replied_frac": ("share", "responses with a reply", "count / responses", "rises where a tool pays", "0: no turn is answered; is the call written as the tool reads it?", "variants/turns.py", "turns"),
    "turns/reply_tokens": ("tokens", "tokens of a response that replies wrote; the policy wrote response/length_mean", "mean over responses", "small beside response/length_mean", "near rollout.turns x rollout.reply_tokens: replies flood the context", "variants/turns.py", "turns"),
    "turns/errors": ("responses", "responses that ended because the reply function failed (reward.on_error='miss')", "count", "0", "above 0: see the log's warnings", "variants/turns.py", "turns"),
    "time/replies_s": ("seconds", "wall-clock in which the sampler waited for replies", "sum", "small beside time/rollout_s", "most of time/rollout_s: raise reward.workers, or make the tool faster", "variants/turns.py", "turns"),
}
