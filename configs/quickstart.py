"""DAPO from nothing on two CPU cores: a tiny Qwen2.5 learns chained arithmetic.

    bash launch/quickstart.sh
    python -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

Another recipe on the same task is named behind the file, `configs/quickstart.py:gspo`: one of
`presets.RECIPES`; `python -m benchmarks arms --study=recipes` compares them.

A supervised warm-up makes a base model of 101,952 parameters that can work a problem out but
mostly guesses; 60 rollout steps of full DAPO then raise its held-out accuracy (T=1) from about 0.15
to above 0.9. Hardware: two cores, about 25 seconds. Five seeds and the baseline:
docs/results/learning.md.
"""

from dapo_jax import config
from dapo_jax.config import presets


def get_config(recipe: str = ""):
    c = config.base()  # full DAPO on the embedded task: steps of 32 x 8 responses and 8 updates
    c.steps = 60
    c.supervised_warmup.optimizer = "muon"
    c.supervised_warmup.skill_steps, c.supervised_warmup.skill_lr = 350, 1e-2
    c.supervised_warmup.habit_steps, c.supervised_warmup.habit_lr = 60, 3e-3
    c.rollout.chunk = 16  # most responses end within it
    c.optim.share_prompts, c.optim.micro_batch_rows = True, 4
    c.checkpoint.every, c.checkpoint.journal_gb = 20, 0  # a step cut off is .2 s of work
    if recipe not in ("", *presets.RECIPES):
        raise ValueError(f"no recipe {recipe!r}; there are {', '.join(presets.RECIPES)}")
    if recipe:
        return presets.RECIPES[recipe](c)
    c.loss.old_logprobs = "reuse"  # all is float32 here: the trainer's own would be these to 3e-6
    return c
