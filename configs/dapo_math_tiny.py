"""Real input, toy weights: does a problem file pass through the whole loop? Minutes on a laptop.

    python -m dapo_jax.train --config=configs/dapo_math_tiny.py --workdir=runs/dapo_math_tiny \\
        --config.data.train=dapo-math-17k.parquet --config.tokenizer.path=Qwen2.5-0.5B

A random Qwen2.5 of two narrow layers with the real vocabulary of 151,936 rows gets every problem
wrong, so the expected result is a run that says so: no group has right and wrong responses, the
rounds are used up, and after two such steps the run stops with a checkpoint and exit code 0.
"""

from dapo_jax import config


def get_config():
    c = config.base()
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 151_936, 32, 64
    c.model.init_std = 0.02
    c.tokenizer.chat = True
    c.data.on_bad = "skip"
    c.data.max_prompt_tokens, c.data.on_long = 256, "filter"
    c.rollout.groups, c.rollout.group_size, c.rollout.slots = 4, 4, 16
    c.rollout.max_response_tokens, c.rollout.prefill_prompts = 16, 4
    c.reward.overlong_buffer_tokens = 4
    c.dynamic_sampling.max_rounds, c.dynamic_sampling.max_empty_steps = 3, 2
    c.optim.minibatches, c.optim.micro_batch_rows = 2, 2
    c.model.head_chunk = 128
    c.steps = 4
    return c
