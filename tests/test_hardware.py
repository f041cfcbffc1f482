"""MFU and memory of devices: from the model's shape, tokens and the chip's peak."""

import types

import jax
import pytest

from dapo_jax import config
from dapo_jax.log import hardware, metrics
from dapo_jax.model import qwen2
from dapo_jax.pods import slices

SHAPE = qwen2.Shape(100, 8, 16, 3, 4, 2, 2, 1e4, 1e-6, False)


def by_hand(tokens: int) -> float:
    """Products of one sequence, one by one: 2 x rows x inner x columns each."""
    V, D, F, L, H, K, d = SHAPE[:7]
    a_layer = 2 * tokens * (D * H * d + 2 * D * K * d + H * d * D + 3 * D * F)
    attention = 2 * 2 * H * d * tokens * tokens / 2  # scores and values, the causal half
    return L * (a_layer + attention) + 2 * tokens * D * V


def test_forward_flops():
    """What no product is (norms, biases) are some hundred weights here."""
    got = hardware.forward_flops(SHAPE, [64, 32])
    want = by_hand(64) + by_hand(32)
    assert want < got < 1.05 * want
    tied = SHAPE._replace(tie_embeddings=True)
    assert hardware.forward_flops(tied, [64, 32]) == got  # the head is multiplied all the same


def group(prompt: int, responses: list[int]):
    rows = [types.SimpleNamespace(tokens=range(n)) for n in responses]
    return types.SimpleNamespace(prompt=range(prompt), responses=rows)


DRAWN = [group(10, [20, 30]), group(5, [8, 8])]
BATCH = types.SimpleNamespace(drawn=DRAWN, groups=DRAWN[:1])
RECORD = types.SimpleNamespace(batch=BATCH, updates=[{}])


def test_step_flops():
    c, f = config.base(), hardware.forward_flops
    c.loss.old_logprobs, c.loss.kl_coef = "recompute", 0.1
    sampling, updating = hardware.step_flops(c, SHAPE, RECORD)
    # A prompt once: what comes on top are the responses' tokens, each attending to all before it.
    again = f(SHAPE, [10, 10, 5, 5]) - f(SHAPE, [10, 5])
    assert sampling == pytest.approx(f(SHAPE, [30, 40, 13, 13]) - again)
    assert updating == pytest.approx((3 + 1 + 1) * f(SHAPE, [30, 40]))
    c.loss.old_logprobs, c.loss.kl_coef, c.model.lora.rank = "reuse", 0.0, 4
    updating = hardware.step_flops(c, SHAPE, RECORD)[1]  # no gradients of the weights
    assert updating == pytest.approx(2 * f(SHAPE, [30, 40]))
    values = SHAPE._replace(value_head=True)  # which reads, and learns, before the policy does
    V, D = SHAPE.vocab_size, SHAPE.hidden_size
    assert f(values, [30]) == pytest.approx(f(SHAPE, [30]) - 2 * 30 * D * (V - 1))
    for updates, policy in (([], 0.0), ([{}], updating)):  # without: value pre-training
        record = types.SimpleNamespace(batch=BATCH, updates=updates)
        both = hardware.step_flops(c, SHAPE, record, [(values, 4)])[1]
        assert both == pytest.approx(policy + 4 * f(values, [30, 40]))


def devices(monkeypatch, kind, platform, *stats):
    about = dict(device_kind=kind, platform=platform)
    them = [types.SimpleNamespace(memory_stats=lambda s=s: s, **about) for s in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: them)
    monkeypatch.setattr(jax, "device_count", lambda: 2 * len(them))  # another host has as many


CLOCKS = metrics.Clocks(10.0, 12.0, 16.0)


def test_of_a_known_chip(monkeypatch):
    two = [dict(bytes_in_use=n, peak_bytes_in_use=p, bytes_limit=10) for n, p in ((5, 7), (6, 6))]
    devices(monkeypatch, "TPU v6 lite", "tpu", *two)
    log = hardware.step_metrics(config.base(), SHAPE, RECORD, CLOCKS)
    sampling, updating = hardware.step_flops(config.base(), SHAPE, RECORD)
    want = sampling / (2.0 * 4 * 918e12), updating / (4.0 * 4 * 918e12), 0.6, 0.7
    names = [f"perf/{name}" for name in ("mfu_rollout", "mfu_update", "hbm_used", "hbm_peak")]
    assert log == pytest.approx(dict(zip(names, want, strict=True)))


def test_of_a_cpu_or_an_unknown_chip_nothing(monkeypatch):
    assert hardware.step_metrics(config.base(), SHAPE, RECORD, CLOCKS) == {}
    for stats in (None, {}, {"bytes_in_use": 3}):
        devices(monkeypatch, "Some chip", "gpu", stats)
        assert hardware.step_metrics(config.base(), SHAPE, RECORD, CLOCKS) == {}


def test_peaks():
    """By jax's names; GPUs' have a suffix."""
    assert slices.peak_flops("TPU v5 lite") == 197e12 and slices.peak_flops("TPU v5") == 459e12
    assert slices.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert slices.peak_flops("NVIDIA H100 PCIe") == 756e12 and slices.peak_flops("cpu") is None
