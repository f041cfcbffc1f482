"""What the programs of a GPU must read, write and multiply, and the least time that this takes.

By arithmetic, so that no GPU is needed: `python -m benchmarks gpu --only=roofline`. Decoding: one
token of each row, mode 'full', keys of so many tokens a row. Update: a pass over packed rows of
2,048 tokens, forward and backward; beside it with what 'full' remat computes again. Bytes are of
weights, keys and values, logits and sums of gradients; those of activations are not counted.
"""

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks import harness
from dapo_jax import plan
from dapo_jax.log import hardware
from dapo_jax.model import paged, paged_triton, qwen2
from dapo_jax.plan import footprint, gpus

CARD = gpus.CHIPS["h100"]
SIZES = "0.5B", "1.5B", "7B"
ROWS, CONTEXT = 256, 512  # of the program for all slots: rows, and tokens that each has behind it
TAIL = (128, 64, 16), 8192  # of those for a call's last rows
PASS, ROW = 8192, 2048  # tokens of a pass of an update, and of a row
ITEM, WIDE = 2, 4  # bytes of bfloat16 and of float32
DRAW_PASSES = 2  # over the logits of a token: written, and read by the draw
LOSS_PASSES = 8  # over those of a pass, forward, again and backward


class Work(NamedTuple):
    """What a program does: FLOPs, and bytes of HBM by what they are."""

    flops: float
    bytes: Mapping[str, float]
    tokens: int  # that come of it
    shares: int = 1  # programs of the attention kernel that share a row

    def seconds(self) -> tuple[float, float]:
        """Seconds of HBM and of the products: the program takes the longer of the two, or more."""
        return sum(self.bytes.values()) / CARD.bandwidth, self.flops / CARD.flops


def decode(shape: qwen2.Shape, rows: int, context: int, row_tokens: int = 22_528) -> Work:
    """One token of each row. row_tokens: of the longest row, by which the kernel is cut."""
    g = paged.geometry(
        shape._replace(scan_layers=False), "gpu", slots=rows, shards=1, row_tokens=row_tokens,
        page_tokens=0, fraction=1.0,
    )  # fmt: skip
    weights, width = footprint.read_count(shape), shape.num_heads * shape.head_dim
    keys = rows * context * paged.pool_bytes(g, "bfloat16") / g.tokens
    moved = {
        "weights": weights * ITEM, "keys": keys,
        "logits": DRAW_PASSES * rows * shape.vocab_size * WIDE,
    }  # fmt: skip
    flops = 2 * rows * weights + 4 * rows * context * width * shape.num_layers
    return Work(flops, moved, rows, paged_triton.shares(rows, g.kv_heads, g.row_pages))


def update(shape: qwen2.Shape, tokens: int = PASS, again: bool = False) -> Work:
    """A pass over `tokens`. again: what 'full' remat computes a second time counts as well."""
    forward = hardware.forward_flops(shape, [ROW] * (tokens // ROW))
    passes, weights = 3 + again, qwen2.param_count(shape)
    moved = {
        "weights": passes * weights * ITEM,
        "gradients": weights * (2 * ITEM + 2 * WIDE),  # one of the pass, and the sum of all
        "logits": LOSS_PASSES * tokens * shape.vocab_size * WIDE,
    }
    return Work(passes * forward, moved, tokens)


def programs(size: str) -> dict[str, Work]:
    shape = plan.published(f"Qwen/Qwen2.5-{size}")
    rows, context = TAIL
    out = {f"decode, {ROWS} rows of {CONTEXT:,} tokens": decode(shape, ROWS, CONTEXT)}
    out |= {f"decode, {n} rows of {context:,} tokens": decode(shape, n, context) for n in rows}
    out[f"update, a pass of {PASS:,} tokens"] = update(shape)
    out[f"update, a pass of {PASS:,} tokens, remat 'full'"] = update(shape, again=True)
    return out


def table() -> harness.Table:
    out = harness.Table(
        "NVIDIA H100, by arithmetic", "GB", "TFLOP", "HBM, ms", "products, ms", "most tokens/s",
        "shares of a row", name="gpu_roofline",
    )  # fmt: skip
    for size in SIZES:
        for name, work in programs(size).items():
            hbm, products = work.seconds()
            out.row(
                f"{size}: {name}",
                f"{sum(work.bytes.values()) / 1e9:.2f}",
                f"{work.flops / 1e12:.3g}",
                f"{hbm * 1e3:.2f}",
                f"{products * 1e3:.2f}",
                f"{work.tokens / max(hbm, products):,.0f}",
                work.shares,
            )
    return out
