"""Adapters in trees of parameters, and in whatever else has their structure: gradients, moments."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, Any]


class Lora(NamedTuple):
    """Adapters (LoRA, arXiv 2106.09685): a linear layer is W + alpha / rank * A B. W stays as it
    is, in `dtype`, and A [in, rank] and B [rank, out], in float32, are all that is trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # linear layers of `Block`, by their names there
    dtype: str  # of the weights that stay; the compute dtype

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def trained(params: Params) -> Params:
    """What an update changes: the adapters where there are some, else all."""
    found = params.get("blocks", {}).get("lora")
    return params if found is None else {"blocks": {"lora": found}}


def with_trained(params: Params, new: Params) -> Params:
    """`params` with `new` in place of `trained(params)`."""
    if new.keys() == params.keys():
        return new
    return params | {"blocks": params["blocks"] | new["blocks"]}


def base(params: Params) -> Params:
    """All but the adapters."""
    if trained(params) is params:
        return params
    return params | {"blocks": {k: w for k, w in params["blocks"].items() if k != "lora"}}


def merge(lora: Lora | None, params: Params, dtype=None) -> Params:
    """The model without adapters: W + alpha / rank A B in float32, then of `dtype` (None: W's)."""
    if trained(params) is params:
        return params
    out, added = base(params), params["blocks"]["lora"]
    multiply = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    new = {}
    for name in lora.targets:
        w, (a, b) = out["blocks"][name], (added[f"{name}_{x}"] for x in "ab")
        whole = w.astype(jnp.float32) + lora.scale * jax.vmap(multiply)(a, b)
        new[name] = whole.astype(dtype or w.dtype)
    return out | {"blocks": out["blocks"] | new}
