"""Flash attention by platform for packed training rows: splash on TPU, packed_triton.py or cuDNN on
NVIDIA GPUs from Ampere on. All give what `attention.packed` gives, and write no scores to memory.
Dims as there."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dapo_jax import parallel
from dapo_jax.model import packed_triton, paged_triton
from dapo_jax.model.attention import in_query_chunks, packed

# Of `splash`'s output and its log-sum-exp: the remat policy 'attention' keeps them.
SAVED = "attention"
_LANES, BLOCK = 128, 1024
_CUDNN_CHUNK = 4096  # queries: a bias of 8 KB for each key, and rows up to that in one call


def kernel(kind: str, dtype, head_dim: int, shared: bool = False):
    """The function (q, k, v, segments, chunk) -> y that `model.attention` names. shared: rows may
    hold prompts of several sequences (`attention.SHARED`), which splash and triton cannot see."""
    kind = choose(kind, dtype, head_dim, shared)
    if kind == "splash":
        return lambda *args: splash(*args[:4])
    if kind == "triton":
        return lambda *args: packed_triton.attend(*args[:4], SAVED)
    step = functools.partial(cudnn if kind == "cudnn" else packed, shared=shared)
    least = _CUDNN_CHUNK if kind == "cudnn" else 0
    return lambda *args: checkpoint_name(step(*args[:4], max(args[4], least)), SAVED)


def choose(kind: str, dtype, head_dim: int, shared: bool = False) -> str:
    """'auto' -> the kernel that the platform in use has for this dtype and head size."""
    if kind != "auto":
        return kind
    platform = parallel.platform()
    if platform == "tpu" and head_dim in (64, 128, 256):
        return "splash"
    if runs_cudnn(dtype, head_dim):
        return "triton" if paged_triton.fits(16, head_dim) and not shared else "cudnn"
    return "chunked"


def runs_cudnn(dtype, head_dim: int) -> bool:
    """Whether cuDNN's kernel runs here; it needs the GPUs that Triton needs."""
    return parallel.runs_triton() and dtype == jnp.bfloat16 and head_dim in range(8, 136, 8)


def splash(q_BxHxTxd, k_BxKxTxd, v_BxKxTxd, segments_BxT) -> jax.Array:
    """jax's splash kernels on each device's rows and heads, without blocks above the diagonal or
    between sequences. Padding sees its own block. Off TPU they are interpreted, for tests."""
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas  # see paged_kernel.py

    def attend(q, k, v, segments):
        (B, H, T, d), K = q.shape, k.shape[1]
        block = min(BLOCK, -(-T // _LANES) * _LANES)
        pad = -T % block
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (q, k, v))
        segments = jnp.pad(segments, ((0, 0), (0, pad)))
        causal = _kernel(H // K, T + pad, block)
        scaled = (q.astype(jnp.float32) * d**-0.5).astype(q.dtype)

        def row(q_KxGxTxd, k_KxTxd, v_KxTxd, segments_T):
            ids = pallas.SegmentIds(segments_T, segments_T)
            kernel = _within_segments(causal, segments_T, block)
            # An axis of vmap is one that a chip's cores share out among themselves.
            by_head = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))
            return by_head(q_KxGxTxd, k_KxTxd, v_KxTxd)

        y = jax.vmap(row)(scaled.reshape(B, K, H // K, T + pad, d), k, v, segments)
        return y.reshape(B, H, T + pad, d)[:, :, :T]

    heads, kv_heads = (("batch", n, None, None) for n in ("heads", "kv_heads"))
    split = parallel.per_shard(attend, (heads, kv_heads, kv_heads, ("batch", None)), heads)
    return split(q_BxHxTxd, k_BxKxTxd, v_BxKxTxd, segments_BxT)


def _kernel(num_heads: int, T: int, block: int):
    """Causal attention of `num_heads` query heads over one key/value head."""
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    # Keys at a time in registers, a divisor of the block's.
    compute = block if block <= 512 else math.gcd(block, 512)
    sizes = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), block)
    sizes |= dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), compute)
    # dQ from the pass that makes dK and dV: 5 products, not 7.
    sizes = pallas.BlockSizes(**sizes, use_fused_bwd_kernel=True)
    mask = pallas.MultiHeadMask([pallas.CausalMask((T, T))] * num_heads)
    how = dict(block_sizes=sizes, head_shards=1, q_seq_shards=1, residual_checkpoint_name=SAVED)
    with jax.ensure_compile_time_eval():
        return pallas.make_splash_mqa(mask, **how, interpret=parallel.platform() != "tpu")


def _within_segments(kernel, segments_T, block: int):
    """The causal kernel without the blocks in which no query and key are of one sequence. Its two
    tables say which (query, key) blocks it computes, and which block of keys, or in the backward
    pass of queries, it asks for meanwhile: where nothing is computed, the next that is."""
    segments_QxC = segments_T.reshape(-1, block)
    key = jnp.arange(len(segments_QxC))
    query = key[:, None]
    # Padding comes last, and nobody reads what it attends to: its own block, to stay finite.
    number_QxC = jnp.where(segments_QxC == 0, 2**30 + query, segments_QxC)
    low_Q, high_Q = number_QxC.min(1), number_QxC.max(1)
    shared_QxK = (low_Q[:, None] <= high_Q) & (low_Q <= high_Q[:, None])
    forward, backward = kernel.fwd_mask_info, kernel.dkv_mask_info
    blocks_QxK = jnp.where(shared_QxK, forward.block_mask[0], 0)
    first_Qx1 = blocks_QxK.argmax(1)[:, None]
    keys_QxK = jnp.where(key < query, first_Qx1, jnp.roll(first_Qx1, -1, 0))
    cut = lambda info, ahead_QxK, at: info._replace(
        block_mask=blocks_QxK[None],
        data_next=jnp.where(blocks_QxK > 0, at, ahead_QxK)[None].astype(info.data_next.dtype),
    )
    # A column of queries begins on the diagonal, for the next head too.
    parts = cut(forward, keys_QxK, key), None, cut(backward, key, query)
    return type(kernel)(*parts, **kernel.kwargs)


def cudnn(
    q_BxHxTxd, k_BxKxTxd, v_BxKxTxd, segments_BxT, chunk: int, implementation="cudnn", shared=False
):
    """cuDNN's flash kernel by jax.nn.dot_product_attention, which knows no segments: they go in as
    a bias, of `chunk` queries at a time and the keys up to their end. Of a row's first chunk, which
    is told that it is causal, cuDNN leaves out what is above the diagonal."""
    by_token = lambda x: jnp.swapaxes(x, 1, 2)  # [B, heads, T, d] <-> [B, T, heads, d]
    k, v = by_token(k_BxKxTxd), by_token(v_BxKxTxd)

    def attend(q, mask_Bx1xcxT):
        queries, keys = mask_Bx1xcxT.shape[2:]
        how = dict(is_causal=queries == keys, implementation=implementation, mask=mask_Bx1xcxT)
        y = jax.nn.dot_product_attention(by_token(q), k[:, :keys], v[:, :keys], **how)
        return by_token(y)

    return in_query_chunks(attend, q_BxHxTxd, segments_BxT, chunk, shared, prefixes=True)
