"""Names of TPU slices; that they are those that Google documents: test_launch.py."""

import pytest

from dapo_jax.pods import slices as pods


def test_several_slices_and_jax_s_names():
    pod = pods.parse("2xv5p-256")
    assert (pod.topology, pod.slices, pod.chips, pod.cloud) == ("v5p:4x4x8", 2, 256, "2xv5p-256")
    assert pods.parse("tpu7x-128").devices == 128  # two of a chip
    odd = ["v5p:2x8x8", "2xv6e:2x3"]  # as many chips as v5p-256 has, and as no slice has
    assert [pods.parse(name).cloud for name in odd] == odd
    assert pods.parse("2xv5p:4x4x8") == pod and pods.parse("v5e-256") == pods.parse("v5e:16x16")


@pytest.mark.parametrize(
    "name", ["v5p-7", "v5p", "h100-8", "v6e:4x4x4", "v5p:4x4", "0xv6e-16", "v9:2x2", "", "v6e:0x4"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="no TPU slice is called that"):
        pods.parse(name)


@pytest.mark.parametrize("family", pods.CHIPS)
def test_every_slice_has_a_name_of_its_own(family):
    """The table's shapes come by size, one to a size."""
    every = [pods.Pod(family, sides) for sides in pods.FAMILIES[family].shapes]
    sizes = [pod.chips for pod in every]
    assert sizes == sorted(set(sizes)) and set(pods.FAMILIES) == set(pods.CHIPS)
    assert [pods.parse(x.cloud) for x in every] == every == [pods.parse(x.topology) for x in every]
