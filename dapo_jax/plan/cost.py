"""Seconds of a rollout step on a slice, from what its programs do and a table of constants.

    work = cost.work(config, traffic, scene)         the schedule, once: it knows no time
    price = cost.pricer(config, work, scene)
    price(constants.values()).phases                 seconds by phase, for any constants

Nothing is measured on a TPU: each constant says where it is from (constants.py), and `spread` what
their ranges make of the sum. What is left out makes a step slower: contention of ICI, waits between
programs, stragglers among hosts.

Dims: C chunks, S slots.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dapo_jax.plan import simulate
from dapo_jax.plan.constants import CONSTANTS, Values, values
from dapo_jax.pods.slices import Pod


class Kernel(NamedTuple):
    """Attention while decoding, and what stands beside it in a layer."""

    name: str
    block_tokens: int  # a turn of its loop
    both_cores: bool  # the rows are split over a chip's cores
    ahead: int  # blocks under way from HBM while one is worked on
    live_pages: bool  # a row's last block is read as far as it is filled
    idle_blocks: int  # that an idle row reads
    scatters: bool  # new keys and values are written by programs of their own
    small_ops: float  # of the constant
    hbm_share: float = 0.0  # of HBM that it reaches, where that is known; 0 = by bundles


JAX = Kernel(
    "JAX's",
    block_tokens=512,
    both_cores=False,
    ahead=1,
    live_pages=False,
    idle_blocks=1,
    scatters=True,
    small_ops=1.0,
)
OURS = Kernel(
    "ours",
    block_tokens=1024,
    both_cores=True,
    ahead=7,
    live_pages=True,
    idle_blocks=0,
    scatters=False,
    # It rotates queries and keys too: beside products and attention stay 53 of the 101 thousand
    # cycles of XLA's `estimated_cycles` of a 32B layer, 2,048 slots, v5p:4x4x8.
    small_ops=0.525,
)


class Design(NamedTuple):
    """How this package's programs work, as far as it takes time. The defaults are the code's; a
    change of the code changes its line here."""

    kernel: Kernel = OURS
    flag_every: int = 8  # tokens between two looks at whether all rows have ended
    host_overlaps: bool = True  # what a chunk drew is handed over while the next is decoded
    few: int = 4  # the last rows run in a program of so many times fewer slots
    own_segment: bool = True  # training attention leaves out blocks of other sequences
    groups_apart: bool = True  # cores share out the groups of heads of its backward pass
    joined_products: bool = True  # one product reads what is gathered of the residual stream
    joined_evaluation: bool = True  # all sets at both settings in one call


DESIGN = Design()


class Scene(NamedTuple):
    """One config on one slice, in numbers. Sizes without a word are of a device."""

    pod: Pod
    sizes: simulate.Sizes  # of the sampler
    prefill_tokens: int  # of a prompt in one call
    layers: int
    width: int  # D, whole
    heads: int  # H, whole
    head_dim: int
    kv_heads: int  # of a device while decoding
    train_kv_heads: int  # ... while training
    key_bytes: float  # of one token in one head and layer, keys and values
    cache: str  # 'ours' or 'ours.int8': the constants of the kernel that reads them
    vocab: int  # columns of the head while decoding
    read: int  # parameters that a token's products read, whole
    wide: int  # of these, in a head of float32 under a model of another type
    item: int  # bytes of a weight or activation
    decode_split: int  # parts of a weight while decoding
    decode_axes: tuple[int, ...]  # ... along each mesh axis
    train_split: int
    fsdp: int  # parts of what `train_split` leaves
    replicas: int  # of the weights in training
    micro_rows: int
    row_tokens: int
    remat: str
    again: float  # share of `read` whose products a backward pass computes again
    scored: int  # forward passes before the updates: old, reference log-probs
    parameters: int
    adapters: int  # trained in their place; 0 = none
    value: "Scene | None" = None  # of the value model beside it, which trains alone

    @property
    def read_bytes(self) -> int:
        return self.read * self.item + self.wide * (4 - self.item)

    @property
    def multiplied(self) -> int:
        """`read` in products of bfloat16, of which the highest precision takes six for one."""
        return self.read + 5 * self.wide


# ------------------------------------------------------------------------------------------------
# What there is to do: the schedule, without time
# ------------------------------------------------------------------------------------------------


class Rollouts(NamedTuple):
    """Rounds of the sampler. Time is nearly linear in a round's problems between two sizes, so a
    few are simulated and the others read off the line between."""

    steps: list[list[int]]  # problems of each round of some rollout steps
    before: list[list[int]]  # the same by the first release
    at: list[int]  # problems, ascending
    traces: list[simulate.Trace]
    pages: int  # that the fullest shard used, or all of them where they were too few


class Work(NamedTuple):
    """Of one rollout step."""

    rollouts: Rollouts
    packed: simulate.Packed
    evaluations: list[simulate.Trace]  # calls of one evaluation
    prefill_chunks: int  # calls that take a prompt through
    responses: float  # drawn
    response: int  # tokens of one, mean


def work(
    config,
    traffic: simulate.Traffic,
    scene: Scene,
    *,
    design: Design = DESIGN,
    eval_problems: int = 0,
    rollouts: Rollouts | None = None,
) -> Work:
    """What a step does. eval_problems: of one set of problems; 0 = evaluation is left out.
    rollouts: where they are known already."""
    known = rollouts or simulated(config, traffic, scene.sizes)
    return Work(
        known,
        simulate.packed(config, traffic, scene.row_tokens, scene.micro_rows),
        evaluated(config, traffic, scene.sizes, eval_problems, design),
        -(-max(traffic.prompt - 1, 1) // scene.prefill_tokens),
        float(np.mean([sum(x) for x in known.steps])) * config.rollout.group_size,
        traffic.response,
    )


def evaluated(
    config, traffic: simulate.Traffic, sizes: simulate.Sizes, problems: int, design: Design = DESIGN
) -> list[simulate.Trace]:
    """The calls of an evaluation of all sets. problems: of one set; 0 = it is left out."""
    if not problems:
        return []
    settings = 1 + (config.eval.top_p < 1)
    sets = max(len([x for x in config.eval.files.split(",") if x]), 1)
    longest = config.eval.max_response_tokens or config.rollout.max_response_tokens
    mean = min(traffic.response, longest // 2)
    joined = settings * sets if design.joined_evaluation else 1
    asked = traffic._replace(response=mean), longest, joined * problems, config.eval.k
    trace = simulate.sample(simulate.lengths(*asked), traffic.prompt, longest, sizes)
    return [trace] * (settings * sets // joined)


def simulated(config, traffic: simulate.Traffic, sizes: simulate.Sizes) -> Rollouts:
    """The rounds of steps as they follow each other, and traces of some sizes."""
    steps = simulate.rounds(config, traffic.accept)
    before = simulate.rounds_aimed(config, traffic.accept)
    at = anchors([n for step in steps + before for n in step])
    G, cap = config.rollout.group_size, config.rollout.max_response_tokens
    traces = [
        simulate.sample(simulate.lengths(traffic, cap, n, G), traffic.prompt, cap, sizes)
        for n in at
    ]
    used = sizes.pages if any(x.evicted for x in traces) else max(x.pages for x in traces)
    return Rollouts(steps, before, at, traces, used)


class Age(NamedTuple):
    """Expected of steps with `rollout.staleness`, far from the run's first."""

    staleness: int
    slots: int
    seconds: float
    occupancy: float  # of the slots, over the whole sampling of a step
    mean: float  # age of the trained tokens, in steps
    oldest: int
    parked: float  # tokens of rows that go on, a step
    phases: dict[str, float]  # seconds; their sum is the step
    apart: "Apart | None" = None  # the same on two meshes; None: of S = 0


def aged(
    config, traffic: simulate.Traffic, known: Work, scene: Scene, k: Values, eval_problems: int = 0
) -> list[Age]:
    """For S = 0, and for S = 1 and 2 with all slots, three quarters and half of them over the same
    pages; all with as many host visits as `quickly`. eval_problems: as of `work`."""
    scene = scene._replace(sizes=quickly(config, scene.sizes))
    shards = scene.sizes.shards
    tests = lambda sizes: evaluated(config, traffic, sizes, eval_problems)
    drawn = simulated(config, traffic, scene.sizes)
    plain = known._replace(rollouts=drawn, evaluations=tests(scene.sizes))
    part_N, traces = shares(plain.rollouts), plain.rollouts.traces
    busy, all_of = (
        sum(n * x for n, x in zip(part_N, of, strict=True))
        for of in (
            [t.count_CxS.sum() for t in traces],
            [t.steps_C.sum() * t.count_CxS.shape[1] for t in traces],
        )
    )
    price = pricer(config, plain, scene)(k)
    prompts = price.phases["prefill"]
    drained = price.step, float(busy / all_of), 0.0, 0, 0.0, price.phases
    out = [Age(0, scene.sizes.slots, *drained)]
    fewer = sorted({scene.sizes.slots * n // 4 // shards * shards for n in (4, 3, 2)} - {0})
    for staleness, slots in itertools.product((1, 2), fewer[::-1]):
        there = scene._replace(sizes=scene.sizes._replace(slots=slots))
        got = simulate.carried(config, traffic, there.sizes, staleness, there.prefill_tokens)
        at = [*range(len(got.traces))]
        rollouts = plain.rollouts._replace(steps=[[i] for i in at], at=at, traces=got.traces)
        work = known._replace(
            rollouts=rollouts,
            evaluations=tests(there.sizes),
            prefill_chunks=1,
            responses=got.judged * config.rollout.group_size,
        )
        price = pricer(config, work, there)(k)
        busy = float(np.mean([t.occupancy for t in got.traces]))
        found = price.step, busy, got.age, got.oldest, got.parked, price.phases
        best = apart(price.phases, busy, prompts, shards)
        out.append(Age(staleness, slots, *found, best))
    return out


class Apart(NamedTuple):
    """A step where some devices only sample and the others only train, at the same time."""

    seconds: float
    share: float  # of the devices, that sample


def apart(phases: dict[str, float], busy: float, prompts: float, shards: int) -> Apart:
    """At best, from the same step on one mesh: each device has as many rows as there, so that a
    share of the devices takes as much longer; no slot is ever idle, new weights arrive in no time,
    and what was parked needs no prefill. prompts: seconds of prefilling prompts alone. The devices
    are shared out by whole shards of decoding."""
    drawn = busy * (phases["decode"] + phases["tail"]) + prompts + phases["evaluation"]
    beside = phases["host"] + phases["grading"]
    outside = ("prefill", "decode", "tail", "host", "grading", "evaluation", "checkpoint")
    trained = sum(s for what, s in phases.items() if what not in outside)

    def step(share: float) -> float:
        return max(drawn / share + beside, trained / (1 - share) + phases["checkpoint"])

    parts = [i / shards for i in range(1, shards)]
    if not parts:
        return Apart(math.inf, 1.0)
    share = min(parts, key=step)
    return Apart(step(share), share)


def quickly(config, sizes: simulate.Sizes) -> simulate.Sizes:
    """For a first look: host visits at most 40 in the longest response, and pages of four."""
    chunk = max(sizes.chunk, config.rollout.max_response_tokens // 40)
    pages = dict(page_tokens=4 * sizes.page_tokens, pages=sizes.pages // 4)
    return sizes._replace(chunk=chunk, **(pages if sizes.pages > 400 else {}))


def anchors(sizes: list[int]) -> list[int]:
    """The sizes to simulate: the largest, eighths of it, and the smallest; all where they are
    few."""
    distinct = sorted(set(sizes))
    if len(distinct) <= 3:
        return distinct
    out, n = {distinct[0]}, distinct[-1]
    while n > distinct[0]:
        out.add(n)
        n //= 8
    return sorted(out)


# ------------------------------------------------------------------------------------------------
# A token of all slots
# ------------------------------------------------------------------------------------------------

_PARTS = 4  # a chunk is looked at in the middle of so many parts


class Reads(NamedTuple):
    """What attention of one layer and head works through in the shard that has most of it, which
    all wait for."""

    blocks_C: np.ndarray  # turns of the kernel's loop
    pages_C: np.ndarray  # read from HBM
    rows_C: np.ndarray


class Call(NamedTuple):
    """One call of the sampler, as far as it takes time."""

    steps_C: np.ndarray  # tokens of each chunk
    reads: "Reads"  # of all tokens of a chunk
    queued_C: np.ndarray  # bool: requests are waiting
    prefills: int  # calls of the prefill program
    rows_C: np.ndarray | int = 0  # rows of a shard that the program has; 0 = all slots


def look(trace: simulate.Trace, work: Work, scene: Scene, design: Design) -> Call:
    prefills = int(trace.prefills_C.sum()) * work.prefill_chunks
    rows, shards = scene.sizes.slots // scene.sizes.shards, scene.sizes.shards
    most_C = (trace.count_CxS > 0).reshape(-1, shards, rows).sum(2).max(1)
    last_C = ~trace.queued_C & (most_C <= rows // design.few) & (rows % 32 == 0)
    rows_C = np.where(last_C, rows // design.few, rows)
    read = reads(trace, scene, design.kernel)
    return Call(trace.steps_C, read, trace.queued_C, prefills, rows_C)


def decode(call: Call, scene: Scene, k: Values, design: Design = DESIGN) -> dict[str, np.ndarray]:
    """Seconds of each chunk by what they go into: {'attention': [C], ...}."""
    rows = np.where(call.rows_C, call.rows_C, scene.sizes.slots // scene.sizes.shards)
    L, kernel = scene.layers, design.kernel
    once = {  # seconds of one token
        "products": products(scene, rows, k),
        "all-reduces": L * 2 * reduce_seconds(scene, rows, k),
        "small operations": L * k["small_ops"] * kernel.small_ops,
        "writes to the cache": L * k["scatter"] * kernel.scatters * rows / 128,
        "head and draw": draw_seconds(scene, rows, k, design),
    }
    read_C = attention_seconds(call.reads, scene, k, kernel)
    begun_C = start_seconds(scene, k, kernel) * call.steps_C
    return {what: s * call.steps_C for what, s in once.items()} | {
        "attention": L * (scene.kv_heads * read_C + begun_C)
    }


def products(scene: Scene, rows: np.ndarray, k: Values) -> np.ndarray:
    """Matrix products of a token of `rows` rows: bound by reading weights, or by multiplying."""
    chip, split = scene.pod.chip, scene.decode_split
    return np.maximum(
        scene.read_bytes / split / (k["weights_hbm"] * chip.bandwidth),
        2 * scene.multiplied / split * rows / (k["decode_mxu"] * chip.flops),
    )


def reduce_seconds(scene: Scene, rows: np.ndarray, k: Values) -> np.ndarray:
    """One all-reduce of the residual stream, along one mesh axis after the other: of each sum a
    device keeps its part, and at last the parts are gathered. Groups along one side of the slice
    share its links."""
    seconds, part, sharing = 0.0, rows * scene.width * scene.item, 1
    for n in scene.decode_axes:
        seconds += 2 * (n - 1) / n * part * sharing / axis_rate(scene.pod, n, k)
        part, sharing = part / n, 1 if n in scene.pod.sides else sharing * n
    return seconds + k["reduce_latency"] * bool(scene.decode_axes)


def axis_rate(pod: Pod, n: int, k: Values) -> float:
    """Bytes a second around n chips in a row: a ring where n is a whole side of a torus that closes
    (v4, v5p: multiples of 4; v5e, v6e: 16), else a line, which goes one way at a time."""
    whole = 4 if pod.family in ("v4", "v5p") else 16
    ring = n in pod.sides and n % whole == 0
    return k[f"ici.{pod.family}"] * (1 if ring else 0.5)


def draw_seconds(scene: Scene, rows: np.ndarray, k: Values, design: Design) -> np.ndarray:
    size = rows * scene.vocab / (128 * 19008)
    over_tensor = 4 * (scene.decode_split > 1)  # embedding, three of the draw
    over_shards = (scene.sizes.shards > 1) / design.flag_every
    return k["draw"] * size + k["small_collective"] * (over_tensor + over_shards)


def reads(trace: simulate.Trace, scene: Scene, kernel: Kernel) -> Reads:
    """Over the tokens of each chunk."""
    page, block = scene.sizes.page_tokens, kernel.block_tokens
    rows, steps_C = scene.sizes.slots // scene.sizes.shards, trace.steps_C
    total = np.zeros((3, len(steps_C)))
    for part in range(_PARTS):
        at_Cx1 = ((part + 0.5) / _PARTS * steps_C)[:, None]
        seen_CxS, live_CxS = trace.position_CxS + at_Cx1 + 1, trace.count_CxS > at_Cx1
        blocks_CxS = np.where(live_CxS, np.ceil(seen_CxS / block), kernel.idle_blocks)
        pages_CxS = blocks_CxS * (block / page)
        if kernel.live_pages:
            pages_CxS = np.where(live_CxS, np.ceil(seen_CxS / page), pages_CxS)
        for x_C, x_CxS in zip(total, (blocks_CxS, pages_CxS, live_CxS), strict=True):
            x_C += x_CxS.reshape(len(steps_C), -1, rows).sum(2).max(1)
    return Reads(*(total / _PARTS * steps_C))


def attention_seconds(read: Reads, scene: Scene, k: Values, kernel: Kernel) -> np.ndarray:
    """[C], of one layer and head: the kernel's bundles, or what HBM gives, or the latency of
    copies, of which `ahead` are under way. The rows are shared by the cores, and so is HBM."""
    family = scene.pod.family
    cores = int(k[f"cores.{family}"]) if kernel.both_cores else 1
    hbm = scene.pod.chip.bandwidth * (kernel.hbm_share or k["keys_hbm"])
    copied_C = read.pages_C * scene.sizes.page_tokens * scene.key_bytes / hbm
    if kernel.hbm_share:
        return copied_C
    if kernel.live_pages:
        block, beside = (k[f"{scene.cache}.{part}.{family}"] for part in ("block", "beside"))
        n_C = read.blocks_C * block + read.rows_C * beside
    else:
        n_C = read.blocks_C * bundles(family, kernel.block_tokens // 128, k)
    waited_C = (read.blocks_C * k["dma_latency"] / cores + copied_C) / kernel.ahead
    return np.maximum.reduce([n_C / k[f"clock.{family}"] / cores, copied_C, waited_C])


def start_seconds(scene: Scene, k: Values, kernel: Kernel) -> float:
    """Of a call, until its first block is there: with one block ahead each waits as long."""
    if not kernel.live_pages:
        return 0.0
    family = scene.pod.family
    return k[f"{scene.cache}.start.{family}"] / k[f"clock.{family}"] + k["dma_latency"]


def bundles(family: str, pages: int, k: Values) -> float:
    """Of a turn of JAX's kernel. Between sizes that were counted what lies between; beyond them as
    on v5p, of which most sizes were."""
    of = lambda chip: {int(n.split(".")[2]): k[n] for n in k if n.startswith(f"bundles.{chip}.")}
    line = lambda x, at: float(np.interp(x, sorted(at), [at[n] for n in sorted(at)]))
    counted, v5p = of(family), of("v5p")
    near = min(max(pages, min(counted)), max(counted))
    return line(near, counted) * line(pages, v5p) / line(near, v5p)


def prefill_call(scene: Scene, k: Values) -> float:
    """One call of a shard's prompts; no head is run."""
    chip = scene.pod.chip
    n = (scene.read - scene.vocab * scene.decode_split * scene.width) / scene.decode_split
    return max(
        2 * n * scene.sizes.prefill_rows * scene.prefill_tokens / (k["prefill_mxu"] * chip.flops),
        n * scene.item / (k["weights_hbm"] * chip.bandwidth),
    )


# ------------------------------------------------------------------------------------------------
# A micro-batch of packed rows
# ------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """One micro-batch of packed rows, on a device."""

    products: float  # seconds
    elementwise: float
    attention: float
    waits: float  # for collectives that nothing runs beside
    flops: float  # of products and attention, what is computed again included

    @property
    def seconds(self) -> float:
        return self.products + self.elementwise + self.attention + self.waits


def micro_batch(
    scene: Scene, pairs: float, k: Values, design: "Design" = DESIGN, *, update: bool
) -> Pass:
    """Forward, or forward, backward and what is computed again. pairs: of a query and a key that
    attention computes in these rows."""
    chip, chips = scene.pod.chip, scene.pod.chips
    narrow = ".8" if scene.train_split >= 8 else ""
    passes = 3 - bool(scene.adapters) + scene.again if update else 1
    flops = passes * 2 * scene.multiplied * scene.micro_rows * scene.row_tokens / chips
    products = flops / (k[f"train_mxu{narrow}"] * chip.flops)

    looks = 2 if update and scene.remat == "full" else 1
    blocks = scene.heads * scene.layers * pairs / simulate.BLOCK**2 / chips
    score = 4 * scene.head_dim * simulate.BLOCK**2 * blocks  # FLOPs of one look
    cores = int(k[f"cores.{scene.pod.family}"])

    def on_cores(way: str, n: int) -> float:
        """Seconds where the cores share out n things of the same size."""
        bundles = k[f"splash.{way}.{scene.pod.family}"] * k["splash_waits"] * blocks
        return bundles / k[f"clock.{scene.pod.family}"] * math.ceil(n / cores) / n

    forward = on_cores("forward", scene.heads // scene.train_split)
    backward = on_cores("backward", scene.train_kv_heads if design.groups_apart else 1)
    return Pass(
        products,
        k[f"elementwise{narrow}"] * products,
        looks * forward + update * backward,
        collective_waits(scene, k, design, update=update),
        flops + score * (looks + 2.5 * update),
    )


def collective_waits(scene: Scene, k: Values, design: "Design", *, update: bool) -> float:
    """Seconds a micro-batch in which a device waits for others: whole rows of the residual stream
    that are gathered over `tensor` (a sum that each device gets whole counts twice), layers of
    weights that are gathered over `fsdp`, and gradients that replicas of the weights add up."""
    t, f, d = scene.train_split, scene.fsdp, scene.replicas
    kind, joined = "update" if update else "forward", update and design.joined_products
    ici, chips, seconds = k[f"ici.{scene.pod.family}"], scene.pod.chips, 0.0
    if t > 1:
        rows = scene.micro_rows * t / chips * scene.row_tokens * scene.width * scene.item
        moved = k[f"{kind}_moved" + ".joined" * joined]
        seconds += moved * scene.layers * rows * (t - 1) / t / axis_rate(scene.pod, t, k)
    weights = scene.read_bytes / t
    if f > 1:
        axes = len(scene.pod.sides) - (t > 1)
        gathered = k[f"{kind}_weights" + ".8" * (t >= 8)] * weights
        seconds += gathered * (f - 1) / f / (ici * axes)
    if d > 1 and update:
        share = (scene.adapters or scene.parameters) / scene.parameters
        seconds += 2 * (d - 1) / d * weights * share / f / axis_rate(scene.pod, d, k)
    return seconds


# ------------------------------------------------------------------------------------------------
# A rollout step
# ------------------------------------------------------------------------------------------------


class Price(NamedTuple):
    """Expected seconds of a rollout step."""

    phases: dict[str, float]  # they add up to the step; 'tail': decoding with nothing to refill
    decoding: dict[str, float]  # what 'decode' and 'tail' go into

    @property
    def step(self) -> float:
        return sum(self.phases.values())


def shares(rollouts: Rollouts) -> np.ndarray:
    """How much of each simulated round there is in a step, on average."""
    parts_N = np.zeros(len(rollouts.at))
    for n in (n for step in rollouts.steps for n in step):
        parts_N += [np.interp(n, rollouts.at, row) for row in np.eye(len(rollouts.at))]
    return parts_N / len(rollouts.steps)


def pricer(config, work: Work, scene: Scene, design: Design = DESIGN) -> Callable[[Values], Price]:
    """Constants -> seconds; evaluation and checkpoint with their share of a step."""
    rounds = [look(x, work, scene, design) for x in work.rollouts.traces]
    evaluated = [look(x, work, scene, design) for x in work.evaluations]
    parts_N = shares(work.rollouts)

    def price(k: Values) -> Price:
        sampled, into = zip(*(sampling(x, scene, k, design) for x in rounds), strict=True)
        weigh = lambda tables: {
            what: float(sum(n * x[what] for n, x in zip(parts_N, tables, strict=True)))
            for what in tables[0]
        }
        tests = sum(sum(sampling(x, scene, k, design)[0].values()) for x in evaluated)
        saved = checkpoint_bytes(config, scene) / hosts(scene, k) / k["to_host"]
        return Price(
            weigh(sampled)
            | {"grading": k["grading"] * work.responses / 8192}
            | training(work.packed, scene, k, design)
            | {
                "evaluation": tests / config.eval.every if config.eval.every else 0.0,
                "checkpoint": saved / config.checkpoint.every if config.checkpoint.every else 0.0,
            },
            weigh(into),
        )

    return price


def training(packed: simulate.Packed, scene: Scene, k: Values, design: Design) -> dict[str, float]:
    def of(scene: Scene, update: bool) -> float:
        one = of_micro_batches(packed, scene, k, design, update=update)
        return packed.micro_batches * one.seconds

    out = {"old log-probs": scene.scored * of(scene, False), "update": of(scene, True)}
    if scene.value:
        out |= {"values": of(scene.value, False), "update of values": of(scene.value, True)}
    return out


def of_micro_batches(packed, scene: Scene, k: Values, design: Design = DESIGN, *, update: bool):
    """The mean Pass of a step's micro-batches."""
    pairs = min(packed.own_pairs, packed.pairs) if design.own_segment else packed.pairs
    return micro_batch(scene, pairs / packed.micro_batches, k, design, update=update)


def sampling(call: Call, scene: Scene, k: Values, design: Design) -> tuple[dict, dict]:
    """Seconds of one call of the sampler: by phase, and by what decoding goes into."""
    into_C = decode(call, scene, k, design)
    token_C = sum(into_C.values())
    host_C = np.full(len(token_C), k["host_chunk"] + k["host_slot"] * scene.sizes.slots)
    if design.host_overlaps:
        rows_C = call.reads.rows_C / np.maximum(call.steps_C, 1) * scene.sizes.shards
        host_C = k["host_chunk"] + k["host_row"] * rows_C
    phases = {
        "prefill": call.prefills * prefill_call(scene, k),
        "decode": float(token_C[call.queued_C].sum()),
        "tail": float(token_C[~call.queued_C].sum()),
        "host": float(host_C.sum()),
    }
    return phases, {what: float(x.sum()) for what, x in into_C.items()}


def checkpoint_bytes(config, scene: Scene) -> float:
    """What is trained and its moments in float32, the reference where there is one, the base of
    adapters, and the value model."""
    trained, base = scene.adapters or scene.parameters, scene.item * scene.parameters
    policy = (12 + 4 * bool(config.loss.kl_coef)) * trained + base * bool(scene.adapters)
    return policy + (12 * scene.value.parameters if scene.value else 0)


def hosts(scene: Scene, k: Values) -> float:
    return max(scene.pod.chips / k["chips_a_host"], 1)


# ------------------------------------------------------------------------------------------------
# A run on chips that are taken away
# ------------------------------------------------------------------------------------------------

_CUTS = 6  # of a call of the sampler, at times as far apart


def drawn_again(config, traffic: simulate.Traffic, work: Work, scene: Scene, k: Values) -> float:
    """Seconds of sampling that a preemption within a rollout costs on average, with the journal:
    responses that had ended are there, and all others are drawn from their first token on."""
    cap, G = config.rollout.max_response_tokens, config.rollout.group_size
    spent, lost = 0.0, 0.0
    for share, n, trace in zip(
        shares(work.rollouts), work.rollouts.at, work.rollouts.traces, strict=True
    ):
        length_NxG = simulate.lengths(traffic, cap, n, G)
        whole = call_seconds(trace, work, scene, k)
        at_C = np.cumsum(sum(decode(look(trace, work, scene, DESIGN), scene, k).values()))
        for cut in (np.arange(_CUTS) + 0.5) / _CUTS:
            during = np.searchsorted(at_C, cut * at_C[-1])  # this chunk is lost
            rest_NxG = np.where(trace.ended_NxG < during, 0, length_NxG)
            rest = simulate.sample(rest_NxG, traffic.prompt, cap, scene.sizes)
            again = call_seconds(rest, work, scene, k) - (1 - cut) * whole
            lost += share * whole * again / _CUTS
        spent += share * whole
    return lost / spent


def call_seconds(trace: simulate.Trace, work: Work, scene: Scene, k: Values) -> float:
    """Of one call of the sampler."""
    return sum(sampling(look(trace, work, scene, DESIGN), scene, k, DESIGN)[0].values())


def preemption(config, phases: dict[str, float], again: float, scene: Scene, k: Values):
    """Seconds of wall time that one preemption costs, by what they go into. phases: Price.phases;
    again: `drawn_again`. At any time of a step alike, of steps between checkpoints alike.

    With the journal what follows the rollout is done again, of this step as far as it had come and
    of steps that no checkpoint holds, but for the samples of evaluations; without it all of these.
    A run that leaves while it samples saves the last step first, where that can be done in time."""
    step, saved = sum(phases.values()), checkpoint_bytes(config, scene)
    sampled = sum(phases[x] for x in ("prefill", "decode", "tail", "host")) / step
    per_host = saved / hosts(scene, k)
    earlier = (max(config.checkpoint.every, 1) - 1) / 2
    if per_host / k["to_host"] <= k["leaving"]:
        earlier *= 1 - sampled
    outside = ("prefill", "decode", "tail", "host", "evaluation", "checkpoint")
    rest = sum(s for x, s in phases.items() if x not in outside)
    after = 1 - sampled - rest / step  # evaluation and saving: nothing of the step is safe yet
    kept = config.checkpoint.journal_gb > 0
    return {
        "earlier steps": earlier * (rest if kept else step),
        "this step": sampled * again + rest / step * rest / 2 + after * rest if kept else step / 2,
        "leaving": k["leaving"],
        "provisioning": k["provision"],
        "start": k["start"] + per_host * scene.replicas / k["from_bucket"],
    }


def goodput(phases: dict[str, float], lost: dict[str, float], hours: float) -> float:
    """`time/goodput` of a run that is preempted every so many hours: saving does not count."""
    good = 1 - phases["checkpoint"] / sum(phases.values())
    return good * max(1 - sum(lost.values()) / 3600 / hours, 0.0)


def rough(config, traffic: simulate.Traffic, scene: Scene, k: Values) -> float:
    """Seconds of a step without its schedule, to tell what is worth simulating: slots that are full
    for all tokens but a tail as long as the longest response, and shards that read alike."""
    cap, G = config.rollout.max_response_tokens, config.rollout.group_size
    drawn = math.ceil(config.rollout.groups / max(traffic.accept, 1 / 64))
    length = simulate.lengths(traffic, cap, drawn, G).reshape(-1).astype(float)
    steps = np.array([length.sum() / scene.sizes.slots + cap])
    seen = length / 2 + traffic.prompt
    sizes = DESIGN.kernel.block_tokens, scene.sizes.page_tokens
    blocks, pages = ((length * (seen / n + 0.5)).sum() for n in sizes)
    shares = (np.array([x / scene.sizes.shards]) for x in (blocks, pages, length.sum()))
    prefills = drawn // max(scene.sizes.prefill_rows, 1)
    call = Call(steps, Reads(*shares), np.array([True]), prefills)
    packed = simulate.packed(config, traffic, scene.row_tokens, scene.micro_rows)
    sampled = sum(sampling(call, scene, k, DESIGN)[0].values())
    return sampled + sum(training(packed, scene, k, DESIGN).values())


class Spread(NamedTuple):
    """Seconds of a step, and what the ranges of the constants make of them."""

    low: float
    high: float
    by: dict[str, tuple[float, float]]  # seconds less and more by one constant alone


def spread(price: Callable[[Values], Price]) -> Spread:
    """One constant at a time as far off as its range, and the root of the sum of squares: errors
    that know nothing of each other."""
    known = values()
    step = price(known).step
    by = {
        name: tuple(price(known | {name: x}).step - step for x in (c.low, c.high))
        for name, c in CONSTANTS.items()
        if not c.low == c.value == c.high
    }
    low, high = (math.sqrt(sum(x * x for x in side)) for side in zip(*by.values(), strict=True))
    return Spread(step - low, step + high, by)


# The programs of the first release, from which `changes` starts.
FIRST = Design(
    kernel=JAX,
    flag_every=1,
    host_overlaps=False,
    own_segment=False,
    few=1,
    groups_apart=False,
    joined_products=False,
    joined_evaluation=False,
)


def changes(config, work: Work, scene: Scene) -> list[tuple[str, float]]:
    """(what, seconds of a step with this and all changes above it), from the first release to
    today's rounds and programs. Evaluation as it is today."""
    first = work.rollouts._replace(steps=work.rollouts.before)
    design, out = FIRST, [("the first release", work._replace(rollouts=first), FIRST)]
    if work.rollouts.before != work.rollouts.steps:
        out.append(("rounds that fill the batch", work, FIRST))
    for name, value in DESIGN._asdict().items():
        if value != getattr(FIRST, name):
            design = design._replace(**{name: value})
            out.append((f"{name}: {getattr(value, 'name', value)}", work, design))
    return [(what, pricer(config, x, scene, d)(values()).step) for what, x, d in out]
