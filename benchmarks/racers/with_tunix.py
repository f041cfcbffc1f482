"""google-tunix in the race: DAPOLearner on its own sampler ('vanilla', JAX on CPU).

Two favours that its documentation does not name, without which it would learn nothing or do work
for nothing: the sampler's seed is changed for every rollout (it would repeat its noise), and beta
is set to 0 after construction (None, which DAPOConfig insists on, runs a reference model).

Its lengths are CHARACTERS: a tokenizer that writes each token as one character makes them tokens.
`dynamic_sampling=True` is its default and is read nowhere.
"""

import clock  # beside this file

EOS, PAD = 1, 47  # PAD is an id that no text uses
FIRST = 0x4E00  # character of token id 0


class Characters:
    """Token id i as the character FIRST + i; prompts come as words."""

    def __init__(self, vocabulary: dict[str, int]):
        self.ids = vocabulary
        self.words = {i: word for word, i in vocabulary.items()}

    def encode(self, text: str, **_) -> list[int]:
        return [self.ids[word] for word in text.split()]

    def decode(self, ids, **_) -> str:
        return "".join(chr(FIRST + int(i)) for i in ids)

    def text(self, characters: str) -> str:
        """The words that `characters` stand for, as our own tokenizer decodes them."""
        return " ".join(self.words.get(ord(c) - FIRST, "") for c in characters)

    bos_id = staticmethod(lambda: None)
    eos_id = staticmethod(lambda: EOS)
    pad_id = staticmethod(lambda: PAD)
    dedup_bos_ids = staticmethod(lambda ids: ids)


def load(base):
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    from tunix.models.qwen2 import model, params

    c = json.loads((base / "config.json").read_text())
    shape = model.ModelConfig(
        num_layers=c["num_hidden_layers"], vocab_size=c["vocab_size"], embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"], num_heads=c["num_attention_heads"],
        head_dim=c["hidden_size"] // c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        rope_theta=(c.get("rope_theta") or c["rope_parameters"]["rope_theta"]),
        norm_eps=c["rms_norm_eps"], use_tied_embedding=c["tie_word_embeddings"],
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        return params.create_model_from_safe_tensors(str(base), shape, mesh, jnp.float32), mesh


def save(folder, model, base) -> None:
    """The inverse of tunix's own table of names and transposes."""
    import re
    import shutil

    import numpy as np
    from flax import nnx
    from safetensors import safe_open
    from safetensors.numpy import save_file
    from tunix.models.qwen2 import params

    arrays = {
        ".".join(map(str, path)): np.asarray(leaf.get_value())
        for path, leaf in nnx.state(model, nnx.Param).flat_state()
    }
    names = params._get_key_and_transform_mapping(model.config)
    tensors = {}
    with safe_open(base / "model.safetensors", "np") as stored:
        for name in stored.keys():  # noqa: SIM118 (not a dict)
            ((pattern, (theirs, change)),) = [
                item for item in names.items() if re.fullmatch(item[0], name)
            ]
            x = arrays[re.sub(pattern, theirs, name)]
            shape = stored.get_slice(name).get_shape()
            if change:  # ((1, 0), ...): a transposed matrix, perhaps with heads apart
                x = x.reshape(shape[1], -1).T
            tensors[name] = np.ascontiguousarray(x.reshape(shape))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(base / "config.json", folder)


def main() -> None:
    args = clock.arguments()
    if args.logits:
        return logits(args)
    watch = clock.Clock(args.out)
    import json

    import jax
    import numpy as np
    import optax
    from flax import nnx
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from dapo_jax.data import verifier

    model, mesh = load(args.base)
    tokenizer = Characters(json.loads((args.base / "vocabulary.json").read_text()))
    rollout = RolloutConfig(
        max_tokens_to_generate=clock.RESPONSE_TOKENS, max_prompt_length=clock.PROMPT_TOKENS,
        kv_cache_size=clock.PROMPT_TOKENS + clock.RESPONSE_TOKENS, temperature=1.0, top_p=1.0,
        top_k=None, seed=args.seed * 1_000_000,
    )  # fmt: skip
    warmed_up = optax.linear_schedule(args.lr / 5, args.lr, 5)
    adamw = optax.adamw(warmed_up, b1=clock.B1, b2=clock.B2, weight_decay=0.0)
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(clock.CLIP_NORM), adamw),
        eval_every_n_steps=1 << 30,
        max_steps=(args.steps + 1) * clock.UPDATES,  # `batches` ends it
        mini_batch_size=clock.GROUPS // clock.UPDATES,
        train_micro_batch_size=clock.GROUPS // clock.UPDATES,
    )
    where = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh), rollout_engine="vanilla",
        training_config=training, rollout_config=rollout,
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(
        actor=model, reference=None, tokenizer=tokenizer, cluster_config=where
    )
    tokens = 0

    def correctness(prompts, completions, answer, **_):
        nonlocal tokens
        rollout.seed += 1
        # The end of text is cut off; what is shorter than the limit had one.
        tokens += sum(min(len(c) + 1, clock.RESPONSE_TOKENS) for c in completions)
        texts = map(tokenizer.text, completions)
        pairs = zip(texts, answer, strict=True)
        return [1.0 if verifier.verify(text, gold).correct else -1.0 for text, gold in pairs]

    buffer = dict(overlong_buffer_length=clock.BUFFER_TOKENS, overlong_buffer_penalty=1.0)
    settings = DAPOConfig(
        num_generations=clock.GROUP_SIZE, num_iterations=1, epsilon=clock.CLIP_LOW,
        epsilon_high=clock.CLIP_HIGH,
        overlong_buffer=buffer | {"enable": True, "max_response_length": clock.RESPONSE_TOKENS},
    )  # fmt: skip
    settings.beta = 0.0
    learner = DAPOLearner(rl_cluster=cluster, algo_config=settings, reward_fns=[correctness])

    def batches():
        """A rollout step's prompts; asked for when the step before has ended."""
        rows = clock.rows(args.base, args.seed, args.steps)
        actor = cluster.actor_trainer.model
        for step in range(args.steps + 1):
            if step % clock.EVERY == 0 or step == args.steps:
                jax.block_until_ready(nnx.state(actor))
                done = step * clock.UPDATES
                if watch.reading(step, tokens, done, lambda f: save(f, actor, args.base)):
                    return
            if step < args.steps:
                part = rows[step * clock.GROUPS : (step + 1) * clock.GROUPS]
                prompts, answers = (np.array([r[x] for r in part]) for x in ("prompt", "answer"))
                yield {"prompts": prompts, "answer": answers}

    with mesh:
        learner.train(batches())


def logits(args) -> None:
    import jax.numpy as jnp
    import numpy as np

    model, mesh = load(args.base)
    tokens_BxT = jnp.asarray(np.load(args.logits))
    B, T = tokens_BxT.shape
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    with mesh:
        out, _ = model(tokens_BxT, jnp.broadcast_to(jnp.arange(T), (B, T)), None, causal)
    np.save(args.out, np.asarray(out, np.float32))


if __name__ == "__main__":
    main()
