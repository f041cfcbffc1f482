"""Hugging Face checkpoints: golden logits of transformers, streaming, export."""

import importlib.util
import json
from fnmatch import fnmatch
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from data.hf_golden import make as golden  # the recipe of the weights
from flax.traverse_util import flatten_dict
from rounding import assert_as_near
from safetensors.numpy import load_file
from test_qwen2 import mesh_of, oracle_logits

from dapo_jax import config, parallel
from dapo_jax.convert import agreement, transformers_logits
from dapo_jax.model import hf, qwen2

CASE = "head_dim"  # the smallest; every dimension differs from every other
RULES = config.base().sharding.train.to_dict()
MESH = mesh_of((2, 2, 2))
live = pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="needs torch and transformers (benchmarks/requirements-peers.txt)",
)


def load_params(directory, *args, **kwargs):
    return hf.load_params(directory, hf.read_shape(directory), *args, **kwargs)


def assert_same(a, b):
    a, b = flatten_dict(jax.device_get(a)), flatten_dict(jax.device_get(b))
    assert a.keys() == b.keys()
    for k in a:
        assert a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes(), k


@pytest.mark.parametrize("case", golden.CASES)
def test_golden_logits(tmp_path, case):
    model = hf.load(golden.write(tmp_path, case))
    tokens, theirs = (np.load(golden.GOLDEN)[f"{case}/{x}"] for x in ("tokens", "logits"))
    logits = model(tokens)
    assert logits.dtype == jnp.float32 and agreement(logits, theirs).top1 == 1.0
    assert_as_near(logits, theirs, oracle_logits(model.shape, model.params, tokens))


@live
@pytest.mark.parametrize("case", golden.CASES)
def test_live_transformers(tmp_path, case):
    """What we export is to it the very model that we loaded."""
    directory = golden.write(tmp_path / "a", case)
    tokens = np.random.RandomState(1).randint(0, golden.VOCAB, (3, 40))
    ours, theirs = hf.load(directory), transformers_logits(directory, tokens)
    assert_as_near(ours(tokens), theirs, transformers_logits(directory, tokens, "float64"))
    hf.save(tmp_path / "b", ours.shape, ours.params, "float32")
    assert transformers_logits(tmp_path / "b", tokens).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path, monkeypatch, dtype, streamed):
    """Any stored dtype becomes any wanted one, as NumPy would convert it; small weights without a
    program."""
    monkeypatch.setattr(hf, *(("_SMALL", 0) if streamed else ("_load_tensor", None)))
    tensors = {k: v.astype(dtype) for k, v in golden.tensors(CASE).items()}
    directory = golden.write(tmp_path, CASE, state=tensors)
    stored = tensors["model.layers.1.self_attn.k_proj.weight"]
    for wanted in ("float32", "bfloat16"):
        params = load_params(directory, dtype=wanted)
        k, norm = params["blocks"]["k"], params["final_norm"]
        assert k.dtype == wanted and k.shape == (2, 20, 3, 8)
        expected = stored.astype(wanted).reshape(3, 8, 20).transpose(2, 0, 1)
        assert np.asarray(k[1]).tobytes() == expected.tobytes()
        assert np.asarray(norm).tobytes() == tensors["model.norm.weight"].astype(wanted).tobytes()


# Cuts every other kind of axis: inside joined dimensions, one over two mesh axes, the stack.
ODD_RULES = RULES | dict(embed="", heads="", kv_heads="", head_dim="tensor", layers="fsdp")
ODD_RULES |= dict(mlp="data", vocab="data,tensor")


@pytest.mark.parametrize("rules, dtype", [(RULES, "float32"), (ODD_RULES, "bfloat16")])
def test_sharded(tmp_path, monkeypatch, rules, dtype):
    """Over eight devices: the same bits, in the layout of the rules, read in parts, each once."""
    settings = golden.CASES["0.5B"] | {"tie_word_embeddings": False}
    tensors = golden.tensors("0.5B")
    tensors["lm_head.weight"] = golden.tensor("0.5B", "lm_head.weight", (64, 56))
    directory = golden.write(tmp_path, "0.5B", state=tensors, config=settings, shards=3)
    whole = load_params(directory, dtype=dtype)

    monkeypatch.setattr(hf, "_SMALL", 0)
    parts = []
    read = hf._read
    monkeypatch.setattr(hf, "_read", lambda *args: parts.append(read(*args)) or parts[-1])
    split = load_params(directory, MESH, rules, dtype)
    assert_same(split, whole)

    shape = hf.read_shape(directory)
    wanted = parallel.shardings(qwen2.metadata(shape, "axes"), MESH, rules)
    for keys, x in flatten_dict(split).items():
        assert x.sharding.is_equivalent_to(flatten_dict(wanted)[keys], x.ndim), keys
    assert max(p.nbytes for p in parts) <= max(t.nbytes for t in tensors.values())
    assert sum(p.nbytes for p in parts) == sum(t.nbytes for t in tensors.values())


def test_stack_is_filled_in_place():
    """One compiled update a weight, which writes into the donated stack."""
    stack = jnp.zeros((4, 64, 32), jnp.bfloat16)
    update = jax.jit(hf._set_layer, donate_argnums=0, static_argnums=3)
    layer = np.full((64, 32), 2.5, ml_dtypes.bfloat16)
    for as_bits in (True, False):
        compiled = update.lower(stack, layer, 1, as_bits).compile().memory_analysis()
        assert compiled.alias_size_in_bytes == stack.nbytes and not compiled.temp_size_in_bytes
        out = update(jnp.zeros_like(stack), layer, 1, as_bits)
        assert (out[1] == 2.5).all() and not out[0].any() and not out[2:].any()


@pytest.mark.parametrize("case", ["qwen3_yarn", CASE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_save_is_the_inverse(tmp_path, case, dtype):
    """Loaded and saved in one dtype, every tensor has its old bytes, and so after reloading.
    Parameters of float16 are none of the config's choices, and no CPU without F16C has them."""
    tensors = {k: v.astype(dtype) for k, v in golden.tensors(case).items()}
    directory = golden.write(tmp_path / "a", case, state=tensors)
    wanted = "float32" if dtype == "float16" else dtype
    shape, params = hf.read_shape(directory), load_params(directory, dtype=wanted)
    (tmp_path / "b.partial" / "left by an interrupted attempt").mkdir(parents=True)
    hf.save(tmp_path / "b", shape, params, dtype)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a", "b"]
    assert not any(f.is_dir() for f in (tmp_path / "b").iterdir())
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, x in tensors.items():
        assert saved[name].dtype == x.dtype and saved[name].tobytes() == x.tobytes(), name
    assert hf.read_shape(tmp_path / "b") == shape
    assert_same(load_params(tmp_path / "b", dtype=wanted), params)


def test_save_from_a_mesh_in_shards(tmp_path):
    directory = golden.write(tmp_path / "a", "0.5B")
    params, shape = load_params(directory, MESH, RULES), hf.read_shape(directory)
    hf.save(tmp_path / "b", shape, params, "float32", shard_bytes=60_000)
    files = sorted(f.name for f in (tmp_path / "b").glob("*.safetensors"))
    n = len(files)
    assert n > 3 and files[0] == f"model-00001-of-{n:05d}.safetensors"
    assert all(f.stat().st_size < 64_000 for f in (tmp_path / "b").glob("*.safetensors"))
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * qwen2.param_count(shape)
    for name, x in golden.tensors("0.5B").items():
        assert load_file(tmp_path / "b" / index["weight_map"][name])[name].tobytes() == x.tobytes()
    assert_same(load_params(tmp_path / "b"), params)


def test_save_with_its_companions(tmp_path):
    """Tokenizer files are copied; what the shape does not know comes from the source's configs."""
    known = {"max_position_embeddings": 131072, "eos_token_id": 7, "pad_token_id": None}
    source = golden.write(tmp_path / "a", CASE, config=golden.CASES[CASE] | known)
    copied = {"chat_template.jinja", "merges.txt", "tokenizer.json", "vocab.json"}
    for name in (*copied, "README.md"):
        (source / name).write_text(name)
    shape, params = hf.read_shape(source), load_params(source)
    hf.save(tmp_path / "b", shape, params, tokenizer_dir=source)
    made = {"config.json", "generation_config.json", "model.safetensors"}
    assert {f.name for f in (tmp_path / "b").iterdir()} == copied | made
    assert (tmp_path / "b" / "merges.txt").read_text() == "merges.txt"
    settings = json.loads((tmp_path / "b" / "config.json").read_text())
    assert settings["max_position_embeddings"] == 131072 and settings["eos_token_id"] == 7
    assert settings["torch_dtype"] == "bfloat16" and "pad_token_id" not in settings
    generation = tmp_path / "b" / "generation_config.json"
    assert json.loads(generation.read_text()) == {"eos_token_id": 7}
    (source / "generation_config.json").write_text('{"temperature": 0.7}')
    hf.save(tmp_path / "c", shape, params, tokenizer_dir=source)
    kept = json.loads((tmp_path / "c" / "generation_config.json").read_text())
    assert kept == {"temperature": 0.7}


def test_save_refuses(tmp_path):
    source = golden.write(tmp_path / "a", CASE)
    shape, params = hf.read_shape(source), load_params(source)
    for folder, how, says in (
        ("a", {}, "exists already"),
        ("b", dict(tokenizer_dir=source), "no tokenizer files"),
        ("b", dict(dtype="int8"), "dtype 'int8'"),
    ):
        with pytest.raises(ValueError, match=says):
            hf.save(tmp_path / folder, shape, params, **how)
    assert not (tmp_path / "b").exists()


def test_resolve(tmp_path, monkeypatch):
    assert hf.resolve(tmp_path) == hf.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "nowhere", tmp_path / "file", "./nowhere", "a/b/c"):
        with pytest.raises(ValueError, match="no such directory; pass the one that holds"):
            hf.resolve(wrong)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("Qwen/Qwen2.5-0.5B", "not a name!"):
        with pytest.raises(ValueError, match="pass the directory that holds its config.json") as e:
            hf.resolve(name)
        assert name in str(e.value) and "\n" not in str(e.value)


def test_resolve_hub_name(monkeypatch, tmp_path):
    """Only the files needed are asked for: never a pickle."""
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hf.resolve("Qwen/Qwen2.5-0.5B") == tmp_path
    (name,), how = download.call_args
    wanted = lambda *files: [any(fnmatch(f, p) for p in how["allow_patterns"]) for f in files]
    assert name == "Qwen/Qwen2.5-0.5B"
    assert all(wanted("model-00001-of-00002.safetensors", "config.json", "merges.txt", "x.jinja"))
    assert not any(wanted("pytorch_model.bin", "model.pt", "x.pth", "a.pkl", "model.gguf"))
