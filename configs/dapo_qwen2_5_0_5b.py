"""DAPO with the paper's numbers on Qwen2.5-0.5B (base), DAPO-Math-17k and AIME 2024.

    launch/tpu_vm.sh run --name=dapo --zone=ZONE --type=v6e-8 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/dapo_qwen2_5_0_5b.py --workdir=gs://BUCKET/dapo_0_5b

512 x 16 responses of at most 20,480 tokens and 16 updates a rollout step; AdamW 1e-6, warm-up 20
rollout steps, clip .2/.28, overlong buffer 4,096: `config.paper`.

Pod: v6e-8, fsdp 4 x tensor 2. By the arithmetic of `python -m dapo_jax.plan --topology=v6e-8`: 22
GB of 33.5 a chip; 1,024 responses of 5,120 tokens in flight, or 256 of full length; LOWER bounds of
a step at the former: decode > 234 s, old log-probs > 7.3 s, update > 29 s.
Compiled by `plan --compile` (2026-11-21, jax 0.10.2, libtpu 0.0.42.1, default optimization level;
nothing run): 19.2 GB of 33.5 a chip while sampling, 22.3 while updating.
Expected: nothing has been measured here. Nothing comparable is published for this size: a small
base model that almost never solves an AIME problem may stop with "nothing to learn" (exit code 0,
checkpoint saved).
"""

from dapo_jax import presets


def get_config():
    return presets.dapo_math("0.5B")
