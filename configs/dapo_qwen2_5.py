"""DAPO with the paper's numbers on Qwen2.5 of 0.5B to 72B, DAPO-Math-17k and AIME 2024.

    launch/tpu_vm.sh run --name=dapo --zone=ZONE --type=v5p-256 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/dapo_qwen2_5.py:32B --workdir=gs://BUCKET/dapo_32b

512 x 16 responses of at most 20,480 tokens and 16 updates per rollout step; AdamW 1e-6, warm-up 20
rollout steps, clip .2/.28, overlong buffer 4,096: `config.paper`. `:32B,verl` is the released
script's reading, where verl differs: warm-up over 10 rollout steps of which the first has learning
rate 0, weight decay 0.1, dual clip 10, and a mean over chunks of 32 responses of token means:
`config.verl`. The sizes are base models; `:Math-7B` is Qwen2.5-Math, base, with responses of 2,048
tokens, for its context is 4,096; `:R1-7B` is DeepSeek-R1-Distill-Qwen. Qwen3 has dapo_qwen3.py.

Each size names its slice (shards x tensor). By the arithmetic of `python -m dapo_jax.plan`, the
same with `verl`: decimal GB of each chip, responses in flight at a quarter of the longest (5,120
tokens) and at full length. LOWER bounds of a step's seconds at the former, by the chip's published
peaks. Last, where it was asked, what `plan --compile` says (2026-11-21, jax 0.10.2, libtpu
0.0.42.1, default optimization level; nothing run): GB while sampling and updating, here
less the cache that updating no longer has beside it; 32B less what its cache lost, updating at O0.

    size       slice    mesh    GB    limit  in flight      decode   old     update   compiled
    0.5B       v6e-8    4 x 2   19    33.5   1,024    256   > 234   > 7.3   > 29    19.2  4.6
    1.5B       v6e-16   8 x 2   24    33.5   1,024    512   > 168   > 11    > 43    23.7  5.3
    3B         v6e-32   16 x 2  20    33.5   2,048    608   > 122   > 10    > 42    -     -
    7B         v6e-64   16 x 4  26    33.5   2,048  1,024   > 109   > 11    > 34    -     -
    14B        v5p-128  16 x 4  81    102.8  2,048  1,024   > 183   > 46    > 184   -     -
    32B        v5p-256  32 x 4  65    102.8  3,776  896     > 117   > 51    > 152   53.6  64.8
    32B-v6e    v6e-256  64 x 4  31    33.5   3,776  896     > 129   > 13    > 51    -     -
    72B        v5p-512  64 x 4  81    102.8  8,192  2,048   > 88    > 56    > 225   -     -
    Math-1.5B  v6e-8    8 x 1   22    33.5   4,096  1,024   > 6.6   > 2.7   > 11    -     -
    Math-7B    v6e-16   16 x 1  23    33.5   2,048    816   > 9.1   > 6.1   > 24    -     -
    R1-1.5B    v6e-16   8 x 2   24    33.5   1,024    512   > 168   > 11    > 43    -     -
    R1-7B      v6e-64   16 x 4  26    33.5   2,048  1,024   > 109   > 11    > 34    -     -
    R1-14B     v5p-128  16 x 4  81    102.8  2,048  1,024   > 183   > 46    > 184   -     -
    R1-32B     v5p-256  32 x 4  65    102.8  4,096  1,024   > 117   > 51    > 152   -     -

32B trains over tensor 4, and decodes each row on 8 chips of the same mesh (16 shards), by the rules
of `presets.lay_out`; so does 72B, and Math-7B on 4. A step of 32B with a mean response of 5,000
tokens: 18 to 24 minutes by the cost model of `plan`, whose constants nobody has measured on a TPU.
Each size runs on other slices too, with more or fewer shards; 32B so on v5p-512 and tpu7x-128.

Expected: nothing has been measured here. For 32B the paper reports 50 on AIME 2024 (avg@32) from
about 320 rollout steps; the authors' released code 52, and 50 without Dynamic Sampling. verl's
example for 7B starts from Qwen2.5-Math-7B with 8,192 tokens and without Dynamic Sampling, and
reports 36. A 0.5B base model almost never solves an AIME problem; its run may stop with "nothing to
learn" (exit code 0, checkpoint saved). configs/dapo_qwen2_5_<size>.py are other names of sizes.
"""

from dapo_jax.config import presets


def get_config(argument: str = "32B"):
    return presets.dapo_math(argument)
