"""TRL in the race: GRPOTrainer with loss_type='dapo' and what its documentation says to add for
DAPO (epsilon_high, mask_truncated_completions, the soft overlong reward), torch on CPU.

TRL's GRPOTrainer has no dynamic sampling.
"""

import clock  # beside this file


def main() -> None:
    args = clock.arguments()
    if args.logits:
        return logits(args)
    watch = clock.Clock(args.out)
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.rewards import get_soft_overlong_punishment

    from dapo_jax.data import verifier

    tokens = 0

    def correctness(completions, completion_ids, answer, **_):
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        pairs = zip(completions, answer, strict=True)
        return [1.0 if verifier.verify(text, gold).correct else -1.0 for text, gold in pairs]

    class Readings(transformers.TrainerCallback):
        def on_train_begin(self, settings, state, control, model, **_):
            watch.reading(0, 0, 0, model.save_pretrained)

        def on_step_end(self, settings, state, control, model, **_):
            step, rest = divmod(state.global_step, clock.UPDATES)
            if not rest and (step % clock.EVERY == 0 or step == args.steps):
                save = model.save_pretrained
                control.should_training_stop |= watch.reading(step, tokens, state.global_step, save)

    data = clock.rows(args.base, args.seed, args.steps)
    settings = GRPOConfig(
        output_dir=str(args.out / "trl"), seed=args.seed,
        loss_type="dapo", epsilon=clock.CLIP_LOW, epsilon_high=clock.CLIP_HIGH, beta=0.0,
        mask_truncated_completions=True, num_generations=clock.GROUP_SIZE,
        per_device_train_batch_size=clock.GROUPS * clock.GROUP_SIZE // clock.UPDATES,
        steps_per_generation=clock.UPDATES, max_steps=args.steps * clock.UPDATES,
        max_completion_length=clock.RESPONSE_TOKENS, temperature=1.0, top_p=1.0, top_k=0,
        shuffle_dataset=False,  # is in the order of the seed
        learning_rate=args.lr, lr_scheduler_type="constant_with_warmup", warmup_steps=5,
        adam_beta1=clock.B1, adam_beta2=clock.B2, weight_decay=0.0, max_grad_norm=clock.CLIP_NORM,
        bf16=False, gradient_checkpointing=False, use_cpu=True, save_strategy="no",
        report_to="none", logging_steps=clock.UPDATES, disable_tqdm=True,
    )  # fmt: skip
    # Not AutoTokenizer, which makes a Qwen2Tokenizer of it: that one splits numbers.
    fast = transformers.PreTrainedTokenizerFast
    overlong = get_soft_overlong_punishment(clock.RESPONSE_TOKENS, clock.BUFFER_TOKENS)
    GRPOTrainer(
        model=load(args.base), args=settings, reward_funcs=[correctness, overlong],
        train_dataset=Dataset.from_list(data), callbacks=[Readings()],
        processing_class=fast.from_pretrained(args.base, padding_side="left"),
    ).train()  # fmt: skip


def load(base):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def logits(args) -> None:
    import numpy as np
    import torch

    with torch.no_grad():
        out = load(args.base).eval()(torch.from_numpy(np.load(args.logits).astype(np.int64)))
    np.save(args.out, out.logits.numpy())


if __name__ == "__main__":
    main()
