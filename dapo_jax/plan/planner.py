"""Does this config fit this pod? Arithmetic, in seconds, without a TPU.

    python -m dapo_jax.plan --config=configs/dapo_qwen2_5_32b.py --topology=v5p-256 [--json=FILE]
    python -m dapo_jax.plan --config=configs/dapo_qwen2_5_32b.py --topology=v5p-256 --compile
    python -m dapo_jax.plan --check --topology=v5p-256 TRAINING FLAG ...

Prints the bytes a device needs while sampling and while updating, item by item; the seconds and the
price to expect of a step and of the run, with a low and a high figure (pods/cost.py: the run's own
schedule over assumed lengths, and a table of constants, of which none was measured on a TPU); and
LOWER bounds of the times: what the published peaks of the chip would allow, which no real program
reaches. Bytes of parameters, optimizer and cache are exact; those of activations are an estimate of
what XLA keeps. `--compile` compiles the run's own programs for the pod and says what XLA keeps
(pods/compile.py; minutes for a large model, JAX_OPTIMIZATION_LEVEL=O0 takes a third of the time and
assigns nearly the same memory). `--kernels` counts the instructions that libtpu makes of the decode
kernel, for constants.py (pods/kernels.py; seconds). `--check` is what launch/ runs before it makes
a slice: would `train` take these flags there?
"""

import functools
import itertools
import json
import math
import pathlib
import re
import sys
from typing import Any, NamedTuple

import huggingface_hub
import jax
from absl import flags

from dapo_jax.config import cli, presets, schema, validation
from dapo_jax.hosts import processes  # noqa: F401  (`--check` takes the flags of a training)
from dapo_jax.model import hf, paged, qwen2
from dapo_jax.plan import compile as plan_compile, constants, cost, kernels, simulate
from dapo_jax.plan.simulate import Traffic
from dapo_jax.pods import slices as pods, topology

GB = 1e9
CELL = 10  # arrays of 4 bytes a packed cell: eight of the rows, old and reference log-probs
NEAR, SIMULATED = (
    1.5,
    4,
)  # choices within this factor of the quickest, and how many kinds of sampler are simulated
CANNOT_KNOW = (
    "times on hardware: the expected ones rest on constants that nobody measured on a TPU",
    "response lengths and how many groups teach: both are assumed, and change while training",
    "whether XLA accepts the programs, and what it keeps: only --compile tells",
    "fragmentation and other programs on the chip: leave some room",
)

# As published: rows, D, F, layers, heads, key/value heads, tied (config.json of each).
QWEN2_5 = {
    "0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "3B": (151936, 2048, 11008, 36, 16, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "14B": (152064, 5120, 13824, 48, 40, 8, False),
    "32B": (152064, 5120, 27648, 64, 40, 8, False),
    "72B": (152064, 8192, 29568, 80, 64, 8, False),
}


QWEN3 = {
    "0.6B": (151936, 1024, 3072, 28, 16, 8, True),
    "1.7B": (151936, 2048, 6144, 28, 16, 8, True),
    "4B": (151936, 2560, 9728, 36, 32, 8, True),
    "8B": (151936, 4096, 12288, 36, 32, 8, False),
    "14B": (151936, 5120, 17408, 40, 40, 8, False),
    "32B": (151936, 5120, 25600, 64, 64, 8, False),
}


def qwen2_5(size: str, **choices) -> qwen2.Shape:
    """Shape of the published model of that size, e.g. '32B'."""
    V, D, F, L, H, K, tied = QWEN2_5[size]
    eps = 1e-5 if D >= 5120 else 1e-6
    return qwen2.Shape(V, D, F, L, H, K, D // H, 1e6, eps, tied, **choices)


def qwen3(size: str, **choices) -> qwen2.Shape:
    """The same of Qwen3, dense."""
    *sizes, tied = QWEN3[size]
    declared = dict(qkv_bias=False, qk_norm=True)
    return qwen2.Shape(*sizes, 128, 1e6, 1e-6, tied, **declared, **choices)


def published(name: str, **choices) -> qwen2.Shape | None:
    """Shape of a model by its hub name; None: not one of those that are known here. The instruct
    variants of Qwen2.5 and the base ones of Qwen3 have the shape of the other."""
    family, _, size = re.sub(r"(Qwen2\.5.*)-Instruct$|(Qwen3.*)-Base$", r"\1\2", name).rpartition(
        "-"
    )
    math_sized = size in ("1.5B", "7B")
    if family == "Qwen/Qwen3" and size in QWEN3:
        return qwen3(size, **choices)
    if family == "Qwen/Qwen2.5" and size in QWEN2_5:
        return qwen2_5(size, **choices)
    if family == "Qwen/Qwen2.5-Math" and math_sized:
        return qwen2_5(size, **choices)._replace(rope_theta=1e4)
    if family == "deepseek-ai/DeepSeek-R1-Distill-Qwen" and (math_sized or size in ("14B", "32B")):
        distilled = qwen2_5(size, **choices)._replace(tie_embeddings=False)
        return distilled._replace(rope_theta=1e4) if math_sized else distilled
    return None


def network(config) -> qwen2.Shape:
    """Shape of the config's model; no weights are read or fetched. ValueError: it is not known."""
    if not config.model.path:
        return qwen2.shape_from_config(config)
    return read_network(config, config.model.path)


def value_model(config, shape: qwen2.Shape) -> qwen2.Shape | None:
    """Shape of the value model beside a policy of `shape`; None: the run has none."""
    if not config.critic.enabled or shape.value_head:
        return None
    start = config.critic.init_from
    body = read_network(config, start)._replace(remat=shape.remat) if start else shape
    return body.merged._replace(value_head=True)


def read_network(config, path: str) -> qwen2.Shape:
    """Shape of the model at `path`, a directory or a hub name, as the config computes it."""
    choices = qwen2.compute_choices(config)
    if "://" in path or pathlib.Path(path).expanduser().is_dir():
        return hf.read_shape(hf.resolve(path, weights=False), **choices)
    if shape := published(path, **choices):
        return shape
    try:
        file = _config_file(path)
    except Exception as e:  # as in hf.resolve
        raise ValueError(f"{path}: its config.json is not to be had ({type(e).__name__})") from e
    return hf.read_shape(pathlib.Path(file).parent, **choices)


@functools.cache
def _config_file(path: str) -> str:
    """Of a model of the hub. A search asks for that of a value model once per mesh."""
    return huggingface_hub.hf_hub_download(path, "config.json")


# ------------------------------------------------------------------------------------------------
# Bytes a device
# ------------------------------------------------------------------------------------------------


def parts(axis: str, rules, sizes) -> int:
    """Into how many parts the mesh splits a logical axis."""
    return math.prod(sizes[a] for a in rules[axis].split(",") if a)


def weight_count(shape: qwen2.Shape, rules, sizes, part=qwen2.base) -> int:
    """Parameters that a device holds, exactly; `part`: of which part of the tree."""
    leaves, axes = part(qwen2.abstract(shape)), part(qwen2.metadata(shape, "axes"))
    leaves = jax.tree.leaves(leaves)
    axes = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    return sum(
        math.prod(
            -(-n // parts(a, rules, sizes)) if a else n for n, a in zip(x.shape, names, strict=True)
        )
        for x, names in zip(leaves, axes, strict=True)
    )


def outputs(shape: qwen2.Shape) -> int:
    """Numbers that the head makes of a token."""
    return 1 if shape.value_head else shape.vocab_size


def read_count(shape: qwen2.Shape) -> int:
    """Parameters that a token's products read: of the embedding only rows are."""
    multiplied = shape.tie_embeddings and not shape.value_head
    embedding = 0 if multiplied else shape.vocab_size * shape.hidden_size
    return qwen2.param_count(shape) - embedding


def wide_count(config, shape: qwen2.Shape) -> int:
    """Parameters of a float32 head under a model of another type, whole; 0: it has none."""
    return shape.float32_head * (_itemsize(config) < 4) * outputs(shape) * shape.hidden_size


def cache(config, shape: qwen2.Shape, sizes) -> paged.Geometry:
    """The sampler's pool of pages on TPUs."""
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens)
    return paged.geometry(
        shape,
        "tpu",
        slots=config.rollout.slots,
        shards=parts("batch", config.sharding.decode, sizes),
        row_tokens=config.data.max_prompt_tokens + response,
        page_tokens=config.rollout.page_tokens,
        fraction=config.rollout.cache_fraction,
        quantized=config.rollout.cache_dtype == "int8",
    )


def token_bytes(config, shape: qwen2.Shape, sizes) -> float:
    """Keys and values of one token in all layers, on a device that holds the token."""
    g = cache(config, shape, sizes)
    split = parts("kv_heads", config.sharding.decode, sizes)
    return paged.pool_bytes(g, config.model.dtype) / g.tokens / split


def memory(config, shape: qwen2.Shape, sizes) -> dict[str, dict[str, float]]:
    """Phase -> item -> bytes per device. 'always' counts in both others: the sampler keeps its
    cache while the trainer works, and the optimizer its moments while the sampler does."""
    train, decode, item = config.sharding.train, config.sharding.decode, _itemsize(config)
    N, n = (weight_count(shape, train, sizes, part) for part in (qwen2.base, qwen2.trained))
    D, F, V = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    mlp, vocab = (parts(a, train, sizes) for a in ("mlp", "vocab"))
    masters = {"master weights (float32)": 4 * n}
    if shape.lora:
        masters = {f"base ({config.model.dtype})": item * N, "adapters (float32)": 4 * n}
    always = masters | {
        "Adam's moments (float32)": 8 * n,
        "cache": cache(config, shape, sizes).tokens
        / parts("batch", decode, sizes)
        * token_bytes(config, shape, sizes),
    }
    if config.loss.kl_coef:
        always["reference weights (float32)"] = 4 * n
    updating = update_memory(config, shape, sizes)
    if value := value_model(config, shape):
        of_value = weight_count(value, train, sizes)
        always["value model's weights (float32)"] = 4 * of_value
        always["value model's moments (float32)"] = 8 * of_value
        made = {"values, advantages, returns": updating["packed rows"] * 3 / CELL}
        of_values = update_memory(config, value, sizes) | made  # before the policy's, and then gone
        updating = max(updating, of_values, key=lambda items: sum(items.values()))

    prompts = -(-config.rollout.prefill_prompts // parts("batch", decode, sizes))
    slots = -(-config.rollout.slots // parts("batch", decode, sizes))
    head_weights = _head_bytes(config, shape, sizes) if D % 128 else 0
    token = token_bytes(config, shape, sizes) + item * (3 * F / mlp + 6 * D)
    sampling = {
        "decode weights": item * weight_count(shape, decode, sizes)
        + (4 - item) * _wide_part(config, shape, sizes, decode),
        "logits": 3 * 4 * slots * V / vocab + head_weights,
        "prefill": prompts
        * min(config.rollout.prefill_tokens, config.data.max_prompt_tokens)
        * token,
    }
    return {"always": always, "sampling": sampling, "updating": updating}


def _wide_part(config, shape: qwen2.Shape, sizes, rules) -> float:
    """`wide_count`, of a device."""
    return wide_count(config, shape) / math.prod(parts(a, rules, sizes) for a in ("vocab", "embed"))


def _head_bytes(config, shape: qwen2.Shape, sizes) -> float:
    """Of a device's part of the output weights as training multiplies with them, gathered over
    `embed`. TPUs lay out the last axis in 128 lanes."""
    item = 4 if wide_count(config, shape) else _itemsize(config)
    lanes = -(-shape.hidden_size // 128) * 128
    return item * outputs(shape) * lanes / parts("vocab", config.sharding.train, sizes)


def update_memory(config, shape: qwen2.Shape, sizes) -> dict[str, float]:
    """Item -> bytes per device of an update of a model of `shape`, the policy or a value model."""
    train, item, L = config.sharding.train, _itemsize(config), shape.num_layers
    n = weight_count(shape, train, sizes, qwen2.trained)
    D, F, H, d = shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.head_dim
    shards = parts("batch", train, sizes)
    heads, mlp, vocab = (parts(a, train, sizes) for a in ("heads", "mlp", "vocab"))
    T, rows = validation.row_tokens(config), -(-config.optim.micro_batch_rows // shards)
    tokens = rows * T  # of a device in a pass
    kept = tokens / parts("sequence", train, sizes)
    per_layer = {
        "full": D * kept,
        "attention": D * kept + tokens * H * d / heads,
        "dots": D * kept + tokens * (2 * D + (2 * H * d) / heads + 2 * F / mlp),
        "none": 8 * D * kept + tokens * (6 * H * d / heads + 4 * F / mlp),
    }[shape.remat]
    chunk = min(shape.attention_chunk, T)
    fused = config.model.attention in ("auto", "splash")
    scores = 0 if fused else 2 * 4 * rows * H / heads * chunk * T
    if shape.remat == "none" and chunk == T:  # not one chunk's, but every layer's
        scores *= L
    tables = shape.vocab_size * (read_count(shape) < qwen2.param_count(shape)) + outputs(shape)
    layer = (qwen2.param_count(shape) - D * tables) / L
    block = scores + item * tokens * (6 * F / mlp + 8 * H * d / heads + 3 * D)
    # A float32 copy to add gradients to; of a float32 head only where it is gathered.
    wide, head_weights = wide_count(config, shape), _head_bytes(config, shape, sizes)
    copied = 2 * head_weights if not wide or parts("embed", train, sizes) > 1 else 0
    head = copied + 4 * rows * min(shape.head_chunk, T) * outputs(shape) / vocab
    minibatch = config.rollout.groups // config.optim.minibatches * config.rollout.group_size
    # Trained weights whose compute copy is float32.
    raised = 0 if shape.lora else _wide_part(config, shape, sizes, train)
    return {
        "compute copy of the weights": item * (n - raised) if item < 4 else 0,
        "gradient sums (float32)": 4 * n,
        "gradients of a pass": item * n + (4 - item) * raised,
        "one layer gathered, and its gradients": (2 if shape.lora else 3) * item * layer / mlp,
        "saved activations": item * L * per_layer,
        "one block backward, or the head": max(block, head),
        # Of all mini-batches.
        "packed rows": config.optim.minibatches * -(-minibatch // shards) * T * 4 * CELL,
    }


def peaks(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """Bytes a device in each phase."""
    always = sum(table["always"].values())
    return {p: always + sum(table[p].values()) for p in ("sampling", "updating")}


def _itemsize(config) -> int:
    return jax.numpy.dtype(config.model.dtype).itemsize


def scene(config, shape: qwen2.Shape, sizes, pod: pods.Pod) -> cost.Scene:
    """What the cost model asks of a config on a slice."""
    g, decode, train = cache(config, shape, sizes), config.sharding.decode, config.sharding.train
    reuse = config.loss.old_logprobs != "recompute"
    read, value = read_count(shape), value_model(config, shape)
    # Of what a block's last product gives, the backward pass needs nothing.
    last = shape.num_layers * shape.intermediate_size * shape.hidden_size
    along = [a for a in reversed(decode["mlp"].split(",")) if a]  # the quickest axis first
    return cost.Scene(
        pod=pod,
        sizes=simulate.Sizes(
            config.rollout.slots,
            g.shards,
            min(config.rollout.chunk, config.rollout.max_response_tokens),
            g.pages,
            g.page_tokens,
            -(-config.rollout.prefill_prompts // g.shards),
        ),
        prefill_tokens=min(
            config.rollout.prefill_tokens, -(-config.data.max_prompt_tokens // 8) * 8
        ),
        layers=shape.num_layers,
        width=shape.hidden_size,
        heads=shape.num_heads,
        head_dim=shape.head_dim,
        kv_heads=-(-shape.num_kv_heads // parts("kv_heads", decode, sizes)),
        train_kv_heads=-(-shape.num_kv_heads // parts("kv_heads", train, sizes)),
        key_bytes=2 * paged.vector_bytes(g, config.model.dtype),
        cache="ours.int8" if g.quantized else "ours",
        vocab=-(-shape.vocab_size // parts("vocab", decode, sizes)),
        read=read,
        wide=wide_count(config, shape),
        item=_itemsize(config),
        decode_split=parts("mlp", decode, sizes),
        decode_axes=tuple(n for a in along if (n := sizes[a]) > 1),
        train_split=(split := parts("mlp", train, sizes)),
        fsdp=(kept := parts("embed", train, sizes)),
        replicas=pod.chips // (split * kept),
        micro_rows=validation.micro_rows(config, sizes),
        row_tokens=validation.row_tokens(config),
        remat=shape.remat,
        again=0.0 if shape.remat in ("none", "dots") else 1 - last / read,
        scored=(not reuse) + bool(config.loss.kl_coef),
        parameters=qwen2.param_count(shape),
        adapters=qwen2.adapter_count(shape),
        value=value and scene(config, value, sizes, pod),
    )


# ------------------------------------------------------------------------------------------------
# Waves and lower bounds
# ------------------------------------------------------------------------------------------------


def waves(config, shape: qwen2.Shape, sizes, length: int) -> dict[str, int]:
    """Sequences of `length` tokens in flight at a time, and how often that makes a batch."""
    g, wanted = cache(config, shape, sizes), config.rollout.groups * config.rollout.group_size
    held = min(config.rollout.slots // g.shards, g.pages // -(-length // g.page_tokens)) * g.shards
    return {"sequences": held, "waves": -(-wanted // held) if held else 0}


def bounds(config, shape: qwen2.Shape, sizes, pod: pods.Pod, traffic: Traffic) -> dict[str, float]:
    """LOWER bounds in seconds of one rollout step in which every prompt and response has the given
    length and every group is accepted. Weights, cache and matrix products only; at the chip's
    published peaks; attention counted causal, within its sequence."""
    p, r = traffic.prompt, traffic.response
    n = config.rollout.groups * config.rollout.group_size
    flight = waves(config, shape, sizes, p + r)
    split = weight_count(shape, config.sharding.decode, sizes) / qwen2.param_count(shape)
    chip, H, d, L = pod.chip, shape.num_heads, shape.head_dim, shape.num_layers
    read = read_count(shape)
    batch, heads = (parts(a, config.sharding.decode, sizes) for a in ("batch", "kv_heads"))
    keys = n * (p * r + r * r / 2) * token_bytes(config, shape, sizes) / batch
    wide, item = wide_count(config, shape), _itemsize(config)
    weights = flight["waves"] * r * (read * item + wide * (4 - item)) * split
    read += 5 * wide  # products of the highest precision are six of bfloat16
    attention = 4 * H * d * L * n * (p * r + r * r / 2) / batch / heads
    decode = max(
        (weights + keys) / chip.bandwidth,
        (2 * read * n * r / pod.chips + attention) / chip.flops,
    )

    def forward(shape: qwen2.Shape) -> float:
        multiplied = read_count(shape) + 5 * wide_count(config, shape)
        squares = shape.num_heads * shape.head_dim * shape.num_layers * (p + r) ** 2
        return n * (2 * multiplied * (p + r) + 2 * squares) / pod.chips / chip.flops

    scored = (config.loss.old_logprobs == "recompute") + bool(config.loss.kl_coef)
    passes = 3 if shape.remat in ("none", "dots") else 4  # backward twice forward; and again
    out = {
        "decode": decode if flight["sequences"] else math.inf,
        "old log-probs": scored * forward(shape),
        "update": (passes - bool(shape.lora)) * forward(shape),  # no gradients of the base
    }
    if value := value_model(config, shape):
        out |= {"values": forward(value), "update of values": passes * forward(value)}
    return out


# ------------------------------------------------------------------------------------------------
# What fits
# ------------------------------------------------------------------------------------------------


def mistakes(config, shape: qwen2.Shape | None, pod: pods.Pod) -> str:
    """Why the config cannot run on that pod, line by line; '' if it can. Without a shape: as far as
    that can be said without it."""
    try:
        validation.validate(config, pod.chips)
        sizes = validation.resolve_mesh(config, pod.chips)
        bad = validation.check_shape(shape, sizes, config.sharding) if shape else []
        if shape and config.critic.init_from and (value := value_model(config, shape)):
            wrong = validation.check_shape(value, sizes, config.sharding)
            bad += [f"the value model: {line}" for line in wrong]
        if sizes["data"] % pod.slices:
            bad.append(
                f"config.mesh.data = {sizes['data']} is no multiple of {pod.slices}, the slices,"
                " which are joined along `data`"
            )
    except schema.ConfigError as error:
        return str(error)
    return "\n".join(bad)


def check(config, pod: pods.Pod, with_files: bool = False, with_memory: bool = True) -> str:
    """What is doubtful about a run of the config on that pod, or ''. ValueError: it cannot run.
    with_files: names of files, relative ones, have to be here. with_memory: what by arithmetic does
    not fit cannot run; else it is doubtful."""
    try:
        shape = network(config)
        value_model(config, shape)
    except ValueError as error:  # a directory of the hosts, or no network here
        shape, doubt = None, f"{error}: not checked whether the model fits"
    wrong = mistakes(config, shape, pod).splitlines()
    if with_files:
        hint = "here, where the slice gets its copy from; --prepare=COMMAND fetches it there"
        wrong += [f"{line} {hint}" for line in validation.missing(config) if ": /" not in line]
    if wrong:
        raise ValueError("\n".join(wrong))
    if shape is None:
        return doubt
    peak = max(peaks(memory(config, shape, validation.resolve_mesh(config, pod.chips))).values())
    if peak <= pod.chip.hbm:
        return ""
    doubt = (
        f"by arithmetic this needs {peak / GB:.1f} GB of a chip's {pod.chip.hbm / GB:.1f}: ask"
        f" python -m dapo_jax.plan --topology={pod.cloud} what fits"
    )
    if with_memory:
        raise ValueError(f"{doubt} (--skip-plan goes on all the same)")
    return doubt


class Choice(NamedTuple):
    mesh: dict[str, int]
    micro_rows: int
    slots: int
    prefill_prompts: int
    cache_fraction: float
    peak: float  # bytes per device
    step: float  # expected seconds
    fields: dict[str, str]  # others that differ from the config's own

    def flags(self) -> str:
        return (
            f"--config.mesh.data={self.mesh['data']} --config.mesh.fsdp={self.mesh['fsdp']}"
            f" --config.mesh.tensor={self.mesh['tensor']}"
            f" --config.optim.micro_batch_rows={self.micro_rows}"
            f" --config.rollout.slots={self.slots}"
            f" --config.rollout.prefill_prompts={self.prefill_prompts}"
            f" --config.rollout.cache_fraction={self.cache_fraction}"
            + "".join(f" --config.{name}={value}" for name, value in self.fields.items())
        )


def chosen(config, x: dict[str, Any]):
    """A copy of the config with the fields of a Choice."""
    t = config.copy_and_resolve_references()
    t.mesh.update(x["mesh"])
    t.optim.micro_batch_rows = x["micro_rows"]
    t.rollout.update({k: x[k] for k in ("slots", "prefill_prompts", "cache_fraction")})
    t.update_from_flattened_dict(x["fields"])
    return t


def layouts(config, shape: qwen2.Shape, pod: pods.Pod):
    """Copies of the config with other meshes: with the rules that `presets.lay_out` makes for each,
    or with the config's own where they are none of these."""
    known = config.copy_and_resolve_references()
    presets.lay_out(known, 2, 1, 1 if config.sharding.train.embed == "fsdp" else 2)
    free = known.sharding == config.sharding
    widths = range(1, min(shape.num_kv_heads, pod.chips) + 1)
    for tensor, together in itertools.product(widths, (1, 2, 4, 8)):
        shards = pod.chips // tensor
        if shape.num_kv_heads % (tensor * together) or pod.chips % (tensor * together):
            continue
        for data in sorted({1, 2, 4, 8, pod.slices}) if together == 1 else [shards // together]:
            t = config.copy_and_resolve_references()
            if free:
                presets.lay_out(t, shards, tensor, together * tensor)
            t.mesh.update({"data": data, "fsdp": shards // data, "tensor": tensor})
            # Weights that training splits over `data` too would be gathered between slices.
            if shards % data == 0 and (together == 1 or (free and pod.slices == 1)):
                yield t


def fitting(config, shape: qwen2.Shape, pod: pods.Pod, traffic: Traffic, room: float):
    """Yields (Choice without its seconds, config) of meshes, micro-batches, slots and activations
    to keep that fit with `room` (a share of the memory) to spare, the cache as large as it can
    be."""
    mean = traffic.prompt + traffic.response
    wanted = config.rollout.groups * config.rollout.group_size
    old = schema.leaves(config)
    kept = ("attention", "full") if shape.remat in ("attention", "full") else (shape.remat,)
    found = set()  # with the least that the backward pass computes again
    for t, rows, remat in itertools.product(layouts(config, shape, pod), (1, 2, 4), kept):
        t, net = t.copy_and_resolve_references(), shape._replace(remat=remat)
        laid = rows, *t.mesh.values(), t.sharding.decode.heads
        if laid in found:
            continue
        sizes, shards = t.mesh.to_dict(), t.mesh.data * t.mesh.fsdp
        t.optim.micro_batch_rows, t.model.remat = rows * shards, remat
        t.rollout.slots, t.rollout.cache_fraction = shards, 1.0
        t.rollout.prefill_prompts = -(-config.rollout.prefill_prompts // shards) * shards
        if mistakes(t, net, pod):
            continue
        own = parts("batch", t.sharding.decode, sizes)  # shards of decoding
        geometry = cache(t, net, sizes)
        row = geometry.row_pages * geometry.page_tokens
        table = memory(t, net, sizes)
        held = table["always"].pop("cache") * own / shards  # of one row per shard
        free = (1 - room) * pod.chip.hbm - max(peaks(table).values())
        if free < held:
            continue
        pool = free / held * row  # tokens a shard can hold
        most = min(2 ** int(math.log2(max(pool / mean, 1))), -(-wanted // own))
        for slots in sorted({most, max(most // 2, 1), max(most // 4, 1)}):
            u = t.copy_and_resolve_references()
            u.rollout.slots = slots * own
            fraction = min(math.floor(pool / slots / row * 1000) / 1000, 1.0)
            u.rollout.cache_fraction = fraction
            peak = max(peaks(memory(u, net, sizes)).values())
            held_rows = waves(u, net, sizes, mean)["sequences"]
            fits = peak <= (1 - room) * pod.chip.hbm and held_rows and fraction > 0
            if fits and slots * own % shards == 0:
                fields = {
                    name: value
                    for name, value in schema.leaves(u).items()
                    if name.startswith(("sharding.", "model.remat")) and value != old[name]
                }
                prompts, micro = u.rollout.prefill_prompts, rows * shards
                found.add(laid)
                yield (
                    Choice(sizes, micro, slots * own, prompts, fraction, peak, math.inf, fields),
                    u,
                )


def search(
    config, shape: qwen2.Shape, pod: pods.Pod, traffic: Traffic, room: float
) -> list[Choice]:
    """What is `fitting`, the shortest expected step first. Simulated are those only that are not
    far behind without a schedule, and with fewer visits of the host."""
    known, timed = constants.values(), []
    for x, t in fitting(config, shape, pod, traffic, room):
        s = scene(t, shape._replace(remat=t.model.remat), x.mesh, pod)
        timed.append((cost.rough(t, traffic, s, known), x, t, s))
    timed.sort(key=lambda x: x[0])
    found, rollouts = [], {}
    for rough, x, t, s in timed:
        key = s.sizes.shards, s.sizes.slots
        if (key not in rollouts and len(rollouts) == SIMULATED) or rough > NEAR * timed[0][0]:
            continue
        # Pages beyond those in use change nothing.
        sizes = cost.quickly(t, s.sizes)
        if key not in rollouts or rollouts[key].pages > sizes.pages:
            rollouts[key] = cost.simulated(t, traffic, sizes)
        work = cost.work(t, traffic, s, rollouts=rollouts[key])
        found.append(x._replace(step=cost.pricer(t, work, s)(known).step))

    def rank(x: Choice):
        """Within 2% of each other: passes that keep a device busy, then the smaller ones."""
        tokens = x.micro_rows * validation.row_tokens(config) // (x.mesh["data"] * x.mesh["fsdp"])
        near = round(math.log(x.step) / 0.02)
        return near, -min(tokens, 16384), x.micro_rows, x.mesh["data"]

    return sorted(found, key=rank)


# ------------------------------------------------------------------------------------------------
# Report
# ------------------------------------------------------------------------------------------------


class Money(NamedTuple):
    """What else is assumed of a run."""

    price: float = 0.0  # $ a chip-hour; 0 = the list price
    eval_problems: int = 30  # of a file: AIME 2024
    preempt_hours: float = 0.0  # wall time from one preemption to the next; 0 = none
    staleness: bool = False  # whether to say what `rollout.staleness` would make of the step


def expected(
    config, shape: qwen2.Shape, sizes, pod: pods.Pod, traffic: Traffic, money: Money
) -> dict[str, Any]:
    """The step and the run in seconds, chip-hours, $ and bytes, as plain JSON values."""
    s, known = scene(config, shape, sizes, pod), constants.values()
    tests = min(config.eval.max_problems or money.eval_problems, money.eval_problems)
    work = cost.work(config, traffic, s, eval_problems=tests)
    price = cost.pricer(config, work, s)
    now, spread = price(known), cost.spread(price)
    rate = money.price or known[f"price.{pod.family}"]
    hours = pod.chips * now.step / 3600
    priced = lambda c: cost.pricer(c, work, scene(c, shape, sizes, pod))(known).step
    plain = _changed(config, {"rollout.cache_dtype": "model"})
    changes = cost.changes(plain, work, scene(plain, shape, sizes, pod))
    if s.cache != "ours":
        changes.append((f"rollout.cache_dtype: {config.rollout.cache_dtype}", now.step))
    busiest = max(work.rollouts.traces, key=lambda x: x.count_CxS.sum())
    saved = cost.checkpoint_bytes(config, s)
    kept = config.checkpoint.keep + 1 + config.checkpoint.keep_best
    taken = (
        preempted(config, shape, sizes, pod, traffic, money, work) if money.preempt_hours else {}
    )
    aged = cost.aged(config, traffic, work, s, known, tests) if money.staleness else []
    aged = [x._asdict() | {"apart": x.apart and x.apart._asdict()} for x in aged]
    alone = min(config.critic.pretrain_steps, config.steps) if s.value else 0
    # The run is as long as so many whole steps: the first ones leave the policy as it is.
    left_out = sum(now.phases[x] for x in ("old log-probs", "update"))
    whole = config.steps - alone * left_out / now.step
    return {
        "step": {
            "expected_s": now.step,
            "staleness": aged,
            "low_s": spread.low,
            "high_s": spread.high,
            "parts": now.phases,
            "decoding": now.decoding,
            "uncertain": spread.by,
            "rounds": sum(map(len, work.rollouts.steps)) / len(work.rollouts.steps),
            "responses": work.responses,
            "occupancy": busiest.occupancy,
            "evicted": sum(x.evicted for x in work.rollouts.traces),
            "filled_cells": work.packed.fill,
            "micro_batch": _micro_batches(work, s, known),
            "chip_hours": hours,
            "price": hours * rate,
            "changes": changes,
            "options": {
                option: priced(_changed(config, fields | dict([option.split("=")])))
                for option, fields in OPTIONS.items()
            },
        },
        "run": {
            "steps": config.steps,
            "expected_s": whole * now.step,
            "chip_hours": whole * hours,
            "price": whole * hours * rate,
            "price_chip_hour": rate,
            "first_compilation_s": known["compile"],
            "checkpoint_bytes": saved,
            "checkpoints_bytes": saved * kept,  # one is being written
            "host_disk_bytes": 2 * s.parameters * bool(config.model.path)
            + (2 * s.value.parameters * bool(config.critic.init_from) if s.value else 0),
            "host_memory_bytes": known["host_token"] * work.responses * traffic.response
            + 29 * work.packed.cells,  # the rows of all mini-batches: 7 numbers and a flag a cell
        }
        | ({"pretrain_steps": alone} if s.value else {})
        | taken,
        "constants": {name: c._asdict() for name, c in constants.CONSTANTS.items()},
    }


def preempted(
    config, shape: qwen2.Shape, sizes, pod: pods.Pod, traffic: Traffic, money: Money, work
) -> dict[str, Any]:
    """Of a run that is preempted every so many hours: seconds that one costs, and the goodput; the
    same without the journal, and with a checkpoint after each step, or each fifth one."""
    known, hours = constants.values(), money.preempt_hours
    again = cost.drawn_again(config, traffic, work, scene(config, shape, sizes, pod), known)

    def of(**fields) -> dict[str, Any]:
        c = _changed(config, {name.replace("__", "."): x for name, x in fields.items()})
        s = scene(c, shape, sizes, pod)
        phases = cost.pricer(c, work, s)(known).phases
        lost = cost.preemption(c, phases, again, s, known)
        good, most = (cost.goodput(phases, x, hours) for x in (lost, {}))
        return {"lost_s": lost, "goodput": good, "goodput_undisturbed": most}

    every = 5 if config.checkpoint.every == 1 else 1
    instead = {
        f"checkpoint.every={every}": of(checkpoint__every=every),
        "checkpoint.journal_gb=0": of(checkpoint__journal_gb=0.0),
    }
    return {"preempted": {"hours": hours} | of() | {"instead": instead}}


def _micro_batches(work: cost.Work, s: cost.Scene, k: constants.Values) -> dict[str, Any]:
    """Seconds of a forward pass and of an update's, by what they go into; the share of the chip's
    peak that an update reaches, counting what is computed again (HFU)."""
    forward, update = (
        cost.of_micro_batches(work.packed, s, k, update=update) for update in (False, True)
    )
    return {
        "rows": s.micro_rows,
        "forward": forward._asdict(),
        "update": update._asdict(),
        "hfu": update.flops / update.seconds / s.pod.chip.flops,
    }


# What makes a step shorter and is off by default, for it changes the samples or what is taken for
# their log-probs; docs/on_a_pod.md has the price. One or the other: int8 needs the pass that the
# first leaves out.
OPTIONS = {
    "loss.old_logprobs=reuse": {"loss.importance_cap": 0.0, "rollout.cache_dtype": "model"},
    "rollout.cache_dtype=int8": {"loss.importance_cap": 2.0, "loss.old_logprobs": "recompute"},
}


def _changed(config, fields: dict[str, Any]):
    out = config.copy_and_resolve_references()
    out.update_from_flattened_dict(fields)
    return out


def counted(config, pod: pods.Pod) -> dict[str, Any]:
    """The bundles of the sampler's decode kernel, counted. ValueError: the compiler refuses."""
    shape = network(config)
    s = scene(config, shape, sizes := validation.resolve_mesh(config, pod.chips), pod)
    heads = parts("heads", config.sharding.decode, sizes)
    part = kernels.Attention(
        s.sizes.slots // s.sizes.shards, shape.num_heads // heads, s.kv_heads, shape.head_dim,
        config.model.dtype,
    )  # fmt: skip
    found = kernels.measure(pod, part, cache(config, shape, sizes))
    block = cost.DESIGN.kernel.block_tokens * s.key_bytes
    return {
        "versions": topology.versions(),
        "bundles": found._asdict(),
        "text": kernels.report(pod, found, block, constants.values()),
    }


def plan(
    config,
    pod: pods.Pod,
    traffic: Traffic,
    room: float,
    money: Money = Money(),  # noqa: B008
) -> dict[str, Any]:
    """Everything about one config on one pod, as plain JSON values (bytes, seconds, tokens)."""
    shape = network(config)
    value = value_model(config, shape)
    out = {
        "pod": {"cloud": pod.cloud, "topology": pod.topology, "slices": pod.slices}
        | {"chips": pod.chips, "chip": pod.chip._asdict()},
        "parameters": qwen2.param_count(shape),
        **({"value_parameters": qwen2.param_count(value)} if value else {}),
        "assumed": traffic._asdict() | {"room": room} | money._asdict(),
        "mistakes": mistakes(config, shape, pod).splitlines(),
        "suggestions": [x._asdict() | {"flags": x.flags()} for x in
                        search(config, shape, pod, traffic, room)[:3]],
        "cannot_know": list(CANNOT_KNOW),
    }  # fmt: skip
    if not out["suggestions"]:
        bigger = (p for p in pods.larger(pod) if any(fitting(config, shape, p, traffic, room)))
        out["smallest_that_fits"] = next((p.cloud for p in bigger), None)
    if out["mistakes"]:
        return out | {"fits": False}
    sizes = validation.resolve_mesh(config, pod.chips)
    table = memory(config, shape, sizes)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    mean = traffic.prompt + traffic.response
    flight = {
        "longest": {"tokens": longest} | waves(config, shape, sizes, longest),
        "mean": {"tokens": mean} | waves(config, shape, sizes, mean),
    }
    peak = peaks(table)
    fits = max(peak.values()) <= pod.chip.hbm and flight["longest"]["sequences"] > 0
    times = expected(config, shape, sizes, pod, traffic, money) if fits else {}
    return out | times | {
        "mesh": sizes,
        "slots": config.rollout.slots,
        "cache_fraction": config.rollout.cache_fraction,
        "bytes": table,
        "peaks": peak,
        "fits": fits,
        "in_flight": flight,
        "lower_bounds_s": bounds(config, shape, sizes, pod, traffic),
    }  # fmt: skip


def aged_lines(aged: list[dict[str, Any]]) -> list[str]:
    """Of `--staleness`, for people."""
    lines = []
    for x in aged:
        lines.append(
            f"    rollout.staleness={x['staleness']} rollout.slots={x['slots']}:"
            f" {x['seconds'] / 60:.1f} min, slots {x['occupancy']:.0%} busy"
        )
        if best := x["apart"]:
            lines[-1] += (
                f"; trained tokens are {x['mean']:.2f} steps old, at most {x['oldest']};"
                f" {x['parked'] / 1e6:.1f} M parked; sampled on {best['share']:.0%} of the devices"
                f" and trained on the others at best {best['seconds'] / 60:.1f} min"
            )
    head = "  responses that outlive steps, over the same cache, with fewer host visits:"
    return [head, *lines] if aged else []


def time_lines(r: dict[str, Any]) -> list[str]:
    """The expected step and run, for people."""
    step, run, a = r["step"], r["run"], r["assumed"]
    number = lambda x: f"{x:,.0f}" if abs(x) >= 10 else f"{x:.2g}"
    table = lambda parts: ", ".join(f"{what} {number(s)}" for what, s in parts.items() if s)
    clock = lambda s: f"{s:,.1f} s" if s < 100 else f"{s / 60:.1f} min"
    micro = step["micro_batch"]
    parts = {x: micro["update"][x] for x in ("products", "elementwise", "attention", "waits")}
    uncertain = sorted(step["uncertain"].items(), key=lambda x: x[1][0] - x[1][1])[:3]
    lines = [
        f"EXPECTED step: {clock(step['expected_s'])} ({clock(step['low_s'])} to"
        f" {clock(step['high_s'])}), if responses have {a['response']:,} tokens (log-normal, sigma"
        f" {a['sigma']:g}) after {a['prompt']:,} of prompt and {a['accept']:.0%} of the groups"
        " are accepted:",
        f"  seconds: {table(step['parts'])}",
        f"  decode and tail go into: {table(step['decoding'])}",
        f"  {micro['rows']} rows of the update: {table(parts)}; {micro['hfu']:.0%} of the chip's"
        " peak, counting what is computed again",
        f"  {step['rounds']:.2f} rounds, {step['responses']:,.0f} responses, slots"
        f" {step['occupancy']:.0%} busy, {step['evicted']} rows evicted, rows of the update"
        f" {step['filled_cells']:.0%} full",
        "  most uncertain: "
        + ", ".join(
            f"{name} {number(low)} to +{number(high)} s" for name, (low, high) in uncertain
        ),
    ]
    if len(step["changes"]) > 1:
        lines.append("  the same step since the first release, one change after the other:")
        lines += [f"    {what:32s} {clock(s)}" for what, s in step["changes"]]
    lines.append("  off by default, each at a price in samples:")
    lines += [f"    {what:32s} {clock(s)}" for what, s in step["options"].items()]
    lines += aged_lines(step["staleness"])
    alone, taken = "", []
    if n := run.get("pretrain_steps"):
        alone = f", the first {n:,} of them the value model's alone"
    if p := run.get("preempted"):
        said = lambda x: (
            f"goodput {x['goodput']:.1%}, without any {x['goodput_undisturbed']:.1%};"
            f" {number(sum(x['lost_s'].values()))} s each ({table(x['lost_s'])})"
        )
        taken = [
            f"a preemption every {p['hours']:g} h: {said(p)}",
            *(f"    {what:32s} {said(x)}" for what, x in p["instead"].items()),
        ]
    return [
        *lines,
        *taken,
        f"a run of {run['steps']:,} steps{alone}: {run['expected_s'] / 86400:.1f} days,"
        f" {run['chip_hours']:,.0f} chip-hours, ${run['price']:,.0f} at"
        f" ${run['price_chip_hour']:g} a chip-hour; a step ${step['price']:,.2f}",
        f"first compilation {clock(run['first_compilation_s'])}; a checkpoint"
        f" {run['checkpoint_bytes'] / GB:,.1f} GB, room for {run['checkpoints_bytes'] / GB:,.1f};"
        f" a host: {run['host_disk_bytes'] / GB:,.1f} GB of disk for the weights,"
        f" {run['host_memory_bytes'] / GB:,.1f} GB of memory for a batch",
    ]


def report(r: dict[str, Any]) -> list[str]:
    """`plan` for people."""
    pod, limit = r["pod"], r["pod"]["chip"]["hbm"]
    value = f" and {n:,} of a value model" if (n := r.get("value_parameters")) else ""
    lines = [
        f"{r['parameters']:,} parameters{value} on {pod['cloud']} = {pod['topology']}"
        f"{' x ' + str(pod['slices']) if pod['slices'] > 1 else ''}: {pod['chips']} chips of"
        f" {limit / GB:.2f} GB"
    ]
    lines += [f"cannot run: {m}" for m in r["mistakes"]]
    if "bytes" in r:
        lines.append("mesh: " + " x ".join(f"{k} {v}" for k, v in r["mesh"].items()))
        lines.append("GB a device (10^9 bytes):")
        for phase, items in r["bytes"].items():
            lines += [f"  {phase:9s} {what:38s} {n / GB:8.2f}" for what, n in items.items() if n]
        for phase, n in r["peaks"].items():
            lines.append(f"  {phase:9s} {'TOTAL':38s} {n / GB:8.2f}   {n / limit:.0%} of the chip")
        lines.append("FITS, by arithmetic" if r["fits"] else "DOES NOT FIT")
        for what, f in r["in_flight"].items():
            lines.append(
                f"sequences of the {what} length ({f['tokens']:,} tokens): {f['sequences']:,} in"
                f" flight, {f['waves']} waves a batch"
            )
        lines += time_lines(r) if r["fits"] else []
        a = r["assumed"]
        lines.append(
            f"LOWER bounds of a step, if every response had {a['response']:,} tokens after"
            f" {a['prompt']:,} of prompt and every group were accepted (published peaks of the"
            " chip, matrix products and HBM only; the real times are longer):"
        )
        lines += [f"  {what:14s} > {s:10.2f} s" for what, s in r["lower_bounds_s"].items()]
    if r["suggestions"]:
        lines.append(f"what fits with {r['assumed']['room']:.0%} to spare, best first:")
        for x in r["suggestions"]:
            lines.append(f"  {x['flags']}   ({x['peak'] / GB:.1f} GB; a step {x['step']:,.1f} s)")
    else:
        other = r["smallest_that_fits"]
        lines.append(
            "no mesh, micro-batch or number of slots fits this pod; "
            + (
                f"the smallest of its family that does is {other}"
                if other
                else "no larger one does"
            )
        )
    return [*lines, "What this cannot know:", *(f"  - {x}" for x in r["cannot_know"])]


def define_flags() -> None:
    """Not at import: tests and others use the functions alone."""
    flags.DEFINE_bool("check", False, "Only check that the config is right for the slice.")
    flags.DEFINE_bool("check_files", False, "And that its files, relative to here, are there.")
    flags.DEFINE_bool("check_memory", True, "And that by arithmetic it fits; else only warn.")
    flags.DEFINE_string("topology", None, "Slice: v5p-256, v6e-256, v5litepod-256, v5p:4x4x8.")
    most = schema.SCHEMA["rollout.max_response_tokens"].high
    for name, share in (("mean_response", "a quarter"), ("mean_prompt", "an eighth")):
        said = f"Assumed mean tokens; default: {share} of the most."
        flags.DEFINE_integer(name, 0, said, lower_bound=0, upper_bound=most)
    default = Traffic._field_defaults
    flags.DEFINE_float("sigma", default["sigma"], "Assumed std of log response length.", 0, 3)
    flags.DEFINE_float("accept", default["accept"], "Assumed share of mixed groups.", 0, 1)
    flags.DEFINE_float("price", 0.0, "$ a chip-hour; default: Cloud's list price on demand.", 0)
    flags.DEFINE_integer("eval_problems", 30, "Assumed problems of an evaluation set.", 0)
    said = "Wall time from one preemption to the next, for the expected goodput; 0 = none."
    flags.DEFINE_float("preempt_hours", 0.0, said, 0)
    said = "Simulate rollout.staleness = 0, 1 and 2, on one mesh and on two; minutes."
    flags.DEFINE_bool("staleness", False, said)
    flags.DEFINE_float("room", 0.1, "Share of the memory that suggestions leave free.", 0, 0.9)
    flags.DEFINE_bool("compile", False, "Compile the run's programs for the slice as well.")
    flags.DEFINE_bool("kernels", False, "Count libtpu's bundles of the decode kernel as well.")
    flags.DEFINE_string("json", "", "File for all of it; '-' = print JSON instead.")
    flags.mark_flag_as_required("topology")


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # shapes only: leave an accelerator to others
    given, config = flags.FLAGS, cli.CONFIG.value
    pod = pods.parse(given.topology)
    if given.check:
        if doubt := check(config, pod, given.check_files, given.check_memory):
            print(f"warning: {doubt}", file=sys.stderr)
        return 0
    traffic = Traffic(
        given.mean_prompt or max(config.data.max_prompt_tokens // 8, 1),
        given.mean_response or max(config.rollout.max_response_tokens // 4, 1),
        given.sigma,
        given.accept,
    )
    money = Money(given.price, given.eval_problems, given.preempt_hours, given.staleness)
    result, text = plan(config, pod, traffic, given.room, money), given.json != "-"
    if text:
        print("\n".join(report(result)), flush=True)
    if given.kernels and plan_compile.available() and not result["mistakes"]:
        result["kernels"] = counted(config, pod)
        if text:
            print("\n".join(result["kernels"]["text"]), flush=True)
    if given.compile and plan_compile.available():
        result["compiled"] = plan_compile.check(
            None if result["mistakes"] else config,
            network(config),
            pod,
            [(x["flags"], chosen(config, x)) for x in result["suggestions"]],
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        if text:
            print("\n".join(plan_compile.report(result["compiled"])))
    elif given.compile or (given.kernels and not plan_compile.available()):
        print(plan_compile.NO_COMPILER, file=sys.stderr)
    if given.json:
        whole = json.dumps(result, indent=2, default=float) + "\n"
        pathlib.Path(given.json).write_text(whole) if text else print(whole, end="")
    return 0 if result.get("compiled", result)["fits"] else 1
