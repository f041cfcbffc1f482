"""Value pre-training (VAPO sections 4.1 and 5.1): the first `critic.pretrain_steps` rollout steps
update the value model alone, on responses of the policy as it began.

The paper does not say whether its 50 "steps" are rollouts or updates; here they are rollouts.
"""

from dapo_jax.dapo import update


def on(config, step: int) -> bool:
    """Whether the policy stays as it is in rollout step `step` (from 0)."""
    return config.critic.enabled and step < config.critic.pretrain_steps


def policy_rate(config, step: int) -> float:
    """The policy's learning rate in rollout step `step`: 0 in pre-training, behind which its
    warm-up begins."""
    if on(config, step):
        return 0.0
    passed = config.critic.pretrain_steps if config.critic.enabled else 0
    return update.learning_rate(config.optim, step - passed)
