"""One gradient update on a CPU core: against google-tunix's GRPO step, and against matmul speed.

    pip install -r benchmarks/requirements-peers.txt ...        (see there; tunix needs Python 3.11)
    python benchmarks/update.py [--write] [--repeats=7] [--only=equal|tailed|rate]
        [--isa=AVX2]                                  (both sides without AVX-512)
        [--micro_rows=8]                              (packed rows of a pass, ours)

Everything runs in this one process on one core and alternates, so that a busy machine slows both
sides alike; the figures are medians of CPU-seconds, and their ratios. Both sides get the same
weights, tokens, advantages and old log-probs, take the DAPO loss (clip 0.2/0.28, token mean, no KL)
and AdamW after clipping at 1, and their losses are compared before anything is timed. Shape: 4
layers, width 128, MLP 512, 4 query and 2 key/value heads of 32, vocabulary 1,024, float32; 64
sequences of a 32-token prompt and at most 128 response tokens.

    equal   all responses are 128 tokens: what the computation itself costs
    tailed  lengths with a long tail, 32 on average: tunix pads, packing does not
    rate    hardware FLOPs a second (recomputation included) of an update at width 1,024, as a part
            of what one float32 matrix product reaches
"""

# ruff: noqa: E402  (jax is imported after the core is chosen)

import argparse

import timing

timing.one_core()

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from jax.sharding import Mesh

from dapo_jax import config, parallel
from dapo_jax.dapo import objective, packing, update
from dapo_jax.model import qwen2
from dapo_jax.pods import topology

HEADING = "## Updates on a CPU core"
PROMPT, CAP, SEQUENCES, LR = 32, 128, 64, 1e-4
SHAPE = qwen2.Shape(
    vocab_size=1024, hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=32, rope_theta=1e6, rms_eps=1e-6, tie_embeddings=True,
    scan_layers=False, remat="none", attention_chunk=512, head_chunk=1024,
)  # fmt: skip
ADAMW = dict(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1)


def data(tailed: bool) -> list[packing.Item]:
    """Items whose recorded log-probs are random: old log-probs of the ratio."""
    rng = np.random.default_rng(0)
    lengths = np.full(SEQUENCES, CAP)
    if tailed:
        lengths = np.ceil(np.minimum(rng.exponential(30.0, SEQUENCES), CAP)).astype(int)
        while lengths.sum() != SEQUENCES * CAP // 4:  # a quarter of the cap, exactly
            i = rng.integers(SEQUENCES)
            step = np.sign(SEQUENCES * CAP // 4 - lengths.sum())
            lengths[i] = np.clip(lengths[i] + step, 1, CAP)
    draw = lambda n: rng.integers(1, SHAPE.vocab_size, n)  # (0 is tunix's padding)
    advantages = rng.normal(size=SEQUENCES)
    return [
        packing.Item(
            draw(PROMPT), draw(n), np.full(n, -7.0, np.float32), float(a), 1 / lengths.sum()
        )
        for n, a in zip(lengths, advantages, strict=True)
    ]


# ------------------------------------------------------------------------------------------------
# Two ways of one step. Each returns a function () -> loss that makes a step and waits for it.
# ------------------------------------------------------------------------------------------------


def trainer_of(shape):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), parallel.AXES)
    tx = update.optimizer(**ADAMW, clip_norm=1.0)
    return update.Trainer(shape, mesh, config.base().sharding.train.to_dict(), tx, "float32")


def ours(params, items, shape=SHAPE, micro_rows=8, row_tokens=PROMPT + CAP):
    trainer = trainer_of(shape)
    rows, used, _ = packing.pack(
        items, row_tokens=row_tokens, micro_rows=micro_rows, max_items=len(items)
    )
    rows = parallel.to_device(rows, trainer.row_sharding)
    loss = objective.coefficients(config.base().loss)
    knobs = update.Knobs(np.float32(LR), np.float32(1), loss)
    params = jax.tree.map(jnp.array, params)
    state = [params, trainer.init_opt_state(params)]
    old = rows.sampled_logp_AxRxT
    rest = update.Batch(rows, old, old, np.int32(used)), knobs

    def step():
        *state[:], metrics = trainer.update(*state, *rest)
        return float(metrics["loss"])

    step.work = topology.matmul_flops(  # of one step
        trainer.update.trace(*state, *rest).jaxpr.jaxpr, while_trips=used
    )
    return step


def tunix(params, items):
    from flax import nnx
    from tunix.models.qwen2 import model as peer
    from tunix.rl import algo_core, common
    from tunix.rl.grpo import grpo_learner

    s = SHAPE
    model = peer.Qwen2(
        peer.ModelConfig(
            num_layers=s.num_layers, vocab_size=s.vocab_size, embed_dim=s.hidden_size,
            hidden_dim=s.intermediate_size, num_heads=s.num_heads, head_dim=s.head_dim,
            num_kv_heads=s.num_kv_heads, rope_theta=int(s.rope_theta), norm_eps=s.rms_eps,
            use_tied_embedding=True,
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    b = params["blocks"]
    model.embedder.input_embedding[...] = params["embed"]
    model.final_norm.w[...] = params["final_norm"]
    for i, layer in enumerate(model.layers):
        a = layer.attn
        for theirs, name in ((a.q_proj, "q"), (a.k_proj, "k"), (a.v_proj, "v")):
            theirs.w[...] = b[name][i].reshape(theirs.w.shape)
            bias = getattr(a, f"{name}_bias")
            bias[...] = b[f"{name}_bias"][i].reshape(bias.shape)
        a.o_proj.w[...] = b["o"][i].reshape(a.o_proj.w.shape)
        layer.input_layernorm.w[...] = b["attn_norm"][i]
        layer.post_attention_layernorm.w[...] = b["mlp_norm"][i]
        for theirs, name in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
            getattr(layer.mlp, theirs).kernel[...] = b[name][i]

    def padded(values, dtype):
        out = np.zeros((len(items), CAP), dtype)
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = value
        return jnp.array(out)

    batch = common.TrainExample(
        prompt_ids=jnp.array(np.stack([i.prompt for i in items]), jnp.int32),
        prompt_mask=jnp.ones((len(items), PROMPT), jnp.int32),
        completion_ids=padded([i.response for i in items], np.int32),
        completion_mask=padded([np.ones(len(i.response)) for i in items], np.int32),
        advantages=jnp.array([i.advantage for i in items], jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=padded([i.sampled_logps for i in items], np.float32),
    )
    how = grpo_learner.GRPOConfig(beta=0.0, loss_agg_mode="token-mean", num_generations=8)
    how.epsilon_high, how.temperature = 0.28, 1.0
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR, **ADAMW))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        loss_fn = lambda m: algo_core.grpo_loss_fn(m, batch, how, 0, 0)
        (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss, aux, optax.global_norm(grads)

    return lambda: float(jax.block_until_ready(train_step(model, optimizer, batch))[0])


# ------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------


def against_tunix(tailed: bool, repeats: int, micro_rows: int) -> str:
    params = qwen2.init(SHAPE, jax.random.key(0))
    items = data(tailed)
    steps = dict(ours=ours(params, items, micro_rows=micro_rows), tunix=tunix(params, items))
    first = {name: step() for name, step in steps.items()}
    assert abs(first["ours"] - first["tunix"]) < 1e-4 * abs(first["tunix"]), first
    t = {name: seconds for name, (seconds, _) in timing.in_turns(steps, repeats).items()}
    name = "lengths with a long tail, mean 32 of 128" if tailed else "all responses 128 tokens"
    return f"| {name} | {t['ours']:.3f} | {t['tunix']:.3f} | {t['tunix'] / t['ours']:.2f}x |"


def rate(repeats: int) -> str:
    shape = SHAPE._replace(
        hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=8, head_dim=64,
        num_layers=4, vocab_size=8192, remat="full", scan_layers=True, head_chunk=512,
    )  # fmt: skip
    params = qwen2.init(shape, jax.random.key(0))
    items = data(False)[:16]
    step = ours(params, items, shape, micro_rows=8, row_tokens=2 * (PROMPT + CAP))
    a, b = (
        jnp.array(np.random.default_rng(i).normal(size=(1024, 1024)), jnp.float32) for i in (0, 1)
    )
    product = jax.jit(lambda a, b: jax.lax.fori_loop(0, 20, lambda _, x: (x @ b) * 0.03, a))
    turns = dict(step=step, product=lambda: jax.block_until_ready(product(a, b)))
    (of_step, _), (of_product, _) = timing.in_turns(turns, repeats).values()
    of_step, of_product = step.work / of_step, 20 * 2 * 1024**3 / of_product
    return (
        f"| update at width 1,024 | {of_step / 1e9:.0f} GFLOP/s | {of_product / 1e9:.0f} GFLOP/s |"
        f" {of_step / of_product:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=("equal", "tailed", "rate"))
    parser.add_argument("--micro_rows", type=int, default=8, help="config.optim.micro_batch_rows")
    parser.add_argument("--isa", choices=timing.ISA, help="both sides without what is beyond it")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    heading = f"{HEADING}, {args.isa} alone" if args.isa else HEADING
    # A matrix product is the libraries' own code, which no flag holds back.
    known = ("equal", "tailed") if args.isa else ("equal", "tailed", "rate")
    if args.only not in (None, *known):
        parser.error(f"--only={args.only}: not with --isa")
    wanted = lambda name: name in known and args.only in (None, name)
    packages = ("jax", "google-tunix") if args.only != "rate" else ("jax",)
    made = results.made_by(*packages)
    lines = [heading, "", f"{made}; float32, one pinned core, medians of CPU-seconds in turns.", ""]
    if wanted("equal") or wanted("tailed"):
        lines += ["| 64 sequences | dapo_jax | google-tunix | |", "|---|---|---|---|"]
        lines += [
            against_tunix(n == "tailed", args.repeats, args.micro_rows)
            for n in ("equal", "tailed")
            if wanted(n)
        ]
    if wanted("rate"):
        lines += ["", "| | update | matrix product | |", "|---|---|---|---|", rate(args.repeats)]
    section = "\n".join(lines) + "\n"
    print(section)
    if args.write:
        results.write(heading, section)


if __name__ == "__main__":
    main()
