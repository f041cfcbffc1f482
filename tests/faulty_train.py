"""`python tests/faulty_train.py FAULT --config=... --workdir=...`: `stubbed_train` with something
that goes wrong on process 1 alone: after the sixth grading, or where it restores."""

import functools
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
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


restored, tries = ocp.CheckpointManager.restore, 0


def restore(self, step, *arguments, **named):
    """Process 0 alone reads the JSON of a step; here it is about the arrays."""
    global tries
    tries += jax.process_index() == 1
    if FAULT == "away" and 0 < tries < 3:
        raise OSError(5, "Input/output error")
    if FAULT == "half" and step == 2 and tries:
        raise ValueError("DATA_LOSS: a checksum does not match")
    return restored(self, step, *arguments, **named)


grading.grade_groups, ocp.CheckpointManager.restore = grade_groups, restore
if __name__ == "__main__":
    cli.run(
        functools.partial(
            train.main, score=stubbed_train.JUDGE, hooks=train.Hooks(step=stubbed_train.record)
        )
    )
