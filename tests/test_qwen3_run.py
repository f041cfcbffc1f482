"""Qwen3, without and with YaRN, through all of a run: read from a directory, trained and resumed,
exported, evaluated."""

import jax
import numpy as np
import pytest
import stubbed_train
from test_train import arrays, assert_same_bits, run, small

from dapo_jax import config, convert, evaluate
from dapo_jax.data import arithmetic
from dapo_jax.log import metrics
from dapo_jax.model import hf, qwen2

STEPS = 4
YARN = qwen2.Yarn(4.0, 16, 1.1386)  # of a context shorter than prompt and response


def qwen3(folder, yarn):
    """A directory of random weights; heads of another width than D / H."""
    shape = qwen2.shape_from_config(config.base())
    shape = shape._replace(qkv_bias=False, qk_norm=True, head_dim=32, yarn=yarn)
    assert shape.num_heads * shape.head_dim != shape.hidden_size
    words = arithmetic.write(folder / "words", train=16, heldout=16).tokenizer
    hf.save(folder / "model", shape, qwen2.init(shape, jax.random.key(0)), "float32", words.parent)
    return shape


@pytest.mark.slow
@pytest.mark.parametrize("yarn", [None, YARN], ids=["qwen3", "qwen3 with yarn"])
def test_trained_resumed_exported_and_evaluated(tmp_path, yarn):
    shape = qwen3(tmp_path, yarn)

    def asked(steps: int):
        c = small(steps)
        c.model.path, c.tokenizer.chat = str(tmp_path / "model"), False
        return c

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(asked(STEPS), whole)
    run(asked(2), cut)
    run(asked(STEPS), cut)
    assert_same_bits(arrays(whole, STEPS), arrays(cut, STEPS))
    records = metrics.read(whole / "metrics.jsonl")
    assert [r["step"] for r in records] == [*range(STEPS + 1)]
    assert max(r["policy/sampler_trainer_logprob_gap"] for r in records[1:]) < 1e-4
    assert sum(r["optim/skipped"] for r in records[1:]) == 0

    out = tmp_path / "export"
    convert.main(["to-hf", str(cut), str(out), "--dtype=float32"])
    policy, start = arrays(whole, STEPS)["params"], hf.load(tmp_path / "model")
    made = hf.load(out)
    assert made.shape == start.shape == hf.read_shape(out) and made.shape.yarn == shape.yarn
    assert made.shape.qk_norm and not made.shape.qkv_bias
    assert_same_bits(jax.tree.map(np.asarray, made.params), policy)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), made.params, start.params)
    assert all(jax.tree.leaves(moved))  # q_norm and k_norm are trained too

    # Of the checkpoint, and of the directory made of it.
    for workdir, given in ((cut, ""), (tmp_path / "new", str(out))):
        found = evaluate.evaluate_checkpoint(
            asked(STEPS), workdir, given, stubbed_train.accept_half
        )
        for name, score in found["sets"].items():
            assert 0 < score["avg@k"] == records[-1][f"eval/{name}_top_p0.7/avg@k"] < 1
