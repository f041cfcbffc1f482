"""`python tests/stubbed_train.py [kill] --config=... --workdir=...`: the trainer with a verifier
that accepts about half of all responses, by a hash of their text. Random weights then have mixed
groups to train on, without a warm-up. kill: a SIGKILL as the third rollout begins, once the
checkpoint of step 2 is there."""

import functools
import os
import pathlib
import signal
import sys
import time
import zlib

from jax._src import cache_key

from dapo_jax import build, train
from dapo_jax.config import cli
from dapo_jax.reward.grading import Grade, Judge
from dapo_jax.rollout import sampler


def accept_half(problem, response: str) -> Grade:
    right = zlib.crc32(response.encode()) % 2 == 0
    return Grade(1.0 if right else -1.0, right, response[-4:] or None)


# As in a run with a verifier of the config, another looks on.
JUDGE = Judge(accept_half, shadow=accept_half)


def at(hooks: train.Hooks, phase: str, times: int, action) -> train.Hooks:
    """`hooks`, and `action()` as that phase begins for the so many-th time."""
    begun = 0

    def begins(name: str) -> None:
        nonlocal begun
        hooks.phase(name)
        begun += name == phase
        if (name, begun) == (phase, times):
            action()

    return hooks._replace(phase=begins)


def kill() -> None:
    while not pathlib.Path(cli.WORKDIR.value, "checkpoints", "2").is_dir():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def forget_programs() -> None:
    """Those that earlier runs of this process have compiled."""
    build._trainer.cache_clear()
    sampler.programs.cache_clear()


def know_programs_of_others(argv: list[str]) -> None:
    """Several processes know a program by the same key, as those of a slice do, and find it where
    process 0 has kept it. On CPU each has another fingerprint of the same devices, and would
    compile all of it at each start. Only for a cache that this machine alone has written."""
    if not any(flag.startswith("--num_processes=") for flag in argv):
        return
    cache_key._hash_accelerator_config = lambda key, devices: key.update(b"slice")


if __name__ == "__main__":
    hooks = train.QUIET
    if sys.argv[1] == "kill":
        del sys.argv[1]
        hooks = at(hooks, "rollout", 3, kill)
    cli.run(functools.partial(train.main, score=JUDGE, hooks=hooks))
