"""How well a step used its TPUs or GPUs: share of the peak FLOPs, and memory in use."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from dapo_jax.algorithm import StepRecord
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.log.metrics import Clocks
from dapo_jax.model import qwen2
from dapo_jax.pods import slices


def forward_flops(shape: qwen2.Shape, lengths) -> float:
    """FLOPs of a forward pass over causal sequences of these lengths [tokens], 2 per multiply-add.
    An embedding costs none; the output head is a product, a value head one row."""
    n = np.asarray(lengths, float)
    weights = qwen2.param_count(shape)
    if shape.value_head or not shape.tie_embeddings:
        weights -= shape.vocab_size * shape.hidden_size
    width = shape.num_layers * shape.num_heads * shape.head_dim
    return float(2 * weights * n.sum() + 2 * width * (n * n).sum())


def step_flops(
    config, shape: qwen2.Shape, record: StepRecord, others: Sequence[tuple[qwen2.Shape, int]] = ()
) -> tuple[float, float]:
    """FLOPs of (sampling, updating): those that the model needs, without what is recomputed to save
    memory and without the adapters' own products. Sampling reads a prompt once per group. The
    policy's passes count only in a step with updates.

    others: (shape, forward passes over the batch) of each further model that the step trains."""
    drawn, trained = record.batch.drawn, record.batch.groups
    prompts = forward_flops(shape, [len(g.prompt) for g in drawn])
    again = forward_flops(shape, [len(g.prompt) for g in drawn for _ in g.responses])
    sampling = forward_flops(shape, _lengths(drawn)) - again + prompts
    # Forward, and backward, which is two passes, or one with LoRA: base weights have no gradient.
    passes = 2 if config.model.lora.rank else 3
    passes += (config.loss.old_logprobs == "recompute") + bool(config.loss.kl_coef)
    models = [(shape, passes), *others] if record.updates else others
    return sampling, sum(n * forward_flops(model, _lengths(trained)) for model, n in models)


def _lengths(groups: Iterable[Group]) -> list[int]:
    return [len(g.prompt) + len(r.tokens) for g in groups for r in g.responses]


def step_metrics(
    config, shape: qwen2.Shape, record: StepRecord, clocks: Clocks, others: Sequence[tuple] = ()
) -> dict[str, float]:
    """The `perf/mfu_*` and `perf/hbm_*` of a step. others: as in `step_flops`."""
    device, log = jax.local_devices()[0], {}
    if peak := slices.peak_flops(device.device_kind):
        peak *= jax.device_count()
        flops = step_flops(config, shape, record, others)
        seconds = (clocks.rollout_done - clocks.started, clocks.done - clocks.rollout_done)
        for name, done, took in zip(("rollout", "update"), flops, seconds, strict=True):
            log[f"perf/mfu_{name}"] = done / (took * peak)
    if device.platform == "cpu":
        return log
    stats = [s for d in jax.local_devices() if (s := d.memory_stats()) and s.get("bytes_limit")]
    for tag, key in (("perf/hbm_used", "bytes_in_use"), ("perf/hbm_peak", "peak_bytes_in_use")):
        if stats and all(key in s for s in stats):
            log[tag] = max(s[key] / s["bytes_limit"] for s in stats)
    return log
