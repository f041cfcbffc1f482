"""Reading compiled programs: a hand-written one, and loops that XLA made on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dapo_jax.plan import hlo

WRITTEN = """
HloModule m, entry_computation_layout={()->f32[]}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%fused (p: bf16[8,16]) -> bf16[8,64] {
  ROOT %all-gather.3 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%p), dimensions={1}
}

%inner_cond (p: (s32[], f32[4])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %three), direction=LT
}

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %all-reduce.1 = (f32[4]{0}, s4[10]{0}) all-reduce(%x, %x), to_apply=%add
  %start = (f32[2,4]{1,0}, f32[6,4]{1,0}, u32[]) all-gather-start(%x), dimensions={0}
  %done = f32[6,4]{1,0} all-gather-done(%start)
  ROOT %t = (s32[], f32[4]) tuple(%x, %x)
}

%outer_cond (p: (s32[], s32[], f32[4])) -> pred[] {
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt.2 = pred[] compare(%i, %n), direction=LT
}

%outer (p: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {
  %w = (s32[], f32[4]) while(%q), condition=%inner_cond, body=%inner
  %f = bf16[8,64]{1,0} fusion(%y), kind=kCustom, calls=%fused
  ROOT %t.2 = (s32[], s32[], f32[4]) tuple(%w)
}

%left (p: f32[]) -> f32[] {
  ROOT %send = f32[5]{0} collective-permute(%p)
}

ENTRY %main (x: f32[4]) -> f32[] {
  %before = f32[1000]{0} all-reduce(%x), to_apply=%add
  %w.2 = (s32[], s32[], f32[4]) while(%z), condition=%outer_cond, body=%outer
  ROOT %c = f32[] conditional(%k, %a, %b), branch_computations={%left, %left}
}
"""


def test_collectives_of_loops_by_hand():
    """Three turns of the inner loop, one of the outer, whose number nobody knows; what is outside
    of loops does not count."""
    assert hlo.collectives(WRITTEN) == {
        "all-reduce": hlo.Moved(3, 3 * (16 + 5)),
        "all-gather": hlo.Moved(3 + 1, 3 * 96 + 8 * 64 * 2),  # the started one, and the fused
    }


STARTED = """
HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s.1 = f32[] add(%a, %b)
}

%wrapped (p: f32[64,8]) -> f32[16,8] {
  ROOT %reduce-scatter.1 = f32[16,8]{1,0} reduce-scatter(%p), dimensions={0}, to_apply=%add
}

%condition (p: (s32[], f32[64,8])) -> pred[] {
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %five), direction=LT
}

%body (p: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %s = ((f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]{:S(2)}) async-start(%x), calls=%wrapped
  %u = ((f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]{:S(2)}) async-update(%s), calls=%wrapped
  %d = f32[16,8]{1,0} async-done(%u), calls=%wrapped
  %g = ((f32[2,4], f32[3]), (f32[8,4], f32[12]), u32[]) all-gather-start(%a, %b), dimensions={0}
  %h = (f32[8,4], f32[12]) all-gather-done(%g)
  %r = ((f32[64,8]{1,0}), f32[16,8]{1,0}) reduce-scatter-start(%x), dimensions={0}
  %p1 = (f32[7]{0}, f32[7]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%y)
  ROOT %t = (s32[], f32[64,8]) tuple(%i, %x)
}

ENTRY %main (x: f32[64,8]) -> f32[64,8] {
  ROOT %w = (s32[], f32[64,8]) while(%z), condition=%condition, body=%body
}
"""


def test_what_is_started_and_done_counts_once():
    """Of a start what comes out of it, not its operands, also of several at once."""
    assert hlo.collectives(STARTED) == {
        "reduce-scatter": hlo.Moved(5 * 2, 5 * 2 * 16 * 8 * 4),
        "all-gather": hlo.Moved(5, 5 * (8 * 4 + 12) * 4),
        "collective-permute": hlo.Moved(5, 5 * 7 * 4),
    }


WINDOWS = """
HloModule m

%condition (p: (f32[4], u32[], s32[])) -> pred[] {
  %end = u32[]{:T(128)} constant(8)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %end), direction=LT
}

%body (p: (f32[4], u32[], s32[])) -> (f32[4], u32[], s32[]) {
  %two = u32[]{:T(128)} constant(2)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %near = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%x)
  %far = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%y)
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %t = (f32[4], u32[], s32[]) tuple(%x, %next, /*index=2*/%j)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  ROOT %w = (f32[4], u32[], s32[]) while(%z), condition=%condition, body=%body
}
"""


def test_loops_that_count_by_two_turn_half_as_often():
    """As XLA:TPU unrolls a product over the windows of a gathered operand."""
    assert hlo.collectives(WINDOWS) == {"collective-permute": hlo.Moved(8, 8 * 16)}
    by_one = WINDOWS.replace("constant(2)", "constant(1)")
    assert hlo.collectives(by_one) == {"collective-permute": hlo.Moved(16, 16 * 16)}


HIDDEN = """
HloModule m

%start (p: bf16[8,4]) -> bf16[8,64] {
  %all-gather.1 = bf16[8,64]{1,0} all-gather(%p), channel_id=5, dimensions={1}
  ROOT %c = (bf16[8,4], bf16[8,64], u32[]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (p: bf16[8,64]) -> bf16[8,64] {
  %all-gather.2 = bf16[8,64]{1,0} all-gather(%p), channel_id=5, dimensions={1}
  ROOT %t = (bf16[9,9], bf16[8,64]) tuple(%convolution, %all-gather.2)
}

%plain (p: bf16[2,4]) -> bf16[2,64] {
  ROOT %all-gather.3 = bf16[2,64]{1,0} all-gather(%p), channel_id=5, dimensions={1}
}

%few (p: (s32[])) -> pred[] {
  %eight = s32[] constant(8)
  ROOT %lt = pred[] compare(%i, %eight), direction=LT
}

%window (p: (s32[])) -> (s32[]) {
  %f = (bf16[9,9], bf16[8,64]) fusion(%y), kind=kOutput, calls=%beside
  ROOT %t.1 = (s32[]) tuple(%i)
}

%layers (p: (s32[])) -> pred[] {
  %three = s32[] constant(3)
  ROOT %lt.1 = pred[] compare(%i, %three), direction=LT
}

%layer (p: (s32[])) -> (s32[]) {
  %s = (bf16[8,4], bf16[8,64], u32[]) fusion(%y), kind=kCustom, calls=%start
  %w = (s32[]) while(%s), condition=%few, body=%window
  %d = (bf16[9,9], bf16[8,64]) fusion(%w), kind=kCustom, calls=%beside
  %e = bf16[2,64] fusion(%w), kind=kCustom, calls=%plain
  ROOT %t.2 = (s32[]) tuple(%i)
}

ENTRY %main (x: s32[]) -> (s32[]) {
  ROOT %w.1 = (s32[]) while(%z), condition=%layers, body=%layer
}
"""  # noqa: E501


def test_a_gather_hidden_behind_other_fusions_counts_once():
    """In three layers: one that is started and goes on beside 8 windows and another fusion, and a
    plain one that has its channel."""
    moved = hlo.collectives(HIDDEN)
    assert moved == {"all-gather": hlo.Moved(3 * 2, 3 * (8 * 64 + 2 * 64) * 2)}


def test_fusions_are_left_out_where_not_wanted():
    inside = [line for _, lines in hlo.in_loops(WRITTEN) for line in lines]
    assert any("all-reduce.1" in x for x in inside) and any("fusion(" in x for x in inside)
    assert not any("all-gather.3" in x or "%before" in x for x in inside)
    sizes = {operation: n for n, operation, _ in hlo.instructions(inside)}
    assert sizes["fusion"] == 8 * 64 * 2 and sizes["all-gather-done"] == 96


def test_collectives_of_a_compiled_loop():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    split, whole = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())

    def f(a, w):
        return jax.lax.scan(lambda a, _: (jnp.tanh(a @ w), None), a, length=7)[0]

    a = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=split)
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)
    text = jax.jit(f, out_shardings=split).lower(a, w).compile().as_text()
    moved = hlo.collectives(text)
    assert set(moved) == {"all-gather"}
    assert moved["all-gather"] == hlo.Moved(7, 7 * 8 * 64 * 4)
    a, w = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in (a, w))
    assert hlo.collectives(jax.jit(f).lower(a, w).compile().as_text()) == {}


WAITED = """
HloModule m

%condition (p: (f32[4], u32[])) -> pred[] {
  %end = u32[] constant(3)
  %i = u32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %end), direction=LT
}

%body (p: (f32[4], u32[])) -> (f32[4], u32[]) {
  %near = (f32[25], f32[25]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %next = (f32[25], f32[25]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %f = f32[4] fusion(%x), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"150"}
  %near.2 = f32[25] collective-permute-done(%near)
  %next.2 = f32[25] collective-permute-done(%next)
  %g = f32[8] all-gather(%y), replica_groups={{0,1},{2,3}}, dimensions={0}
  %r = f32[4] all-reduce(%y), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %t = (f32[4], u32[]) tuple(%x, %n)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %before = f32[1000] all-gather(%x), replica_groups=[2,4]<=[8]
  ROOT %w = (f32[4], u32[]) while(%z), condition=%condition, body=%body
}
"""


def test_waits_by_hand():
    """At a byte a second and a cycle a second: two permutations one way take 100 s one after the
    other, beside which 150 s of work run; then 32 s of two devices and 16 of four. Three turns."""
    groups = []

    def wire(kind, size, devices):
        groups.append((kind, devices))
        return float(size)

    assert hlo.waits(WAITED, wire, 1.0) == (3 * 150, 3 * (50 + 32 + 16))
    assert groups[2:] == [("all-gather", 2), ("all-reduce", 4)]
