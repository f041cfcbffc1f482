"""GSM8K with DAPO on Qwen2.5-0.5B on one NVIDIA GPU of 80 GB, or on eight of them in a host.

    python -m dapo_jax.train --config=configs/gpus.py --workdir=runs/gsm8k       one GPU
    python -m dapo_jax.train --config=configs/gpus.py:8 --workdir=runs/gsm8k     8, in one process
    launch/local.sh --gpus=8 -- --config=configs/gpus.py:8 --workdir=runs/gsm8k  a process for each

`presets.one_chip` with a larger batch, in sizes that fill a GPU: passes of 16,384 tokens, no
product computed again, every response in flight at once. Each GPU holds all weights. Less memory:
configs/one_chip.py, or --config.optim.micro_batch_rows=1 --config.model.remat=full.

By the arithmetic of `python -m dapo_jax.plan --topology=h100-1` (h100-8; nothing run): GB of a
GPU's 77.0 while sampling and while updating; seconds of a step, if responses have 128 tokens:

    gpus.py:1    13.1   37.1   4.5
    gpus.py:8    10.3   37.1   4.1
"""

from dapo_jax.config import presets


def get_config(gpus="1"):
    n = {"1": 1, "2": 2, "4": 4, "8": 8}.get(gpus)
    if not n:
        raise ValueError(f"configs/gpus.py:{gpus}: wants 1, 2, 4 or 8 GPUs")
    c = presets.one_chip()
    c.rollout.groups = 64 if n == 1 else 256
    c.rollout.slots, c.rollout.prefill_prompts = c.rollout.groups * 8, 32 * n
    c.optim.row_tokens, c.optim.micro_batch_rows = 2048, 8 * n
    c.model.remat, c.model.head_chunk = "dots_attention", 2048
    c.mesh.data, c.mesh.fsdp = -1, 1
    c.eval.max_problems = 0
    return c
