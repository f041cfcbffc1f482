"""What sections must not say together: (when, the line that says so), one rule a row."""
# fmt: off

import math
from collections.abc import Mapping

from dapo_jax.config.schema import Config
from dapo_jax.dapo.settings import Advantage, Loss
from dapo_jax.gate import wrong
from dapo_jax.variants.settings import Curriculum, Tokens


def longest(c: Config) -> int:
    """Longest prompt + longest response in TOKENS."""
    return c.data.max_prompt_tokens + c.rollout.max_response_tokens


def warm_up(c: Config) -> tuple[str, ...]:
    """What the model imitates before its first step, in this order, unless `init_from` gives the
    weights: examples of the embedded 'task', rows of 'files'; () = nothing."""
    settings = c.supervised_warmup
    asked = {"task": settings.skill_steps + settings.habit_steps, "files": settings.files}
    return tuple(what for what, wanted in asked.items() if wanted)


def one_ratio(loss: Loss) -> bool:
    """Whether the objective has one ratio for a whole response."""
    from dapo_jax.variants import objectives  # imports JAX, which a config file does not need

    chosen = objectives.OBJECTIVES.get(loss.objective)  # of one of the user's, nobody knows
    return bool(chosen and chosen.of_responses)


def relations(c: Config) -> list[str]:
    """Mistakes between sections, one line each."""
    rollout, sampling, reward, loss = c.rollout, c.dynamic_sampling, c.reward, c.loss
    curriculum, critic, stale, turns = c.curriculum, c.critic, rollout.staleness, rollout.turns
    corrected = loss.importance_cap > 0  # which needs old_logprobs='recompute'
    usual = Advantage().to_dict() if critic.enabled else {}
    changed = {n: (getattr(c.advantage, n), value) for n, value in usual.items()}
    return wrong(
        # responses of several turns
        (turns and not reward.reply,
         "config.rollout.turns: nobody answers a turn; name a function or tool in reward.reply, or set 0"),
        (reward.reply and not turns,
         f"config.reward.reply: {reward.reply!r:.60} is never asked; set rollout.turns to the most replies of a response, or reward.reply=''"),
        (turns and sampling.surplus == "end",
         "config.rollout.turns: surplus 'end' ends rows by the order of their requests, and a turn is a request of its own; set dynamic_sampling.surplus='drop'"),
        (turns and critic.enabled,
         "config.rollout.turns: the value model's GAE goes through a response without gaps, and a reply is one; set critic.enabled=False"),
        (turns and c.eval.stop_strings,
         "config.eval.stop_strings: with rollout.turns a response ends by stop tokens and replies; set ''"),
        (c.eval.with_rollout and (stale or turns or rollout.draft_tokens or c.eval.stop_strings or c.eval.temperature != rollout.temperature or curriculum.temperature_schedule != "constant"),
         "config.eval.with_rollout: one call has one temperature and ends responses by tokens alone; set False, or eval.temperature = rollout.temperature, a constant one, with rollout.staleness=0 rollout.turns=0 rollout.draft_tokens=0 eval.stop_strings=''"),
        (c.init_state == "all" and not c.init_from,
         "config.init_state: 'all' is the state of another run; name it in init_from, or set 'weights'"),
        # groups and rows
        (rollout.group_size == 1 and (sampling.enabled or not critic.enabled),
         "config.rollout.group_size: 1 response makes no group to compare or to filter; set 2 or more, or critic.enabled=True and dynamic_sampling.enabled=False"),
        (0 < c.optim.row_tokens < longest(c),
         f"config.optim.row_tokens: {c.optim.row_tokens} cannot hold the longest prompt + response ({longest(c)}); raise it or set 0"),
        (c.optim.last_row_tokens >= (c.optim.row_tokens or longest(c)),
         f"config.optim.last_row_tokens: {c.optim.last_row_tokens} is not less than the length of the other rows ({c.optim.row_tokens or longest(c)}); lower it or set 0"),
        (reward.overlong_penalty and reward.overlong_buffer_tokens > rollout.max_response_tokens,
         f"config.reward.overlong_buffer_tokens: {reward.overlong_buffer_tokens} exceeds rollout.max_response_tokens = {rollout.max_response_tokens}: every response would be punished"),
        # samples that do not come from the trained policy
        (rollout.cache_dtype == "int8" and not corrected,
         "config.rollout.cache_dtype: 'int8' samples from a policy that is a little off; needs loss.old_logprobs='recompute' and loss.importance_cap (2 is usual), which weigh that"),
        (stale and not corrected,
         "config.rollout.staleness: trains on tokens of earlier weights; needs loss.old_logprobs='recompute' and loss.importance_cap (AReaL: 5), which weigh that"),
        (stale and not sampling.refill,
         "config.rollout.staleness: a batch that is short by dynamic_sampling.refill=False needs the end of a round, and there are none; set refill=True or staleness=0"),
        (stale and curriculum != Curriculum(),
         "config.rollout.staleness: a curriculum chooses by what earlier steps have finished, and here they have not; set 0, or leave config.curriculum as it is"),
        # curriculum
        ((curriculum.band_low > 0 or curriculum.band_high < 1) and not sampling.enabled,
         "config.curriculum.band_low: a band is a rule of Dynamic Sampling; set dynamic_sampling.enabled=True"),
        ((curriculum.band_low > 0 or curriculum.band_high < 1) and sampling.surplus == "end",
         "config.curriculum.band_low: whether a group is in the band is known with its last response alone; set dynamic_sampling.surplus='drop'"),
        (curriculum.temperature_schedule != "constant" and sampling.surplus == "carry",
         "config.curriculum.temperature_schedule: the log-probs of groups carried over are of an earlier temperature; set dynamic_sampling.surplus='drop'"),
        # a value model, which gives each token its own advantage
        *((value != usual, f"config.advantage.{name}: {value!r} is for advantages within a group; with critic.enabled GAE makes them: leave it at {usual!r}")
          for name, (value, usual) in changed.items()),
        (critic.enabled and c.optim.share_prompts,
         "config.optim.share_prompts: a value model reads each response behind a prompt of its own; with critic.enabled set it to False"),
        (critic.enabled and critic.bootstrap_truncated and loss.overlong_filter != "off",
         f"config.critic.bootstrap_truncated: True needs truncated responses, which loss.overlong_filter={loss.overlong_filter!r} leaves out; set that to 'off'"),
        (critic.enabled and critic.bootstrap_truncated and reward.overlong_penalty,
         "config.critic.bootstrap_truncated: True drops the reward of a truncated response and its overlong penalty with it, so that the longest would be the least punished; set reward.overlong_penalty=0"),
        (critic.enabled and one_ratio(loss) and loss.objective != "gspo_token",
         f"config.loss.objective: {loss.objective!r} has one ratio for a response, and with critic.enabled each token has its own advantage; set ppo, cispo or gspo_token"),
        # objectives that look at the whole mini-batch
        (loss.objective == "ess" and loss.kl_coef,
         "config.loss.kl_coef: 'ess' has a KL term of its own, to the old policy, and there can be only one; set 0"),
        *((value != (usual := getattr(Tokens(), name)) and not name.startswith(loss.objective.removeprefix("high_")),
           f"config.tokens.{name}: {value} belongs to another objective than loss.objective={loss.objective!r}; leave it at {usual}")
          for name, value in c.tokens.to_dict().items()),
        ("task" in warm_up(c) and (c.data.train or c.model.path),
         "config.supervised_warmup: skill_steps and habit_steps are for the embedded task only; set both to 0, and name worked examples of your own in supervised_warmup.files"),
    )


def check_cache(c: Config, pool, sizes: Mapping[str, int]) -> list[str]:
    """Mistakes of a cache that its kernel cannot read; `pool` has the fields of `paged.Geometry`."""
    rows, split = c.rollout.slots // pool.shards, c.sharding.decode["kv_heads"].split(",")
    most = (2**20 - 2**14) // (4 * (pool.row_pages + 2))  # a row's page numbers, length and place
    heads = pool.kv_heads // math.prod(sizes[axis] for axis in split if axis)
    numbers = heads * pool.layers * pool.pages * pool.page_tokens * pool.head_dim
    return wrong(
        (pool.reader == "kernel" and rows > most,
         f"config.rollout.slots: the page numbers of {rows} rows a shard, {pool.row_pages} each, exceed a TPU's scalar memory (1 MiB); set at most {most * pool.shards}, or larger rollout.page_tokens"),
        # jax's Pallas-Triton counts numbers in 32 signed bits up to 2^32 bytes of an array, and in 64
        # beyond (jax 0.10 to 0.12): of two bytes and more, those of 32 bits are always enough.
        (pool.reader == "triton" and pool.quantized and 2**31 < numbers <= 2**32,
         f"config.rollout.cache_dtype: the GPU kernel reads wrong pages of an int8 cache of 2^31 to 2^32 numbers a device and array of layers, here {numbers}; lower rollout.cache_fraction, or set 'model'"),
    )


def warnings(c: Config) -> list[str]:
    """Settings that work but deserve a word before a long run."""
    loss, critic = c.loss, c.critic
    return wrong(
        (critic.enabled and critic.pretrain_steps >= c.steps > 0,
         f"critic.pretrain_steps={critic.pretrain_steps} of steps={c.steps}: the policy does not learn in this run"),
        (loss.overlong_filter == "group" and not c.reward.overlong_penalty,
         "loss.overlong_filter='group' without the soft ramp (reward.overlong_penalty=0): nothing restrains response length"),
        (one_ratio(loss) and loss.normalizer != "sequence",
         f"loss.normalizer={loss.normalizer!r} with the objective {loss.objective!r}: the paper's is 'sequence', where every response weighs the same"),
        (loss.objective == "cispo" and loss.clip_low < 1,
         f"loss.clip_low={loss.clip_low} with the objective 'cispo' lifts small ratios to a bound; MiniMax-M1 and ScaleRL have none (clip_low=1, clip_high=4)"),
        (c.rollout.top_p < 1.0,
         f"rollout.top_p={c.rollout.top_p}: training samples are cut, log-probs are not; the gradient is biased"),
    )
