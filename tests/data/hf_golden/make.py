"""Golden logits and greedy responses of `transformers`, and the recipe of the weights behind them.

    pip install -r benchmarks/requirements-peers.txt
    python tests/data/hf_golden/make.py  # rewrites golden.npz and greedy.npz beside it

Made with torch 2.13.0 on CPU in float32 (eager attention) by transformers 5.12.1; 5.23.0 gave the
same up to "head_dim". Only tokens and logits are stored. The weights come again from `tensor`:
NumPy's legacy RandomState, whose streams never change, seeded by the CRC-32 of 'case/tensor name':

    norm weights     1 + 0.3 n
    biases           0.5 n
    embedding        n / 3
    linear weights   n / sqrt(inputs)          n: standard normal, then rounded to float32
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).with_name("golden.npz")
GREEDY = GOLDEN.with_name("greedy.npz")
VOCAB = 64
GREEDY_CASES = ("0.5B", "7B", "head_dim", "qwen3_yarn")  # prompts of 12 tokens, 40 new ones


def _config(heads, kv_heads, head_dim, tied, **other):
    D = heads * head_dim
    sizes = dict(vocab_size=VOCAB, hidden_size=D, intermediate_size=2 * D + 4, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    how = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=tied)
    limits = dict(use_sliding_window=False, max_position_embeddings=256)
    return dict(model_type="qwen2") | sizes | how | limits | other


def _qwen3(hidden, heads, kv_heads, head_dim, tied, **other):
    sizes = dict(model_type="qwen3", hidden_size=hidden, head_dim=head_dim, attention_bias=False)
    return _config(heads, kv_heads, head_dim, tied) | sizes | other


def _yarn(**other):
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    return {"rope_scaling": yarn | other}


# The head layouts and choices of the published sizes, at small widths.
CASES = {
    "0.5B": _config(14, 2, 4, True),
    "1.5B": _config(12, 2, 8, True),
    "7B": _config(28, 4, 4, False),
    "14B_32B": _config(40, 8, 4, False),
    "72B": _config(64, 8, 4, False, rms_norm_eps=1e-5),
    "math": _config(28, 4, 4, False, rope_theta=1e4),
    "head_dim": _config(6, 3, 8, False) | {"hidden_size": 20, "head_dim": 8},
    "r1_distill": _config(12, 2, 8, False, rope_theta=1e4, use_mrope=False),
    "yarn": _config(6, 3, 8, True) | _yarn(),
    "qwen3": _qwen3(20, 6, 3, 8, False),
    "qwen3_tied": _qwen3(32, 16, 8, 4, True),
    "qwen3_yarn": _qwen3(20, 4, 2, 16, True) | _yarn(beta_fast=4.0, attention_factor=1.25),
}


def shapes(config) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, as Hugging Face stores them."""
    D, F = config["hidden_size"], config["intermediate_size"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim", D // H)
    out = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (VOCAB, D)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
            "self_attn.o_proj.weight": (D, H * d),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
        }
        for name, heads in (("q", H), ("k", K), ("v", K)):
            layer[f"self_attn.{name}_proj.weight"] = (heads * d, D)
            if config["model_type"] == "qwen2":
                layer[f"self_attn.{name}_proj.bias"] = (heads * d,)
            elif name != "v":
                layer[f"self_attn.{name}_norm.weight"] = (d,)
        out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return out


def tensor(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    n = np.random.RandomState(zlib.crc32(f"{case}/{name}".encode())).standard_normal(shape)
    if "norm" in name:
        n = 1 + 0.3 * n
    elif name.endswith("bias"):
        n = 0.5 * n
    else:
        n = n / (3 if "embed" in name else np.sqrt(shape[1]))
    return n.astype(np.float32)


def tensors(case: str) -> dict[str, np.ndarray]:
    return {name: tensor(case, name, shape) for name, shape in shapes(CASES[case]).items()}


def tokens(case: str) -> np.ndarray:
    return np.random.RandomState(zlib.crc32(case.encode())).randint(0, VOCAB, (2, 24))


def write(directory: Path, case: str, *, state=None, config=None, shards: int = 1) -> Path:
    """A checkpoint directory of the case, or of another state or config, by safetensors' writer."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    state = tensors(case) if state is None else state
    (directory / "config.json").write_text(json.dumps(config or CASES[case]))
    if shards == 1:
        save_file(state, directory / "model.safetensors")
        return directory
    names, listed = sorted(state), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: state[n] for n in names[i::shards]}, directory / file)
        listed |= dict.fromkeys(names[i::shards], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return directory


def logits_of(case: str, tokens_BxT) -> np.ndarray:
    """What `transformers` computes from the directory of the case."""
    from dapo_jax.convert import transformers_logits

    with tempfile.TemporaryDirectory() as folder:
        return transformers_logits(write(Path(folder), case), tokens_BxT)


def make_greedy():
    out = {}
    for case in GREEDY_CASES:
        tokens_BxT = tokens(case)[:, :12]
        for _ in range(40):
            last_BxV = logits_of(case, tokens_BxT)[:, -1]
            second, best = np.sort(last_BxV)[:, -2:].T
            gap = (best - second).min()
            assert gap > 2e-4, f"{case}: two tokens are {gap} apart, rounding may choose"
            tokens_BxT = np.append(tokens_BxT, last_BxV.argmax(-1)[:, None], axis=1)
        out[f"{case}/prompt"] = tokens_BxT[:, :12]
        out[f"{case}/greedy"] = tokens_BxT[:, 12:].astype(np.int32)
    np.savez(GREEDY, **out)


def main():
    make_greedy()
    out = {}
    for case in CASES:
        out[f"{case}/tokens"] = tokens(case).astype(np.int32)
        out[f"{case}/logits"] = logits_of(case, tokens(case))
    np.savez(GOLDEN, **out)


if __name__ == "__main__":
    main()
