"""GSM8K with DAPO on Qwen2.5-1.5B in AReaL's setting: hours on one host, not days on a pod.

    launch/tpu_vm.sh run --name=gsm8k --zone=ZONE --type=v6e-8 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/gsm8k_*.jsonl.gz dapo_jax/' \\
        -- --config=configs/gsm8k_dapo_qwen2_5_1_5b.py --workdir=gs://BUCKET/gsm8k

AReaL's examples/math/gsm8k_dapo_dynamic_bs.yaml in our terms (its knob -> ours):

    train_dataset.batch_size 256,                 rollout.groups,
      max_length 1024                             data.max_prompt_tokens
    gconfig.n_samples 4, max_new_tokens 4096      rollout.group_size, rollout.max_response_tokens
    actor.eps_clip .2, eps_clip_higher .28        loss.clip_low, loss.clip_high
    ppo_n_minibatches 1                           optim.minibatches
    optimizer lr 1.7e-5, weight_decay .017,       optim.lr, optim.weight_decay
      constant after 0.1% of the steps            optim.warmup_steps 0
    overlong_tokens 512, overlong_penalty_factor  reward.overlong_buffer_tokens, overlong_penalty
    rewards 1 and 0, reward_bias, reward_scaling  reward.correct, reward.wrong; a shift and a scale
                                                  of all rewards drop out of the group's norm
    reward_norm group/group, eps 1e-5             advantage.epsilon, advantage.ddof
    adv_norm batch/batch                          advantage.whiten
    use_decoupled_loss                            loss.old_logprobs 'recompute'
    rejection_sampling ratio, upper 5 (before:    loss.importance 'token_mask', importance_cap: zero
      behav_imp_weight_cap 5)                     beyond it, in spite of the older name no cap
    dynamic_filter_fn, dynamic_bs                 dynamic_sampling.enabled, refill False
    total_train_epochs 10 of 7,473 problems       steps

Not the same: sampling waits for the update (AReaL's may be two versions old), and the prompt asks
for "Answer:" (the DAPO paper's) instead of a box.

Pod: v6e-8, fsdp 4 x tensor 2. By the arithmetic of `python -m dapo_jax.plan --topology=v6e-8`: 23
GB of 33.5 a chip; 1,024 responses of 1,024 tokens in flight, or 1,024 of full length; LOWER bounds
of a step by the chip's published peaks: decode > 2.4 s, old log-probs > 0.5 s, update > 2.0 s.
Compiled by `plan --compile` (2026-11-21, jax 0.10.2, libtpu 0.0.42.1, default optimization level;
nothing run): 23.1 GB of 33.5 a chip while sampling, 5.0 while updating.
Expected: AReaL reports .7957 at best for GRPO on the Instruct model in this setting (G=4, about 35
minutes on 8 H800). Nothing has been measured here.
"""

from dapo_jax.config import presets


def get_config():
    c = presets.gsm8k_dapo()
    c.model.path = "Qwen/Qwen2.5-1.5B"
    c.data.train, c.eval.files = "gsm8k_train.jsonl.gz", "gsm8k=gsm8k_test.jsonl.gz"
    c.steps = 290
    c.eval.k, c.eval.every, c.checkpoint.every = 1, 29, 29  # once an epoch
    return presets.place(c, presets.Slice("v6e-8", 2, 4, 1024, 1.0))
