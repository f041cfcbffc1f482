"""`python tests/stubbed_train.py --config=... --workdir=...`: the trainer with a verifier that
accepts about half of all responses, by a hash of their text. Random weights then have mixed groups
to train on, so that a test needs no warm-up. Each process writes what it drew, all of it, to
WORKDIR/drawn_<process>.jsonl: one object a rollout step."""

import json
import pathlib
import zlib

import jax

from dapo_jax import cli, train
from dapo_jax.data import verifier


def accept_half(response: str, answer: str, mode: str = "dapo") -> verifier.Verdict:
    return verifier.Verdict(zlib.crc32(response.encode()) % 2 == 0, response[-4:] or None)


def recorded(sample_batch):
    def wrapper(c, text, machine, stream, state):
        got, stats = sample_batch(c, text, machine, stream, state)
        row = {
            "step": state.step,
            "tokens": [[r.tokens.tolist() for r in g.responses] for g in got.drawn],
            "correct": [g.correct.tolist() for g in got.drawn],
            "accepted": [g.position for g in got.groups],
        }
        name = f"drawn_{jax.process_index()}.jsonl"
        with pathlib.Path(cli.WORKDIR.value, name).open("a") as file:
            file.write(json.dumps(row) + "\n")
        return got, stats

    return wrapper


if __name__ == "__main__":
    verifier.verify = accept_half
    train.sample_batch = recorded(train.sample_batch)
    cli.run(train.main)
