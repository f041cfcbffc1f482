"""How noisy the gradient of an update is with and without Dynamic Sampling, at fixed weights.

At checkpoints of a run, `BATCHES` rollout batches are drawn with it and as many without it, from
the same stream of problems, and cut into mini-batches as in training; the gradient of each
mini-batch is taken and not applied. Given the weights these are independent: no problem is in two
of one kind.
"""

import itertools
import pathlib
import time

import jax
import numpy as np
from absl import logging

from dapo_jax import algorithm, build
from dapo_jax.dapo.state import State
from dapo_jax.data import problems
from dapo_jax.lab.experiments import bases

STEPS = (0, 20, 60)  # rollout steps of the checkpoints
BATCHES = 12  # of 32 groups, 8 mini-batches each
SEED_OFFSET = 1 << 10  # another order of the problems and other uniforms than the run had


def measure(config, where: pathlib.Path, run: pathlib.Path) -> dict:
    """{steps: checkpoint step -> 'off' or 'on' -> measures, cpu_s} of the run of `config` in the
    folder `run`; `where`: a folder to work in."""
    logging.set_verbosity(logging.WARNING)
    started = time.process_time()
    config.seed += SEED_OFFSET
    text = build.load_text(config, where, None)
    machine = build.build_machine(config, text.tokenizer.vocab_size, text.tokenizer.stop_ids, None)
    out = {}
    for step in STEPS:
        params = bases.restore(run, machine, step)
        out[str(step)] = {}
        for way, dynamic in (("off", False), ("on", True)):
            config.dynamic_sampling.enabled = dynamic
            out[str(step)][way] = noise(gradients(config, text, machine, params))
    return {"steps": out, "cpu_s": time.process_time() - started}


def gradients(config, text: build.Text, machine: build.Machine, params) -> np.ndarray:
    """float32 [batches, mini-batches, weights]: what `algorithm.update_policy` would hand to the
    optimizer if no update changed the weights; 0 for a mini-batch without a trained token."""
    stream = problems.stream(range(len(text.train.ids)), config.seed)
    state = State(params, None)
    knobs = algorithm.update_knobs(config, state)
    size = sum(w.size for w in jax.tree.leaves(params))
    out = np.zeros((BATCHES, config.optim.minibatches, size), np.float32)
    for b in range(BATCHES):
        got, _ = algorithm.sample_batch(config, text, machine, stream, state)
        minibatches = algorithm.make_minibatches(config, got.groups, b)
        for u, packed in enumerate(algorithm.pack_minibatches(config, machine, state, minibatches)):
            gradient = machine.trainer.gradient(params, packed, knobs)
            leaves = map(np.ravel, jax.tree.leaves(gradient))
            out[b, u] = np.concatenate(list(leaves))
        state = state.count(position=got.next_position, accept_rate=got.accept_rate)
    return out


def noise(gradients_BxUxP: np.ndarray) -> dict[str, float]:
    """Of independent gradients of one update each:

    snr             |mean|^2 / variance of one update's gradient, both without bias. The variance is
                    the sum over weights.
    cosine          of two batches' gradients (means over their mini-batches), mean over pairs
    signal, noise   the two parts of snr
    empty           share of updates whose gradient is zero
    """
    batches = gradients_BxUxP.astype(np.float64).mean(1)
    updates = gradients_BxUxP.reshape(-1, gradients_BxUxP.shape[-1]).astype(np.float64)
    mean = updates.mean(0)
    variance = ((updates - mean) ** 2).sum() / (len(updates) - 1)
    signal = (mean**2).sum() - variance / len(updates)
    norms = np.linalg.norm(batches, axis=1)
    cosines = [
        batches[i] @ batches[j] / (norms[i] * norms[j])
        for i, j in itertools.combinations(range(len(batches)), 2)
        if norms[i] and norms[j]
    ]
    return {
        "snr": float(signal / variance),
        "cosine": float(np.mean(cosines)),
        "signal": float(signal),
        "noise": float(variance),
        "empty": float((np.abs(updates).max(1) == 0).mean()),
    }
