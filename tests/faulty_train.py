"""`python tests/faulty_train.py FAULT --config=... --workdir=...`: `stubbed_train` with something
that goes wrong on process 1 alone: in the third rollout, or where it restores. 'kill' is a SIGKILL
of any process as the third rollout begins, once the checkpoint of step 2 is there."""

import functools
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import stubbed_train

from dapo_jax import parallel, train
from dapo_jax.config import cli

FAULT = sys.argv.pop(1)
third, tries = False, 0
to_host, restored = parallel.to_host, ocp.CheckpointManager.restore


def stands_still() -> None:
    time.sleep(3600)


def third_rollout() -> None:
    global third
    third = True
    if FAULT == "kill":
        while not pathlib.Path(cli.WORKDIR.value, "checkpoints", "2").is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "hang" and jax.process_index() == 1:
        stands_still()
    if FAULT == "break" and jax.process_index() == 1:
        raise ValueError("no more of this")


def flipped_to_host(tree):
    """One bit of one log-prob, as this host sees it."""
    out = to_host(tree)
    if FAULT == "flip" and third and jax.process_index() == 1 and hasattr(out, "logp_SxN"):
        logp_SxN = np.array(out.logp_SxN)
        logp_SxN.view(np.uint32)[0, 0] ^= np.uint32(1)
        out = out._replace(logp_SxN=logp_SxN)
    return out


def restore(self, step, *arguments, **named):
    """Process 1 reads arrays alone, not the JSON of a step."""
    global tries
    tries += jax.process_index() == 1
    if FAULT == "away" and 0 < tries < 3:
        raise OSError(5, "Input/output error")
    if FAULT == "half" and step == 2 and tries:
        raise ValueError("DATA_LOSS: a checksum does not match")
    return restored(self, step, *arguments, **named)


parallel.to_host, ocp.CheckpointManager.restore = flipped_to_host, restore
if __name__ == "__main__":
    stubbed_train.know_programs_of_others(sys.argv)
    hooks = train.Hooks(step=stubbed_train.record)
    hooks = stubbed_train.at(hooks, "rollout", 3, third_rollout)
    cli.run(functools.partial(train.main, score=stubbed_train.JUDGE, hooks=hooks))
