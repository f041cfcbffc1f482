"""The parts that training and evaluation share."""

import numpy as np
import pytest

from dapo_jax import config, grading
from dapo_jax.data import arithmetic, tokenizer as tokenizer_lib


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    made = arithmetic.write(tmp_path_factory.mktemp("data"), train=4, heldout=4)
    return tokenizer_lib.load(made.tokenizer)


def test_cut_keeps_the_token_that_completes_a_text(tok):
    ids = np.array(tok.encode("f 4 g 6 h 3 Answer: 3 f 4 Answer: 3"))
    for texts in (["h 3"], ["Answer: 3", "h 3"], ["never", "g"], ["3"]):
        n = grading.cut_at(tok, texts)(ids)
        assert any(t in tok.decode(ids[:n].tolist()) for t in texts)
        assert not any(t in tok.decode(ids[: n - 1].tolist()) for t in texts)
    assert grading.cut_at(tok, ["h 4"])(ids) == 0
    assert grading.cut_at(tok, []) is None


def test_stop_strings_of_a_config():
    c = config.base()
    assert config.stop_strings(c.eval.stop_strings) == []
    c.eval.stop_strings = r"\n\n|Problem: |</s>"
    assert config.stop_strings(c.eval.stop_strings) == ["\n\n", "Problem: ", "</s>"]
    config.validate(c, 1)
    c.eval.stop_strings = "a||b"
    with pytest.raises(config.ConfigError, match=r"eval.stop_strings: 'a\|\|b' has an empty text"):
        config.validate(c, 1)
