"""DAPO with the paper's numbers on Qwen2.5-1.5B (base), DAPO-Math-17k and AIME 2024.

    launch/tpu_vm.sh run --name=dapo --zone=ZONE --type=v6e-16 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/dapo_qwen2_5_1_5b.py --workdir=gs://BUCKET/dapo_1_5b

512 x 16 responses of at most 20,480 tokens and 16 updates a rollout step; AdamW 1e-6, warm-up 20
rollout steps, clip .2/.28, overlong buffer 4,096: `config.paper`.

Pod: v6e-16, fsdp 8 x tensor 2. By the arithmetic of `python -m dapo_jax.plan --topology=v6e-16`: 26
GB of 33.5 a chip; 1,024 responses of 5,120 tokens in flight, or 512 of full length; LOWER bounds of
a step at the former: decode > 168 s, old log-probs > 11 s, update > 43 s.
Compiled by `plan --compile` (2026-11-21, jax 0.10.2, libtpu 0.0.42.1, default optimization level;
nothing run): 23.7 GB of 33.5 a chip while sampling, 26.0 while updating.
Expected: nothing has been measured here. Nothing comparable is published for this size (base model,
these lengths, this data).
"""

from dapo_jax import presets


def get_config():
    return presets.dapo_math("1.5B")
