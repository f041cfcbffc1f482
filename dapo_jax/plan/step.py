"""Expected seconds of a rollout step on a slice: the schedule, and a table of constants.

    work = step.work(config, traffic, scene)         the schedule, once: it knows no time
    timer = step.timer(config, work, scene)
    timer(constants.VALUES).phases                   seconds by phase, for any constants

Nothing is measured on a TPU: constants.txt says where each constant is from, and `spread` what
their ranges make of the sum. What is left out makes a step slower: contention of ICI, waits between
programs, stragglers among hosts.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.plan import roofline, simulate
from dapo_jax.plan.constants import CONSTANTS, VALUES, Values
from dapo_jax.plan.roofline import Scene
from dapo_jax.plan.simulate import Sizes, Trace, Traffic


class Rollouts(NamedTuple):
    """Rounds of the sampler. Time is nearly linear in a round's problems between two sizes, so a
    few are simulated and the others interpolated."""

    steps: list[list[int]]  # problems of each round of some rollout steps
    at: list[int]  # problems of the simulated rounds, ascending
    traces: list[Trace]
    pages: int  # that the fullest shard used, or all of them where they were too few

    def shares(self) -> np.ndarray:
        """How much of each simulated round there is in a step, on average."""
        parts_N = np.zeros(len(self.at))
        for n in (n for step in self.steps for n in step):
            parts_N += [np.interp(n, self.at, row) for row in np.eye(len(self.at))]
        return parts_N / len(self.steps)


class Work(NamedTuple):
    """What one rollout step does."""

    rollouts: Rollouts
    packed: simulate.Packed
    evaluations: list[tuple[int, Trace]]  # (sign, call): their signed seconds are one evaluation's
    prefill_chunks: int  # calls that take a prompt through
    responses: float  # drawn


def work(
    config, traffic: Traffic, scene: Scene, *, tests=True, rollouts: Rollouts | None = None
) -> Work:
    """tests: False = evaluation is left out. rollouts: where they are known already."""
    known = rollouts or simulated(config, traffic, scene.sizes)
    largest = known.at[-1], known.traces[-1]
    return Work(
        known,
        simulate.packed(config, traffic, scene.row_tokens, scene.micro_rows),
        evaluation(config, traffic, scene.sizes, largest) if tests else [],
        -(-max(traffic.prompt - 1, 1) // scene.prefill_tokens),
        float(np.mean([sum(x) for x in known.steps])) * config.rollout.group_size,
    )


def simulated(config, traffic: Traffic, sizes: Sizes) -> Rollouts:
    """The rounds of steps as they follow each other, and traces of some sizes: of all where they
    are few, else of the largest, eighths of it, and the smallest."""
    steps = simulate.rounds(config, traffic.accept)
    at = sorted({n for step in steps for n in step})
    if len(at) > 3:
        eighths = (at[-1] // 8**i for i in range(10))
        at = sorted({at[0], *(n for n in eighths if n > at[0])})
    G, cap = config.rollout.group_size, config.rollout.max_response_tokens
    drawn = ((simulate.lengths(traffic, cap, n, G), simulate.ends(config, traffic, n)) for n in at)
    traces = [simulate.sample(x, traffic.prompt, cap, sizes, ends) for x, ends in drawn]
    used = sizes.pages if any(x.evicted for x in traces) else max(x.pages for x in traces)
    return Rollouts(steps, at, traces, used)


def evaluation(
    config, traffic: Traffic, sizes: Sizes, largest: tuple[int, Trace] | None = None
) -> list[tuple[int, Trace]]:
    """(sign, call): an evaluation takes the seconds of the calls with +1, less those with -1.
    largest: problems and trace of a step's largest round; with `eval.with_rollout` both are drawn
    in one call, from which the round alone is taken off."""
    problems = min(config.eval.max_problems or traffic.eval_problems, traffic.eval_problems)
    named = [x for x in config.eval.files.split(",") if x.strip()]
    sets = len(named) or 2 * (not config.data.train)  # the embedded task has two
    if not problems * sets:
        return []
    settings = 1 + (config.eval.top_p < 1)
    G, cap = config.rollout.group_size, config.rollout.max_response_tokens
    longest = config.eval.max_response_tokens or cap
    own = traffic._replace(response=min(traffic.response, max(longest // 2, 1)))
    drawn = simulate.lengths(own, longest, settings * sets * problems, config.eval.k)
    if not (config.eval.with_rollout and largest):
        return [(1, simulate.sample(drawn, traffic.prompt, longest, sizes))]
    n, alone = largest
    round_, ends = simulate.lengths(traffic, cap, n, G), simulate.ends(config, traffic, n)
    both = simulate.sample(round_, traffic.prompt, max(cap, longest), sizes, ends, drawn)
    return [(1, both), (-1, alone)]


def quickly(config, sizes: Sizes) -> Sizes:
    """For a first look: at most 40 host visits in the longest response, and pages of four."""
    chunk = max(sizes.chunk, config.rollout.max_response_tokens // 40)
    pages = dict(page_tokens=4 * sizes.page_tokens, pages=sizes.pages // 4)
    return sizes._replace(chunk=chunk, **(pages if sizes.pages > 400 else {}))


class Expected(NamedTuple):
    """Seconds of a rollout step."""

    phases: dict[str, float]  # they add up to the step
    decoding: dict[str, float]  # what 'decode' and 'tail' go into

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def timer(config, work: Work, scene: Scene) -> Callable[[Values], Expected]:
    """Constants -> seconds; evaluation and checkpoint with their share of a step."""
    call = lambda trace: roofline.call(trace, work.prefill_chunks, scene)
    rounds = [*map(call, work.rollouts.traces)]
    evaluations = [(n, call(trace)) for n, trace in work.evaluations]
    parts_N = work.rollouts.shares()

    def expected(k: Values) -> Expected:
        sampled, into = zip(*(roofline.sampling(x, scene, k) for x in rounds), strict=True)
        weigh = lambda tables: {
            what: float(sum(n * x[what] for n, x in zip(parts_N, tables, strict=True)))
            for what in tables[0]
        }
        tests = sum(n * sum(roofline.sampling(x, scene, k)[0].values()) for n, x in evaluations)
        hosts = max(scene.pod.chips / k["chips_a_host"], 1)
        saved = checkpoint_bytes(config, scene) / hosts / k["to_host"]
        phases = weigh(sampled) | {"grading": k["grading"] * work.responses / 8192}
        phases |= roofline.training(work.packed, scene, k)
        phases["evaluation"] = tests / config.eval.every if config.eval.every else 0.0
        phases["checkpoint"] = saved / config.checkpoint.every if config.checkpoint.every else 0.0
        return Expected(phases, weigh(into))

    return expected


def checkpoint_bytes(config, scene: Scene) -> float:
    """What is trained and its moments in float32, the reference where there is one, the base of
    adapters, and the value model."""
    trained, base = scene.adapters or scene.parameters, scene.item * scene.parameters
    policy = (12 + 4 * bool(config.loss.kl_coef)) * trained + base * bool(scene.adapters)
    return policy + (12 * scene.value.parameters if scene.value else 0)


def rough(config, traffic: Traffic, scene: Scene, k: Values) -> float:
    """Seconds of a step without its schedule, to tell what is worth simulating: slots that are full
    for all tokens but a tail as long as the longest response, and shards that read alike."""
    cap, G, sizes = config.rollout.max_response_tokens, config.rollout.group_size, scene.sizes
    drawn = math.ceil(config.rollout.groups / max(traffic.accept, 1 / 64))
    length = simulate.lengths(traffic, cap, drawn, G).reshape(-1).astype(float)
    steps = np.array([length.sum() / sizes.slots + cap])
    seen = length / 2 + traffic.prompt
    units = roofline.BLOCK_TOKENS, sizes.page_tokens
    read = *((length * (seen / n + 0.5)).sum() for n in units), length.sum()
    shares = (np.array([x / sizes.shards]) for x in read)
    prefills, rows = drawn // max(sizes.prefill_rows, 1), sizes.slots // sizes.shards
    call = roofline.Call(steps, np.array([True]), prefills, rows, *shares)
    packed = simulate.packed(config, traffic, scene.row_tokens, scene.micro_rows)
    sampled = sum(roofline.sampling(call, scene, k)[0].values())
    return sampled + sum(roofline.training(packed, scene, k).values())


def spread(timer: Callable[[Values], Expected]) -> dict[str, Any]:
    """What the ranges of the constants make of a step's seconds. 'uncertain': seconds less and more
    by one constant alone as far off as its range; 'low_s', 'high_s': by the root of the sum of
    their squares, errors that know nothing of each other."""
    expected = timer(VALUES).seconds
    by = {
        name: tuple(timer(VALUES | {name: x}).seconds - expected for x in (c.low, c.high))
        for name, c in CONSTANTS.items()
        if not c.low == c.value == c.high
    }
    low, high = (math.sqrt(sum(x * x for x in side)) for side in zip(*by.values(), strict=True))
    return {"low_s": expected - low, "high_s": expected + high, "uncertain": by}
