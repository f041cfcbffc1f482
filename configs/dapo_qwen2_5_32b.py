"""The paper's run: DAPO on Qwen2.5-32B (base), DAPO-Math-17k and AIME 2024.

    launch/tpu_vm.sh run --name=dapo --zone=ZONE --type=v5p-256 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/dapo_qwen2_5_32b.py --workdir=gs://BUCKET/dapo_32b

512 x 16 responses of at most 20,480 tokens and 16 updates a rollout step; AdamW 1e-6, warm-up 20
rollout steps, clip .2/.28, overlong buffer 4,096: `config.paper`.

Pod: v5p-256, fsdp 16 x tensor 8. By the arithmetic of `python -m dapo_jax.plan --topology=v5p-256`:
59 GB of 102.8 a chip; 2,048 responses of 5,120 tokens in flight, or 1,024 of full length. A step
with a mean response of 5,000: 64 minutes, 53 to 80, by constants of which none was measured on a
TPU; a run of 320 steps 14 days.
Compiled by `plan --compile` (2026-11-21, jax 0.10.2, libtpu 0.0.42.1, default optimization level;
nothing run): 59.0 GB of 102.8 a chip while sampling, 57.1 while updating.
Expected: nothing has been measured here. The paper reports 50 on AIME 2024 (avg@32) from about 320
rollout steps; the authors' released code 52.
"""

from dapo_jax import presets


def get_config():
    return presets.dapo_math("32B")
