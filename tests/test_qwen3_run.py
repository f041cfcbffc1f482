"""Qwen3, without and with YaRN, through all of a run: read from a directory, trained, killed with
SIGKILL and resumed, exported, evaluated."""

import re
import signal

import jax
import numpy as np
import pytest
import stubbed_train
from test_train import arrays, assert_same_bits, finish, launch, without_clocks

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
def test_trained_killed_resumed_exported_and_evaluated(tmp_path, yarn):
    shape = qwen3(tmp_path, yarn)
    asked = [f"model.path={tmp_path / 'model'}", f"steps={STEPS}", "checkpoint.every=1"]
    asked += ["model.dtype=float32", "tokenizer.chat=False"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(launch(tmp_path, whole, 1, *asked))
    killed = launch(tmp_path, cut, 1, *asked, program=("stubbed_train.py", "kill"))
    said, _ = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, said
    assert re.search(r"resumed .*step 2\b", finish(launch(tmp_path, cut, 1, *asked)))
    assert_same_bits(arrays(whole, STEPS), arrays(cut, STEPS))
    assert without_clocks(whole) == without_clocks(cut)
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

    scores = evaluated(tmp_path, asked, cut), evaluated(tmp_path, asked, tmp_path / "new", out)
    assert scores[0] == scores[1]  # of the checkpoint, and of the directory made of it
    last = records[-1]
    for name, score in scores[0].items():
        assert 0 < score == last[f"eval/{name}_top_p0.7/avg@k"] < 1


def evaluated(tmp_path, asked, workdir, given="") -> dict[str, float]:
    space: dict = {}
    exec((tmp_path / "config.py").read_text(), space)
    c = space["get_config"]()
    for field in asked:
        name, _, value = field.partition("=")
        c.update({name: type(config.leaves(c)[name])(value)})
    c.tokenizer.chat, c.mesh.fsdp, c.mesh.tensor = False, 4, 2
    found = evaluate.evaluate_checkpoint(c, workdir, str(given), stubbed_train.accept_half)
    return {name: s["avg@k"] for name, s in found["sets"].items()}
