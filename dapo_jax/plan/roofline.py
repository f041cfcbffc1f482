"""A config on a slice in numbers; seconds of a call of the sampler and of passes over packed rows.

Each part is a roofline: the bytes that it reads over what HBM gives, or the operations that it does
over what the matrix units do, whichever takes longer; and beside it what waits for other devices.

Dims: C chunks, S slots. Seconds and sizes are of one device; all devices work alike.
"""

import copy
import math
from typing import NamedTuple

import numpy as np

from dapo_jax.config import validation
from dapo_jax.model import paged, qwen2
from dapo_jax.model.paged_kernel import _AHEAD as AHEAD, _BLOCK_TOKENS as BLOCK_TOKENS
from dapo_jax.plan.constants import Values
from dapo_jax.plan.footprint import cache, item_bytes, outputs, parts, read_count, wide_count
from dapo_jax.plan.shapes import value_model
from dapo_jax.plan.simulate import BLOCK, Packed, Sizes, Trace
from dapo_jax.pods.slices import Pod
from dapo_jax.rollout.schedule import rungs

# How this package's programs work; a change of theirs changes these lines.
FLAG_EVERY = 8  # tokens between two looks at whether all rows have ended

_PARTS = 4  # a chunk is looked at in the middle of so many parts


class Scene:
    """A config on a slice, in the numbers that the time model reads. Sizes are of one device, but
    for those that say 'whole'."""

    def __init__(self, config, shape: qwen2.Shape, sizes, pod: Pod):
        """sizes: the mesh, {'data': ..., 'fsdp': ..., 'tensor': ...}."""
        g, rollout = cache(config, shape, sizes, pod.platform), config.rollout
        row = config.data.max_prompt_tokens
        decode, train = config.sharding.decode, config.sharding.train
        self.pod, self.shape = pod, shape  # whole
        # The sampler.
        chunk = min(rollout.chunk, rollout.max_response_tokens)
        held = g.pages, g.page_tokens, -(-rollout.prefill_prompts // g.shards), pod.slices == 1
        self.sizes = Sizes(rollout.slots, g.shards, chunk, *held)
        self.prefill_tokens = min(rollout.prefill_tokens, -(-row // 8) * 8)  # of a prompt in a call
        self.kv_heads = -(-shape.num_kv_heads // parts("kv_heads", decode, sizes))
        self.key_bytes = 2 * paged.vector_bytes(g, config.model.dtype)  # of a token, layer and head
        self.cache = "ours.int8" if g.quantized else "ours"  # whose constants the kernel has
        self.vocab = -(-shape.vocab_size // parts("vocab", decode, sizes))  # columns of the head
        self.decode_split = parts("mlp", decode, sizes)  # parts of a weight
        # The same along each mesh axis, the quickest first.
        along = [a for a in reversed(decode["mlp"].split(",")) if a]
        self.decode_axes = tuple(n for a in along if (n := sizes[a]) > 1)
        # The weights.
        self.parameters, self.read = qwen2.param_count(shape), read_count(shape)  # whole
        self.adapters = qwen2.adapter_count(shape)  # trained in their place; 0 = none
        self.wide = wide_count(config, shape)  # read by a float32 head of a model of another dtype
        self.item = item_bytes(config)  # of a weight or activation
        self.read_bytes = self.read * self.item + self.wide * (4 - self.item)  # whole
        # `read` in bfloat16 products; the highest precision takes six of them for one.
        self.multiplied = self.read + 5 * self.wide
        self.stream_bytes = shape.hidden_size * self.item  # of a token's residual stream, whole
        # The trainer.
        self.train_kv_heads = -(-shape.num_kv_heads // parts("kv_heads", train, sizes))
        self.train_split = parts("mlp", train, sizes)  # parts of a weight's inner axis
        self.fsdp = parts("embed", train, sizes)  # parts of what `train_split` leaves
        self.replicas = pod.devices // (self.train_split * self.fsdp)  # of the weights
        # Slices that hold different weights, which each gathers from the others.
        self.weight_slices = pod.slices if "data" in train["embed"].split(",") else 1
        self.micro_rows = validation.micro_rows(config, sizes)  # of a micro-batch, on all devices
        self.row_tokens = validation.row_tokens(config)
        self.last_row_tokens = config.optim.last_row_tokens
        # Share of `read` whose products a backward pass computes again: it needs nothing of what a
        # block's last product gives, and keeps logits of whole rows.
        last = shape.num_layers * shape.intermediate_size * shape.hidden_size
        head = outputs(shape) * shape.hidden_size
        again = 0 if shape.remat == "none" or "dots" in shape.remat else self.read - head - last
        again += head * (shape.head_chunk < self.row_tokens)
        self.again = again / self.read
        # Forward passes before the updates: old, reference log-probs.
        self.scored = (config.loss.old_logprobs == "recompute") + bool(config.loss.kl_coef)
        value = value_model(config, shape)
        self.value = value and Scene(config, value, sizes, pod)  # which only trains

    def replaced(self, **fields) -> "Scene":
        """A copy with other fields; what is made of them stays."""
        new = copy.copy(self)
        vars(new).update(fields)
        return new


class Call(NamedTuple):
    """One call of the sampler, as far as it takes time. Blocks, pages and live rows are what
    attention of one layer and head works through in the shard that has most of it, which all others
    wait for; summed over the tokens of each chunk."""

    steps_C: np.ndarray  # tokens of each chunk
    queued_C: np.ndarray  # bool: requests are waiting
    prefills: int  # calls of the prefill program
    slots_C: np.ndarray | int  # slots of a shard in the program that runs
    blocks_C: np.ndarray  # turns of the kernel's loop
    pages_C: np.ndarray  # read from HBM: of a row's last block only as far as it is filled
    live_C: np.ndarray  # rows in flight
    moved: int = 0  # pages copied between shards


def call(trace: Trace, prefill_chunks: int, scene: Scene) -> Call:
    """prefill_chunks: calls of the prefill program that take one prompt through."""
    shards, steps_C = scene.sizes.shards, trace.steps_C
    rows = scene.sizes.slots // shards
    fullest = lambda x_CxS: x_CxS.reshape(len(steps_C), shards, rows).sum(2).max(1)
    most_C, slots_C = fullest(trace.count_CxS > 0), np.full(len(steps_C), rows)
    for n in rungs(scene.sizes.slots, shards):  # the most first
        slots_C[~trace.queued_C & (most_C * shards <= n)] = n // shards
    read = np.zeros((3, len(steps_C)))
    for part in range(_PARTS):
        at_Cx1 = ((part + 0.5) / _PARTS * steps_C)[:, None]
        live_CxS = trace.count_CxS > at_Cx1
        seen_CxS = np.where(live_CxS, trace.position_CxS + at_Cx1 + 1, 0)
        held = (np.ceil(seen_CxS / n) for n in (BLOCK_TOKENS, scene.sizes.page_tokens))
        read += [fullest(x_CxS) for x_CxS in (*held, live_CxS)]
    prefills = int(trace.prefills_C.sum()) * prefill_chunks
    return Call(steps_C, trace.queued_C, prefills, slots_C, *(read / _PARTS * steps_C), trace.moved)


def sampling(call: Call, scene: Scene, k: Values) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds by phase, seconds by what decoding goes into) of one call. 'tail': decoding while
    no request waits for a slot. 'host': between two chunks the device waits for the host and copies
    pages between shards, one by one, each as a sum over all."""
    into_C = decode(call, scene, k)
    token_C = sum(into_C.values())
    rows_C = call.live_C / np.maximum(call.steps_C, 1) * scene.sizes.shards
    host_C = k["host_chunk"] + k["host_row"] * rows_C
    chip, sizes = scene.pod.chip, scene.sizes
    read = scene.read / scene.decode_split - scene.vocab * scene.shape.hidden_size  # no head is run
    prefill = max(
        2 * read * sizes.prefill_rows * scene.prefill_tokens / (k["prefill_mxu"] * chip.flops),
        read * scene.item / (k["weights_hbm"] * chip.bandwidth),
    )
    page = scene.shape.num_layers * scene.kv_heads * sizes.page_tokens * scene.key_bytes
    copied = 2 * (1 - 1 / sizes.shards) * page / axis_rate(scene.pod, sizes.shards, k)
    copied += 2 * k["reduce_latency"]
    phases = {
        "prefill": call.prefills * prefill,
        "decode": float(token_C[call.queued_C].sum()),
        "tail": float(token_C[~call.queued_C].sum()),
        "host": float(host_C.sum()) + call.moved * copied,
    }
    return phases, {what: float(x.sum()) for what, x in into_C.items()}


def decode(call: Call, scene: Scene, k: Values) -> dict[str, np.ndarray]:
    """Seconds of each chunk by what they go into: {'attention': [C], ...}."""
    over_tensor = 4 * (scene.decode_split > 1)  # small collectives: the embedding's, the draw's 3
    over_shards = (scene.sizes.shards > 1) / FLAG_EVERY
    over_slices = k["dcn_latency"] * (scene.pod.slices > 1) / FLAG_EVERY
    draw = (k["draw"] + k["draw_row"] * call.slots_C) * (scene.vocab / 19008)
    chip, split = scene.pod.chip, scene.decode_split
    products = np.maximum(  # bound by reading weights, or by multiplying
        scene.read_bytes / split / (k["weights_hbm"] * chip.bandwidth),
        2 * scene.multiplied / split * call.slots_C / (k["decode_mxu"] * chip.flops),
    )
    once = {  # seconds of one token
        "products": products,
        "all-reduces": scene.shape.num_layers * 2 * reduce_seconds(scene, call.slots_C, k),
        "small operations": scene.shape.num_layers * k["small_ops"],
        "head and draw": draw + k["small_collective"] * (over_tensor + over_shards) + over_slices,
    }
    once = {what: k["decode_beside"] * s for what, s in once.items()}
    attention_C = scene.shape.num_layers * attention_seconds(call, scene, k)
    return {what: s * call.steps_C for what, s in once.items()} | {"attention": attention_C}


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
    (of three sides multiples of 4; v5e, v6e: 16), else a line, which goes one way at a time."""
    whole = 4 if len(pod.sides) == 3 else 16
    ring = len(pod.sides) == 1 or (n in pod.sides and n % whole == 0)  # 1: behind a switch
    return k[f"ici.{pod.family}"] * (1 if ring else 0.5)


def attention_seconds(call: Call, scene: Scene, k: Values) -> np.ndarray:
    """[C], of one layer. A head takes the kernel's bundles, or what HBM gives, or the latency of
    copies, of which AHEAD are under way. The cores of a chip share out its rows, and its HBM."""
    family, chip = scene.pod.family, scene.pod.chip
    cores, clock = int(k[f"cores.{family}"]), k[f"clock.{family}"]
    bundles = lambda part: k[f"{scene.cache}.{part}.{family}"]
    copied_C = call.pages_C * scene.sizes.page_tokens * scene.key_bytes
    copied_C = copied_C / (chip.bandwidth * k["keys_hbm"])
    busy_C = call.blocks_C * bundles("block") + call.live_C * bundles("beside")
    busy_C = busy_C / clock / cores
    waited_C = (call.blocks_C * k["dma_latency"] / cores + copied_C) / AHEAD
    head_C = np.maximum.reduce([busy_C, copied_C, waited_C])
    return scene.kv_heads * head_C + (bundles("start") / clock + k["dma_latency"]) * call.steps_C


class Pass(NamedTuple):
    """One micro-batch of packed rows, on a device."""

    products: float  # seconds
    elementwise: float
    attention: float
    waits: float  # for collectives that nothing runs beside
    flops: float  # of products and attention, what is computed again included

    @property
    def seconds(self) -> float:
        return self.products + self.elementwise + self.attention + self.waits


def micro_batch(scene: Scene, pairs: float, k: Values, *, update: bool) -> Pass:
    """A forward pass; with `update` also the backward pass and what it computes again. pairs: of a
    query and a key that attention computes in these rows."""
    family, chip, chips = scene.pod.family, scene.pod.chip, scene.pod.devices
    narrow = ".8" if scene.train_split >= 8 else ""
    passes = 3 - bool(scene.adapters) + scene.again if update else 1
    flops = passes * 2 * scene.multiplied * scene.micro_rows * scene.row_tokens / chips
    products = flops / (k[f"train_mxu{narrow}"] * chip.flops)

    looks = 2 if update and scene.shape.remat in ("dots", "full") else 1
    blocks = scene.shape.num_heads * scene.shape.num_layers * pairs / BLOCK**2 / chips
    score = 4 * scene.shape.head_dim * BLOCK**2 * blocks  # FLOPs of one look
    cores = int(k[f"cores.{family}"])

    def on_cores(way: str, n: int) -> float:
        """Seconds where the cores share out n things of one size."""
        bundles = k[f"splash.{way}.{family}"] * k["splash_waits"] * blocks
        return bundles / k[f"clock.{family}"] * math.ceil(n / cores) / n

    forward = on_cores("forward", scene.shape.num_heads // scene.train_split)
    backward = on_cores("backward", scene.train_kv_heads)
    return Pass(
        products,
        k[f"elementwise{narrow}"] * products,
        looks * forward + update * backward,
        collective_waits(scene, k, update=update),
        flops + score * (looks + 2.5 * update),
    )


def collective_waits(scene: Scene, k: Values, *, update: bool) -> float:
    """Seconds per micro-batch in which a device waits for others: for whole rows of the residual
    stream that are gathered over `tensor` (a sum that each device gets whole counts twice), layers
    of weights that are gathered over `fsdp`, gradients that replicas of the weights add up. Between
    slices each device fetches what its own slice lacks, and adds up its part of gradients."""
    t, f, d = scene.train_split, scene.fsdp, scene.replicas
    kind, seconds = "update" if update else "forward", 0.0
    if t > 1:
        rows = scene.micro_rows * t / scene.pod.devices * scene.row_tokens * scene.stream_bytes
        moved = k[f"{kind}_moved"] * scene.shape.num_layers * rows
        seconds += moved * (t - 1) / t / axis_rate(scene.pod, t, k)
    weights, family = scene.read_bytes / t, scene.pod.family
    dcn, far = k[f"dcn.{family}"] * k["dcn_share"], scene.weight_slices
    if f > 1:
        axes = max(len(scene.pod.sides) - (t > 1), 1)
        gathered = k[f"{kind}_weights" + ".8" * (t >= 8)] * weights
        seconds += gathered * (1 / far - 1 / f) / (k[f"ici.{family}"] * axes)
        seconds += gathered * (1 - 1 / far) / dcn
    if d > 1 and update:
        slices = scene.pod.slices // far
        near, trained = d // slices, scene.adapters or scene.parameters
        gradients = 2 * weights / f * trained / scene.parameters
        seconds += gradients * (1 - 1 / near) / axis_rate(scene.pod, near, k)
        seconds += gradients / near * (1 - 1 / slices) / dcn
    return seconds


def training(packed: Packed, scene: Scene, k: Values) -> dict[str, float]:
    """Seconds of a rollout step by phase."""

    def of(scene: Scene, update: bool) -> float:
        last = scene.replaced(row_tokens=scene.last_row_tokens)
        whole, short = (micro_batch(x, packed.pairs, k, update=update) for x in (scene, last))
        return (packed.micro_batches - packed.short) * whole.seconds + packed.short * short.seconds

    out = {"old log-probs": scene.scored * of(scene, False), "update": of(scene, True)}
    if scene.value:
        out |= {"values": of(scene.value, False), "update of values": of(scene.value, True)}
    return out
