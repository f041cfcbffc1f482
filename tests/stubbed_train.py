"""`python tests/stubbed_train.py --config=... --workdir=...`: the trainer with a verifier that
accepts about half of all responses, by a hash of their text. Random weights then have mixed groups
to train on, so that a test needs no warm-up."""

import zlib

from dapo_jax import cli, train
from dapo_jax.data import verifier


def accept_half(response: str, answer: str, mode: str = "dapo") -> verifier.Verdict:
    return verifier.Verdict(zlib.crc32(response.encode()) % 2 == 0, response[-4:] or None)


if __name__ == "__main__":
    verifier.verify = accept_half
    cli.run(train.main)
