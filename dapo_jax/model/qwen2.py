"""Qwen2.5 and Qwen3 (dense) in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU. Qwen2.5 has
biases on q, k and v; Qwen3 has none, and a norm over each head of q and of k.

Every weight is declared once, by `declare(...)`: shape, logical axes, initializer and Hugging Face
name. Between functions the parameters travel as a plain nested dict of arrays (`params`), blocks
stacked along a leading `layers` axis; `bind(shape, params)` makes a callable module of them inside
a jitted function. Trainer and sampler run the same `Block`, whose attention reads other keys.

Dims: B rows, T tokens, D hidden, F intermediate, H query heads, K key/value heads, d head_dim,
L layers, V vocabulary, S slots, C cached tokens.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dapo_jax import parallel
from dapo_jax.model import adapters, attention_kernels as splash, ops, remat, rope
from dapo_jax.parallel import constrain

Params = adapters.Params


class Shape(NamedTuple):
    """What the network is; static under jit. Fields as in `config.model`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tie_embeddings: bool
    qkv_bias: bool = True
    qk_norm: bool = False
    yarn: rope.Yarn | None = None  # from config.json alone
    init_std: float = 0.02
    scan_layers: bool = True
    remat: str = "full"
    attention: str = "chunked"  # kernel of training (attention_kernels.choose)
    attention_chunk: int = 512
    head_chunk: int = 1024
    float32_head: bool = False  # the compute copy of the output weights stays float32
    shared_prompts: bool = False  # packed rows may hold such (`attention.SHARED`)
    lora: adapters.Lora | None = None
    value_head: bool = False  # one number a token in place of logits: a value or reward model

    @property
    def merged(self) -> "Shape":
        """The network without adapters: what is sampled, exported and published."""
        return self._replace(lora=None)


def shape_from_config(c) -> Shape:
    """`config.model` -> Shape (for models made from the config's own fields)."""
    of_model = {name: getattr(c.model, name) for name in Shape._fields if hasattr(c.model, name)}
    return Shape(**of_model | compute_choices(c))


def compute_choices(c) -> dict[str, Any]:
    """The fields of `config.model` that change how the network is computed, not what it is."""
    names = ("scan_layers", "remat", "attention", "attention_chunk", "head_chunk", "float32_head")
    others = dict(shared_prompts=c.optim.share_prompts, lora=lora_choice(c))
    return {name: getattr(c.model, name) for name in names} | others


def lora_choice(c) -> adapters.Lora | None:
    """`config.model.lora`; rank 0 = no adapters."""
    rank, alpha, targets = c.model.lora.rank, c.model.lora.alpha, c.model.lora.targets
    return adapters.Lora(rank, alpha, tuple(targets.split(",")), c.model.dtype) if rank else None


# --- Weights --------------------------------------------------------------------------------------


_ones = lambda key, shape: jnp.ones(shape, jnp.float32)
_zeros = lambda key, shape: jnp.zeros(shape, jnp.float32)
_normal = lambda std: lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def declare(rngs, shape, axes, init, hf: str, in_axes: int = 0, layers: int = 0) -> nnx.Param:
    """One weight. hf: its Hugging Face name ('{}' = layer number); in_axes: how many dimensions, the
    first, are a linear layer's inputs (0 = not linear); layers > 0: stacked along a first axis."""
    if layers:
        shape, axes = (layers, *shape), ("layers", *axes)
    # Numbers are drawn by their place in the flattened weight. Drawn flat they are the same ones,
    # and compile five times faster on CPU; devices that share a weight draw each its own part.
    whole = all(axis is None or parallel.axis_size(axis) == 1 for axis in axes)
    w = init(rngs.params(), (math.prod(shape),) if whole else shape).reshape(shape)
    return nnx.Param(w, axes=axes, hf=hf, in_axes=in_axes)


LINEAR = ("q", "k", "v", "o", "gate", "up", "down")  # weights of a block that take adapters


class Adapters(nnx.Module):
    """A and B of each adapted weight of a block, declared by the weight's own declaration: A is split
    as its inputs are, B as its outputs. B begins at zero, so that the model begins as its base."""

    def __init__(self, c: Shape, rngs: nnx.Rngs, weights: dict[str, nnx.Param]):
        r, weight = c.lora.rank, functools.partial(declare, rngs, layers=c.num_layers)
        for name, w in weights.items():
            inputs, (shape, axes) = w.in_axes, (w.shape[1:], w.axes[1:])
            std = math.prod(shape[:inputs]) ** -0.5
            into, out = (*axes[:inputs], None), (None, *axes[inputs:])
            # Without a Hugging Face name: what is exported is merged.
            setattr(self, f"{name}_a", weight((*shape[:inputs], r), into, _normal(std), "", inputs))
            setattr(self, f"{name}_b", weight((r, *shape[inputs:]), out, _zeros, "", 1))


class Block(nnx.Module):
    """One decoder block; its weights carry a leading layer axis until a scan or slice takes it."""

    def __init__(self, c: Shape, rngs: nnx.Rngs):
        self.c, D, F = c, c.hidden_size, c.intermediate_size
        H, K, d = c.num_heads, c.num_kv_heads, c.head_dim
        weight = functools.partial(declare, rngs, layers=c.num_layers)
        absent = lambda *declaration: None  # for a weight that the shape does not have
        bias, head_norm = (weight if has else absent for has in (c.qkv_bias, c.qk_norm))
        over_D, over_F, over_Hd = _normal(D**-0.5), _normal(F**-0.5), _normal((H * d) ** -0.5)
        # fmt: off
        attn, mlp = "model.layers.{}.self_attn", "model.layers.{}.mlp"
        self.attn_norm = weight((D,), ("embed",), _ones, "model.layers.{}.input_layernorm.weight")
        self.q = weight((D, H, d), ("embed", "heads", "head_dim"), over_D, attn + ".q_proj.weight", 1)
        self.k = weight((D, K, d), ("embed", "kv_heads", "head_dim"), over_D, attn + ".k_proj.weight", 1)
        self.v = weight((D, K, d), ("embed", "kv_heads", "head_dim"), over_D, attn + ".v_proj.weight", 1)
        self.q_bias = bias((H, d), ("heads", "head_dim"), _zeros, attn + ".q_proj.bias")
        self.k_bias = bias((K, d), ("kv_heads", "head_dim"), _zeros, attn + ".k_proj.bias")
        self.v_bias = bias((K, d), ("kv_heads", "head_dim"), _zeros, attn + ".v_proj.bias")
        self.q_norm = head_norm((d,), ("head_dim",), _ones, attn + ".q_norm.weight")
        self.k_norm = head_norm((d,), ("head_dim",), _ones, attn + ".k_norm.weight")
        self.o = weight((H, d, D), ("heads", "head_dim", "embed"), over_Hd, attn + ".o_proj.weight", 2)
        self.mlp_norm = weight((D,), ("embed",), _ones, "model.layers.{}.post_attention_layernorm.weight")
        self.gate = weight((D, F), ("embed", "mlp"), over_D, mlp + ".gate_proj.weight", 1)
        self.up = weight((D, F), ("embed", "mlp"), over_D, mlp + ".up_proj.weight", 1)
        self.down = weight((F, D), ("mlp", "embed"), over_F, mlp + ".down_proj.weight", 1)
        # fmt: on
        if c.lora:
            self.lora = Adapters(c, rngs, {name: getattr(self, name) for name in c.lora.targets})

    def __call__(self, x_BxTxD, attend: Callable, beside=None):
        """`attend(q, k, v) -> (y_BxHxTxd, extra)` gives q and k their positions and decides where
        keys come from; `extra` (what became of a cache, say) is handed back beside the output.
        beside: products (joined.py) in place of those of q, k and v, which `attend` may then get as
        one array, and of gate and up."""
        h = ops.rms_norm(x_BxTxD, self.attn_norm[...], self.c.rms_eps)
        joined = parallel.axis_size("sequence") > 1
        pairs = (self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias)
        if beside:
            heads = beside.heads(h, self.c)
        else:
            heads = self._joined_heads(h) if joined else [ops.to_heads(h, *pair) for pair in pairs]
        if self.c.lora:
            heads = [self._add(n, y, h, out=ops.to_heads) for n, y in zip("qkv", heads)]  # noqa: B905
        if self.c.qk_norm:
            q, k, v = heads
            q = ops.rms_norm(q, self.q_norm[...], self.c.rms_eps)
            heads = q, ops.rms_norm(k, self.k_norm[...], self.c.rms_eps), v
        split = zip(heads, ("heads", "kv_heads"))  # noqa: B905
        split = [constrain(x, "batch", axis, "token", "head_dim") for x, axis in split]
        y, extra = attend(*split, *heads[2:])
        x_BxTxD = x_BxTxD + self._add("o", ops.from_heads(y, self.o[...]), y, into=ops.from_heads)
        x_BxTxD = constrain(x_BxTxD, "batch", "sequence", "act_embed")

        h = ops.rms_norm(x_BxTxD, self.mlp_norm[...], self.c.rms_eps)
        if joined:
            both = jnp.einsum("BTD,DCF->BTCF", h, jnp.stack([self.gate[...], self.up[...]], 1))
            both = constrain(both, "batch", "token", None, "mlp")
            gate, up = both[:, :, 0], both[:, :, 1]
        elif beside:
            gate, up = beside.gate_up(h)
        else:
            gate, up = ops.linear(h, self.gate[...]), ops.linear(h, self.up[...])
        gate, up = self._add("gate", gate, h), self._add("up", up, h)
        h_BxTxF = constrain(jax.nn.silu(gate) * up, "batch", "token", "mlp")
        x_BxTxD = x_BxTxD + self._add("down", ops.linear(h_BxTxF, self.down[...]), h_BxTxF)
        return constrain(x_BxTxD, "batch", "sequence", "act_embed"), extra

    def _add(self, name: str, y, x, into=jnp.matmul, out=jnp.matmul):
        """`y`, the product of `x` with a weight, plus that with its adapters. The gradient of W + A B
        would have the size of W; here only x A [B, T, rank] travels beyond what `y` does."""
        if not self.c.lora or name not in self.c.lora.targets:
            return y
        a, b = getattr(self.lora, f"{name}_a"), getattr(self.lora, f"{name}_b")
        z_BxTxr = constrain(into(x, a[...]), "batch", "sequence", None)
        return y + out(self.c.lora.scale * z_BxTxr, b[...])

    def _joined_heads(self, h_BxTxD):
        """Queries, keys and values by one product. Where devices hold tokens apart XLA gathers them
        while a product runs if it is the only one that reads them, and before it otherwise."""
        K, d = self.c.num_kv_heads, self.c.head_dim

        def by_group(*ws):
            return jnp.concatenate([w[...].reshape(*w.shape[:-2], K, -1) for w in ws], -1)

        y = jnp.einsum("BTD,DKg->BTKg", h_BxTxD, by_group(self.q, self.k, self.v))
        y = constrain(y, "batch", "token", "kv_heads", None)
        y = y + by_group(self.q_bias, self.k_bias, self.v_bias) if self.c.qkv_bias else y
        y = y.swapaxes(1, 2)
        q, k, v = jnp.split(y, [y.shape[-1] - 2 * d, y.shape[-1] - d], -1)
        B, _, T, _ = y.shape
        return q.reshape(B, K, T, -1, d).swapaxes(2, 3).reshape(B, -1, T, d), k, v


class Qwen2(nnx.Module):
    """The network. `model(tokens_BxT) -> logits_BxTxV` is for notebooks and tests; the trainer uses
    `hidden` with `head`, the sampler `cached`, none of which makes [B, T, V]."""

    def __init__(self, c: Shape, rngs: nnx.Rngs):
        self.c = c
        V, D = c.vocab_size, c.hidden_size
        self.embed = declare(
            rngs, (V, D), ("vocab", "embed"), _normal(c.init_std), "model.embed_tokens.weight"
        )
        self.blocks = Block(c, rngs)
        self.final_norm = declare(rngs, (D,), ("embed",), _ones, "model.norm.weight")
        if c.value_head:
            self.score = declare(rngs, (D, 1), ("embed", None), _zeros, "score.weight", in_axes=1)
        elif not c.tie_embeddings:
            self.lm_head = declare(
                rngs, (D, V), ("embed", "vocab"), _normal(D**-0.5), "lm_head.weight", in_axes=1
            )

    def hidden(self, tokens_BxT, positions_BxT, segments_BxT) -> jax.Array:
        """Packed rows -> final hidden states [B, T, D]. Segment 0 is padding."""
        c, x_BxTxD = self.c, self._embed(tokens_BxT)
        kernel = splash.kernel(c.attention, x_BxTxD.dtype, c.head_dim, c.shared_prompts)
        angles = self._angles(positions_BxT)

        def attend(q, k, v):
            q, k = rope.rotate(q, angles), rope.rotate(k, angles)
            return kernel(q, k, v, segments_BxT, c.attention_chunk), None

        return self._final(self._run(x_BxTxD, attend))

    def head(self) -> jax.Array:
        """Output weights [D, V]: logits = hidden @ head. Of a value head [D, 1]."""
        if self.c.value_head:
            return constrain(self.score[...], None, None)
        return self.embed[...].T if self.c.tie_embeddings else self.lm_head[...]

    def __call__(self, tokens_BxT) -> jax.Array:
        """float32 logits [B, T, V] of whole sequences, one a row."""
        positions = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
        return ops.logits(
            self.hidden(tokens_BxT, positions, jnp.ones_like(tokens_BxT)), self.head()
        )

    def cached(self, tokens_BxT, positions_BxT, pool, attend: Callable, layers):
        """The sampler's pass, over the layers of `bind_layers`: (final hidden states [B, T, D], pool).
        Layer i calls `attend(angles)(i, pool, q, k, v) -> (pool, y)`, which rotates, stores the new
        keys and reads the older ones. The pool is carried whole: a scan would cut it by layers."""
        graphdef = nnx.split(self.blocks)[0]

        def step(carry, layer):
            x_BxTxD, pool = carry
            i, weights, *beside = layer
            pool_attend = lambda *heads: attend(i, pool, *heads)[::-1]
            return nnx.merge(graphdef, weights)(x_BxTxD, pool_attend, *beside), None

        attend = attend(self._angles(positions_BxT))
        carry = self._embed(tokens_BxT), pool
        if self.c.scan_layers:
            carry, _ = jax.lax.scan(step, carry, (jnp.arange(self.c.num_layers), layers))
        else:
            layers = ((i, *layer) for i, layer in enumerate(layers))
            carry = functools.reduce(lambda x, layer: step(x, layer)[0], layers, carry)
        return self._final(carry[0]), carry[1]

    def _embed(self, tokens_BxT):
        x_BxTxD = ops.lookup(self.embed[...], tokens_BxT).astype(self.final_norm[...].dtype)
        return constrain(x_BxTxD, "batch", "sequence", "act_embed")

    def _angles(self, positions_BxT):
        return rope.angles(positions_BxT, self.c.head_dim, self.c.rope_theta, self.c.yarn)

    def _final(self, x_BxTxD):
        return ops.rms_norm(x_BxTxD, self.final_norm[...], self.c.rms_eps)

    def _run(self, x_BxTxD, attend):
        """The training pass over the blocks: scanned or unrolled, under the remat policy."""
        graphdef, stacked = nnx.split(self.blocks)

        def step(x, layer):
            return nnx.merge(graphdef, layer)(x, attend)

        # A GPU would copy what is kept of a layer into the stack of all, and out again. Where it has
        # only a part of the weights, XLA would gather those of all unrolled layers ahead, and keep
        # all gradients before it sums them up: 32B and rows of 22,528 took 404 GB a GPU so, 109 in a loop.
        whole = parallel.axis_size("embed") == 1
        unroll = parallel.platform() == "gpu" and whole and self.c.num_layers
        if self.c.remat != "none":
            policy = remat.policy(self.c.remat, self.c.lora)
            step = jax.checkpoint(step, policy=policy, prevent_cse=unroll > 1)
        if self.c.scan_layers:
            return jax.lax.scan(step, x_BxTxD, stacked, unroll=unroll or 1)[0]
        for i in range(self.c.num_layers):
            x_BxTxD, _ = step(x_BxTxD, jax.tree.map(lambda w: w[i], stacked))  # noqa: B023
        return x_BxTxD


# --- Parameters as plain data ---------------------------------------------------------------------


@functools.lru_cache
def _abstract(c: Shape):
    return nnx.split(nnx.eval_shape(lambda: Qwen2(c, nnx.Rngs(0))))


def init(c: Shape, key: jax.Array) -> Params:
    """Random float32 parameters. Pure; jit with `out_shardings` in `mesh_scope` fills in place."""
    return nnx.to_pure_dict(nnx.state(Qwen2(c, nnx.Rngs(params=key))))


def abstract(c: Shape) -> Params:
    """All parameters as jax.ShapeDtypeStructs: float32, but for those that adapters leave alone."""
    params = nnx.to_pure_dict(_abstract(c)[1])
    return jax.eval_shape(functools.partial(_freeze, c), params) if c.lora else params


def _freeze(c: Shape, params: Params) -> Params:
    """What stays, in the dtype it is computed in: its compute copy is then no copy."""
    return adapters.with_trained(cast(params, c.lora.dtype, c), adapters.trained(params))


def adapted(c: Shape, params: Params, key: jax.Array) -> Params:
    """A model with new adapters of the key, which add nothing yet. Pure, as `init`."""
    blocks = params["blocks"] | {"lora": init(c, key)["blocks"]["lora"]}
    return _freeze(c, params | {"blocks": blocks})


def metadata(c: Shape, name: str) -> Params:
    """The tree of one declared property: 'axes', 'hf' or 'in_axes'."""
    is_param = lambda x: isinstance(x, nnx.Variable)
    state = jax.tree.map(lambda p: p.get_metadata()[name], _abstract(c)[1], is_leaf=is_param)
    return nnx.to_pure_dict(state)


def bind(c: Shape, params: Params) -> Qwen2:
    """A callable module over these arrays; use it inside jitted functions."""
    graphdef, state = _abstract(c)
    return nnx.merge(graphdef, _filled(state, params))


def _filled(state, params: Params):
    """A copy of an nnx state with these arrays."""
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return state


def unstacked(params: Params) -> Params:
    """The same with a list of layers in place of the stack of them."""
    blocks = params["blocks"]
    count = len(blocks["attn_norm"])
    return params | {"blocks": [jax.tree.map(lambda w: w[i], blocks) for i in range(count)]}  # noqa: B023


def _flat_heads(path, w):
    """Stacked weights, those that take heads [L, H d, D]. Of four axes XLA on TPU would copy a
    layer's out of the stack before each product; the others it reads as they are."""
    return w.reshape(w.shape[0], -1, w.shape[-1]) if path[0].key == "o" else w


def bind_layers(c: Shape, params: Params) -> tuple[Qwen2, Any]:
    """`bind` of the sampler's weights, and what `Qwen2.cached` runs over: all layers stacked where
    they are scanned, else (`unstacked`) each as it lies in memory."""
    if c.scan_layers:
        model = bind(c, params)
        return model, jax.tree.map_with_path(_flat_heads, nnx.split(model.blocks)[1])
    model = bind(c, params | {"blocks": params["blocks"][0]})
    first = nnx.split(model.blocks)[1]
    return model, [(_filled(first, layer),) for layer in params["blocks"]]


def cast(params: Params, dtype, c: Shape | None = None) -> Params:
    """Compute copy of the master weights (the identity for float32), as the shape wants it."""
    out = jax.tree.map(lambda w: w.astype(dtype), params)
    if c and c.float32_head:
        head = "score" if c.value_head else "embed" if c.tie_embeddings else "lm_head"
        out[head] = params[head]
    return out


def zeros(tree) -> Any:
    """float32 sums of what a tree holds, before the first."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def param_count(c: Shape) -> int:
    """Parameters of the network, without adapters."""
    return sum(w.size for w in jax.tree.leaves(abstract(c.merged)))


def adapter_count(c: Shape) -> int:
    return sum(w.size for w in jax.tree.leaves(adapters.trained(abstract(c)))) if c.lora else 0
