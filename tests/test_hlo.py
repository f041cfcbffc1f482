"""Reading compiled programs: hand-written ones, and a loop that XLA made on this machine."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dapo_jax.plan import hlo
from dapo_jax.plan.hlo import Moved


def text(name: str) -> str:
    """A program in XLA's words, written by hand: `tests/data/hlo/NAME.txt`."""
    return (pathlib.Path(__file__).parent / "data" / "hlo" / f"{name}.txt").read_text()


NESTED, WINDOWS = text("nested"), text("windows")


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        (  # three turns of the inner loop, one of the outer, whose number nobody knows
            NESTED,
            {
                "all-reduce": Moved(3, 3 * (16 + 5)),
                "all-gather": Moved(3 + 1, 3 * 96 + 8 * 64 * 2),  # the started one, and the fused
            },
        ),
        (  # of a start what comes out of it, not its operands, also of several at once
            text("started"),
            {
                "reduce-scatter": Moved(5 * 2, 5 * 2 * 16 * 8 * 4),
                "all-gather": Moved(5, 5 * (8 * 4 + 12) * 4),
                "collective-permute": Moved(5, 5 * 7 * 4),
            },
        ),
        # As XLA:TPU unrolls a product over the windows of a gathered operand: it counts by two.
        (WINDOWS, {"collective-permute": Moved(8, 8 * 16)}),
        (WINDOWS.replace("constant(2)", "constant(1)"), {"collective-permute": Moved(16, 16 * 16)}),
        # In three layers one gather that is started and goes on beside 8 windows and another
        # fusion, and a plain one that has its channel.
        (text("hidden"), {"all-gather": Moved(3 * 2, 3 * (8 * 64 + 2 * 64) * 2)}),
    ],
    ids=("nested", "started", "by two", "by one", "hidden"),
)
def test_collectives_of_loops_by_hand(text, moved):
    """What is outside of loops does not count."""
    assert hlo.collectives(text) == moved


def test_collectives_of_a_compiled_loop():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def moved(spec: P) -> dict[str, Moved]:
        lay = NamedSharding(mesh, spec)
        f = lambda a, w: jax.lax.scan(lambda a, _: (jnp.tanh(a @ w), None), a, length=7)[0]
        sizes = ((8, 64), (64, 64))
        a, w = (jax.ShapeDtypeStruct(x, jnp.float32, sharding=lay) for x in sizes)
        return hlo.collectives(jax.jit(f, out_shardings=lay).lower(a, w).compile().as_text())

    assert moved(P(None, "x")) == {"all-gather": Moved(7, 7 * 8 * 64 * 4)}
    assert moved(P()) == {}
