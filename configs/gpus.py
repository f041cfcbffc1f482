"""GSM8K with DAPO on Qwen2.5-0.5B on one NVIDIA GPU of 40 GB or more, or on eight in a host.

    python -m dapo_jax.train --config=configs/gpus.py --workdir=runs/gsm8k       one GPU
    python -m dapo_jax.train --config=configs/gpus.py:8 --workdir=runs/gsm8k     8, in one process
    launch/local.sh --gpus=8 -- --config=configs/gpus.py:8 --workdir=runs/gsm8k  a process for each

`presets.one_chip` with a larger batch: every response in flight at once, nothing computed again,
passes of 8 rows of the longest sequence. With more rows a mini-batch's last pass would be mostly
padding. Each GPU holds all weights. Less memory: configs/one_chip.py, or
--config.optim.micro_batch_rows=1 --config.model.remat=full.

By the arithmetic of `python -m dapo_jax.plan --topology=h100-1` (h100-8; nothing run): GB of a
GPU's 77.0 while sampling and while updating; seconds of a step, if responses have 128 tokens:

    gpus.py:1    13.1   22.6   3.3
    gpus.py:8    10.3   22.6   3.5
"""

from dapo_jax.config import presets


def get_config(gpus="1"):
    n = {"1": 1, "2": 2, "4": 4, "8": 8}.get(gpus)
    if not n:
        raise ValueError(f"configs/gpus.py:{gpus}: wants 1, 2, 4 or 8 GPUs")
    c = presets.one_chip()
    c.rollout.groups = 64 if n == 1 else 256
    c.rollout.slots, c.rollout.prefill_prompts = c.rollout.groups * 8, 32 * n
    c.optim.micro_batch_rows = 8 * n
    c.model.remat, c.model.head_chunk = "none", 1024
    c.mesh.data, c.mesh.fsdp = -1, 1
    c.eval.max_problems = 0
    return c
