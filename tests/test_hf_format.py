"""What a Hugging Face directory says: published shapes, and every refusal in one line by name."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from data.hf_golden import make as golden
from tables import cases
from test_hf import CASE, load_params

from dapo_jax.model import hf, hf_format, qwen2

# config.json of Qwen2.5-0.5B
PUBLISHED = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def read(tmp_path, settings) -> qwen2.Shape:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return hf.read_shape(tmp_path)


@pytest.mark.parametrize("case", cases("hf_config_read"), ids=lambda case: str(case)[:60])
def test_read(tmp_path, case):
    shape = read(tmp_path, PUBLISHED | case["changed"])
    for field, want in case["shape"].items():
        got = getattr(shape, field)
        assert (list(got) if field == "yarn" and got else got) == pytest.approx(want), field
    assert shape.scan_layers and not hf.read_shape(tmp_path, scan_layers=False).scan_layers


def test_a_network_of_no_family_is_not_exported(tmp_path):
    shape = read(tmp_path, PUBLISHED)._replace(qk_norm=True)
    with pytest.raises(ValueError, match="model.qkv_bias=True with model.qk_norm=True"):
        hf_format.config_json(shape, "float32")


@pytest.mark.parametrize("case", cases("hf_config_refused"), ids=lambda case: str(case)[:60])
def test_refused_by_name(tmp_path, case):
    with pytest.raises(ValueError) as e:
        read(tmp_path, PUBLISHED | case["changed"])
    assert case["named"] in str(e.value) and "config.json" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "[" * 100_000, '{"a":' * 100_000])
def test_unreadable_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: "):
        hf.read_shape(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        hf.read_shape(tmp_path / "nowhere")
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")  # who reads it waits for ever
    with pytest.raises(ValueError, match=r"config\.json: is no file"):
        hf.read_shape(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(tmp_path, value):
    tensors = {name: x.copy() for name, x in golden.tensors(CASE).items()}
    tensors["model.norm.weight"].flat[-1] = value
    directory = golden.write(tmp_path, CASE, state=tensors)
    with pytest.raises(ValueError, match="model.norm.weight holds NaN or infinity"):
        load_params(directory)


def test_stored_head_of_a_tied_model(tmp_path):
    """Some files of tied models hold the head as well; it has to be the embedding."""
    tensors = golden.tensors("0.5B")
    head = tensors["model.embed_tokens.weight"].copy()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    directory = golden.write(tmp_path, "0.5B", state=tensors | {"lm_head.weight": head} | buffer)
    assert "lm_head" not in load_params(directory)
    head[-1, -1] += 1
    golden.write(tmp_path, "0.5B", state=tensors | {"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding"):
        load_params(directory)


SHARD, NORM = "model-00002-of-00003.safetensors", "model.norm.weight"
INDEX = "model.safetensors.index.json"


def _edit_index(directory: Path, edit):
    file = directory / INDEX
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


def _no_weights(directory: Path):
    for file in directory.glob("model*"):
        file.unlink()


# What is done to a directory of three shards; what its error says.
BROKEN_FILES = [
    (lambda d: (d / SHARD).unlink(), "1 of 3 safetensors files are missing"),
    (lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size - 100), "bytes.: truncated"),
    (lambda d: (d / SHARD).write_bytes(b"x" * 999), f"{SHARD} .* not safetens"),
    (lambda d: (d / INDEX).write_text("{"), r"index\.json: not valid JSON"),
    (lambda d: (d / INDEX).write_text("{}"), "index.json: corrupt: no weight_map"),
    (lambda d: _edit_index(d, lambda m: m.update({NORM: "../x.safetensors"})),
     "corrupt: .* is no safetensors file name"),
    (lambda d: _edit_index(d, lambda m: m.update(dict.fromkeys(m, SHARD))),
     "corrupt: 18 tensors are not in the files it says"),
    (_no_weights, "holds neither model.safetensors nor"),
    (lambda d: (_no_weights(d), (d / "pytorch_model.bin").touch()),
     "pytorch_model.bin is a pickle"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BROKEN_FILES, ids=[b[1] for b in BROKEN_FILES])
def test_broken_files(tmp_path, damage, message):
    directory = golden.write(tmp_path, CASE, shards=3)
    damage(directory)
    with pytest.raises(ValueError, match=message) as e:
        load_params(directory)
    assert "\n" not in str(e.value)


K_BIAS = "model.layers.1.self_attn.k_proj.bias"
UP, LATER = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 2))
ZEROS = lambda *shape: np.zeros(shape, np.float32)
WRONG_TENSORS = [
    ({K_BIAS: None}, f"1 tensors missing .{K_BIAS}. .*tie_word_embeddings=false"),
    ({LATER: ZEROS(100, 20)}, f"1 tensors unexpected .{LATER}. .*num_hidden_layers=2"),
    ({NORM: ZEROS(19)}, r"model.norm.weight has shape \[19\], but config.json wants \[20\]"),
    ({UP: ZEROS(20, 100)}, r"up_proj.weight has shape \[20, 100\], but .* wants \[100, 20\]"),
    ({NORM: np.ones(20, np.int32)}, "model.norm.weight has dtype I32, not one of"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS, ids=[w[1] for w in WRONG_TENSORS])
def test_wrong_tensors(tmp_path, change, message):
    tensors = {k: v for k, v in (golden.tensors(CASE) | change).items() if v is not None}
    with pytest.raises(ValueError, match=message) as e:
        load_params(golden.write(tmp_path, CASE, state=tensors))
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)
