"""GSM8K with DAPO on Qwen2.5-0.5B on one chip: a free TPU of Colab (v5e-1) or a GPU of 16 to 24 GB.

Command: python -m dapo_jax.train --config=configs/one_chip.py --workdir=runs/gsm8k
In a notebook: notebooks/train_on_colab.ipynb. The settings are `presets.one_chip`, which an install
without this folder has too.

Memory, compiled by `python -m dapo_jax.plan --topology=v5e:1x1 --compile` (2026-11-27, jax 0.10.2,
libtpu 0.0.42.1; nothing run): 9.7 GB of 16.9 while sampling, 11.4 while updating; on an RTX 4090
(--topology=rtx4090-1) 8.5 and 11.1 of 23.2. All its weights are trained: 2.0 GB of them, 4.0 of
Adam's moments and 2.0 of gradients, in float32. Keys and values of 128 responses of full length
take 2.4 GB on a TPU, which pads heads of 64 to 128, and 1.2 on a GPU. Less memory:
--config.optim.micro_batch_rows=1, --config.model.head_chunk=256.
Expected: 4 to 6 s a step on v5e-1 if responses have 128 tokens, by the planner's arithmetic, from
constants that nobody has measured on a TPU. Nothing has been trained with it here.
"""

from dapo_jax.config import presets


def get_config():
    return presets.one_chip()
