"""One gradient update on a CPU core: against google-tunix's GRPO step, and against matmul speed.

    pip install -r benchmarks/requirements-peers.txt ...        (see there; tunix needs Python 3.11)
    python -m benchmarks update --full [--isa=AVX2] [--parts equal tailed] [--micro_rows=2]

Everything runs in this one process on one core and alternates, so that a busy machine slows both
sides alike; the figures are medians of CPU-seconds, and their ratios. Both sides get the same
weights, tokens, advantages and old log-probs, take the DAPO loss (clip 0.2/0.28, token mean, no KL)
and AdamW after clipping at 1, and their losses are compared before anything is timed. Shape: 4
layers, width 128, MLP 512, 4 query and 2 key/value heads of 32, vocabulary 1,024, float32; 64
sequences of a 32-token prompt and at most 128 response tokens.

    equal   all responses are 128 tokens: what the computation itself costs
    tailed  lengths with a long tail, 32 on average: tunix pads, packing does not
    rate    hardware FLOPs a second (recomputation included) of an update at width 1,024, as a part
            of what one float32 matrix product reaches (the libraries' own code, which --isa does
            not hold back)
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness, sides
from benchmarks.harness import Flag
from dapo_jax.dapo import packing
from dapo_jax.model import qwen2
from dapo_jax.pods import topology

PROMPT, CAP, LR = 32, 128, 1e-4
SHAPE = sides.SMALL._replace(rope_theta=1e6, remat="none", attention_chunk=512, head_chunk=1024)


def data(tailed: bool, n: int) -> list[packing.Item]:
    """n items whose recorded log-probs are random: old log-probs of the ratio."""
    rng = np.random.default_rng(0)
    lengths = sides.log_normal(n, CAP, CAP / 4) if tailed else np.full(n, CAP)
    draw = lambda n: rng.integers(1, SHAPE.vocab_size, n)  # (0 is tunix's padding)
    prompts, responses = [draw(PROMPT) for _ in lengths], [draw(n) for n in lengths]
    return sides.items(prompts, responses, rng.normal(size=n), -7.0)


def ours(params, items, shape=SHAPE, micro_rows=8, row_tokens=PROMPT + CAP):
    made = sides.trainer(shape, "float32")
    params = jax.tree.map(jnp.array, params)  # a copy: the other side reads them too
    sizes = dict(row_tokens=row_tokens, micro_rows=micro_rows, lr=LR)
    step, passes = sides.update_step(made, params, items, **sizes)
    program = made.update.trace(*made.abstract(passes, micro_rows, row_tokens)).jaxpr.jaxpr
    loss = lambda: float(step()["loss"])
    loss.work = topology.matmul_flops(program, while_trips=passes)  # of one step
    return loss


def tunix(params, items):
    from flax import nnx
    from tunix.rl import algo_core, common
    from tunix.rl.grpo import grpo_learner

    model, b = sides.tunix_model(SHAPE), params["blocks"]
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
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR, **sides.ADAMW))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        loss_fn = lambda m: algo_core.grpo_loss_fn(m, batch, how, 0, 0)
        (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss, aux, optax.global_norm(grads)

    return lambda: float(jax.block_until_ready(train_step(model, optimizer, batch))[0])


def against_tunix(table: harness.Table, args, tailed: bool) -> None:
    params, items = qwen2.init(SHAPE, jax.random.key(0)), data(tailed, args.sequences)
    steps = dict(ours=ours(params, items, micro_rows=args.micro_rows), tunix=tunix(params, items))
    first = {name: step() for name, step in steps.items()}
    assert abs(first["ours"] - first["tunix"]) < 1e-4 * abs(first["tunix"]), first
    a, b = (seconds for seconds, _ in harness.in_turns(steps, args.repeats).values())
    name = "lengths with a long tail, mean 32 of 128" if tailed else "all responses 128 tokens"
    table.row(f"{name}, {args.micro_rows} rows a pass", f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}x")


def rate(table: harness.Table, args) -> None:
    width = 1024 if args.full else 256
    shape = SHAPE._replace(
        hidden_size=width, intermediate_size=4 * width, num_heads=width // 64,
        num_kv_heads=width // 128, head_dim=64, vocab_size=8 * width, remat="full",
        scan_layers=True, head_chunk=512,
    )  # fmt: skip
    params, items = qwen2.init(shape, jax.random.key(0)), data(False, 16)
    step = ours(params, items, shape, micro_rows=8, row_tokens=2 * (PROMPT + CAP))
    a, b = (
        jnp.array(np.random.default_rng(i).normal(size=(width, width)), jnp.float32) for i in (0, 1)
    )
    product = jax.jit(lambda a, b: jax.lax.fori_loop(0, 20, lambda _, x: (x @ b) * 0.03, a))
    turns = dict(step=step, product=lambda: jax.block_until_ready(product(a, b)))
    (of_step, _), (of_product, _) = harness.in_turns(turns, args.repeats).values()
    of_step, of_product = step.work / of_step / 1e9, 20 * 2 * width**3 / of_product / 1e9
    table.note(
        f"At width {width:,} an update reaches {of_step:.0f} GFLOP/s of the {of_product:.0f} of one"
        f" matrix product ({of_step / of_product:.0%})."
    )


PARTS = {
    "equal": lambda table, args: against_tunix(table, args, False),
    "tailed": lambda table, args: against_tunix(table, args, True),
    "rate": rate,
}
FLAGS = {
    "repeats": Flag(1, 7, "turns that are counted"),
    "sequences": Flag(16, 64),
    "micro_rows": Flag(8, 8, "packed rows of a pass, ours (config.optim.micro_batch_rows)"),
    "parts": Flag(tuple(PARTS), tuple(PARTS), choices=tuple(PARTS)),
}


def measure(args) -> list[harness.Table]:
    what = f"{args.sequences} sequences, CPU-seconds"
    table = harness.Table(what, "dapo_jax", "google-tunix", "ours over it")
    for part in args.parts:
        PARTS[part](table, args)
    return [table]
