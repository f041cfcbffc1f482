"""Maximum and sums of a softmax in one reading of its logits: a Pallas kernel by Triton, for NVIDIA
GPUs, where XLA reads them once for the maximum and once for the sums.

Dims: N rows of logits, V vocabulary, J blocks of a row, b tokens of a block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax import parallel

_BLOCK = 4096  # tokens of the vocabulary that a program reads
LOWEST = -1e30  # finite: exp of a difference to it is 0 and not NaN


class Sums(NamedTuple):
    """About x, logits over the temperature; float32, [N, J] of blocks or [N] of rows."""

    top: jax.Array  # the largest x
    total: jax.Array  # sum of exp(x - top)
    mean: jax.Array  # sum of exp(x - top) (x - top)

    def of_rows(self) -> "Sums":
        top = self.top.max(-1, keepdims=True)
        fade = jnp.exp(self.top - top)
        mean = fade * (self.mean + self.total * (self.top - top))
        return Sums(top[..., 0], (fade * self.total).sum(-1), mean.sum(-1))


def how() -> dict:
    """What kernels of blocks are called with. Off GPUs they are interpreted, for tests."""
    from jax.experimental.pallas import triton  # here: see paged_kernel.py

    options = triton.CompilerParams(num_warps=8, num_stages=2)
    return dict(compiler_params=options, interpret=parallel.platform() != "gpu")


def block_tokens(vocab: int) -> int:
    """b, of a vocabulary that one device holds."""
    return min(_BLOCK, 1 << (vocab - 1).bit_length())


def block_sums(logits_NxV: jax.Array, temperature: jax.Array) -> Sums:
    """[N, J], of float32 logits. Minus infinity counts as LOWEST."""
    from jax.experimental import pallas as pl

    N, V = logits_NxV.shape
    b = block_tokens(V)
    J = pl.cdiv(V, b)
    row = lambda n: pl.BlockSpec((None, n), lambda s, j: (s, 0))
    sums = pl.pallas_call(
        functools.partial(_sum_block, vocab=V, b=b),
        grid=(N, J),
        in_specs=[row(V), pl.BlockSpec((1,), lambda s, j: (0,))],
        out_specs=[row(J)] * 3,
        out_shape=[jax.ShapeDtypeStruct((N, J), jnp.float32)] * 3,
        name="softmax_sums",
        **how(),
    )(logits_NxV, jnp.reshape(temperature, 1))
    return Sums(*sums)


def scaled(logits_ref, temperature_ref, j, vocab: int, b: int):
    """In a kernel: block j of a row's logits over the temperature; LOWEST behind the vocabulary."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    there_b = j * b + jnp.arange(b) < vocab
    x_b = triton.load(logits_ref.at[pl.ds(j * b, b)], mask=there_b, other=0.0)
    return jnp.where(there_b, jnp.maximum(x_b / temperature_ref[0], LOWEST), LOWEST)


def _sum_block(logits_ref, temperature_ref, top_ref, total_ref, mean_ref, *, vocab, b):
    from jax.experimental import pallas as pl

    j = pl.program_id(1)
    x_b = scaled(logits_ref, temperature_ref, j, vocab, b)
    top = x_b.max()
    weight_b = jnp.exp(x_b - top)
    top_ref[j], total_ref[j] = top, weight_b.sum()
    mean_ref[j] = (weight_b * (x_b - top)).sum()
