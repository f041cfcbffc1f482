"""The ladder: a paper's techniques taken away one by one, as in its Table 1."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dapo_jax.config.paper import vapo
from dapo_jax.config.schema import Config, base, leaves

# The paper's techniques in the order of its Table 1 -> fields of full DAPO that change without it.
WITHOUT: dict[str, Callable[[Config], dict[str, Any]]] = {
    "overlong_filtering": lambda c: {"loss.overlong_filter": "off"},
    "clip_higher": lambda c: {"loss.clip_high": c.loss.clip_low},
    "soft_overlong": lambda c: {"reward.overlong_penalty": 0.0},
    "token_loss": lambda c: {"loss.normalizer": "sequence"},
    "dynamic_sampling": lambda c: {
        "dynamic_sampling.enabled": False,
        "dynamic_sampling.surplus": c.dynamic_sampling.surplus.replace("carry", "drop"),
    },
}


class Ladder(NamedTuple):
    """A paper's techniques: added one after the other, and each left out of the whole."""

    full: str  # what has all of them, in words
    bare: str  # name of the rung without any
    without: Mapping[str, Callable[[Config], dict[str, Any]]]
    paper: Mapping[str, int]  # rung -> AIME 2024, avg@32, of Qwen2.5-32B

    @property
    def cumulative(self) -> tuple[str, ...]:
        return self.bare, *(f"+{name}" for name in self.without)

    @property
    def leave_one_out(self) -> tuple[str, ...]:
        return tuple(f"-{name}" for name in self.without)

    @property
    def rungs(self) -> tuple[str, ...]:
        """All of them, once: the last one left out is the last but one of the cumulative."""
        return *self.cumulative, *self.leave_one_out[:-1]


# Table 1 of each paper; VAPO's (arXiv 2504.05118) adds nothing one by one. Without decoupled GAE
# the value model's targets have the policy's fixed lambda; without group sampling there are as many
# responses, each to a problem of its own.
LADDERS = {
    "dapo": Ladder("full DAPO", "grpo", WITHOUT, {
        "grpo": 30, "+overlong_filtering": 36, "+clip_higher": 38, "+soft_overlong": 41,
        "+token_loss": 42, "+dynamic_sampling": 50,
    }),
    "vapo": Ladder("VAPO", "ppo",
        {
            "value_pretraining": lambda c: {  # there is none without a value model
                "critic.pretrain_steps": 0 if c.critic.enabled else c.critic.pretrain_steps
            },
            "decoupled_gae": lambda c: {"critic.lambda_value": c.critic.lambda_policy},
            "length_adaptive_gae": lambda c: {"critic.length_alpha": 0.0},
            "clip_higher": WITHOUT["clip_higher"],
            "token_loss": WITHOUT["token_loss"],
            "positive_lm": lambda c: {"loss.positive_coef": 0.0},
            "group_sampling": lambda c: {
                "rollout.groups": c.rollout.groups * c.rollout.group_size,
                "rollout.group_size": 1,
            },
        },
        {
            "ppo": 5, "-value_pretraining": 11, "-decoupled_gae": 33, "-length_adaptive_gae": 45,
            "-clip_higher": 46, "-token_loss": 53, "-positive_lm": 54, "+positive_lm": 55,
            "+group_sampling": 60,
        },
    ),
}  # fmt: skip


def rung(c: Config, name: str, ladder: Ladder = LADDERS["dapo"]) -> Config:
    """The rung `name` of a ladder, from `c`, the config with all its techniques.

    A rung with overlong filtering takes truncated responses out of the loss and keeps them in the
    statistics of their group (loss.overlong_filter 'loss'), unless `c` itself says 'group': the
    paper "masks the loss of truncated samples" and does not mention the group's mean and std.
    Raises ValueError for an unknown name, and if `c` lacks one of the techniques.
    """
    known = ladder.cumulative + ladder.leave_one_out
    if name not in known:
        raise ValueError(f"the ladder has no rung {name!r}; there are {', '.join(known)}")
    c = copy.deepcopy(c)
    if "overlong_filtering" in ladder.without and c.loss.overlong_filter == "off":
        c.loss.overlong_filter = "loss"
    flat = leaves(c)
    for technique, fields in ladder.without.items():
        if all(flat[field] == value for field, value in fields(c).items()):
            raise ValueError(
                f"the ladder starts from {ladder.full}, and this config is without {technique}"
            )
    techniques, up_to = list(ladder.without), ladder.cumulative
    taken = techniques[up_to.index(name) :] if name in up_to else [name[1:]]
    for technique in taken:
        c.update(ladder.without[technique](c))
    return c


def ladder_task() -> Config:
    """Full DAPO on the embedded task, as configs/ladder.py compares its rungs.

    Against the quickstart: a little less warm-up, so that there is more to learn; a higher learning
    rate, at which noise costs accuracy; and responses of at most 20 tokens, of which the longest
    right answers need 17, so that there is truncation to filter and to punish.
    """
    c = base()
    c.steps = 90
    c.supervised_warmup.skill_steps, c.supervised_warmup.habit_steps = 800, 160
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = 20, 3
    c.optim.lr = 5e-4
    c.eval.every, c.eval.top_p = 15, 1.0  # T=1, top-p 1 only
    c.checkpoint.every = 30
    return c


def vapo_ladder_task() -> Config:
    """VAPO on the task of `ladder_task`, whose responses have about 12 tokens.

    Fewer steps and a lower rate for the policy than there, so that it still learns when rungs are
    compared; why lambda is .5: docs/vapo.md.
    """
    c = vapo(ladder_task())
    c.critic.pretrain_steps, c.critic.lr = 20, 1e-3
    c.critic.lambda_policy, c.critic.length_alpha = 0.5, 1.5
    c.steps, c.optim.lr = 30 + c.critic.pretrain_steps, 2e-4
    c.eval.every, c.checkpoint.every = 10, 25
    return c
