"""Seconds of sampling: a token of all slots, a prompt, a call of the sampler.

Each part is a roofline: the bytes that it reads over what HBM gives, or the operations that it does
over what the matrix units do, whichever takes longer; and beside it what waits for other devices.

Dims: C chunks, S slots. Seconds and sizes are of one device; all devices work alike.
"""

from typing import NamedTuple

import numpy as np

from dapo_jax.plan.constants import Values
from dapo_jax.plan.scene import Scene
from dapo_jax.plan.simulate import Trace
from dapo_jax.pods.slices import Pod

# How this package's programs work; a change of theirs changes these lines.
BLOCK_TOKENS = 1024  # keys in a turn of the kernel's loop: paged_kernel._BLOCK_TOKENS
AHEAD = 7  # blocks under way from HBM while one is worked on: paged_kernel._AHEAD
FLAG_EVERY = 8  # tokens between two looks at whether all rows have ended
FEW = 4  # the last rows run in a program of so many times fewer slots

_PARTS = 4  # a chunk is looked at in the middle of so many parts


class Reads(NamedTuple):
    """What attention of one layer and head works through in the shard that has most of it, which
    all others wait for; summed over the tokens of each chunk."""

    blocks_C: np.ndarray  # turns of the kernel's loop
    pages_C: np.ndarray  # read from HBM: of a row's last block only as far as it is filled
    rows_C: np.ndarray  # rows in flight


class Call(NamedTuple):
    """One call of the sampler, as far as it takes time."""

    steps_C: np.ndarray  # tokens of each chunk
    reads: Reads
    queued_C: np.ndarray  # bool: requests are waiting
    prefills: int  # calls of the prefill program
    rows_C: np.ndarray | int  # slots of a shard in the program that runs


def call(trace: Trace, prefill_chunks: int, scene: Scene) -> Call:
    """prefill_chunks: calls of the prefill program that take one prompt through."""
    shards, rows = scene.sizes.shards, scene.sizes.slots // scene.sizes.shards
    most_C = (trace.count_CxS > 0).reshape(-1, shards, rows).sum(2).max(1)
    last_C = ~trace.queued_C & (most_C <= rows // FEW) & (rows % 32 == 0)
    rows_C = np.where(last_C, rows // FEW, rows)
    prefills = int(trace.prefills_C.sum()) * prefill_chunks
    return Call(trace.steps_C, reads(trace, scene), trace.queued_C, prefills, rows_C)


def reads(trace: Trace, scene: Scene) -> Reads:
    rows, steps_C = scene.sizes.slots // scene.sizes.shards, trace.steps_C
    total = np.zeros((3, len(steps_C)))
    for part in range(_PARTS):
        at_Cx1 = ((part + 0.5) / _PARTS * steps_C)[:, None]
        live_CxS = trace.count_CxS > at_Cx1
        seen_CxS = np.where(live_CxS, trace.position_CxS + at_Cx1 + 1, 0)
        blocks_CxS = np.ceil(seen_CxS / BLOCK_TOKENS)
        pages_CxS = np.ceil(seen_CxS / scene.sizes.page_tokens)
        for x_C, x_CxS in zip(total, (blocks_CxS, pages_CxS, live_CxS), strict=True):
            x_C += x_CxS.reshape(len(steps_C), -1, rows).sum(2).max(1)
    return Reads(*(total / _PARTS * steps_C))


def decode(call: Call, scene: Scene, k: Values) -> dict[str, np.ndarray]:
    """Seconds of each chunk by what they go into: {'attention': [C], ...}."""
    once = {  # seconds of one token
        "products": products(scene, call.rows_C, k),
        "all-reduces": scene.shape.num_layers * 2 * reduce_seconds(scene, call.rows_C, k),
        "small operations": scene.shape.num_layers * k["small_ops"],
        "head and draw": draw_seconds(scene, call.rows_C, k),
    }
    read_C = attention_seconds(call.reads, scene, k)
    begun_C = start_seconds(scene, k) * call.steps_C
    return {what: s * call.steps_C for what, s in once.items()} | {
        "attention": scene.shape.num_layers * (scene.kv_heads * read_C + begun_C)
    }


def products(scene: Scene, rows: np.ndarray, k: Values) -> np.ndarray:
    """Matrix products of a token of `rows` rows: bound by reading weights, or by multiplying."""
    chip, split = scene.pod.chip, scene.decode_split
    return np.maximum(
        scene.read_bytes / split / (k["weights_hbm"] * chip.bandwidth),
        2 * scene.multiplied / split * rows / (k["decode_mxu"] * chip.flops),
    )


def reduce_seconds(scene: Scene, rows: np.ndarray, k: Values) -> np.ndarray:
    """One all-reduce of the residual stream, along one mesh axis after the other: a device keeps
    its part of each sum, and at last the parts are gathered. Groups along one side of the slice
    share its links."""
    seconds, part, sharing = 0.0, rows * scene.stream_bytes, 1
    for n in scene.decode_axes:
        seconds += 2 * (n - 1) / n * part * sharing / axis_rate(scene.pod, n, k)
        part, sharing = part / n, 1 if n in scene.pod.sides else sharing * n
    return seconds + k["reduce_latency"] * bool(scene.decode_axes)


def axis_rate(pod: Pod, n: int, k: Values) -> float:
    """Bytes a second around n chips in a row: a ring where n is a whole side of a torus that closes
    (v4, v5p: multiples of 4; v5e, v6e: 16), else a line, which goes one way at a time."""
    whole = 4 if pod.family in ("v4", "v5p") else 16
    ring = n in pod.sides and n % whole == 0
    return k[f"ici.{pod.family}"] * (1 if ring else 0.5)


def draw_seconds(scene: Scene, rows: np.ndarray, k: Values) -> np.ndarray:
    size = rows * scene.vocab / (128 * 19008)
    over_tensor = 4 * (scene.decode_split > 1)  # embedding, three of the draw
    over_shards = (scene.sizes.shards > 1) / FLAG_EVERY
    return k["draw"] * size + k["small_collective"] * (over_tensor + over_shards)


def attention_seconds(read: Reads, scene: Scene, k: Values) -> np.ndarray:
    """[C], of one layer and head: the kernel's bundles, or what HBM gives, or the latency of
    copies, of which AHEAD are under way. The cores of a chip share out its rows, and its HBM."""
    family = scene.pod.family
    cores = int(k[f"cores.{family}"])
    hbm = scene.pod.chip.bandwidth * k["keys_hbm"]
    copied_C = read.pages_C * scene.sizes.page_tokens * scene.key_bytes / hbm
    block, beside = (k[f"{scene.cache}.{part}.{family}"] for part in ("block", "beside"))
    n_C = read.blocks_C * block + read.rows_C * beside
    waited_C = (read.blocks_C * k["dma_latency"] / cores + copied_C) / AHEAD
    return np.maximum.reduce([n_C / k[f"clock.{family}"] / cores, copied_C, waited_C])


def start_seconds(scene: Scene, k: Values) -> float:
    """From the kernel's call until its first block is there."""
    family = scene.pod.family
    return k[f"{scene.cache}.start.{family}"] / k[f"clock.{family}"] + k["dma_latency"]


def prefill_seconds(scene: Scene, k: Values) -> float:
    """One call of a shard's prompts; no head is run."""
    chip = scene.pod.chip
    n = scene.read / scene.decode_split - scene.vocab * scene.shape.hidden_size
    return max(
        2 * n * scene.sizes.prefill_rows * scene.prefill_tokens / (k["prefill_mxu"] * chip.flops),
        n * scene.item / (k["weights_hbm"] * chip.bandwidth),
    )


def sampling(call: Call, scene: Scene, k: Values) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds by phase, seconds by what decoding goes into) of one call. 'tail': decoding while
    no request waits for a slot. 'host': what the device waits for the host between two chunks."""
    into_C = decode(call, scene, k)
    token_C = sum(into_C.values())
    rows_C = call.reads.rows_C / np.maximum(call.steps_C, 1) * scene.sizes.shards
    host_C = k["host_chunk"] + k["host_row"] * rows_C
    phases = {
        "prefill": call.prefills * prefill_seconds(scene, k),
        "decode": float(token_C[call.queued_C].sum()),
        "tail": float(token_C[~call.queued_C].sum()),
        "host": float(host_C.sum()),
    }
    return phases, {what: float(x.sum()) for what, x in into_C.items()}
