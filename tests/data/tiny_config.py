"""A run of 0 steps on the embedded task: a random model, evaluated and saved."""

from dapo_jax import config


def get_config():
    c = config.base()
    c.steps = 0
    c.model.hidden_size, c.model.intermediate_size, c.model.num_layers = 32, 32, 1
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 2, 1, 16
    c.reward.verifier = "integer"  # of which a random model gets a few right
    c.rollout.slots, c.rollout.prefill_prompts = 8, 8
    c.rollout.groups, c.rollout.max_response_tokens = 8, 12
    c.eval.max_problems, c.eval.k = 48, 8
    c.data.embedded_problems = 16
    c.log.tensorboard = False
    return c
