"""The sides of the comparisons on one device: our engine and update, the peers' models."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy.special import ndtri

from dapo_jax import config, parallel
from dapo_jax.dapo import objective, packing, update
from dapo_jax.model import learner, qwen2
from dapo_jax.plan import simulate
from dapo_jax.rollout.engine import Engine, Request
from dapo_jax.rollout.settings import Rollout

ADAMW = dict(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1)
SMALL = qwen2.Shape(
    vocab_size=1024, hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=32, rope_theta=1e4, rms_eps=1e-6, tie_embeddings=True,
    scan_layers=False,
)  # fmt: skip


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), parallel.AXES)


def engine(
    shape: qwen2.Shape, slots: int, prompt: int, response: int, chunk: int, dtype: str, **more
) -> Engine:
    """A sampler on one device. Lengths in TOKENS. Responses end by length alone, without `stop_ids`
    in `more`."""
    stop_ids, rules = more.pop("stop_ids", []), config.base().sharding.decode.to_dict()
    settings = Rollout(**dict(slots=slots, chunk=chunk, prefill_prompts=8) | more)
    return Engine(
        shape, one_device(), rules, settings, prompt_tokens=prompt, response_tokens=response,
        stop_ids=stop_ids, dtype=dtype,
    )  # fmt: skip


def log_normal(n: int, cap: int, mean: float, sigma: float = 0.9, seed: int = 0) -> np.ndarray:
    """int [n]: lengths in TOKENS with a long tail, cut at `cap`, of this mean after the cut: the n
    quantiles in random order, so that every n has the same distribution."""
    mu, z = simulate.log_mean(mean, sigma, cap, n), ndtri((np.arange(n) + 0.5) / n)
    return np.random.default_rng(seed).permutation(simulate.cut(mu, sigma, z, cap))


def requests(prompts_NxT: np.ndarray, lengths: Iterable[int] = ()) -> list[Request]:
    """One for each row of token ids. lengths: of the responses; not given, the engine's limit."""
    rows = itertools.zip_longest(prompts_NxT.tolist(), lengths, fillvalue=0)
    return [Request(prompt, i, 0, int(length)) for i, (prompt, length) in enumerate(rows)]


def items(
    prompts: Iterable[np.ndarray],
    responses: Sequence[np.ndarray],
    advantages: Iterable[float],
    logp: float,
) -> list[packing.Item]:
    """Sequences of an update under the token mean, each response token of this log-prob before."""
    tokens = sum(map(len, responses))
    return [
        packing.Item(prompt, response, np.full(len(response), logp, "f"), float(a), 1 / tokens)
        for prompt, response, a in zip(prompts, responses, advantages, strict=True)
    ]


def trainer(shape: qwen2.Shape, dtype: str) -> update.Trainer:
    rules, tx = config.base().sharding.train.to_dict(), learner.optimizer(**ADAMW, clip_norm=1.0)
    return update.Trainer(shape, learner.Setup(one_device(), rules, tx, dtype))


def update_step(
    made: update.Trainer,
    params: qwen2.Params,
    items: Sequence[packing.Item],
    *,
    row_tokens: int,
    micro_rows: int,
    lr: float,
) -> tuple[Callable[[], dict[str, Any]], int]:
    """(a function that makes a step on the items and waits for its metrics, its micro-batches). It
    owns `params`; the items' recorded log-probs are the old ones of the ratio."""
    rows, used, _ = packing.pack(
        items, packing.Layout(row_tokens=row_tokens, micro_rows=micro_rows, max_items=len(items))
    )
    rows = parallel.to_device(rows, made.row_sharding)
    params = jax.device_put(params, made.param_shardings)  # or the second update compiles again
    state = [params, made.init_opt_state(params)]
    del params
    old = rows.sampled_logp_AxRxT
    batch = update.Batch(rows, old, old, np.int32(used))
    knobs = update.Knobs(np.float32(lr), np.float32(1), objective.coefficients(config.base().loss))

    def step() -> dict[str, Any]:
        *state[:], metrics = made.update(*state, batch, knobs)
        return jax.device_get(metrics)

    return step, used


def transformers_model(shape: qwen2.Shape, **more):
    """transformers' Qwen2 of this shape with random weights and no stop tokens."""
    import transformers

    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=shape.rms_eps, tie_word_embeddings=shape.tie_embeddings,
            eos_token_id=None, bos_token_id=None, pad_token_id=None, **more,
        )
    )  # fmt: skip


def transformers_generate(network, ids, tokens: int, top_p: float = 1.0):
    """`tokens` more at temperature 1 for each row of `ids`, a torch tensor [rows, prompt]."""
    import torch

    with torch.inference_mode():
        return network.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            top_p=top_p, min_new_tokens=tokens, max_new_tokens=tokens,
        )  # fmt: skip


def tunix_model(shape: qwen2.Shape):
    """google-tunix's Qwen2 of this shape with random float32 weights."""
    from flax import nnx
    from tunix.models.qwen2 import model

    network = model.Qwen2(
        model.ModelConfig(
            num_layers=shape.num_layers, vocab_size=shape.vocab_size, embed_dim=shape.hidden_size,
            hidden_dim=shape.intermediate_size, num_heads=shape.num_heads, head_dim=shape.head_dim,
            num_kv_heads=shape.num_kv_heads, rope_theta=int(shape.rope_theta),
            norm_eps=shape.rms_eps, use_tied_embedding=True,
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    assert {x.dtype for x in jax.tree.leaves(nnx.state(network, nnx.Param))} == {jnp.dtype("f4")}
    return network
