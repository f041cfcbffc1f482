"""An evaluation in one call of the sampler with the next step's first round."""

import pytest
from test_train import assert_same_bits, run, saved, small, without_clocks


@pytest.mark.slow
def test_an_evaluation_beside_the_next_rollout_changes_no_bit(tmp_path):
    """It has another length and nucleus; rows that no batch can use end, and more wait than fit."""
    other = dict(eval__every=1, eval__top_p=0.5, eval__max_response_tokens=9)
    other |= dict(dynamic_sampling__surplus="end")
    for joined in (False, True):
        run(small(2, eval__with_rollout=joined, **other), tmp_path / str(joined))
    two, one = tmp_path / "False", tmp_path / "True"
    assert_same_bits(*(saved(x, 2) for x in (two, one)))
    for a, b in zip(without_clocks(two)[1:], without_clocks(one)[1:], strict=True):
        assert a.pop("perf/slot_occupancy") != b.pop("perf/slot_occupancy") and a == b
    for file in (two / "eval").iterdir():
        assert file.read_bytes() == (one / "eval" / file.name).read_bytes()
