"""DAPO from nothing on two CPU cores: a tiny model learns a game of several turns.

    python -m dapo_jax.train --config=configs/guess.py --workdir=runs/guess

A problem hides a number from 1 to 15 (of a hash of its id; the prompt says nothing of it). The
policy names numbers in at most four turns, and is told after each whether the hidden one is higher
(+) or lower (-): halving finds every number. The base model has seen that done, and mostly names
any number. Numbers found before and after, five seeds: docs/turns.md; 75 s, 106 of CPU time.
"""

from dapo_jax import config


def get_config():
    c = config.base()
    c.steps = 60
    c.supervised_warmup.optimizer = "muon"
    c.supervised_warmup.skill_steps, c.supervised_warmup.skill_lr = 150, 1e-2
    c.supervised_warmup.habit_steps, c.supervised_warmup.habit_lr = 30, 3e-3
    c.optim.lr = 1e-3
    c.reward.reply, c.rollout.turns, c.rollout.reply_tokens = "guess", 3, 4
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = 16, 4
    c.rollout.chunk = 2  # a guess and its stop token
    c.optim.share_prompts, c.optim.micro_batch_rows = True, 4
    c.checkpoint.every, c.checkpoint.journal_gb = 20, 0
    c.loss.old_logprobs = "reuse"  # all is float32 here
    return c
