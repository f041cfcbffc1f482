"""Rewards and machines with the mistakes that `benchmarks/diagnose.py` breaks runs by."""

import dataclasses
import re
from unittest import mock

import jax
import numpy as np

from dapo_jax import build
from dapo_jax.dapo.reward import Grade


def said(response: str) -> str:
    """The last stated answer; '' where there is none."""
    return (re.findall(r"Answer: (\S+)", response) or [""])[-1]


def graded(response: str, right: bool) -> Grade:
    return Grade(float(right), right, said(response) or None)


def text(problem, response: str) -> Grade:
    """Compares texts, where gold answers are written otherwise ('9 apples')."""
    return graded(response, said(response) == problem.answer)


def one_digit(problem, response: str) -> Grade:
    """Reads one digit, so that a gold answer of two is never right."""
    return graded(response, said(response)[:1] == problem.answer)


def failing(problem, response: str) -> Grade:
    """Has an error, which shows where the gold answer has two digits."""
    gold = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")[int(problem.answer)]
    return graded(response, said(response) == gold)


def at_most(problem, response: str) -> Grade:
    """Takes every number up to the gold answer for right."""
    number = said(response)
    return graded(response, number.isdigit() and int(number) <= int(problem.answer))


def anywhere(problem, response: str) -> Grade:
    """Finds the gold answer anywhere in the response."""
    return graded(response, problem.answer in response.split())


def form(problem, response: str) -> Grade:
    """Pays four times as much for `Wait` in the response as for its answer."""
    parts = {"right": float(said(response) == problem.answer), "form": float("Wait" in response)}
    return Grade(0.2 * parts["right"] + 0.8 * parts["form"], parts=parts)


def brief(problem, response: str) -> float:
    """Pays for few words, and a little for the answer."""
    return 0.2 * (said(response) == problem.answer) + 1 / (1 + len(response.split()))


def lengthy(problem, response: str) -> float:
    """Pays for words beside the answer."""
    return 0.5 * (said(response) == problem.answer) + len(response.split()) / 16


def replaced(where, name: str, make):
    """Within it `where.name` is `make(what it was)`."""
    return mock.patch.object(where, name, make(getattr(where, name)))


def noisy():
    """The sampler's weights are each some 5% off the trainer's, as under a poor rounding."""

    def off(x, rng):
        noise = 1 + 0.05 * rng.standard_normal(x.shape).astype(np.float32)
        return jax.device_put(x * noise, x.sharding)

    def make(usual):
        def decode_params(self, params):
            rng = np.random.default_rng(0)
            return usual(self, jax.tree.map(lambda x: off(x, rng), params))

        return decode_params

    return replaced(build.Machine, "decode_params", make)


def unsent():
    """The sampler keeps the first weights: updates are not sent to it."""
    first = []

    def make(usual):
        def decode_params(self, params):
            first[:] = first or [jax.tree.map(np.asarray, params)]
            put = lambda old, new: jax.device_put(old, new.sharding)
            return usual(self, jax.tree.map(put, *first, params))

        return decode_params

    return replaced(build.Machine, "decode_params", make)


def stopped_by(word: str):
    """Another token ends a response: the last of `word`, or one that is never written."""

    def make(usual):
        def load_text(*args, **kwargs):
            loaded = usual(*args, **kwargs)
            tok = loaded.tokenizer
            last = tok.encode(word)[-1] if word else tok.vocab_size - 1
            tok = dataclasses.replace(tok, stop_ids=frozenset([last]))
            return loaded._replace(tokenizer=tok)

        return load_text

    return replaced(build, "load_text", make)
