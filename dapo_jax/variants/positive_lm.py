"""Positive-example language-model loss (VAPO Eq. 9-10): L = L_PPO + mu L_NLL,

    L_NLL = -(sum over tokens of right responses of log pi) / (tokens of right responses).

Right is what the judge says, not a shaped reward above 0; the divisor is that of the whole
mini-batch, so that micro-batches, packing and mesh change nothing; and a mini-batch without a right
response has a term of 0. It asks for no value model: `loss.positive_coef` adds it to any objective.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dapo_jax.config import schema
from dapo_jax.dapo.packing import CellSpan, Item, PackedBatch
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.update import LossTerm


def right(grades: Grades, coef: float) -> Sequence[bool]:
    """Whether each response to a problem is right; all False without the loss. ConfigError: the
    reward is a score alone and the loss is on."""
    if coef and grades.right_G is None:
        raise schema.ConfigError(
            f"config.loss.positive_coef: {coef} needs responses that are right or wrong, and the"
            " reward only scores; give Grade(..., right=...), or set 0"
        )
    return [False] * len(grades.score_G) if grades.right_G is None else grades.right_G.tolist()


def cells(
    rows: PackedBatch, items: Sequence[Item], places: Sequence[CellSpan | None], coef: float
) -> tuple[np.ndarray, ...]:
    """The weight of -log pi of each cell in the loss: `coef` over the trained tokens of right
    responses; float32 [A, R, T], one array for each of `terms`. rows, items, places: a whole
    mini-batch, as `packing.pack` took and returned it."""
    if not coef:
        return ()
    spans = [p for item, p in zip(items, places, strict=True) if item.right and p is not None]
    tokens = sum(p.cells.stop - p.cells.start for p in spans)
    weight_AxRxT = np.zeros(rows.tokens_AxRxT.shape, np.float32)
    for p in spans:
        weight_AxRxT[p.micro, p.row, p.cells] = coef / tokens
    return (weight_AxRxT,)


def likelihood(logp_RxT, weight_RxT):
    return -jnp.sum(weight_RxT * logp_RxT)


def terms(coef: float) -> tuple[LossTerm, ...]:
    """The loss's terms; none without the loss, whose program is then the one of DAPO."""
    return (LossTerm("positive_loss", likelihood),) if coef else ()
