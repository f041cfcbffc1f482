"""DAPO with the paper's numbers on Qwen3 (dense) of 0.6B to 32B, DAPO-Math-17k and AIME 2024.

    launch/tpu_vm.sh run --name=dapo --zone=ZONE --type=v6e-128 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/dapo_qwen3.py:8B --workdir=gs://BUCKET/dapo_qwen3_8b

The same as configs/dapo_qwen2_5.py, where the table is explained; `:8B,verl` is the released
script's reading. The models are base models, but for 32B, of which there is none: that one thinks
before it answers. All sizes have 8 key/value heads of 128, four times and more of what the cache
holds for a small Qwen2.5, and take larger slices for it.

    size       slice    mesh    GB    limit  in flight      decode   old     update   compiled
    0.6B       v6e-32   32 x 1  22    33.5   1,024    256   > 288   > 2.7   > 11    -     -
    1.7B       v6e-32   16 x 2  23    33.5   1,024    256   > 301   > 6.1   > 24    -     -
    4B         v6e-64   32 x 2  18    33.5   1,024    304   > 191   > 7.2   > 29    -     -
    8B         v6e-128  64 x 2  16    33.5   2,048    512   > 107   > 6.3   > 25    16.4  14.3
    14B        v5p-128  16 x 4  81    102.8  4,096  1,216   > 135   > 45    > 181   -     -
    32B        v5p-256  32 x 4  67    102.8  4,096  1,024   > 117   > 52    > 157   -     -

By the arithmetic of `python -m dapo_jax.plan`; 8B's last numbers are of `plan --compile`'s programs
(2026-11-22, jax 0.10.2, libtpu 0.0.42.1, default optimization level; nothing run).
Expected: nothing has been measured here.
"""

from dapo_jax.config import presets

SIZES = [name.removeprefix("Qwen3-") for name in presets.PLACES if name.startswith("Qwen3-")]


def get_config(argument: str = "8B"):
    if (size := argument.partition(",")[0]) not in SIZES:
        raise ValueError(f"no size {size!r} of Qwen3; there are {', '.join(SIZES)}")
    return presets.dapo_math(f"Qwen3-{argument}")
