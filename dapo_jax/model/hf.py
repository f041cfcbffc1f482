"""Checkpoints in Hugging Face form: found, streamed into (sharded) arrays, written. A checkpoint is
a directory: config.json, one model.safetensors or several with an index, tokenizer files.

    model = load("Qwen/Qwen2.5-0.5B")  # or a directory
    logits_BxTxV = model(tokens_BxT)
"""

import atexit
import fnmatch
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from tqdm import tqdm

from dapo_jax import bars, gate, parallel
from dapo_jax.model import hf_format, qwen2
from dapo_jax.model.hf_format import DTYPES, Header, Weight, read_shape
from dapo_jax.model.qwen2 import Params, Shape

__all__ = ["Model", "load", "load_params", "read_shape", "resolve", "save"]

_TOKENIZER = ("tokenizer*", "vocab.json", "merges.txt", "*.jinja")
_TOKENIZER += ("special_tokens_map.json", "added_tokens.json")
_SMALL = 1 << 20  # elements of a stack that passes through the host whole


def resolve(path_or_name: str | Path, weights: bool = True) -> Path:
    """Directory of a checkpoint: a local one, else a bucket's (gs://...) or a hub name, fetched or
    found in the hub's cache; weights=False: without them. ValueError: there is none."""
    path, name = Path(os.path.expanduser(path_or_name)), str(path_or_name)
    wanted = ["*.json", *_TOKENIZER] + ["*.safetensors"] * weights
    if path.is_dir():
        return path
    if "://" in name:
        return _fetched(name, wanted)
    none = f"{name}: no such directory"
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{none}; pass the one that holds config.json")
    try:
        fetch = lambda: huggingface_hub.snapshot_download(name, allow_patterns=wanted)
        return Path(gate.download(name, fetch))
    except Exception as e:  # the client's own errors, those of its HTTP library, the system's
        none += f", and the Hugging Face hub and its cache do not give it ({type(e).__name__})"
        raise ValueError(f"{none}; pass the directory that holds its config.json") from e


@functools.cache
def config_file(name: str) -> Path:
    """config.json of a model of the hub, fetched once: a plan's search reads it for every mesh."""
    get = lambda: huggingface_hub.hf_hub_download(name, "config.json")
    return Path(gate.download(name, get))


def _fetched(name: str, wanted: Sequence[str]) -> Path:
    """A copy of a bucket's directory, for as long as this process lives."""
    here = Path(tempfile.mkdtemp(prefix="dapo_jax-"))
    atexit.register(shutil.rmtree, here, ignore_errors=True)
    with gate.reading(name, what="no directory of config.json and safetensors"):
        for file in epath.Path(name).iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in wanted):
                with file.open("rb") as source, (here / file.name).open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 24)
    return here


# --- Loading --------------------------------------------------------------------------------------


class Model(NamedTuple):
    """`model(tokens_BxT)`: float32 logits [B, T, V] of whole sequences, one a row, jitted."""

    shape: Shape
    params: Params

    def __call__(self, tokens_BxT) -> jax.Array:
        return _logits(self.shape, self.params, jnp.asarray(tokens_BxT))


_logits = jax.jit(lambda shape, params, x: qwen2.bind(shape, params)(x), static_argnums=0)


def load(path: str | Path) -> Model:
    """A directory or hub name in float32, for notebooks and tests (it makes [B, T, V])."""
    directory = resolve(path)
    shape = read_shape(directory)
    return Model(shape, load_params(directory, shape))


def load_params(
    path: str | Path, shape: Shape, mesh: Mesh | None = None, rules=None, dtype: str = "float32"
) -> Params:
    """Stream a checkpoint directory into arrays of `dtype`, by `rules` on `mesh` or on one device.
    The host holds one tensor at a time; stacked arrays are filled in place on the devices, a layer
    at a time (small ones on the host). Of several processes the first reads, once, for all of them.
    ValueError: as `hf_format.read_headers`, before a weight is read; a weight is not finite."""
    path, dtype = Path(path), jnp.dtype(dtype)
    headers = parallel.of_main_process(lambda: hf_format.read_headers(path, shape))
    headers, params = {name: Header(*header) for name, header in headers.items()}, {}
    total, show = sum(h.nbytes for h in headers.values()), parallel.is_main_process()
    how = dict(desc=f"loading {path.name}", unit="B", unit_scale=True)
    with bars.bar(total=total, **how, show=show) as bar:
        # Largest first: a tensor's passing copies then exist while little else does.
        for w in sorted(hf_format.weights(shape), key=lambda w: -w.size):
            params[w.keys] = _load_weight(w, headers, mesh, rules, dtype, bar)
    return unflatten_dict(params)


def _load_weight(w: Weight, headers, mesh, rules, dtype, bar: tqdm) -> jax.Array:
    layer_sharding = _sharding(w.axes, mesh, rules)
    if jax.process_count() == 1 and len(w.names) * w.size <= _SMALL:
        layers = []  # in our layout and of `dtype`, as the programs below would make them
        for name in w.names:
            x = _read_whole(headers[name], name, w)
            _require_finite(np.isfinite(x).all(), headers[name], name)
            bar.update(headers[name].nbytes)
            layers.append(x.astype(dtype))
        if not w.stacked:
            return jax.device_put(layers[0], layer_sharding)
        return jax.device_put(np.stack(layers), _sharding(("layers", *w.axes), mesh, rules))
    if not w.stacked:
        x = _load_tensor(headers[w.names[0]], w.names[0], w, layer_sharding, bar)
        convert = jax.jit(lambda x: x.astype(dtype), out_shardings=layer_sharding)
        return x if x.dtype == dtype else convert(x)

    sharding = _sharding(("layers", *w.axes), mesh, rules)
    zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)
    set_layer = jax.jit(_set_layer, donate_argnums=0, static_argnums=3, out_shardings=sharding)
    # XLA's CPU backend converts a whole bfloat16 stack to float32 and back at each update; of bits
    # it writes the one layer. On TPU it is the bits that would cost a copy of the stack.
    as_bits = next(iter(sharding.device_set)).platform == "cpu"
    stack = zeros((len(w.names), *w.shape), dtype)
    for i, name in enumerate(w.names):
        layer = _load_tensor(headers[name], name, w, layer_sharding, bar)
        stack = set_layer(stack, layer, i, as_bits)
        stack.block_until_ready()  # else the host reads ahead, and layers pile up
    return stack


def _require_finite(finite, header: Header, name: str) -> None:
    if not finite:
        raise ValueError(f"{header.file}: {name} holds NaN or infinity; fetch it again")


def _set_layer(stack, layer, i, as_bits: bool):
    """Layer i of the stack, in place: the stack is donated."""
    layer = layer.astype(stack.dtype)
    if not as_bits:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0)
    bits = f"uint{8 * stack.dtype.itemsize}"
    stack_bits, layer_bits = (jax.lax.bitcast_convert_type(x, bits) for x in (stack, layer))
    stack_bits = jax.lax.dynamic_update_index_in_dim(stack_bits, layer_bits, i, 0)
    return jax.lax.bitcast_convert_type(stack_bits, stack.dtype)


def _sharding(axes, mesh, rules) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, parallel.spec(axes, rules))


def _load_tensor(header: Header, name: str, w: Weight, sharding: Sharding, bar: tqdm) -> jax.Array:
    """One tensor in our layout, in its file's dtype; float16 as float32, which holds it exactly."""
    make = lambda part: jax.make_array_from_callback(w.shape, sharding, part).block_until_ready()
    if jax.process_count() == 1:
        # Opened once a tensor: the file is mapped into memory, and pages once read stay resident.
        with hf_format.open_file(header.file) as f:
            stored = f.get_slice(name)
            # Replicas share what was read.
            read = functools.cache(lambda *ranges: _for_xla(_read(stored, w, ranges)))
            x = make(lambda index: read(*(s.indices(n)[:2] for s, n in zip(index, w.shape))))  # noqa: B905
    else:
        whole = np.empty(w.shape, next(n for n, d in DTYPES.items() if d == header.dtype))
        if parallel.is_main_process():
            whole[...] = _read_whole(header, name, w)
        parallel.broadcast(whole)
        x = make(_for_xla(whole).__getitem__)
    _require_finite(_all_finite(x), header, name)
    bar.update(header.nbytes)
    return x


def _for_xla(x: np.ndarray) -> np.ndarray:
    """XLA cannot convert float16 on a CPU that has no instruction for it (F16C)."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())


def _read_whole(header: Header, name: str, w: Weight) -> np.ndarray:
    with hf_format.open_file(header.file) as f:
        return _read(f.get_slice(name), w, tuple((0, n) for n in w.shape))


def _read(stored, w: Weight, ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    """From an open tensor, the part that is `ranges` ((start, stop) of each dimension) in our
    layout. Of dimensions that are joined there, the first is cut while reading, others after."""
    rows, sizes, cut = [], [], []
    for first, *rest in w.groups:
        (start, stop), others = ranges[first], [w.shape[a] for a in rest]
        stride = int(np.prod(others, dtype=int))
        rows.append(slice(start * stride, stop * stride))
        sizes += [stop - start, *others]
        cut += [slice(None), *(slice(*ranges[a]) for a in rest)]
    return stored[tuple(rows)].reshape(sizes)[tuple(cut)].transpose(np.argsort(w.order))


# --- Saving ---------------------------------------------------------------------------------------

Tensors = list[tuple[Weight, int]]  # weights and which layer of each


def new_directory(path: str | Path) -> Path:
    """The path, absolute. ValueError: there is something in it."""
    if (path := Path(path).absolute()).exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: exists already; choose another directory or remove it")
    return path


def save(
    path: str | Path,
    shape: Shape,
    params: Params,
    dtype: str = "bfloat16",
    tokenizer_dir: str | Path | None = None,
    model_dir: str | Path | None = None,
    chat_template: str | Path | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a directory that `transformers` opens, whole or not at all; the host holds one tensor
    at a time. tokenizer_dir gives the tokenizer; model_dir, or else that one, what `shape` does not
    know (context length, special token ids, generation settings). chat_template: a Jinja file in
    place of the tokenizer's own. Every process calls this, and process 0 writes; its OSError is
    raised after the last gather. ValueError: `path` holds something, `tokenizer_dir` no tokenizer,
    or `dtype` is none of `DTYPES`."""
    path, dtype = new_directory(path), str(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: wants one of {', '.join(DTYPES)}")
    small = _small_files(tokenizer_dir, model_dir or tokenizer_dir, chat_template, shape, dtype)
    files, index = _plan(shape, jnp.dtype(dtype).itemsize, shard_bytes)
    small |= {hf_format.INDEX: index} if len(files) > 1 else {}
    flat, writes = flatten_dict(params), parallel.is_main_process()
    partial, wrong = path.with_name(path.name + ".partial"), None
    if writes:
        shutil.rmtree(partial, ignore_errors=True)  # of an interrupted attempt
    total = sum(len(tensors) for tensors in files.values())
    with bars.bar(total=total, desc=f"writing {path.name}", unit="tensor", show=writes) as bar:
        for file, tensors in files.items():
            values = (_fetch(flat[w.keys], i, w, dtype, bar) for w, i in tensors)
            try:
                if writes and not wrong:
                    partial.mkdir(parents=True, exist_ok=True)
                    _write_file(partial / file, tensors, dtype, values)
            except OSError as error:
                wrong = error
            for _ in values:  # take part in the gathers
                pass
    try:
        if writes and not wrong:
            for name, content in small.items():
                (partial / name).write_bytes(content)
            partial.rename(path)
    except OSError as error:
        wrong = error
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {path}")
    if wrong:
        shutil.rmtree(partial, ignore_errors=True)
        raise wrong


def _plan(c: Shape, itemsize: int, shard_bytes: int) -> tuple[dict[str, Tensors], bytes]:
    """(file -> its tensors in the network's order, their index); of at most `shard_bytes` each."""
    place = lambda w, i: 1 + i if w.stacked else 0 if w.keys == ("embed",) else 1 + c.num_layers
    tensors = [(w, i) for w in hf_format.weights(c) for i in range(len(w.names))]
    named = {w.names[i]: (w, i) for w, i in sorted(tensors, key=lambda tensor: place(*tensor))}
    split = huggingface_hub.split_state_dict_into_shards_factory(
        named,
        get_storage_size=lambda tensor: tensor[0].size * itemsize,
        filename_pattern=hf_format.SINGLE.replace(".", "{suffix}."),
        max_shard_size=shard_bytes,
    )
    listed = dict(sorted(split.tensor_to_filename.items()))
    files = {file: [named[n] for n in names] for file, names in split.filename_to_tensors.items()}
    return files, _json({"metadata": split.metadata, "weight_map": listed})


def _fetch(x: jax.Array, i: int, w: Weight, dtype: str, bar: tqdm) -> np.ndarray:
    bar.update()
    converted = "float32" if dtype == "float16" else dtype  # see `_for_xla`
    tensor = _to_hf(x, i, w.stacked, w.order, w.hf_shape, converted)
    return parallel.to_host(tensor).astype(dtype, copy=False)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _to_hf(x, i, stacked: bool, order, hf_shape, dtype: str):
    """Layer i in Hugging Face's layout."""
    x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False) if stacked else x
    return x.transpose(order).reshape(hf_shape).astype(dtype)


def _write_file(file: Path, tensors: Tensors, dtype: str, values: Iterable[np.ndarray]) -> None:
    """One safetensors file: the header's length, the header in JSON, the data; the library's writer
    wants all of a file's tensors in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for w, i in tensors:
        start, end = end, end + w.size * jnp.dtype(dtype).itemsize
        header[w.names[i]] = dict(dtype=DTYPES[dtype], shape=w.hf_shape, data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            f.write(np.ascontiguousarray(value).view(np.uint8).data)


def _small_files(tokenizer_dir, model_dir, chat_template, c: Shape, dtype) -> dict[str, bytes]:
    """File name -> content of all that is not weights."""
    files, config, generation = {}, {}, {}
    if tokenizer_dir is not None:
        source = Path(tokenizer_dir)
        for pattern in _TOKENIZER:
            files |= {f.name: f.read_bytes() for f in source.glob(pattern) if f.is_file()}
        if not files:
            raise ValueError(f"{source}: no tokenizer files (tokenizer.json, vocab.json, ...)")
        if chat_template:
            template = Path(os.path.expanduser(chat_template)).read_text()
            about = json.loads(files.get("tokenizer_config.json", b"{}"))
            files["tokenizer_config.json"] = _json(about | {"chat_template": template})
            files.pop("chat_template.jinja", None)  # transformers would take that one
    if model_dir is not None:
        read = lambda file: hf_format.read_json(file) if file.is_file() else {}
        names = ("config.json", "generation_config.json")
        config, generation = (read(Path(model_dir, name)) for name in names)
    kept = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {k: config[k] for k in kept if config.get(k) is not None}
    generation = generation or {k: v for k, v in config.items() if k.endswith("_token_id")}
    files["config.json"] = _json(hf_format.config_json(c, dtype) | config)
    files["generation_config.json"] = _json(generation)
    return files


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
