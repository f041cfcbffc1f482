"""One rung of the paper's ladder (Table 1), or full DAPO without one technique.

    python -m dapo_jax.train --config=configs/ladder.py:+clip_higher --workdir=runs/rung
    python -m dapo_jax.lab ladder --seeds=5 --out=runs/ladder

The rungs, each with all before it: grpo, +overlong_filtering, +clip_higher, +soft_overlong,
+token_loss, +dynamic_sampling (full DAPO; the default). Left out of full DAPO: -overlong_filtering,
-clip_higher, -soft_overlong, -token_loss, -dynamic_sampling (the same as +token_loss).

Without more, the embedded task (`presets.ladder_task`): a rung is to take about 40 seconds of a CPU
core behind its base model, all rungs of five seeds about 20 minutes of two cores (those without
Dynamic Sampling go on, there, to the tokens of those with it). With a size of Qwen the paper's
setting on its slice of TPUs, as configs/dapo_qwen2_5.py:7B has it:

    launch/tpu_vm.sh run --name=rung --zone=ZONE --type=v6e-64 --spot \\
        --prepare='gcloud storage cp gs://BUCKET/data/*.parquet dapo_jax/' \\
        -- --config=configs/ladder.py:+clip_higher@7B --workdir=gs://BUCKET/ladder/+clip_higher/seed_0

Overlong filtering is the literal reading of the paper, which "masks the loss of truncated samples":
they stay, as wrong, in the mean and std of their group (loss.overlong_filter 'loss'). The authors'
best run was without it ("-overlong_filtering"), as are the other configs here. The other reading,
'group', takes them out of both and leaves nothing that restrains length before +soft_overlong.
"""

from dapo_jax.config import presets


def get_config(argument: str = presets.LADDERS["dapo"].cumulative[-1]):
    name, _, size = argument.partition("@")
    return presets.rung(presets.dapo_math(size) if size else presets.ladder_task(), name)
