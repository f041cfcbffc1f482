"""The released script's reading of DAPO on Qwen2.5-0.5B: dapo_qwen2_5_0_5b.py where verl differs.

    launch/tpu_vm.sh run --name=dapo --zone=ZONE --type=v6e-8 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/dapo_qwen2_5_0_5b_verl.py --workdir=gs://BUCKET/dapo_0_5b_verl

Warm-up over 10 rollout steps of which the first has learning rate 0, weight decay 0.1, dual clip
10, and a mean over chunks of 32 responses of token means: `config.verl`. `python -m dapo_jax.plan
--topology=v6e-8` says the same of memory and time as without `_verl`.
Expected: nothing has been measured here.
"""

from dapo_jax import config, presets


def get_config():
    return config.verl(presets.dapo_math("0.5B"))
