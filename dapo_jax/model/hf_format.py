"""What a Hugging Face Qwen2 directory says, before any weight is read.

config.json <-> Shape, the tensor names and layouts of every weight, and the headers of the
safetensors files with all checks on them. Reading and writing the weights is `hf`.
"""

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError, safe_open

from dapo_jax import gate
from dapo_jax.model import qwen2
from dapo_jax.model.qwen2 import Shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # NumPy name -> safetensors name


# ------------------------------------------------------------------------------------------------
# config.json
# ------------------------------------------------------------------------------------------------

# Fields that would change the computation -> the one value this network computes, which is also
# Qwen2's default: an absent field is fine.
_COMPUTED = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "use_sliding_window": False,
    "use_mrope": False,
    "attention_bias": True,  # q, k and v have biases,
    "qkv_bias": True,
    "attention_out_bias": False,  # nothing else has
    "mlp_bias": False,
}


def read_shape(path: str | Path, **compute_choices) -> Shape:
    """Shape of the checkpoint in directory `path`; `compute_choices` as `qwen2.compute_choices`.

    ValueError: config.json is missing or malformed, or asks for what the network does not compute.
    """
    file = Path(path) / "config.json"
    config = {k: v for k, v in read_json(file).items() if v is not None}
    if "model_type" not in config:
        raise ValueError(f"{file}: no model_type; is this a language model's config.json?")
    for name, only in _COMPUTED.items():
        if config.get(name, only) != only:
            raise ValueError(
                f"{file}: {name}={json.dumps(config[name])} is not supported, only"
                f" {json.dumps(only)}"
            )
    if "quantization_config" in config:
        raise ValueError(f"{file}: quantization_config: quantised weights are not supported")
    layer_types = config.get("layer_types", [])
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in layer_types):
        raise ValueError(f"{file}: layer_types: only full_attention is supported")

    hidden, heads = (_number(file, config, n) for n in ("hidden_size", "num_attention_heads"))
    if "head_dim" not in config and hidden % heads:
        raise ValueError(f"{file}: hidden_size={hidden} is not divisible by {heads} heads")
    kv_heads = _number(file, config, "num_key_value_heads")
    head_dim = _number(file, {"head_dim": hidden // heads} | config, "head_dim")
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"{file}: {heads} query heads on {kv_heads} key/value heads of width {head_dim}: wants"
            " a whole multiple and an even width"
        )
    return Shape(
        vocab_size=_number(file, config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(file, config, "intermediate_size"),
        num_layers=_number(file, config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=_rope_theta(file, config),
        rms_eps=_number(file, {"rms_norm_eps": 1e-6} | config, "rms_norm_eps"),
        tie_embeddings=_flag(file, config, "tie_word_embeddings"),
        **compute_choices,
    )


def _rope_theta(file: Path, config: dict) -> float:
    """From `rope_theta` and `rope_scaling`, or from newer files' `rope_parameters`: both in one."""
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field, {})
        if not isinstance(rope, dict):
            raise ValueError(f"{file}: {field} {json.dumps(rope)}: wants an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"{file}: {field} {json.dumps(rope)} is not supported, only type default (every"
                " dimension rotated, no scaling)"
            )
    # 1e4 is Qwen2's default; `rope` is now rope_parameters, which wins as in transformers.
    both = {"rope_theta": 1e4} | config | {k: v for k, v in rope.items() if v is not None}
    return _number(file, both, "rope_theta")


# What any Qwen2 could have, and far beyond: names -> (type, smallest, largest).
_BOUNDS = {
    "vocab_size": (int, 1, 2**24),
    "hidden_size": (int, 1, 2**20),
    "intermediate_size": (int, 1, 2**22),
    "num_hidden_layers": (int, 1, 10_000),
    "num_attention_heads": (int, 1, 2**16),
    "num_key_value_heads": (int, 1, 2**16),
    "head_dim": (int, 1, 2**16),
    "rope_theta": (float, 1.0, 1e15),
    "rms_norm_eps": (float, 1e-12, 1.0),
}


def _number(file: Path, config: dict, name: str):
    value, (kind, low, high) = config.get(name), _BOUNDS[name]
    # NaN is in no interval.
    if isinstance(value, bool) or not isinstance(value, (kind, int)) or not low <= value <= high:
        said = str(json.dumps(value))[:60]
        raise ValueError(f"{file}: {name}={said}: wants a {kind.__name__} of {low} to {high}")
    return kind(value)


def _flag(file: Path, config: dict, name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {name}={json.dumps(value)[:60]}: wants true or false")
    return value


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; ValueError with one line if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:  # bad JSON or bad UTF-8
        raise ValueError(f"{file}: not valid JSON ({gate.describe(e)})") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file}: wants a JSON object, not {type(value).__name__}")
    return value


def config_json(c: Shape, dtype: str) -> dict[str, Any]:
    """Contents of config.json; `read_shape` gives the shape back."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.rms_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "use_sliding_window": False,
        "max_position_embeddings": 32768,  # Qwen2's default: the shape does not know it
        "torch_dtype": dtype,
    }


# ------------------------------------------------------------------------------------------------
# Which tensor is which weight
# ------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """One entry of the parameter tree and the tensor(s) that it is in Hugging Face form.

    A linear layer is stored [out, in] there and inputs first here; heads are flat there and a
    dimension of their own here; layers are separate tensors there and stacked here.
    """

    keys: tuple[str, ...]  # its path in the tree
    names: tuple[str, ...]  # of its tensors, one a layer
    stacked: bool  # has a leading layer dimension here
    shape: tuple[int, ...]  # of one layer, our layout
    axes: tuple[str, ...]  # logical axes of `shape`
    groups: tuple[tuple[int, ...], ...]  # for each dimension there, those of `shape` it joins

    @property
    def hf_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[a] for a in group) for group in self.groups)

    @property
    def order(self) -> tuple[int, ...]:
        """Transposing by this and joining the groups gives Hugging Face's layout."""
        return sum(self.groups, ())

    @property
    def size(self) -> int:
        """Elements of one layer."""
        return math.prod(self.shape)


def weights(c: Shape) -> list[Weight]:
    """Every weight of the network, from its declaration in `qwen2`."""
    axes, hf, in_axes = (flatten_dict(qwen2.metadata(c, n)) for n in ("axes", "hf", "in_axes"))
    out = []
    for keys, w in flatten_dict(qwen2.abstract(c)).items():
        name, inputs, stacked = hf[keys], in_axes[keys], "{}" in hf[keys]
        dims = tuple(range(w.ndim - stacked))
        if inputs:
            groups = (dims[inputs:], dims[:inputs])
        elif name.endswith(".bias"):
            groups = (dims,)
        else:
            groups = tuple((a,) for a in dims)
        names = tuple(name.format(i) for i in range(c.num_layers if stacked else 1))
        out.append(Weight(keys, names, stacked, w.shape[stacked:], axes[keys][stacked:], groups))
    return out


# ------------------------------------------------------------------------------------------------
# The safetensors files
# ------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """What a safetensors file says of one tensor."""

    file: Path
    dtype: str  # safetensors name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2)


@contextlib.contextmanager
def open_file(file: Path):
    """safetensors.safe_open, for NumPy, with one-line errors."""
    try:
        with safe_open(file, framework="np") as f:
            yield f
    except (SafetensorError, OSError) as e:
        size = f"{file.stat().st_size} bytes" if file.exists() else "no such file"
        raise ValueError(
            f"{file} ({size}): truncated, or not safetensors ({e}); fetch it again"
        ) from e


def read_headers(path: Path, c: Shape) -> dict[str, Header]:
    """Tensor name -> header, exactly those of a model of shape `c`.

    ValueError: a missing, truncated or unreadable file, an index that does not match the files,
    missing or unexpected tensors, a wrong shape or dtype.
    """
    headers = _headers(path)
    expected = {name: w for w in weights(c) for name in w.names}
    ignored = {n for n in headers if n.endswith(".rotary_emb.inv_freq")}  # a buffer of old files
    if c.tie_embeddings and {"lm_head.weight", "model.embed_tokens.weight"} <= set(headers):
        _check_tied(path, headers["lm_head.weight"], headers["model.embed_tokens.weight"])
        ignored.add("lm_head.weight")
    for problem, names in (
        ("missing", sorted(set(expected) - set(headers))),
        ("unexpected", sorted(set(headers) - set(expected) - ignored)),
    ):
        if names:
            raise ValueError(
                f"{path}: {len(names)} tensors {problem} ({_some(names)}) for config.json's"
                f" num_hidden_layers={c.num_layers} and"
                f" tie_word_embeddings={json.dumps(c.tie_embeddings)}"
            )
    for name, w in expected.items():
        file, dtype, shape = headers[name]
        if shape != w.hf_shape:
            raise ValueError(
                f"{file}: {name} has shape {list(shape)}, but config.json wants {list(w.hf_shape)}"
            )
        if dtype not in DTYPES.values():
            raise ValueError(
                f"{file}: {name} has dtype {dtype}, not one of {', '.join(DTYPES.values())}"
            )
    return {name: headers[name] for name in expected}


def _headers(path: Path) -> dict[str, Header]:
    """Headers of the one file, or of all that the index lists."""
    if (path / SINGLE).is_file():
        return _file_headers(path / SINGLE)
    index = path / INDEX
    if not index.is_file():
        pickles = sorted(f.name for f in path.glob("*.bin"))
        note = f" ({pickles[0]} is a pickle and is not read: convert it)" if pickles else ""
        raise ValueError(f"{path}: holds neither {SINGLE} nor {INDEX}{note}")

    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: corrupt: no weight_map; fetch it again")
    for file in listed.values():  # plain names: an index must not point out of its directory
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise ValueError(f"{index}: corrupt: {json.dumps(file)} is no safetensors file name")
    files = sorted(set(listed.values()))
    if missing := [f for f in files if not (path / f).is_file()]:
        raise ValueError(
            f"{path}: {len(missing)} of {len(files)} safetensors files are missing"
            f" ({_some(missing)}); fetch them"
        )
    headers: dict[str, Header] = {}
    for file in files:
        for name, header in _file_headers(path / file).items():
            if listed.get(name, file) == file:  # of copies, the one that the index means
                headers[name] = header
    if lost := sorted(set(listed) - set(headers)):
        raise ValueError(
            f"{index}: corrupt: {len(lost)} tensors are not in the files it says ({lost[0]} in"
            f" {listed[lost[0]]}); fetch it again"
        )
    return headers


def _file_headers(file: Path) -> dict[str, Header]:
    with open_file(file) as f:
        slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
        return {n: Header(file, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}


def _check_tied(path: Path, head: Header, embedding: Header) -> None:
    """A tied checkpoint may store its output head as well, but then it is the embedding."""
    same = head[1:] == embedding[1:]
    with open_file(head.file) as f, open_file(embedding.file) as g:
        a, b = f.get_slice("lm_head.weight"), g.get_slice("model.embed_tokens.weight")
        rows = head.shape[0] if same else 0
        for i in range(0, rows, 4096):  # neither is ever whole in memory
            part = slice(i, min(i + 4096, rows))
            same = same and np.array_equal(a[part], b[part])
    if not same:
        raise ValueError(
            f"{path}: tie_word_embeddings is true, but lm_head.weight is not the embedding: correct"
            " config.json, or remove the tensor"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
