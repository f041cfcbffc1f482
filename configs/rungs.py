"""One rung of DAPO's ladder on a task whose bottlenecks are the paper's: docs/rungs.md.

    python -m benchmarks rungs
    python -m dapo_jax.train --config=configs/rungs.py:+clip_higher --workdir=runs/rung

The first command writes the problems and makes the base model under runs/rungs, from which every
run begins. Rungs: those of configs/ladder.py; `vapo`, which is VAPO on the same task; and the
recipes of `presets.RECIPES`, of which `cispo` alone, DAPO with another clip, filters as DAPO does.

A response of training has at most 28 tokens, one of evaluation twice as many (JustRL's ratio): the
base writes long, and what it writes is mostly right where it may end. Truncated responses leave the
loss and the statistics of their group (loss.overlong_filter 'group'): the other reading of the
paper's sentence than that of configs/ladder.py.
"""

import pathlib

from dapo_jax import config
from dapo_jax.config import presets

HOME = pathlib.Path("runs/rungs")  # of `python -m benchmarks rungs`
LEVELS = (1, 2, 3, 4, 5, 6, 7)  # operations of a problem
LIMIT = 28  # longest response of training in TOKENS
VALUE_STEPS = 20  # rollout steps of value pre-training, of rung `vapo`


def get_config(rung: str = presets.LADDERS["dapo"].cumulative[-1], home: pathlib.Path = HOME):
    """home: folder of the problems and of the base model."""
    c = config.base()
    c.steps, c.optim.lr = 20, 4.5e-4
    c.init_from, data = str(home / "base_100" / "checkpoints"), home / "data"
    c.data.train, c.tokenizer.path = str(data / "train.jsonl"), str(data / "tokenizer.model")
    c.eval.files, c.eval.max_problems = f"heldout={data / 'heldout.jsonl'}", 0
    c.eval.every, c.eval.k, c.eval.top_p, c.eval.max_response_tokens = 4, 2, 1.0, 2 * LIMIT
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 128, 8, 32
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = LIMIT, 6  # the paper's fifth
    c.rollout.chunk, c.optim.micro_batch_rows = 16, 4
    c.loss.overlong_filter = "group"
    c.loss.old_logprobs = "reuse"  # all is float32 here
    c.checkpoint.every, c.checkpoint.journal_gb, c.log.tensorboard = 0, 0, False
    if rung == "vapo":
        c = presets.vapo(c)
        c.critic.lr, c.critic.length_alpha, c.critic.pretrain_steps = 1e-3, 1.5, VALUE_STEPS
        c.steps += VALUE_STEPS
        return c
    c.optim.share_prompts = True  # a value model cannot
    if rung in presets.RECIPES:
        c.loss.overlong_filter = "group" if rung == "cispo" else "off"
        return presets.RECIPES[rung](c)
    dapo = presets.LADDERS["dapo"]
    known = dict.fromkeys([*dapo.cumulative, *dapo.leave_one_out, "vapo", *presets.RECIPES])
    if rung not in known:
        raise ValueError(f"no rung {rung!r}; there are {', '.join(known)}")
    return presets.rung(c, rung)
