"""A config on a slice, in the numbers that the time model reads."""

from typing import NamedTuple

from dapo_jax.config import validation
from dapo_jax.model import paged, qwen2
from dapo_jax.plan.footprint import cache, item_bytes, parts, read_count, wide_count
from dapo_jax.plan.shapes import value_model
from dapo_jax.plan.simulate import Sizes
from dapo_jax.pods.slices import Pod


class Scene(NamedTuple):
    """Sizes are of one device, but for those that say 'whole'."""

    pod: Pod
    sizes: Sizes  # of the sampler
    prefill_tokens: int  # of a prompt in one call
    shape: qwen2.Shape  # whole
    kv_heads: int  # while decoding
    train_kv_heads: int  # while training
    key_bytes: float  # keys and values of one token in one head and layer
    cache: str  # 'ours' or 'ours.int8': whose constants the decode kernel has
    vocab: int  # columns of the head while decoding
    read: int  # parameters that a token's products read, whole
    wide: int  # of these, in a float32 head of a model of another dtype
    item: int  # bytes of a weight or activation
    decode_split: int  # parts of a weight while decoding
    decode_axes: tuple[int, ...]  # the same along each mesh axis, the quickest first
    train_split: int  # parts of a weight's inner axis while training
    fsdp: int  # parts of what `train_split` leaves
    replicas: int  # of the weights while training
    micro_rows: int  # packed rows of a micro-batch, on all devices
    row_tokens: int
    again: float  # share of `read` whose products a backward pass computes again
    scored: int  # forward passes before the updates: old, reference log-probs
    parameters: int  # whole
    adapters: int  # parameters that are trained in their place; 0 = none
    value: "Scene | None" = None  # of the value model, which only trains

    @property
    def stream_bytes(self) -> int:
        """Bytes of one token in the residual stream, whole."""
        return self.shape.hidden_size * self.item

    @property
    def read_bytes(self) -> int:
        return self.read * self.item + self.wide * (4 - self.item)

    @property
    def multiplied(self) -> int:
        """`read` in bfloat16 products; the highest precision takes six of them for one."""
        return self.read + 5 * self.wide


def scene(config, shape: qwen2.Shape, sizes, pod: Pod) -> Scene:
    """sizes: the mesh, {'data': ..., 'fsdp': ..., 'tensor': ...}."""
    g, decode, train = cache(config, shape, sizes), config.sharding.decode, config.sharding.train
    rollout, value, read = config.rollout, value_model(config, shape), read_count(shape)
    split, kept = (parts(a, train, sizes) for a in ("mlp", "embed"))
    # The backward pass needs nothing of what a block's last product gives.
    last = shape.num_layers * shape.intermediate_size * shape.hidden_size
    along = [a for a in reversed(decode["mlp"].split(",")) if a]
    return Scene(
        pod=pod,
        sizes=Sizes(
            slots=rollout.slots,
            shards=g.shards,
            chunk=min(rollout.chunk, rollout.max_response_tokens),
            pages=g.pages,
            page_tokens=g.page_tokens,
            prefill_rows=-(-rollout.prefill_prompts // g.shards),
        ),
        prefill_tokens=min(rollout.prefill_tokens, -(-config.data.max_prompt_tokens // 8) * 8),
        shape=shape,
        kv_heads=-(-shape.num_kv_heads // parts("kv_heads", decode, sizes)),
        train_kv_heads=-(-shape.num_kv_heads // parts("kv_heads", train, sizes)),
        key_bytes=2 * paged.vector_bytes(g, config.model.dtype),
        cache="ours.int8" if g.quantized else "ours",
        vocab=-(-shape.vocab_size // parts("vocab", decode, sizes)),
        read=read,
        wide=wide_count(config, shape),
        item=item_bytes(config),
        decode_split=parts("mlp", decode, sizes),
        decode_axes=tuple(n for a in along if (n := sizes[a]) > 1),
        train_split=split,
        fsdp=kept,
        replicas=pod.chips // (split * kept),
        micro_rows=validation.micro_rows(config, sizes),
        row_tokens=validation.row_tokens(config),
        again=0.0 if shape.remat in ("none", "dots") else 1 - last / read,
        scored=(config.loss.old_logprobs == "recompute") + bool(config.loss.kl_coef),
        parameters=qwen2.param_count(shape),
        adapters=qwen2.adapter_count(shape),
        value=value and scene(config, value, sizes, pod),
    )
