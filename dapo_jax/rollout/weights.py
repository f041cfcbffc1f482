"""Weights as the sampler reads them: from the layout of training into that of decoding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dapo_jax import parallel
from dapo_jax.model import adapters, int8_keys, joined, qwen2


class DecodeWeights(NamedTuple):
    """Programs from training params to decode params, of the compute dtype; if the network is not
    scanned a list of layers, since XLA on CPUs and GPUs copies what it cuts out of a stack."""

    to_decode_layout: Callable
    take: Callable  # the same, and the training params are gone; see `Engine.decode_params`
    layout: Any  # shardings of the decode params


def decode_weights(
    trained: qwen2.Shape, mesh: Mesh, rules: parallel.Rules, dtype, even_keys: bool
) -> DecodeWeights:
    """trained: the shape in training, whose adapters are merged. even_keys: for an int8 cache."""
    shape = trained.merged
    stacked = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)
    layer = jax.tree.map(lambda s: NamedSharding(mesh, P(*s.spec[1:])), stacked["blocks"])
    join, of_layer = joined.choose(shape, mesh, layer)
    layout = stacked if shape.scan_layers else stacked | {"blocks": [of_layer] * shape.num_layers}

    def convert(params):
        params = adapters.merge(trained.lora, params, dtype)
        return qwen2.cast(int8_keys.even_keys(params) if even_keys else params, dtype, shape)

    def to_decode_layout(params):
        return convert(params) if shape.scan_layers else join(qwen2.unstacked(convert(params)))

    to_decode_layout = jax.jit(to_decode_layout, out_shardings=layout)

    def take(params):
        if even_keys or adapters.trained(params) is not params:
            return to_decode_layout(params)
        params = jax.tree.map(_take, params, jax.eval_shape(convert, params), stacked)
        return params if shape.scan_layers else join(_take_apart(params, layer, shape.num_layers))

    return DecodeWeights(to_decode_layout, take, layout)


def _take(w, like, sharding):
    """`w` in the dtype of `like` and laid out so: itself where it is already, else gone."""
    if w.dtype == like.dtype and w.sharding.is_equivalent_to(sharding, w.ndim):
        return w
    out = jax.block_until_ready(jax.jit(lambda w: w.astype(like.dtype), out_shardings=sharding)(w))
    w.delete()
    return out


def _take_apart(params, layout, count: int):
    """`qwen2.unstacked`, one kind of weight after the other, of which each stack is then gone. By a
    program of one layer: that of all compiles for seconds."""
    layers = [{} for _ in range(count)]
    for name, stack in params["blocks"].items():
        cut = jax.jit(lambda w, i: w[i], out_shardings=layout[name])
        for i, layer in enumerate(layers):
            layer[name] = jax.block_until_ready(cut(stack, i))
        stack.delete()
    return params | {"blocks": layers}
