"""Names of TPU slices."""

import pytest

from dapo_jax.pods import slices as pods


@pytest.mark.parametrize(
    ("name", "topology", "slices", "chips"),
    [
        ("v5p-128", "v5p:4x4x4", 1, 64),
        ("v5p-256", "v5p:4x4x8", 1, 128),
        ("v5p-512", "v5p:4x8x8", 1, 256),
        ("v4-8", "v4:2x2x1", 1, 4),
        ("v6e-16", "v6e:4x4", 1, 16),
        ("v6e-256", "v6e:16x16", 1, 256),
        ("v5litepod-256", "v5e:16x16", 1, 256),
        ("v5e-256", "v5e:16x16", 1, 256),
        ("2xv5p-256", "v5p:4x4x8", 2, 256),
        ("v5p:4x4x8", "v5p:4x4x8", 1, 128),
        ("4xv6e:8x8", "v6e:8x8", 4, 256),
    ],
)
def test_cloud_names_and_toruses(name, topology, slices, chips):
    pod = pods.parse(name)
    assert (pod.topology, pod.slices, pod.chips) == (topology, slices, chips)
    assert pods.parse(pod.cloud) == pod


@pytest.mark.parametrize(
    "name", ["v5p-7", "v5p", "h100-8", "v6e:4x4x4", "v5p:4x4", "0xv6e-16", "v9:2x2", "", "v6e:0x4"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="no TPU slice is called that"):
        pods.parse(name)


def test_larger_slices_come_by_size():
    sizes = [p.chips for p in pods.larger(pods.parse("v6e-16"))]
    assert sizes == [32, 64, 128, 256]
