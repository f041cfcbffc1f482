"""DAPO with the paper's numbers on Qwen2.5-7B (base), DAPO-Math-17k and AIME 2024.

    launch/tpu_vm.sh run --name=dapo --zone=ZONE --type=v6e-64 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/dapo_qwen2_5_7b.py --workdir=gs://BUCKET/dapo_7b

512 x 16 responses of at most 20,480 tokens and 16 updates a rollout step; AdamW 1e-6, warm-up 20
rollout steps, clip .2/.28, overlong buffer 4,096: `config.paper`.

Pod: v6e-64, fsdp 16 x tensor 4. By the arithmetic of `python -m dapo_jax.plan --topology=v6e-64`:
27 GB of 33.5 a chip; 2,048 responses of 5,120 tokens in flight, or 1,024 of full length; LOWER
bounds of a step at the former: decode > 109 s, old log-probs > 11 s, update > 46 s.
Compiled by `plan --compile` (2026-11-21, jax 0.10.2, libtpu 0.0.42.1, default optimization level;
nothing run): 26.1 GB of 33.5 a chip while sampling, 26.8 while updating.
Expected: nothing has been measured here. verl's example for 7B starts from Qwen2.5-Math-7B with
8,192 tokens and without Dynamic Sampling, and reports 36 on AIME 2024; this base model with these
lengths has no published number.
"""

from dapo_jax import presets


def get_config():
    return presets.dapo_math("7B")
