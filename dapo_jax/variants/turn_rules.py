"""What several turns do not go with, and their metrics (columns: `log.tags.Tag`). No JAX."""
# fmt: off

from dapo_jax.gate import wrong


def mistakes(c) -> list[str]:
    """Lines for `config.rules.relations`. c: the config."""
    on = c.rollout.turns > 0
    return wrong(
        (on and not c.reward.reply,
         "config.rollout.turns: nobody answers a turn; name a function or tool in reward.reply, or set 0"),
        (c.reward.reply and not on,
         f"config.reward.reply: {c.reward.reply!r:.60} is never asked; set rollout.turns to the most replies of a response, or reward.reply=''"),
        (on and c.rollout.staleness,
         "config.rollout.turns: a row that outlives its step cannot wait for a reply yet; set rollout.staleness=0"),
        (on and c.dynamic_sampling.surplus == "end",
         "config.rollout.turns: surplus 'end' ends rows by the order of their requests, and a turn is a request of its own; set dynamic_sampling.surplus='drop'"),
        (on and c.critic.enabled,
         "config.rollout.turns: the value model's GAE goes through a response without gaps, and a reply is one; set critic.enabled=False"),
        (on and c.eval.stop_strings,
         "config.eval.stop_strings: with rollout.turns a response ends by stop tokens and replies; set ''"),
    )


WHEN = {"turns": "every rollout step, with rollout.turns"}
TAGS = {
    "turns/mean": ("turns", "turns of a response: 1 and its replies", "mean over responses", "as the task wants it", "1: the policy never calls; at 1 + rollout.turns: it calls without end", "variants/turns.py", "turns"),
    "turns/replied_frac": ("share", "responses with a reply", "count / responses", "rises where a tool pays", "0: no turn is answered; is the call written as the tool reads it?", "variants/turns.py", "turns"),
    "turns/reply_tokens": ("tokens", "tokens of a response that replies wrote; the policy wrote response/length_mean", "mean over responses", "small beside response/length_mean", "near rollout.turns x rollout.reply_tokens: replies flood the context", "variants/turns.py", "turns"),
    "turns/errors": ("responses", "responses that ended because the reply function failed (reward.on_error='miss')", "count", "0", "above 0: see the log's warnings", "variants/turns.py", "turns"),
    "time/replies_s": ("seconds", "wall-clock in which the sampler waited for replies", "sum", "small beside time/rollout_s", "most of time/rollout_s: raise reward.workers, or make the tool faster", "variants/turns.py", "turns"),
}
