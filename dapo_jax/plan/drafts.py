"""What guesses (docs/drafts.md) would make of a step: `plan --draft_acceptance=.4,.5,runs/x`.

Each guessed token is right with one probability, those before it being so, whatever the row; so the
schedule stays what it is, and a chunk of it takes fewer passes. Where a pass is made, and with how
many guesses, is decided as `rollout.drafts.Drafts.choose` does it, by the cost that is known here.

Dims: C chunks.
"""

import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config import validation
from dapo_jax.plan import roofline, step
from dapo_jax.plan.constants import VALUES, Values
from dapo_jax.plan.report import filled_in
from dapo_jax.plan.roofline import Call, Scene
from dapo_jax.plan.shapes import network
from dapo_jax.plan.simulate import Traffic
from dapo_jax.pods.slices import Pod

# Bundles of the kernel of several queries over those of one, 4 places of a row: counted by
# `plan --kernels` on v5p and v6e, bfloat16 and int8 (docs/drafts.md), the most of them.
BLOCK, BESIDE = 1.15, 2.04
STEPS = 10  # the last of a run's in which passes verified guesses


class Drafted(NamedTuple):
    """Seconds of a rollout step with guesses. Without them: acceptance 0."""

    acceptance: float  # of a guessed token
    visited: bool  # whether the host comes between two passes, as it does; else none would wait
    tail: float
    host: float
    evaluation: float
    step: float
    tokens: float  # that a row draws in a pass, on average over the tail's tokens


def per_pass(acceptance: float, guesses: np.ndarray) -> np.ndarray:
    """Tokens that a row draws in a pass: 1 + a + a^2 + ... of so many guesses; of a broken number
    some rows have one more than others."""
    whole = np.floor(guesses).astype(int)
    longest = int(whole.max(initial=0)) + 1
    sums = np.cumsum(acceptance ** np.arange(longest + 1))
    return sums[whole] + (guesses - whole) * acceptance ** (whole + 1.0)


class Measured(NamedTuple):
    """What a run's passes did in the last steps that had any."""

    run: str
    steps: int
    guesses: float  # of a row in a pass
    tokens: float  # that it drew
    acceptance: float  # with which so many guesses give so many tokens


def measured(run: str) -> Measured:
    """run: a run's directory or its metrics.jsonl. ValueError: neither, or nothing was guessed.

    Guesses behind a wrong one were verified for nothing, so that the share of kept ones is less
    than the probability of one; this is found from `per_pass`, which grows with it."""
    path = pathlib.Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"--draft_acceptance: {run!r}: wants shares below 1, as .4,.5,.6, or a run's directory"
            " with its metrics.jsonl"
        )
    with path.open(errors="replace") as lines:
        records = [r for r in map(_record, lines) if r.get("drafts/passes")][-STEPS:]
    verified, kept = (
        [sum(n for tag, n in r.items() if tag.startswith(f"drafts/{what}/")) for r in records]
        for what in ("drafted", "accepted")
    )
    if not sum(kept):
        what = "no guess was right" if records else "nothing was guessed"
        raise ValueError(
            f"--draft_acceptance: {path}: {what} in it; wants the log of a run with"
            " rollout.draft_tokens, or shares as .4,.5,.6"
        )
    # Where none was kept its rows are not told: one of each pass at least.
    more = [r.get("drafts/tokens_per_row", 1) - 1 for r in records]
    rows = sum(
        n / x if x > 0 else r["drafts/passes"] for n, x, r in zip(kept, more, records, strict=True)
    )
    guesses, tokens = sum(verified) / rows, 1 + sum(kept) / rows
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        enough = per_pass(middle, np.array([guesses]))[0] >= tokens
        low, high = (low, middle) if enough else (middle, high)
    return Measured(run, len(records), guesses, tokens, high)


def _record(line: str) -> dict[str, float]:
    """The numbers of a log's line; none where it is no record, as one that was cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    numbers = found.items() if isinstance(found, dict) else ()
    return {tag: x for tag, x in numbers if isinstance(x, int | float)}


def slowed(scene: Scene, k: Values) -> Values:
    """Constants of the kernel that takes several queries of a row; all of decoding is by it."""
    named = {"block": BLOCK, "beside": BESIDE}
    at = lambda part: f"{scene.cache}.{part}.{scene.pod.family}"
    return k | {at(part): by * k[at(part)] for part, by in named.items()}


def sampling(
    call: Call, scene: Scene, k: Values, config, acceptance: float, visited: bool
) -> tuple[dict[str, float], float, float]:
    """(seconds by phase as of `roofline.sampling`, tokens of the tail, passes of them)."""
    rollout, k = config.rollout, slowed(scene, k)
    phases, _ = roofline.sampling(call, scene, k)
    rows_C = call.live_C / np.maximum(call.steps_C, 1)  # of the fullest shard
    places_C = np.maximum(call.slots_C, rollout.draft_places // scene.sizes.shards)
    spare_C = np.maximum(places_C / np.maximum(rows_C, 1) - 1, 0)
    drawn_C = per_pass(acceptance, np.minimum(spare_C, rollout.draft_tokens))
    token_C = sum(roofline.decode(call, scene, k).values())
    pass_C = sum(roofline.decode(call._replace(slots_C=places_C), scene, k).values())
    visit_C = k["host_chunk"] + k["host_row"] * rows_C * scene.sizes.shards
    waits_C = visit_C * call.steps_C * visited / drawn_C
    by_pass_C = pass_C / drawn_C
    pays_C = (by_pass_C + waits_C < token_C + visit_C) & (drawn_C > 1) & (call.steps_C > 0)
    seconds_C = np.where(pays_C, by_pass_C, token_C)
    phases["decode"] = float(seconds_C[call.queued_C].sum())
    phases["tail"] = float(seconds_C[~call.queued_C].sum())
    phases["host"] += float((waits_C - visit_C)[pays_C & visited].sum())
    tail = call.steps_C * ~call.queued_C
    return phases, float(tail.sum()), float((tail / np.where(pays_C, drawn_C, 1)).sum())


class Traced(NamedTuple):
    """Calls of the sampler, without guesses."""

    share: float  # of such calls in a step; of tests: in an evaluation
    call: Call
    phases: dict[str, float]  # seconds, as of `roofline.sampling`


def drafted(
    config, plain: dict[str, float], rollouts: list[Traced], tests: list[Traced], scene: Scene,
    k: Values, acceptance: float, visited: bool,
) -> Drafted:  # fmt: skip
    """`Drafted` of one acceptance; 0: of the plain engine. plain: its seconds by phase."""
    phases, tokens, passes, longer = dict(plain), 0.0, 0.0, 0.0
    with_guesses = lambda call: sampling(call, scene, k, config, acceptance, visited)
    for share, call, before in rollouts if acceptance else []:
        after, n, made = with_guesses(call)
        tokens, passes = tokens + share * n, passes + share * made
        for what, seconds in after.items():
            phases[what] += share * (seconds - before[what])
    for share, call, before in tests if acceptance else []:
        after, *_ = with_guesses(call)
        longer += share * (sum(after.values()) - sum(before.values()))
    phases["evaluation"] += longer / config.eval.every if config.eval.every else 0.0
    parts = phases["tail"], phases["host"], phases["evaluation"], sum(phases.values())
    return Drafted(acceptance, visited, *parts, tokens / passes if passes else 1.0)


def without(config, traffic: Traffic, scene: Scene):
    """What a step does without guesses: (seconds by phase, rollouts, tests)."""
    work = step.work(config, traffic, scene)

    def traced(share, trace):
        call = roofline.call(trace, work.prefill_chunks, scene)
        return Traced(share, call, roofline.sampling(call, scene, VALUES)[0])

    rollouts = [*map(traced, work.rollouts.shares(), work.rollouts.traces)]
    evaluations = [traced(*x) for x in work.evaluations]
    return step.timer(config, work, scene)(VALUES).phases, rollouts, evaluations


def compared(config, pod: Pod, traffic: Traffic, shares: list[str]) -> dict[str, Any]:
    """The step without guesses and with them, and lines about it for people. ValueError: what the
    flags leave open."""
    if pod.platform != "tpu":
        raise ValueError("--draft_acceptance: there is no time of a pass with guesses for GPUs")
    if not config.rollout.draft_tokens:
        raise ValueError("--draft_acceptance: set --config.rollout.draft_tokens, at most 15")
    known = [re.fullmatch(r"0?\.\d*[1-9]\d*", share) for share in shares]
    runs = [measured(share) for share, number in zip(shares, known, strict=True) if not number]
    logged = {run.run: run.acceptance for run in runs}
    acceptances = [logged[x] if x in logged else float(x) for x in shares]
    sizes = validation.resolve_mesh(config, pod.devices)
    scene = Scene(config, network(config), sizes, pod)
    plain = without(config, traffic, scene)
    of = lambda a, visited: drafted(config, *plain, scene, VALUES, a, visited)
    found = [of(0.0, True), *(of(a, visited) for visited in (True, False) for a in acceptances)]
    text = filled_in("drafts.txt", found=found, config=config, pod=pod, runs=runs)
    told = {"drafts": [x._asdict() for x in found], "runs": [x._asdict() for x in runs]}
    return told | {"text": text}
