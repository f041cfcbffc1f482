"""What a Hugging Face directory of a Qwen says, before any weight is read: config.json <-> Shape,
names and layouts of the tensors, and the checked headers of the safetensors files."""

import contextlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError, safe_open

from dapo_jax import gate
from dapo_jax.model import qwen2
from dapo_jax.model.qwen2 import Shape
from dapo_jax.model.rope import Yarn

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # NumPy name -> safetensors name


# --- config.json ----------------------------------------------------------------------------------

# Fields of `Shape` -> config.json's, which have no default there
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
# Fields that would change the computation -> the one value that this network computes, the default
_COMPUTED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "use_mrope": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


class Family(NamedTuple):
    """What a model_type says of the network; Qwen2.5-Math and R1-Distill-Qwen are qwen2."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    head_dim: int  # where config.json has none; 0 = hidden_size / heads


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, head_dim=0),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, head_dim=128),
}


def read_shape(path: str | Path, **compute_choices) -> Shape:
    """Shape of the checkpoint in directory `path`; compute_choices: of `qwen2.compute_choices`.
    ValueError: config.json is missing, malformed or asks for what the network does not compute."""
    file = Path(path) / "config.json"
    config = {k: v for k, v in read_json(file).items() if v is not None}
    if "model_type" not in config:
        raise ValueError(f"{file}: no model_type; is this a language model's config.json?")
    family = FAMILIES.get(str(config["model_type"]))
    wrong = lambda name: f"{file}: {name}={json.dumps(config[name])[:60]} is not supported, only"
    if not family:
        raise ValueError(f"{wrong('model_type')} {', '.join(map(json.dumps, FAMILIES))}")
    biases = dict.fromkeys(("attention_bias", "qkv_bias"), family.qkv_bias)
    for name, only in (_COMPUTED | biases).items():
        if config.get(name, only) != only:
            raise ValueError(f"{wrong(name)} {json.dumps(only)}")
    layer_types = config.get("layer_types", [])
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in layer_types):
        raise ValueError(f"{file}: layer_types: only full_attention is supported")

    sizes = {ours: _number(file, config, theirs) for ours, theirs in _SIZES.items()}
    hidden, heads, kv_heads = (sizes[n] for n in ("hidden_size", "num_heads", "num_kv_heads"))
    if "head_dim" not in config and not family.head_dim and hidden % heads:
        raise ValueError(f"{file}: hidden_size={hidden} is not divisible by {heads} heads")
    default = {"head_dim": family.head_dim or hidden // heads, "rms_norm_eps": 1e-6}
    head_dim = _number(file, default | config, "head_dim")
    if heads % kv_heads or head_dim % 2:
        said = f"{heads} query heads on {kv_heads} key/value heads of width {head_dim}"
        raise ValueError(f"{file}: {said}: wants a whole multiple and an even width")
    rope_theta, yarn = _rope(file, config)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        said = json.dumps(tied)[:60]
        raise ValueError(f"{file}: tie_word_embeddings={said}: wants true or false")
    return Shape(
        **sizes,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rms_eps=_number(file, default | config, "rms_norm_eps"),
        tie_embeddings=tied,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        yarn=yarn,
        **compute_choices,
    )


# All that may stand beside the type where it is yarn: what else there is would change the numbers.
_YARN = {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}


def _rope(file: Path, config: dict) -> tuple[float, Yarn | None]:
    """From `rope_theta` and `rope_scaling`, or from newer files' `rope_parameters`: both in one."""
    yarn = None
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field, {})
        if not isinstance(rope, dict):
            raise ValueError(f"{file}: {field} {json.dumps(rope)}: wants an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "yarn") or rope.get("partial_rotary_factor", 1.0) != 1.0:
            only = "only the types default and yarn, with every dimension rotated"
            raise ValueError(f"{file}: {field} {json.dumps(rope)} is not supported, {only}")
        if kind == "yarn":
            yarn = _yarn(f"{file}: {field}", config, rope)
    # 1e4 is the default; `rope` is now rope_parameters, which wins as in transformers.
    both = {"rope_theta": 1e4} | config | {k: v for k, v in rope.items() if v is not None}
    theta = _number(file, both, "rope_theta")
    if yarn and config.get("rope_scaling") and config.get("rope_parameters"):
        raise ValueError(f"{file}: rope_scaling and rope_parameters: with yarn, give only one")
    return theta, yarn


def _yarn(where: str, config: dict, rope: dict) -> Yarn:
    said = {k: v for k, v in rope.items() if v is not None}
    common = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
    if unknown := sorted(set(said) - _YARN - common):
        raise ValueError(f"{where}: {unknown[0]} is not supported, only {', '.join(sorted(_YARN))}")
    said = {"original_max_position_embeddings": config.get("max_position_embeddings")} | said
    factor = _number(where, said, "factor")
    default = {"attention_factor": 0.1 * math.log(factor) + 1, "beta_fast": 32.0, "beta_slow": 1.0}
    names = ("original_max_position_embeddings", *default)
    yarn = Yarn(factor, *(_number(where, default | said, name) for name in names))
    if yarn.beta_fast < yarn.beta_slow:
        raise ValueError(f"{where}: beta_fast={yarn.beta_fast} is below beta_slow={yarn.beta_slow}")
    return yarn


# What any Qwen could have, and far beyond: names -> (type, smallest, largest).
_BOUNDS = {
    "vocab_size": (int, 1, 2**24),
    "hidden_size": (int, 1, 2**20),
    "intermediate_size": (int, 1, 2**22),
    "num_hidden_layers": (int, 1, 10_000),
    "num_attention_heads": (int, 1, 2**16),
    "num_key_value_heads": (int, 1, 2**16),
    "head_dim": (int, 1, 2**16),
    "rope_theta": (float, 1.1, 1e15),  # YaRN divides by its logarithm
    "rms_norm_eps": (float, 1e-12, 1.0),
    "factor": (float, 1.0, 1e4),
    "original_max_position_embeddings": (int, 1, 2**31),
    "attention_factor": (float, 1e-3, 1e3),
    "beta_fast": (float, 1e-3, 1e6),
    "beta_slow": (float, 1e-3, 1e6),
}


def _number(file: Path | str, config: dict, name: str):
    value, (kind, low, high) = config.get(name), _BOUNDS[name]
    # NaN is in no interval.
    if isinstance(value, bool) or not isinstance(value, (kind, int)) or not low <= value <= high:
        said = str(json.dumps(value))[:60]
        raise ValueError(f"{file}: {name}={said}: wants a {kind.__name__} of {low} to {high}")
    return kind(value)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; ValueError with one line if there is none."""
    if file.exists() and not file.is_file():  # a pipe would never end
        raise ValueError(f"{file}: is no file")
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
    """Contents of config.json; `read_shape` gives the shape back. ValueError: no family has it."""
    kinds = {(family.qkv_bias, family.qk_norm): name for name, family in FAMILIES.items()}
    name = kinds.get((c.qkv_bias, c.qk_norm))
    if not name:
        said = f"model.qkv_bias={c.qkv_bias} with model.qk_norm={c.qk_norm}"
        none = f"no Hugging Face architecture of {', '.join(FAMILIES)} is that"
        raise ValueError(f"{said}: {none}; such a model cannot be exported")
    context, rope = 32768, {}  # as most have: the shape does not know it
    if c.yarn:
        context, yarn = int(c.yarn.factor * c.yarn.original), c.yarn._asdict()
        yarn["original_max_position_embeddings"] = yarn.pop("original")
        rope = {"rope_scaling": {"rope_type": "yarn"} | yarn}
    return rope | {
        "architectures": [FAMILIES[name].architecture],
        "model_type": name,
        "attention_bias": c.qkv_bias,
        **{theirs: getattr(c, ours) for ours, theirs in _SIZES.items()},
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.rms_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "use_sliding_window": False,
        "max_position_embeddings": context,
        "torch_dtype": dtype,
    }


# --- Which tensor is which weight -----------------------------------------------------------------


class Weight(NamedTuple):
    """One entry of the parameter tree and its tensors in Hugging Face form, where a linear layer is
    [out, in], heads are flat and layers apart: here inputs come first, and layers are stacked."""

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
        alone = (dims,) if name.endswith(".bias") else tuple((a,) for a in dims)
        groups = (dims[inputs:], dims[:inputs]) if inputs else alone
        names = tuple(name.format(i) for i in range(c.num_layers if stacked else 1))
        out.append(Weight(keys, names, stacked, w.shape[stacked:], axes[keys][stacked:], groups))
    return out


# --- The safetensors files ------------------------------------------------------------------------


class Header(NamedTuple):
    """What a safetensors file says of one tensor; as JSON, a list of its fields."""

    file: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2)


@contextlib.contextmanager
def open_file(file: str):
    """safetensors.safe_open, for NumPy, with one-line errors."""
    try:
        with safe_open(file, framework="np") as f:
            yield f
    except (SafetensorError, OSError) as e:
        size = f"{os.path.getsize(file)} bytes" if os.path.exists(file) else "no such file"
        wrong = f"{file} ({size}): truncated, or not safetensors ({e}); fetch it again"
        raise ValueError(wrong) from e


def read_headers(path: Path, c: Shape) -> dict[str, Header]:
    """Tensor name -> header, exactly those of a model of shape `c`. ValueError: files, index,
    tensors, shapes or dtypes that are missing, unreadable or others."""
    headers = _headers(path)
    expected = {name: w for w in weights(c) for name in w.names}
    ignored = {n for n in headers if n.endswith(".rotary_emb.inv_freq")}  # a buffer of old files
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"  # some tied models store both
    if c.tie_embeddings and {head, embedding} <= set(headers):
        with open_file(headers[head].file) as f, open_file(headers[embedding].file) as g:
            if not np.array_equal(f.get_tensor(head), g.get_tensor(embedding)):
                other = "tie_word_embeddings is true, but lm_head.weight is not the embedding"
                raise ValueError(f"{path}: {other}: correct config.json, or remove the tensor")
        ignored.add(head)
    tied = json.dumps(c.tie_embeddings)
    told = f"num_hidden_layers={c.num_layers} and tie_word_embeddings={tied}"
    for problem, names in (
        ("missing", sorted(set(expected) - set(headers))),
        ("unexpected", sorted(set(headers) - set(expected) - ignored)),
    ):
        if names:
            some = f"{len(names)} tensors {problem} ({_some(names)})"
            raise ValueError(f"{path}: {some} for config.json's {told}")
    for name, w in expected.items():
        file, dtype, shape = headers[name]
        if shape != w.hf_shape:
            said = f"shape {list(shape)}, but config.json wants {list(w.hf_shape)}"
            raise ValueError(f"{file}: {name} has {said}")
        if dtype not in DTYPES.values():
            said = f"dtype {dtype}, not one of {', '.join(DTYPES.values())}"
            raise ValueError(f"{file}: {name} has {said}")
    return {name: headers[name] for name in expected}


def has_value_head(path: Path) -> bool:
    """Whether it is a reward or value model (Qwen2ForSequenceClassification of one label)."""
    return "score.weight" in _headers(path)


def _headers(path: Path) -> dict[str, Header]:
    """Headers of the one file, or of all that the index lists."""
    if (path / SINGLE).is_file():
        return _file_headers(str(path / SINGLE))
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
        many = f"{len(missing)} of {len(files)} safetensors files are missing"
        raise ValueError(f"{path}: {many} ({_some(missing)}); fetch them")
    headers: dict[str, Header] = {}
    for file in files:
        for name, header in _file_headers(str(path / file)).items():
            if listed.get(name, file) == file:  # of copies, the one that the index means
                headers[name] = header
    if lost := sorted(set(listed) - set(headers)):
        first = f"{lost[0]} in {listed[lost[0]]}"
        many = f"{len(lost)} tensors are not in the files it says ({first})"
        raise ValueError(f"{index}: corrupt: {many}; fetch it again")
    return headers


def _file_headers(file: str) -> dict[str, Header]:
    with open_file(file) as f:
        slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
        return {n: Header(file, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
