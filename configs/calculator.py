"""DAPO from nothing on two CPU cores: a tiny model learns to call a calculator.

    python -m dapo_jax.train --config=configs/calculator.py --workdir=runs/calculator

The embedded task; a turn that ends with an expression (`g 4 + 2`) is answered with its value by the
shipped tool, and the response goes on behind it. A supervised warm-up teaches a base model how a
call is written, but nothing of arithmetic: it mostly guesses. 40 rollout steps of full DAPO then
make it call as often as the problem wants. Held-out accuracy at T=1, seed 0, one run: .06 -> .34 at
step 20 -> .71, with 1.1 -> 4.8 turns a response of the training problems; 52 s, 76 of CPU time.
"""

from dapo_jax import config


def get_config():
    c = config.base()
    c.steps = 40
    c.supervised_warmup.optimizer = "muon"
    c.supervised_warmup.skill_steps, c.supervised_warmup.skill_lr = 220, 1e-2
    c.supervised_warmup.habit_steps, c.supervised_warmup.habit_lr = 40, 3e-3
    c.reward.reply, c.rollout.turns, c.rollout.reply_tokens = "calculator", 8, 4
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = 56, 8
    c.rollout.chunk = 5  # a call and its stop token
    c.optim.share_prompts, c.optim.micro_batch_rows = True, 4
    c.checkpoint.every, c.checkpoint.journal_gb = 20, 0  # a step cut off is a second of work
    c.loss.old_logprobs = "reuse"  # all is float32 here
    return c
