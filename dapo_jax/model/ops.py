"""Operations of the network that XLA would compute slowly, or round, if they were written plainly:
rows of the embedding, products of tokens with weights, logits, RMSNorm.

Dims: B rows, T tokens, N = B T, D hidden, F outputs, H heads, d head_dim, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from dapo_jax import parallel


@jax.custom_vjp
def _rows(table_VxD, ids):
    return table_VxD[ids]


def _rows_backward(kept, grad):
    table, ids = kept  # the table for its shape and dtype alone
    if parallel.platform() == "gpu":
        grad_NxD = grad.reshape(ids.size, -1).astype(jnp.float32)
        grad_VxD = _sums_of_rows(table.shape, ids.reshape(-1), grad_NxD)
    else:
        grad_VxD = jnp.zeros(table.shape, jnp.float32).at[ids].add(grad.astype(jnp.float32))
    return grad_VxD.astype(table.dtype), None


def _sums_of_rows(shape, ids_N, grad_NxD) -> jax.Array:
    """`zeros.at[ids].add(grad)` added up in one order: a GPU's additions at like indices come in
    any, and XLA's own way to order them takes 10 ms for 8,192 tokens of 1.5B, on H100."""
    order_N = jnp.argsort(ids_N)
    ids_N, grad_NxD = ids_N[order_N], grad_NxD[order_N]

    def add(a, b):  # sums from the first of a run of like ids on
        (a_ids, a_sums), (b_ids, b_sums) = a, b
        return b_ids, b_sums + jnp.where((a_ids == b_ids)[:, None], a_sums, 0.0)

    _, sums_NxD = jax.lax.associative_scan(add, (ids_N, grad_NxD))
    last_N = jnp.append(ids_N[1:] != ids_N[:-1], True)
    spot_N = jnp.where(last_N, ids_N, shape[0] + jnp.arange(ids_N.size))  # out of range: dropped
    return jnp.zeros(shape, jnp.float32).at[spot_N].set(sums_NxD, mode="drop", unique_indices=True)


_rows.defvjp(lambda table, ids: (table[ids], (table, ids)), _rows_backward)


def lookup(embed_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Rows of the embedding, [B, T, D]; gradients of a row add up in float32. Of a split table
    every device looks its own part of the vocabulary up, and the answer is the sum over devices:
    the partitioner would gather the whole table or activation on each device."""
    over_V, over_D = parallel.mesh_axes("vocab"), parallel.mesh_axes("embed")
    if parallel.axis_size("vocab") * parallel.axis_size("embed") == 1:
        return _rows(embed_VxD, tokens_BxT)
    scatter = bool(over_V) and over_V == parallel.mesh_axes("sequence")

    def part(embed, tokens):
        embed = jax.lax.all_gather(embed, over_D, axis=1, tiled=True) if over_D else embed
        first = jax.lax.axis_index(over_V) * embed.shape[0] if over_V else 0
        ids = tokens - first
        mine = (ids >= 0) & (ids < embed.shape[0])
        x = jnp.where(mine[..., None], _rows(embed, jnp.where(mine, ids, 0)), 0)
        if scatter:
            return jax.lax.psum_scatter(x, over_V, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x, over_V) if over_V else x

    token = "sequence" if scatter else None
    split = parallel.per_shard(part, (("vocab", "embed"), ("batch", None)), ("batch", token, None))
    return split(embed_VxD, tokens_BxT)


# Matrix products and not einsums over three axes: for one token a row XLA on CPU then neither
# transposes weights nor activations.


def linear(x_xD, w_DxF, **how):
    """Product of each token with the weights. On CPU as one of all tokens: over two axes of tokens
    XLA sums the gradient of the weights from a transposed copy, at a third of the speed."""
    x = x_xD.reshape(-1, x_xD.shape[-1]) if parallel.platform() == "cpu" else x_xD
    return jnp.matmul(x, w_DxF, **how).reshape(*x_xD.shape[:-1], -1)


def to_heads(x_BxTxD, w_DxHxd, bias_Hxd=None):
    """Product [B, H, T, d] of each token with the weights of the heads."""
    D, H, d = w_DxHxd.shape
    y_BxTxHd = linear(x_BxTxD, w_DxHxd[...].reshape(D, H * d))
    y_BxTxHd = y_BxTxHd if bias_Hxd is None else y_BxTxHd + bias_Hxd[...].reshape(H * d)
    return y_BxTxHd.reshape(*x_BxTxD.shape[:2], H, d).swapaxes(1, 2)


def from_heads(y_BxHxTxd, w_HxdxD):
    """Product [B, T, D] of the heads of each token with the weights."""
    B, H, T, d = y_BxHxTxd.shape
    return linear(y_BxHxTxd.swapaxes(1, 2).reshape(B, T, H * d), w_HxdxD.reshape(H * d, -1))


def logits(x_xD, head_DxV) -> jax.Array:
    """float32 [..., V]: products of the compute dtype, added up and returned in float32. Under a
    float32 head (as of ScaleRL and MiniMax-M1) TPUs do not multiply in bfloat16."""
    if head_DxV.dtype == x_xD.dtype:
        return (_product if parallel.platform() == "gpu" else _matmul)(x_xD, head_DxV)
    return jnp.matmul(x_xD.astype(jnp.float32), head_DxV, precision=jax.lax.Precision.HIGHEST)


_matmul = functools.partial(linear, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _product(x_xD, head_DxV):
    """`_matmul` whose gradient multiplies in the compute dtype too, as TPUs do unasked: with the
    float32 gradient of logits GPUs would multiply in float32, at half the speed."""
    return _matmul(x_xD, head_DxV)


def _product_backward(kept, grad_xV):
    x_xD, head_DxV = kept
    grad_xV = grad_xV.astype(x_xD.dtype)
    x_NxD, grad_NxV = (a.reshape(-1, a.shape[-1]) for a in (x_xD, grad_xV))
    return grad_xV @ head_DxV.T, x_NxD.T @ grad_NxV


_product.defvjp(lambda x, head: (_matmul(x, head), (x, head)), _product_backward)


def rms_norm(x, scale, eps: float):
    """x / rms(x) * scale, with the mean square in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale
