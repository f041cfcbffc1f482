"""An objective from a file of the user's, `loss.objective=FILE.py:FUNCTION` (docs/own_loss.md)."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from dapo_jax import gate
from dapo_jax.dapo.objective import Coefficients, PerResponse, TokenLoss, ratio_of


def load(name: str, shipped: Iterable[str]) -> Callable[..., TokenLoss]:
    """The function of that name, the same object as long as its file is the same: what is compiled
    depends on it. shipped: other names, for the error. ValueError: there is none, or it gives no
    loss per token."""
    return _loaded(name, source(name), ", ".join(shipped))


def source(name: str) -> str:
    """SHA-256 of the file that an objective names, which resume compares; '' if it names none."""
    path = pathlib.Path(os.path.expanduser(name.rpartition(":")[0]))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@functools.lru_cache
def _loaded(name: str, source: str, shipped: str) -> Callable[..., TokenLoss]:
    place = "config.loss.objective:"
    function = gate.function(place, name, {}, shipped.split(", "))

    def token_loss(logp, old_logp, advantage, c, per_response) -> TokenLoss:
        said = function(logp, old_logp, advantage, c, per_response)
        if isinstance(said, TokenLoss):
            return said
        ratio = ratio_of(logp - old_logp, c)
        never = jnp.zeros_like(ratio, bool)
        return TokenLoss(said, ratio, never, never, never)

    cells, one = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    numbers = Coefficients(*[one] * len(Coefficients._fields))
    over = PerResponse(lambda cells: cells, lambda cells: cells)
    with gate.reading(place, name, what="it gives no loss per token"):
        out = jax.eval_shape(lambda *x: token_loss(*x, over), cells, cells, cells, numbers)
        for term, got in out._asdict().items():
            if got.shape != cells.shape or (got.dtype != cells.dtype and term in ("loss", "ratio")):
                raise ValueError(f"{term} is {got.dtype}{got.shape}, of inputs float32(2, 3)")
    return token_loss
