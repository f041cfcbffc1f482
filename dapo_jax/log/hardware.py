"""What a step made of its devices: share of the peak, and memory in use. Only where the platform
tells: TPUs and GPUs; a CPU has no such tags."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from dapo_jax.algorithm import StepRecord
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.log.metrics import Clocks
from dapo_jax.model import qwen2
from dapo_jax.pods import slices


def forward_flops(shape: qwen2.Shape, lengths) -> float:
    """Of one forward pass over sequences of so many tokens, each causal within itself; 2 per
    multiply-add. An embedding is looked up, the output head multiplied. A value head is one row."""
    n = np.asarray(lengths, float)
    weights = qwen2.param_count(shape)
    if shape.value_head or not shape.tie_embeddings:
        weights -= shape.vocab_size * shape.hidden_size
    width = shape.num_layers * shape.num_heads * shape.head_dim
    return float(2 * weights * n.sum() + 2 * width * (n * n).sum())


def step_flops(
    config, shape: qwen2.Shape, record: StepRecord, others: Sequence[qwen2.Shape] = ()
) -> tuple[float, float]:
    """(of sampling, of updating): what the model needs, without what is computed again to save
    memory. A prompt is read once per group; the backward pass is two forward ones, or with adapters
    (LoRA), whose own products are left out, one. others: shapes of
    further models; each reads the batch and learns, also in a step without an update of the policy.
    """
    drawn, trained = record.batch.drawn, record.batch.groups
    prompts = forward_flops(shape, [len(g.prompt) for g in drawn])
    again = forward_flops(shape, [len(g.prompt) for g in drawn for _ in g.responses])
    sampling = forward_flops(shape, _lengths(drawn)) - again + prompts
    passes = (
        3
        - bool(config.model.lora.rank)
        + (config.loss.old_logprobs == "recompute")
        + bool(config.loss.kl_coef)
    )
    updating = passes * bool(record.updates) * forward_flops(shape, _lengths(trained))
    return sampling, updating + sum(4 * forward_flops(s, _lengths(trained)) for s in others)


def _lengths(groups: Iterable[Group]) -> list[int]:
    return [len(g.prompt) + len(r.tokens) for g in groups for r in g.responses]


def step_metrics(
    config,
    shape: qwen2.Shape,
    record: StepRecord,
    clocks: Clocks,
    others: Sequence[qwen2.Shape] = (),
) -> dict[str, float]:
    """The `perf/mfu_*` and `perf/hbm_*` of a step."""
    device, log = jax.local_devices()[0], {}
    if peak := slices.peak_flops(device.device_kind):
        peak *= jax.device_count()
        flops = step_flops(config, shape, record, others)
        seconds = (clocks.rollout_done - clocks.started, clocks.done - clocks.rollout_done)
        for name, done, took in zip(("rollout", "update"), flops, seconds, strict=True):
            log[f"perf/mfu_{name}"] = done / (took * peak)
    if device.platform == "cpu":
        return log
    told = [s for d in jax.local_devices() if (s := d.memory_stats()) and s.get("bytes_limit")]
    for tag, key in (("perf/hbm_used", "bytes_in_use"), ("perf/hbm_peak", "peak_bytes_in_use")):
        if told and all(key in s for s in told):
            log[tag] = max(s[key] / s["bytes_limit"] for s in told)
    return log
