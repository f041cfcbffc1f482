"""dapo_jax in the race: `dapo_jax.train` as it is, read where it would evaluate.

`--arm=dapo` is configs/quickstart.py; `--arm=fixed` the same without Dynamic Sampling.
"""

import os
import pathlib
import signal

import clock  # beside this file


def config(base: pathlib.Path, seed: int, steps: int, arm: str, lr: float):
    from configs import quickstart

    c = quickstart.get_config()
    c.seed, c.steps, c.optim.lr = seed, steps, lr
    c.supervised_warmup.skill_steps = c.supervised_warmup.habit_steps = 0
    c.model.path, c.tokenizer.path = str(base), str(base / "tokenizer.model")
    c.data.train, c.eval.files = str(base / "train.jsonl"), f"heldout={base / 'heldout.jsonl'}"
    c.dynamic_sampling.enabled = arm == "dapo"
    c.eval.every, c.eval.top_p = clock.EVERY, 1.0
    # As for the others: no checkpoints but the trainer's first and last, no TensorBoard.
    c.checkpoint.every, c.log.tensorboard, c.log.samples = 0, False, 0
    same = (c.rollout.groups, c.rollout.group_size, c.optim.minibatches)
    assert same == (clock.GROUPS, clock.GROUP_SIZE, clock.UPDATES), same
    same = (c.loss.clip_low, c.loss.clip_high, c.optim.b1, c.optim.b2)
    assert same == (clock.CLIP_LOW, clock.CLIP_HIGH, clock.B1, clock.B2), same
    same = (c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens, c.optim.clip_norm)
    assert same == (clock.RESPONSE_TOKENS, clock.BUFFER_TOKENS, clock.CLIP_NORM), same
    return c


def main() -> None:
    args = clock.arguments()
    if args.logits:
        return logits(args)
    watch = clock.Clock(args.out)
    import jax
    from absl import logging

    from dapo_jax import train
    from dapo_jax.model import hf

    logging.set_verbosity(logging.WARNING)  # as the command line does

    def evaluate_policy(c, machine, text, state, writer, say):
        jax.block_until_ready(state.params)
        counters = state.counters

        def save(folder):
            hf.save(folder, machine.shape, state.params, "float32")

        if watch.reading(counters.step, counters.tokens, counters.updates, save):
            os.kill(os.getpid(), signal.SIGTERM)  # the trainer saves and leaves
        return {"time/eval_s": 0.0}

    train.evaluate_policy = evaluate_policy
    train.train(config(args.base, args.seed, args.steps, args.arm, args.lr), args.out / "workdir")


def logits(args) -> None:
    import numpy as np

    from dapo_jax.model import hf

    np.save(args.out, np.asarray(hf.load(args.base)(np.load(args.logits))))


if __name__ == "__main__":
    main()
