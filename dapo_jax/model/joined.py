"""Weights of a layer that multiply the same input, side by side, for the sampler on a GPU.

One product then reads the input once and fills more of the GPU: those of queries, keys and values
take 5 us together for 256 rows of 0.5B, and 13 apart. (XLA joins such products of itself, but
copies the weights together for each token, or multiplies by a kernel that looks for them in two
places.)

Dims: S rows, D hidden, F intermediate, H query heads, K key/value heads, d head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax import parallel
from dapo_jax.model import ops, qwen2

_HEADS, _BIASES, _MLP = ("q", "k", "v"), ("q_bias", "k_bias", "v_bias"), ("gate", "up")


class Joined(NamedTuple):
    """A layer's products of one input; `Block` calls it in place of its own."""

    qkv_DxHKKd: jax.Array
    bias_HKKd: jax.Array | None
    gate_up_Dx2F: jax.Array

    def heads(self, h_BxTxD, shape: qwen2.Shape) -> tuple[jax.Array, ...]:
        """Queries, keys and values side by side, [B, H + 2 K, T, d]; apart where norms follow."""
        y = ops.linear(h_BxTxD, self.qkv_DxHKKd)
        y = y if self.bias_HKKd is None else y + self.bias_HKKd
        y = y.reshape(*y.shape[:2], -1, shape.head_dim).swapaxes(1, 2)
        return apart((y,), shape.num_kv_heads) if shape.qk_norm else (y,)

    def gate_up(self, h_BxTxD) -> list[jax.Array]:
        return jnp.split(ops.linear(h_BxTxD, self.gate_up_Dx2F), 2, axis=-1)


def apart(heads, kv_heads: int):
    """Queries, keys and values, which may lie side by side in one array."""
    if len(heads) == 3:
        return heads
    H = heads[0].shape[1] - 2 * kv_heads
    return jnp.split(heads[0], [H, H + kv_heads], axis=1)


def pays(mesh: Mesh, layer) -> bool:
    """On GPUs that hold each layer whole. layer: the shardings of its weights."""
    whole = all(s.is_fully_replicated for s in layer.values())
    return whole and mesh.devices.flat[0].platform == "gpu"


def join(layer: qwen2.Params) -> qwen2.Params:
    """A layer's weights as `Joined` has them, under "joined", and the others as they are."""
    beside = lambda names, *inputs: jnp.concatenate(
        [layer[n].reshape(*inputs, -1) for n in names], -1
    )
    D = layer["attn_norm"].shape[0]
    bias = beside(_BIASES) if _BIASES[0] in layer else None
    rest = {n: w for n, w in layer.items() if n not in _HEADS + _BIASES + _MLP}
    return rest | {"joined": Joined(beside(_HEADS, D), bias, beside(_MLP, D))}


def choose(c: qwen2.Shape, mesh: Mesh, layer):
    """(function that joins the layers of decode weights where that pays, shardings of one layer).
    layer: those of its weights apart. What is joined leaves the list that is given, so that one
    layer alone is held twice."""
    if c.scan_layers or not pays(mesh, layer):
        return (lambda params: params), layer
    one = jax.jit(join)
    weights = {n: jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for n, w in _stacks(c).items()}
    whole = jax.tree.map(lambda _: parallel.replicated(mesh), jax.eval_shape(join, weights))

    def joined(params):
        apart = params["blocks"]
        return params | {"blocks": [one(apart.pop(0)) for _ in range(len(apart))]}

    return joined, whole


def _stacks(c: qwen2.Shape) -> qwen2.Params:
    return qwen2.abstract(c)["blocks"]


def bind_layers(c: qwen2.Shape, params: qwen2.Params):
    """`qwen2.bind_layers` of decode weights, joined or not."""
    blocks = params["blocks"]
    if c.scan_layers or "joined" not in blocks[0]:
        return qwen2.bind_layers(c, params)
    # What stands in for the weights that are joined is never computed with.
    like = {n: jnp.zeros(w.shape[1:], w.dtype) for n, w in _stacks(c).items()}
    apart = [like | {n: w for n, w in layer.items() if n != "joined"} for layer in blocks]
    model, layers = qwen2.bind_layers(c, params | {"blocks": apart})
    return model, [(*layer, block["joined"]) for layer, block in zip(layers, blocks, strict=True)]
