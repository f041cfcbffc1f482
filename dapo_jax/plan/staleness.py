"""What `rollout.staleness` would make of a step.

The schedule never drains there: rows that have not ended at the end of a step go on in the next.
"""

import itertools
import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from dapo_jax.plan import step
from dapo_jax.plan.constants import Values
from dapo_jax.plan.roofline import Scene
from dapo_jax.plan.simulate import Sampler, Sizes, Trace, Traffic, lengths
from dapo_jax.rollout.schedule import Request
from dapo_jax.variants.clock import Clock, Run


def carried(
    config, traffic: Traffic, sizes: Sizes, staleness: int, prefill_tokens: int, steps: int = 2
) -> tuple[list[Trace], float, tuple[float, int, float]]:
    """`steps` rollout steps, from the first on that is like those after it, as
    `carried.sample_batch` takes them, by the same clock and schedule: (traces, groups judged a
    step, (mean age and greatest age of the trained tokens in steps, tokens of rows that go on a
    step))."""
    rollout, versions = config.rollout, steps + staleness
    cap, G, need = rollout.max_response_tokens, rollout.group_size, rollout.groups
    most = math.ceil((versions + staleness + 3) * need / max(traffic.accept, 1 / 64))
    length_NxG = lengths(traffic, cap, most, G).tolist()
    taught_N = (np.random.default_rng(0).random(most) < traffic.accept).tolist()
    every = not config.dynamic_sampling.enabled
    judge = lambda whole: [every or taught_N[f.position % most] for f in whole]
    # (position, sample) -> tokens of each version
    drawn = defaultdict(lambda: np.zeros(versions, int))
    trained_V = np.zeros(versions, int)  # tokens by age
    flights, position, traces, judged, parked = [], 0, [], 0, 0
    settings = dict(need=need, staleness=staleness, samples=G, lanes=sizes.slots)
    settings |= dict(tick=min(sizes.chunk, cap), most=config.dynamic_sampling.max_rounds * need)
    for version in range(versions):
        clock = Clock(flights, version=version, position=position, **settings)
        runs: list[tuple[tuple[int, int], Run, int]] = []  # of a request; where it begins
        call = Sampler([], [], cap, sizes, prefill_tokens)

        def join(flights, call=call, runs=runs) -> None:
            for f in flights:
                p = f.position % most  # beyond: the same problems again
                for g, run in enumerate(f.runs):
                    if not run.whole:
                        prompt, prefix = (f.position,) * traffic.prompt, (-1 - g,) * run.at
                        request = Request(prompt, f.position, g, prefix=prefix)
                        call.schedule.waiting.append((len(runs), request))
                        call.left.append(length_NxG[p][g] - run.at)
                        runs.append(((f.position, g), run, run.at))

        join(flights)
        late = version >= staleness
        parked += late * sum(r.at for f in flights for r in f.runs if not r.whole)
        while (used := clock.run(judge, join)) is None:
            for index, emitted, left in call.chunk():
                _, run, start = runs[index]
                run.known = max(run.known, start + emitted)
                run.ended |= not left
        for row, run, start in runs:
            drawn[row][version] = run.at - start
        if late:
            traces.append(call.trace())
            judged += clock.judged
            of_V = sum(drawn[f.position, g] for f in used for g in range(G))
            trained_V[: version + 1] += of_V[version::-1]
        taken, position = {f.position for f in used}, clock.position
        flights = [f for f in clock.flights if f.position not in taken]
        for f in flights:
            f.runs = [Run(r.at, r.whole, r.at) for r in f.runs]
    age = float(trained_V @ np.arange(versions) / trained_V.sum())
    ages = age, int(np.flatnonzero(trained_V).max()), parked / steps
    return traces, judged / steps, ages


def carrying(config, traffic: Traffic, scene: Scene, staleness: int):
    """What differs in `step.Work` from a step that carries nothing; and `carried`'s ages."""
    traces, judged, ages = carried(config, traffic, scene.sizes, staleness, scene.prefill_tokens)
    at, responses = [*range(len(traces))], judged * config.rollout.group_size
    rollouts = step.Rollouts([[i] for i in at], at, traces, scene.sizes.pages)
    return dict(rollouts=rollouts, prefill_chunks=1, responses=responses), ages


class Age(NamedTuple):
    """Expected of a step with `rollout.staleness`, far from the run's first."""

    staleness: int
    slots: int
    seconds: float
    occupancy: float  # of the slots, over the whole sampling of a step
    mean: float  # age of the trained tokens, in steps
    oldest: int
    parked: float  # tokens of rows that go on, a step
    phases: dict[str, float]  # seconds; their sum is the step


def aged(config, traffic: Traffic, known: step.Work, scene: Scene, k: Values) -> list[Age]:
    """For staleness 0; and for 1 and 2 with all slots, three quarters and half of them over the
    same pages. All with as few host visits as `step.quickly`."""
    quick = step.quickly(config, scene.sizes)

    def timed(sizes: Sizes, **work) -> step.Expected:
        tests = step.evaluation(config, traffic, sizes)
        there = scene.replaced(sizes=sizes)
        return step.timer(config, known._replace(evaluations=tests, **work), there)(k)

    rollouts = step.simulated(config, traffic, quick)
    plain = timed(quick, rollouts=rollouts)
    # Share of the slots in use over the sampling of a step.
    parts_N, traces = rollouts.shares(), rollouts.traces
    used_N = np.array([t.count_CxS.sum() for t in traces])
    all_N = np.array([t.steps_C.sum() * t.count_CxS.shape[1] for t in traces])
    busy = float(parts_N @ used_N / (parts_N @ all_N))
    out = [Age(0, quick.slots, plain.seconds, busy, 0.0, 0, 0.0, plain.phases)]
    fewer = {quick.slots * n // 4 // quick.shards * quick.shards for n in (4, 3, 2)} - {0}
    for staleness, slots in itertools.product((1, 2), sorted(fewer, reverse=True)):
        sizes = quick._replace(slots=slots)
        work, ages = carrying(config, traffic, scene.replaced(sizes=sizes), staleness)
        found = timed(sizes, **work)
        busy = float(np.mean([t.occupancy for t in work["rollouts"].traces]))
        out.append(Age(staleness, slots, found.seconds, busy, *ages, found.phases))
    return out
