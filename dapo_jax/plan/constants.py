"""What the time model takes as given: one table, every number with its range and its source.

Marks of `source`: 'published' by the maker or in a paper; 'counted' in what libtpu 0.0.42.1 made of
this package's programs (bundles of a kernel at `python -m dapo_jax.plan --kernels`, or XLA's
`estimated_cycles`); 'measured' on a CPU; 'assumed': nobody measured it on a TPU, and `low` and
`high` say how far off it may be. 'low' is what makes a step short.
"""

from collections.abc import Mapping
from typing import NamedTuple

US, GIGA = 1e-6, 1e9


class Constant(NamedTuple):
    value: float
    low: float  # the value that makes a step shortest
    high: float
    unit: str
    source: str


def _exact(value: float, unit: str, source: str) -> Constant:
    return Constant(value, value, value, unit, source)


def _chips(name: str, unit: str, source: str, v4, v5e, v5p, v6e) -> dict[str, Constant]:
    by_family = dict(v4=v4, v5e=v5e, v5p=v5p, v6e=v6e).items()
    return {f"{name}.{family}": _exact(x, unit, source) for family, x in by_family}


_BOOK = "published: jax-ml.github.io/scaling-book, 'TPUs', both directions of one axis"
_CLOCK = "assumed: by peak / (multiply-adds of the matrix units a cycle)"
_SPLASH = "counted: jax's splash kernels in libtpu's dump, a block of 1,024 queries and keys of one head of 128, a core"
_OURS = "counted: `plan --kernels`, model/paged_kernel.py, 128 rows, 5 query heads of one key head"
_INT8 = f"{_OURS}, rollout.cache_dtype='int8'"

# fmt: off
CONSTANTS: dict[str, Constant] = {
    # --- chips; peaks of FLOPs and HBM are in slices.CHIPS ------------------------------------------
    **_chips("ici", "B/s", _BOOK, 0.9e11, 0.9e11, 1.8e11, 1.8e11),
    **_chips("clock", "Hz", _CLOCK, 1.05e9, 1.5e9, 1.75e9, 1.75e9),
    **_chips("cores", "", "published: cloud.google.com/tpu/docs/system-architecture", 2, 1, 2, 1),

    # --- one token of all slots --------------------------------------------------------------------
    "weights_hbm": Constant(0.80, 0.90, 0.70, "of HBM", "assumed: weights of a product, as they are read"),
    "decode_mxu": Constant(0.65, 0.75, 0.55, "of peak", "assumed: those products where rows are many"),
    "dma_latency": Constant(0.50 * US, 0.38 * US, 0.75 * US, "s", "assumed: from asking for a block of keys to its first byte"),
    "keys_hbm": Constant(0.90, 0.97, 0.80, "of HBM", "assumed: pages of keys, as they arrive; 0.86 of another kernel on v6e by arXiv 2604.15464"),
    # Beside products and attention stand 53 of the 101 thousand cycles of XLA's `estimated_cycles` of a 32B layer, 2,048 slots, v5p:4x4x8.
    "small_ops": Constant(26.25 * US, 13.125 * US, 33.6 * US, "s a layer", "assumed; counted: 33.6 in fusions (casts, layouts, page numbers)"),
    "reduce_latency": Constant(6 * US, 2 * US, 10 * US, "s", "assumed: one all-reduce over `tensor`, beside its bytes"),
    "draw": Constant(250 * US, 150 * US, 350 * US, "s, 128 x 19,008 logits", "counted: 253 outside of the layers"),
    "small_collective": Constant(30 * US, 10 * US, 50 * US, "s", "assumed: a number a row, over `tensor` or the shards"),

    # --- the other parts of a rollout ----------------------------------------------------------------
    "prefill_mxu": Constant(0.45, 0.60, 0.35, "of peak", "assumed"),
    "host_chunk": Constant(25e-3, 10e-3, 40e-3, "s a chunk", "assumed: dispatch, gathers, copies"),
    "host_row": Constant(11 * US, 8 * US, 20 * US, "s a row in flight and chunk", "measured: 10 ms of schedule and tables at 888 rows on average, while no chunk is decoded"),
    "grading": Constant(2.5, 1.0, 4.0, "s a round of 8,192", "assumed: decoding texts and verifying"),

    # --- packed rows -----------------------------------------------------------------------------------
    # Those in .8 where `tensor` is 8 or more and each device has a narrow part of a weight.
    "train_mxu.8": Constant(0.62, 0.75, 0.52, "of peak", "counted: 2.3 s of products in a micro-batch of 16 rows of 32B on v5p-256"),
    "train_mxu": Constant(0.70, 0.80, 0.58, "of peak", "counted: 3.5 s of products in one of 32 rows, .80 of peak; assumed lower, since MaxText publishes an MFU of .65"),
    "splash_waits": Constant(1.2, 1.02, 1.5, "of the bundles", "assumed: cycles of training attention, beside those that are counted below"),
    "elementwise.8": Constant(0.29, 0.10, 0.40, "of the products", "counted: .27 s copies, .27 fusions, .15 sums of dQ in the micro-batch of 16 rows"),
    "elementwise": Constant(0.19, 0.08, 0.30, "of the products", "counted: .10 s copies, .28 fusions, .30 sums of dQ in the one of 32"),
    # By the order of instructions in compiled layers; with what windows of products leave of their permutations.
    "forward_moved": Constant(3, 2, 4, "rows x D a layer", "counted: 2 all-gathers, and 1 in windows"),
    "update_moved": Constant(9.4, 7, 11, "rows x D a layer", "counted: 7 all-gathers, and 2.4 in windows, at `tensor` 4"),
    "forward_weights.8": Constant(0.35, 0, 1, "of the weights", "counted: 2.9 GB of 8.2 gathered without overlap"),
    "forward_weights": Constant(1, 0.35, 1, "of the weights", "counted: all of them, at `tensor` 4"),
    "update_weights.8": Constant(1.2, 0, 3, "of the weights", "counted: 9.5 GB of 8.2"),
    "update_weights": Constant(2.1, 1, 3, "of the weights", "counted: .52 GB a layer of .24, at `tensor` 4"),

    # --- around the steps ------------------------------------------------------------------------------
    "to_host": Constant(1 * GIGA, 4 * GIGA, 0.7 * GIGA, "B/s a host", "published: marin-community/marin#1747, ~1 GB/s"),
    "compile": Constant(450, 235, 600, "s", "measured: all programs of the shipped configs on two CPU cores"),
    "host_token": _exact(12, "B", "counted: token, log-prob, entropy of a response"),
    "chips_a_host": _exact(4, "", "published: hosts of v5p, and of v5e and v6e slices of several hosts"),

    # --- attention while decoding: bundles, at least a cycle each -----------------------------------------
    **_chips("ours.start", "bundles", _OURS, 411, 458, 445, 301),
    **_chips("ours.block", "bundles", _OURS, 360, 350, 343, 312),
    **_chips("ours.beside", "bundles", _OURS, 358, 264, 245, 247),
    **_chips("ours.int8.start", "bundles", _INT8, 267, 281, 286, 266),
    **_chips("ours.int8.block", "bundles", _INT8, 1941, 451, 441, 358),
    **_chips("ours.int8.beside", "bundles", _INT8, 488, 325, 314, 294),
    # --- attention while training -------------------------------------------------------------------------
    **_chips("splash.forward", "bundles", _SPLASH, 9522, 5948, 6223, 4226),
    **_chips("splash.backward", "bundles", _SPLASH, 14029, 10131, 10554, 6830),
}
# fmt: on

Values = Mapping[str, float]
VALUES: dict[str, float] = {name: c.value for name, c in CONSTANTS.items()}
