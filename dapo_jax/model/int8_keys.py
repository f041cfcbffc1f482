"""A model whose keys an int8 cache holds well."""

import jax.numpy as jnp

from dapo_jax.model.adapters import Params


def even_keys(params: Params) -> Params:
    """The same model with the components of its keys in like ranges, for a cache that gives all of
    a key one scale: biases of Qwen2.5 reach hundreds in single components, and the others would be
    rounded away. Queries take the factors back: powers of two, one for both components that RoPE
    turns into each other, so that scores stay the same bit for bit. The range of a component: its
    bias and four standard deviations of a normalized input. Where a norm follows (Qwen3), its scale
    takes the factors: each component's from the head where it is largest."""
    b = params["blocks"]
    spread_LxKxd = jnp.sqrt(jnp.square(b["attn_norm"][:, :, None, None] * b["k"]).sum(1))
    range_LxKxd = (jnp.abs(b["k_bias"]) if "k_bias" in b else 0.0) + 4 * spread_LxKxd
    if "k_norm" in b:
        size_LxKx1 = jnp.sqrt(jnp.mean(jnp.square(range_LxKxd), axis=-1, keepdims=True))
        range_LxKxd = (range_LxKxd / size_LxKx1).max(1, keepdims=True)  # K = 1 from here on
        range_LxKxd = 4 * jnp.abs(b["k_norm"])[:, None] * range_LxKxd
    pair_LxKxh = jnp.hypot(*jnp.split(range_LxKxd, 2, axis=-1))
    power_LxKxh = jnp.round(jnp.log2(jnp.maximum(pair_LxKxh, 1e-6))).astype(jnp.int32)
    keys_LxKxd = jnp.ldexp(1.0, jnp.concatenate([power_LxKxh] * 2, axis=-1))
    if "k_norm" in b:
        keys_Lxd = keys_LxKxd[:, 0]
        even = {"q_norm": b["q_norm"] * keys_Lxd, "k_norm": b["k_norm"] / keys_Lxd}
        return params | {"blocks": b | even}
    queries_LxHxd = jnp.repeat(keys_LxKxd, b["q"].shape[2] // b["k"].shape[2], axis=1)
    even = {"q": b["q"] * queries_LxHxd[:, None]}
    if "q_bias" in b:
        even["q_bias"] = b["q_bias"] * queries_LxHxd
    even["k"] = b["k"] / keys_LxKxd[:, None]
    if "k_bias" in b:
        even["k_bias"] = b["k_bias"] / keys_LxKxd
    return params | {"blocks": b | even}
