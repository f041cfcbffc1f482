"""Reading compiled programs: hand-written ones, and a loop that XLA made on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dapo_jax.plan import hlo
from dapo_jax.plan.hlo import Moved


def module(main: str, **others: str) -> str:
    """The text of a program, from the instructions of its computations."""
    bodies = "".join(f"%{name} (p: f32[4]) -> f32[4] {{\n{x}\n}}\n\n" for name, x in others.items())
    return f"HloModule m\n\n{bodies}ENTRY %main (x: f32[4]) -> f32[4] {{\n{main}\n}}\n"


def below(end: int, kind: str = "s32") -> str:
    """The condition of a loop whose counter is the first element of its state."""
    return f"""\
  %end = {kind}[]{{:T(128)}} constant({end})
  %i = {kind}[]{{:T(128)}} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %end), direction=LT"""


LOOP = "  ROOT %w = (s32[], f32[4]) while(%z), condition=%few, body=%body"

# Three turns of the inner loop, one of the outer, whose number nobody knows.
NESTED = module(
    """\
  %before = f32[1000]{0} all-reduce(%x), to_apply=%add
  %w.2 = (s32[], s32[], f32[4]) while(%z), condition=%unknown, body=%outer
  ROOT %c = f32[] conditional(%k, %a, %b), branch_computations={%left, %left}""",
    add="  ROOT %s = f32[] add(%a, %b)",
    fused="  ROOT %all-gather.3 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%p), dimensions={1}",
    three=below(3),
    inner="""\
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %all-reduce.1 = (f32[4]{0}, s4[10]{0}) all-reduce(%x, %x), to_apply=%add
  %start = (f32[2,4]{1,0}, f32[6,4]{1,0}, u32[]) all-gather-start(%x), dimensions={0}
  %done = f32[6,4]{1,0} all-gather-done(%start)
  ROOT %t = (s32[], f32[4]) tuple(%x, %x)""",
    unknown="""\
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt.2 = pred[] compare(%i, %n), direction=LT""",
    outer="""\
  %w = (s32[], f32[4]) while(%q), condition=%three, body=%inner
  %f = bf16[8,64]{1,0} fusion(%y), kind=kCustom, calls=%fused
  ROOT %t.2 = (s32[], s32[], f32[4]) tuple(%w)""",
    left="  ROOT %send = f32[5]{0} collective-permute(%p)",
)

# Of a start what comes out of it, not its operands, also of several at once.
STARTED = module(
    LOOP,
    few=below(5),
    wrapped="  ROOT %r.1 = f32[16,8]{1,0} reduce-scatter(%p), dimensions={0}, to_apply=%add",
    add="  ROOT %s.1 = f32[] add(%a, %b)",
    body="""\
  %s = ((f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]{:S(2)}) async-start(%x), calls=%wrapped
  %u = ((f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]{:S(2)}) async-update(%s), calls=%wrapped
  %d = f32[16,8]{1,0} async-done(%u), calls=%wrapped
  %g = ((f32[2,4], f32[3]), (f32[8,4], f32[12]), u32[]) all-gather-start(%a, %b), dimensions={0}
  %h = (f32[8,4], f32[12]) all-gather-done(%g)
  %r = ((f32[64,8]{1,0}), f32[16,8]{1,0}) reduce-scatter-start(%x), dimensions={0}
  %p1 = (f32[7]{0}, f32[7]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%y)
  ROOT %t = (s32[], f32[64,8]) tuple(%i, %x)""",
)

# As XLA:TPU unrolls a product over the windows of a gathered operand: the loop counts by two.
WINDOWS = module(
    LOOP,
    few=below(8, "u32"),
    body="""\
  %step = u32[]{:T(128)} constant(2)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %near = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%x)
  %far = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%y)
  %next = u32[]{:T(128)} add(%i, %step)
  ROOT %t = (u32[], f32[4], s32[]) tuple(%next, %x, /*index=2*/%j)""",
)

# In three layers: one gather that is started and goes on beside 8 windows and another fusion, and a
# plain one that has its channel.
HIDDEN = module(
    "  ROOT %w.1 = (s32[]) while(%z), condition=%layers, body=%layer",
    start="""\
  %all-gather.1 = bf16[8,64]{1,0} all-gather(%p), channel_id=5, dimensions={1}
  ROOT %c = (bf16[8,4], u32[]) custom-call(%a), custom_call_target="AsyncCollectiveStart\"""",
    beside="""\
  %all-gather.2 = bf16[8,64]{1,0} all-gather(%p), channel_id=5, dimensions={1}
  ROOT %t = (bf16[9,9], bf16[8,64]) tuple(%convolution, %all-gather.2)""",
    plain="  ROOT %all-gather.3 = bf16[2,64]{1,0} all-gather(%p), channel_id=5, dimensions={1}",
    few=below(8),
    window="""\
  %f = (bf16[9,9], bf16[8,64]) fusion(%y), kind=kOutput, calls=%beside
  ROOT %t.1 = (s32[]) tuple(%i)""",
    layers=below(3),
    layer="""\
  %s = (bf16[8,4], bf16[8,64], u32[]) fusion(%y), kind=kCustom, calls=%start
  %w = (s32[]) while(%s), condition=%few, body=%window
  %d = (bf16[9,9], bf16[8,64]) fusion(%w), kind=kCustom, calls=%beside
  %e = bf16[2,64] fusion(%w), kind=kCustom, calls=%plain
  ROOT %t.2 = (s32[]) tuple(%i)""",
)


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        (
            NESTED,
            {
                "all-reduce": Moved(3, 3 * (16 + 5)),
                "all-gather": Moved(3 + 1, 3 * 96 + 8 * 64 * 2),  # the started one, and the fused
            },
        ),
        (
            STARTED,
            {
                "reduce-scatter": Moved(5 * 2, 5 * 2 * 16 * 8 * 4),
                "all-gather": Moved(5, 5 * (8 * 4 + 12) * 4),
                "collective-permute": Moved(5, 5 * 7 * 4),
            },
        ),
        (WINDOWS, {"collective-permute": Moved(8, 8 * 16)}),
        (
            WINDOWS.replace("constant(2)", "constant(1)"),
            {"collective-permute": Moved(16, 16 * 16)},
        ),
        (HIDDEN, {"all-gather": Moved(3 * 2, 3 * (8 * 64 + 2 * 64) * 2)}),
    ],
    ids=("nested", "started", "by two", "by one", "hidden"),
)
def test_collectives_of_loops_by_hand(text, moved):
    """What is outside of loops does not count."""
    assert hlo.collectives(text) == moved


def test_fusions_are_left_out_where_not_wanted():
    inside = [line for _, lines in hlo.in_loops(NESTED) for line in lines]
    assert any("all-reduce.1" in x for x in inside) and any("fusion(" in x for x in inside)
    assert not any("all-gather.3" in x or "%before" in x for x in inside)
    sizes = {operation: n for n, operation, _ in hlo.instructions(inside)}
    assert sizes["fusion"] == 8 * 64 * 2 and sizes["all-gather-done"] == 96


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
