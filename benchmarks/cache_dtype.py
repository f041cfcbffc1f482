"""What int8 keys and values, and bfloat16, do to the samples of a trained model. CPU, minutes.

    python -m benchmarks cache_dtype --full --model=DIR      # config.json + safetensors

Samples responses at T=1 after one token of prompt, takes the log-probs that the sampler records,
and runs the trainer's forward over the same tokens in the same dtype. What it finds is how far off
the denominator of the ratio is with loss.old_logprobs='reuse', and what loss.importance_cap has to
weigh with rollout.cache_dtype='int8'. The last two rows: the same function with one pair of key
components 100 times as large and the queries' as much smaller, as biases of Qwen2.5 make some; int8
as it is, and without `int8_keys.even_keys`.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, sides
from benchmarks.harness import Flag
from dapo_jax.model import hf, qwen2
from dapo_jax.rollout.engine import Draw, Request

FLAGS = {
    "model": Flag("", "", "folder of the model"),
    "samples": Flag(16, 256),
    "tokens": Flag(16, 120, "of a response"),
}
# row: (compute, keys and values, is stretched, is evened)
ROWS = {
    "float32": ("float32", "model", False, True),
    "float32, int8": ("float32", "int8", False, True),
    "bfloat16": ("bfloat16", "model", False, True),
    "bfloat16, int8": ("bfloat16", "int8", False, True),
    "bfloat16, int8, stretched": ("bfloat16", "int8", True, True),
    "bfloat16, int8, stretched, not evened": ("bfloat16", "int8", True, False),
}


def generate(model, dtype: str, cache: str, even: bool, samples: int, tokens: int):
    """Tokens and log-probs of responses at T=1, and greedy tokens after as many first ones."""
    slots = min(samples, 128)
    engine = sides.engine(model.shape, slots, 1, tokens, tokens, dtype, cache_dtype=cache)
    cast = engine.decode_params if even else lambda p: qwen2.cast(p, dtype)
    weights = cast(model.params)
    requests = [Request([1], 0, i) for i in range(samples)]
    drawn, _ = engine.generate(weights, requests, Draw(seed=0))
    starts = [Request([i % model.shape.vocab_size], 0, 0) for i in range(samples)]
    greedy, _ = engine.generate(weights, starts, Draw(seed=0, temperature=0))
    stacked = lambda responses, name: np.stack([getattr(r, name) for r in responses])
    return stacked(drawn, "tokens"), stacked(drawn, "logps"), stacked(greedy, "tokens")


def trainer(model, dtype: str, tokens_NxT: np.ndarray) -> np.ndarray:
    """Log-probs of the trainer's forward; float64 [N, T]."""
    weights = qwen2.cast(model.params, jnp.dtype(dtype))
    whole = np.concatenate([np.ones_like(tokens_NxT[:, :1]), tokens_NxT], 1)

    @jax.jit
    def logps(tokens):
        logits = qwen2.bind(model.shape, weights)(tokens[:, :-1])
        found = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(found, tokens[:, 1:, None], 2)[..., 0]

    return np.concatenate([np.asarray(logps(x), np.float64) for x in np.split(whole, 8)])


def compared(sampled_NxT, trained_NxT) -> list[str]:
    """Cells about the sampler's log-probs against the trainer's of the same tokens. KL(sampler ||
    trainer) by Schulman's k3; effective samples: of tokens with weights pi_trainer / pi_sampler."""
    gap = trained_NxT - sampled_NxT
    weight, size = np.exp(gap), np.abs(gap)
    kl, ess = (weight - 1 - gap).mean(), weight.sum() ** 2 / weight.size / (weight**2).sum()
    gaps = size.mean(), np.quantile(size, 0.99), size.max(), kl
    return [*(f"{x:.2g}" for x in gaps), f"{ess:.5f}", f"{(weight > 2).mean():.2g}"]


def flips(greedy_NxT, exact_NxT) -> float:
    """Share of greedy tokens that differ, among those whose prefixes do not."""
    same = np.cumprod(greedy_NxT == exact_NxT, axis=1).sum(1)
    diverged = (same < exact_NxT.shape[1]).sum()
    return diverged / (same.sum() + diverged)


def stretched(model, by: float = 100.0):
    """The same function, with a pair of key components `by` times as large in every head."""
    blocks, h = dict(model.params["blocks"]), model.shape.head_dim // 2
    pair = np.ones(model.shape.head_dim, np.float32)
    pair[[1, 1 + h]] = by
    for name, factor in (("k", pair), ("k_bias", pair), ("q", 1 / pair), ("q_bias", 1 / pair)):
        blocks[name] = blocks[name] * factor
    return model._replace(params=model.params | {"blocks": blocks})


def measure(args) -> list[harness.Table]:
    if not args.model:
        raise SystemExit("error: --model=DIR, a trained model")
    model = hf.load(pathlib.Path(args.model))
    table = harness.Table(
        "compute, keys and values", "mean log-prob difference", "99%", "largest",
        "KL a token, nats", "effective samples", "weights above 2", "greedy tokens that flip",
    )  # fmt: skip
    exact = {}
    for name, (dtype, cache, is_stretched, even) in ROWS.items():
        m = stretched(model) if is_stretched else model
        tokens, logps, greedy = generate(m, dtype, cache, even, args.samples, args.tokens)
        exact.setdefault(dtype, greedy)
        cells = compared(logps, trainer(m, dtype, tokens))
        table.row(name, *cells, f"{flips(greedy, exact[dtype]):.2%}")
    return [table]
