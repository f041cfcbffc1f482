"""Bytes per device while sampling and while updating, by arithmetic; can a config run on a slice?

Bytes of parameters, optimizer and cache are exact. Those of activations estimate what XLA keeps,
within 20% of what XLA:TPU assigned (tests/test_plan.py), within 10% of XLA:GPU in bfloat16
(tests/test_gpu_compile.py).

`sizes` is everywhere the mesh: {'data': 1, 'fsdp': 16, 'tensor': 8}.
"""

import math

import jax

from dapo_jax.config import schema, validation
from dapo_jax.model import adapters, paged, paged_triton, qwen2
from dapo_jax.plan.shapes import network, value_model
from dapo_jax.pods.slices import Pod

GB = 1e9
CELL_ARRAYS = 10  # of 4 bytes per packed cell: eight of the rows, old and reference log-probs
VALUE_ARRAYS = 3  # values, advantages, returns
HEAD = "vocab", "embed"  # the axes of the output weights
# Arrays of scores; F, H d and D of a cell in a block's backward pass; F of a cell in a prefill.
KEPT = {"tpu": (2, 6, 8, 3, 3), "gpu": (3, 4, 4, 2, 2)}
# With remat 'none': D, H d and F of a cell and layer.
NONE = {"tpu": (8, 6, 4), "gpu": (4, 3.5, 3), "gpu, float32": (6, 5, 3)}


def parts(axis: str, rules, sizes) -> int:
    """Into how many parts the mesh splits a logical axis."""
    return math.prod(sizes[a] for a in rules[axis].split(",") if a)


def weight_count(shape: qwen2.Shape, rules, sizes, part=adapters.base) -> int:
    """Parameters on one device, exactly. part: adapters.base or adapters.trained."""

    def here(leaf, axes: tuple[str | None, ...]) -> int:
        split = (parts(a, rules, sizes) if a else 1 for a in axes)
        return math.prod(-(-n // k) for n, k in zip(leaf.shape, split, strict=True))

    tree, axes = part(qwen2.abstract(shape)), part(qwen2.metadata(shape, "axes"))
    return sum(jax.tree.leaves(jax.tree.map(here, tree, axes)))


def read_count(shape: qwen2.Shape) -> int:
    """Parameters that the matrix products of a token read: not an embedding that is no head."""
    multiplied = shape.tie_embeddings and not shape.value_head
    embedding = 0 if multiplied else shape.vocab_size * shape.hidden_size
    return qwen2.param_count(shape) - embedding


def item_bytes(config) -> int:
    """Bytes of a weight or an activation in the model's dtype."""
    return jax.numpy.dtype(config.model.dtype).itemsize


def outputs(shape: qwen2.Shape) -> int:
    return 1 if shape.value_head else shape.vocab_size


def wide_count(config, shape: qwen2.Shape) -> int:
    """Parameters of a float32 head on a model of another dtype; 0 where there is none."""
    return shape.float32_head * (item_bytes(config) < 4) * outputs(shape) * shape.hidden_size


def cache(config, shape: qwen2.Shape, sizes, platform="tpu") -> paged.Geometry:
    """The sampler's pool of pages. platform: 'tpu' or 'gpu', here and below."""
    rollout, shards = config.rollout, parts("batch", config.sharding.decode, sizes)
    response = max(rollout.max_response_tokens, config.eval.max_response_tokens)
    return paged.geometry(
        shape, platform, slots=rollout.slots, shards=shards,
        row_tokens=config.data.max_prompt_tokens + response, page_tokens=rollout.page_tokens,
        fraction=rollout.cache_fraction, quantized=rollout.cache_dtype == "int8",
    )  # fmt: skip


def token_bytes(config, shape: qwen2.Shape, sizes, platform="tpu") -> float:
    """Bytes of one token's keys and values in all layers, on a device that holds the token."""
    g = cache(config, shape, sizes, platform)
    split = parts("kv_heads", config.sharding.decode, sizes)
    return paged.pool_bytes(g, config.model.dtype) / g.tokens / split


def waves(config, shape: qwen2.Shape, sizes, length: int, platform="tpu") -> dict[str, int]:
    """How many sequences of `length` tokens are in flight at once, and how many such waves make a
    batch (0 where none fits)."""
    wanted = config.rollout.groups * config.rollout.group_size
    g = cache(config, shape, sizes, platform)
    held = min(config.rollout.slots // g.shards, g.pages // -(-length // g.page_tokens)) * g.shards
    return {"sequences": held, "waves": -(-wanted // held) if held else 0}


def memory(config, shape: qwen2.Shape, sizes, platform="tpu") -> dict[str, dict[str, float]]:
    """{phase: {item: bytes per device}}. 'always' counts in 'sampling' and in 'updating': the
    trainer keeps its state while the sampler works, which gives its cache back before updates."""
    train, decode, item = config.sharding.train, config.sharding.decode, item_bytes(config)
    updating, value = update_memory(config, shape, sizes, platform), value_model(config, shape)
    n, of_value = weight_count(shape, train, sizes, adapters.trained), 0
    if value:  # its update ends before the policy's begins
        made = {"values, advantages, returns": updating["packed rows"] * VALUE_ARRAYS / CELL_ARRAYS}
        of_values = update_memory(config, value, sizes, platform) | made
        updating = max(updating, of_values, key=lambda items: sum(items.values()))
        of_value = weight_count(value, train, sizes)
    trained = "adapters" if shape.lora else "master weights"
    base = item * weight_count(shape, train, sizes) if shape.lora else 0
    rollout, shards = config.rollout, parts("batch", decode, sizes)
    given = config, shape, sizes, platform
    tokens, per_token = cache(*given).tokens, token_bytes(*given)
    always = {
        f"base ({config.model.dtype})": base,
        f"{trained} (float32)": 4 * n,
        "Adam's moments (float32)": 8 * n,
        "reference weights (float32)": 4 * n * bool(config.loss.kl_coef),
        "value model's weights (float32)": 4 * of_value,
        "value model's moments (float32)": 8 * of_value,
    }
    most = max(rollout.slots, rollout.draft_places)  # rows of a pass, guessed tokens among them
    prompts, drawn = (-(-n // shards) for n in (rollout.prefill_prompts, most))
    window = config.data.max_prompt_tokens
    cells = prompts * (once := min(rollout.prefill_tokens, window))
    heads = (platform == "gpu") * shape.num_heads / parts("heads", decode, sizes)
    scores = 4 * prompts * heads * min(shape.attention_chunk, once) * window
    F, D, mlp = shape.intermediate_size, shape.hidden_size, parts("mlp", train, sizes)
    wide = wide_count(config, shape) / math.prod(parts(a, decode, sizes) for a in HEAD)
    logits = 3 * 4 * drawn * shape.vocab_size / parts("vocab", train, sizes)
    sampling = {
        "cache": tokens / shards * per_token,
        "decode weights": item * weight_count(shape, decode, sizes) + (4 - item) * wide,
        "logits": logits + (_head_bytes(config, shape, sizes) if D % 128 else 0),
        "prefill": scores + cells * (per_token + item * (KEPT[platform][-1] * F / mlp + 6 * D)),
    }
    always = {what: n for what, n in always.items() if n}
    return {"always": always, "sampling": sampling, "updating": updating}


def peaks(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """Bytes per device in each phase of `memory`."""
    always = sum(table["always"].values())
    return {p: always + sum(table[p].values()) for p in ("sampling", "updating")}


def _head_bytes(config, shape: qwen2.Shape, sizes) -> float:
    """A device's part of the output weights as training multiplies with them, gathered over
    `embed`. TPUs lay out the last axis in 128 lanes."""
    item = 4 if wide_count(config, shape) else item_bytes(config)
    lanes = -(-shape.hidden_size // 128) * 128
    return item * outputs(shape) * lanes / parts("vocab", config.sharding.train, sizes)


def update_memory(config, shape: qwen2.Shape, sizes, platform="tpu") -> dict[str, float]:
    """{item: bytes per device} of an update of the policy or of a value model."""
    train, item, L = config.sharding.train, item_bytes(config), shape.num_layers
    n = weight_count(shape, train, sizes, adapters.trained)
    D, F, H, d = shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.head_dim
    shards, heads, mlp, vocab = (parts(x, train, sizes) for x in ("batch", "heads", "mlp", "vocab"))
    T, rows = validation.row_tokens(config), -(-config.optim.micro_batch_rows // shards)
    tokens = rows * T  # of a device in a micro-batch
    kept = tokens / parts("sequence", train, sizes)
    kv = 2 * shape.num_kv_heads * d
    gpu = platform == "gpu"
    # The outputs of five products; a GPU keeps what comes into a layer as well.
    dots = (2 + gpu) * D * kept + tokens * ((H * d + kv) / heads + 2 * F / mlp)
    all_D, all_H, all_F = NONE[platform + ", float32" * (gpu and item == 4)]
    per_layer = {
        "full": D * kept,
        "attention": D * kept + tokens * H * d / heads,
        "dots": dots,
        "dots_attention": dots + tokens * H * d / heads,
        "none": all_D * D * kept + tokens * (all_H * H * d / heads + all_F * F / mlp),
    }[shape.remat]
    chunk = min(shape.attention_chunk, T)
    of_gpus = ("auto", "cudnn", "triton") if item < 4 else ()
    fused = config.model.attention in (("auto", "splash") if platform == "tpu" else of_gpus)
    arrays, of_mlp, of_heads, of_stream, _ = KEPT[platform]
    of_mlp += 3 * (gpu and shape.lora is not None)  # of adapters, beside those of the weights
    scores = 0 if fused else arrays * 4 * rows * H / heads * chunk * T
    by_triton = paged_triton.fits(16, d) and not shape.shared_prompts
    without_bias = ("triton", "auto") if by_triton else ("triton",)
    if fused and gpu and config.model.attention not in without_bias:  # of cuDNN, for segments
        scores = item * rows * min(4096, T) * T
    elif shape.remat == "none" and chunk == T:  # the scores of all layers, not of one chunk
        scores *= L
    tables = shape.vocab_size * (read_count(shape) < qwen2.param_count(shape)) + outputs(shape)
    layer = (qwen2.param_count(shape) - D * tables) / L
    block = item * tokens * (of_mlp * F / mlp + of_heads * H * d / heads + of_stream * D)
    # The head's float32 sum of gradients is a copy, but for a float32 head that is not gathered.
    # One that stays as it is XLA:TPU reads where it lies.
    wide, head_weights = wide_count(config, shape), _head_bytes(config, shape, sizes)
    there = parts("embed", train, sizes) == 1  # nothing is gathered
    copied = 0 if there and (wide or (shape.lora and not gpu)) else 2 * head_weights
    logit = 4  # bytes
    if gpu and item < 4:  # XLA:GPU has them, and the gradient of a head that is trained, in both
        copied, logit = copied / 2 * (1 if shape.lora else 1 + 4 / item), 4 + item
    head = copied + logit * rows * min(shape.head_chunk, T) * outputs(shape) / vocab
    minibatch = config.rollout.groups // config.optim.minibatches * config.rollout.group_size
    whole = gpu and there
    gathered = 1 if whole else 2 if shape.lora else 3
    # Weights that stay as they are are cut out of the stack of layers, all of them at once; with
    # 'none' some are cut out again where memory is short.
    cut = L * (0.8 if shape.remat == "none" else 1) if whole and shape.lora else 0
    # Trained weights whose compute copy is float32.
    raised = 0 if shape.lora else wide / math.prod(parts(a, train, sizes) for a in HEAD)
    return {
        "compute copy of the weights": item * (n - raised) if item < 4 else 0,
        "gradient sums (float32)": 4 * n,
        "gradients of a pass": item * n + (4 - item) * raised,
        "one layer gathered, and its gradients": (gathered + cut) * item * layer / mlp,
        "saved activations": item * L * per_layer,
        "one block backward, or the head": max(scores + block, head),
        # Of all mini-batches.
        "packed rows": config.optim.minibatches * -(-minibatch // shards) * T * 4 * CELL_ARRAYS,
    }


def mistakes(config, shape: qwen2.Shape | None, pod: Pod) -> str:
    """Why the config cannot run on that pod, a reason per line; '' if it can. Without a shape only
    what does not depend on it is checked."""
    try:
        validation.validate(config, pod.devices)
    except schema.ConfigError as error:
        return str(error)
    sizes = validation.resolve_mesh(config, pod.devices)
    bad = validation.check_shape(shape, sizes, config.sharding) if shape else []
    if shape and config.critic.init_from and (value := value_model(config, shape)):
        wrong = validation.check_shape(value, sizes, config.sharding)
        bad += [f"the value model: {line}" for line in wrong]
    if shape:
        bad += validation.check_cache(config, cache(config, shape, sizes, pod.platform), sizes)
    if sizes["data"] % pod.slices:
        slices = f"{pod.slices}, the slices (of GPUs: hosts), which are joined along `data`"
        bad.append(f"config.mesh.data = {sizes['data']} is no multiple of {slices}")
    return "\n".join(bad)


def check(config, pod: Pod, with_files: bool = False, with_memory: bool = True) -> str:
    """A doubt about running the config on that pod, or ''. ValueError: it cannot run. launch/ asks
    this before it makes a slice. with_files: files with relative names have to exist here.
    with_memory: a config that by arithmetic does not fit cannot run; otherwise that is a doubt."""
    try:
        shape = network(config)
        value_model(config, shape)
    except ValueError as error:  # a directory of the hosts, or there is no network here
        shape, doubt = None, f"{error}: not checked whether the model fits"
    wrong = mistakes(config, shape, pod).splitlines()
    missing = [x for x in validation.missing(config) if ": /" not in x] if with_files else []
    hint = "here, where the slice gets its copy from; --prepare=COMMAND fetches it there"
    if wrong := wrong + [f"{line} {hint}" for line in missing]:
        raise ValueError("\n".join(wrong))
    if shape is None:
        return doubt
    sizes = validation.resolve_mesh(config, pod.devices)
    peak = max(peaks(memory(config, shape, sizes, pod.platform)).values())
    needs = f"by arithmetic this needs {peak / GB:.1f} GB of a chip's {pod.chip.hbm / GB:.1f}"
    doubt = f"{needs}: ask python -m dapo_jax.plan --topology={pod.cloud} what fits"
    if peak > pod.chip.hbm and with_memory:
        raise ValueError(f"{doubt} (--skip-plan goes on all the same)")
    return doubt if peak > pod.chip.hbm else ""
