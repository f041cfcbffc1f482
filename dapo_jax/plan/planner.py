"""Everything about one config on one slice, as plain JSON values (bytes, seconds, tokens)."""

import math
from typing import Any

import numpy as np

from dapo_jax.config import presets, validation
from dapo_jax.model import qwen2
from dapo_jax.plan import footprint, roofline, staleness, step
from dapo_jax.plan.constants import CONSTANTS, VALUES
from dapo_jax.plan.footprint import mistakes, waves
from dapo_jax.plan.layouts import changed, fitting, search
from dapo_jax.plan.roofline import Scene, micro_batch
from dapo_jax.plan.shapes import network, published, value_model
from dapo_jax.plan.simulate import Traffic
from dapo_jax.pods import slices
from dapo_jax.pods.slices import Pod

# Off by default: each changes the samples, or what is taken for their log-probs, and they do not go
# together (docs/on_a_pod.md). Called by the first field.
OPTIONS = (
    {"loss.old_logprobs": "reuse", "loss.importance_cap": 0.0, "rollout.cache_dtype": "model"},
    {"rollout.cache_dtype": "int8", "loss.importance_cap": 2.0, "loss.old_logprobs": "recompute"},
)


def plan(config, pod: Pod, traffic: Traffic, room: float, with_staleness=False) -> dict[str, Any]:
    """room: share of the memory that suggestions leave free. with_staleness: simulate
    `rollout.staleness` too, which takes minutes."""
    shape = network(config)
    value = value_model(config, shape)
    found = search(config, shape, pod, traffic, room)
    named = {x: getattr(pod, x) for x in ("cloud", "topology", "slices", "chips", "platform")}
    out = {
        "pod": named | {"chip": pod.chip._asdict()},
        "parameters": qwen2.param_count(shape),
        **({"value_parameters": qwen2.param_count(value)} if value else {}),
        "assumed": traffic._asdict() | {"room": room},
        "mistakes": mistakes(config, shape, pod).splitlines(),
        "suggestions": [x._asdict() | {"flags": x.flags()} for x in found[:3]],
    }
    if not found:
        bigger = (p for p in pod.larger() if any(fitting(config, shape, p, traffic, room)))
        out["smallest_that_fits"] = next((p.cloud for p in bigger), None)
    if out["mistakes"]:
        return out | {"fits": False}
    sizes = validation.resolve_mesh(config, pod.devices)
    table = footprint.memory(config, shape, sizes, pod.platform)
    peaks = footprint.peaks(table)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lengths = {"longest": longest, "mean": traffic.prompt + traffic.response}
    held = lambda n: waves(config, shape, sizes, n, pod.platform)
    flight = {what: {"tokens": n} | held(n) for what, n in lengths.items()}
    out |= {"mesh": sizes, "bytes": table, "peaks": peaks, "in_flight": flight}
    out |= {name: config.rollout[name] for name in ("slots", "cache_fraction")}
    out["fits"] = max(peaks.values()) <= pod.chip.hbm and flight["longest"]["sequences"] > 0
    more = expected(config, shape, sizes, pod, traffic, with_staleness) if out["fits"] else {}
    return out | more


def anchors() -> list[dict[str, float]]:
    """Milliseconds between tokens of Qwen3-32B on v6e-4, tensor 4, bfloat16, 64 requests: published
    (sglang-jax, docs/cookbook/autoregressive/Qwen/Qwen3.md) and by this model, contexts in tokens.
    """
    c, mesh, one = presets.paper(), dict(data=1, fsdp=1, tensor=4), np.ones(1)
    c.rollout.slots = 64
    s = Scene(c, published("Qwen/Qwen3-32B"), mesh, slices.parse("v6e-4"))

    def ms(context: int) -> float:
        pages = 64 * context / s.sizes.page_tokens * one
        call = roofline.Call(one, one > 0, 0, 64, 0 * one, pages, 0 * one)
        return 1e3 * float(sum(roofline.decode(call, s, VALUES).values())[0])

    return [dict(context=n, published_ms=x, ms=ms(n)) for n, x in ((1536, 29.5), (4608, 35.3))]


def expected(
    config, shape: qwen2.Shape, sizes, pod: Pod, traffic: Traffic, with_staleness=False
) -> dict[str, Any]:
    """The step and the run in seconds, chip-hours and bytes."""
    s = Scene(config, shape, sizes, pod)
    work = step.work(config, traffic, s)
    timer = step.timer(config, work, s)
    now = timer(VALUES)

    def optional(settings: dict[str, Any]) -> float:
        c = changed(config, settings)
        return step.timer(c, work, Scene(c, shape, sizes, pod))(VALUES).seconds

    rounds, traces = work.rollouts.steps, work.rollouts.traces
    forward, update = (micro_batch(s, work.packed.pairs, VALUES, update=x) for x in (False, True))
    passes = dict(rows=s.micro_rows, forward=forward._asdict(), update=update._asdict())
    aged = staleness.aged(config, traffic, work, s, VALUES) if with_staleness else []
    return {
        "step": {
            "expected_s": now.seconds,
            **step.spread(timer),
            "parts": now.phases,
            "decoding": now.decoding,
            "rounds": sum(map(len, rounds)) / len(rounds),
            "responses": work.responses,
            "occupancy": max(traces, key=lambda x: x.count_CxS.sum()).occupancy,
            "evicted": sum(x.evicted for x in traces),
            "filled_cells": work.packed.fill,
            # Seconds of a mean forward pass and of an update's, by what they go into; the share of
            # the chip's peak that an update reaches, counting what is computed again (HFU).
            "micro_batch": passes | {"hfu": update.flops / update.seconds / pod.chip.flops},
            "chip_hours": pod.chips * now.seconds / 3600,
            "options": {"=".join(next(iter(o.items()))): optional(o) for o in OPTIONS},
            "staleness": [x._asdict() for x in aged],
        },
        "run": _run(config, s, now),
        "anchors": anchors() if pod.platform == "tpu" else [],
        "constants": {name: c._asdict() for name, c in CONSTANTS.items()},
    }


def _run(config, s: Scene, now: step.Expected) -> dict[str, Any]:
    saved = step.checkpoint_bytes(config, s)
    c = config.checkpoint
    kept = c.keep + 1 + c.keep_best  # one is being written
    if c.keep_every:
        kept += config.steps // math.lcm(c.keep_every, c.every or max(config.steps, 1))
    alone = min(config.critic.pretrain_steps, config.steps) if s.value else 0
    # The first steps of a value model leave the policy as it is.
    left_out = sum(now.phases[x] for x in ("old log-probs", "update"))
    whole = config.steps - alone * left_out / now.seconds
    seconds = whole * now.seconds
    out = {"expected_s": seconds, "chip_hours": seconds * s.pod.chips / 3600}
    out |= {"steps": config.steps, **({"pretrain_steps": alone} if s.value else {})}
    out |= {"checkpoint_bytes": saved, "checkpoints_bytes": saved * kept}
    return out | {"first_compilation_s": VALUES["compile"]}
