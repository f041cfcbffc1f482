"""`python tests/faulty_train.py FAULT --config=... --workdir=...`: `stubbed_train` with something
that goes wrong on process 1 alone, from the third rollout on."""

import functools
import sys
import time

import jax
import numpy as np
import stubbed_train

from dapo_jax import cli, grading, train

FAULT = sys.argv.pop(1)
graded, rounds = grading.grade_groups, 0


def grade_groups(tokenizer, judge, groups, problems):
    """After every round. Evaluation, which grades too, comes before the first."""
    global rounds
    groups = graded(tokenizer, judge, groups, problems)
    rounds += 1
    if rounds < 6 or jax.process_index() != 1:
        return groups
    if FAULT == "hang":
        time.sleep(3600)
    if FAULT == "break":
        raise ValueError("no more of this")
    if FAULT == "flip":  # one bit of one log-prob
        response = groups[1].responses[2]
        response.logps.view(np.uint32)[0] ^= np.uint32(1)
    return groups


grading.grade_groups = grade_groups
if __name__ == "__main__":
    cli.run(
        functools.partial(
            train.main, score=stubbed_train.JUDGE, hooks=train.Hooks(step=stubbed_train.record)
        )
    )
