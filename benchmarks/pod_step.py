"""What a step of 32B takes on pods by the cost model of `plan`; with the constants of before too.

    python -m benchmarks pod_step --full        all rows, half a minute each; arithmetic, no TPU

A change that is a field of the config is a row. One that is none shows in all rows: run it at the
commit before and at the one after.
"""

from benchmarks.harness import Flag, Table
from dapo_jax.config import presets, validation
from dapo_jax.plan import Traffic, mistakes, network, planner
from dapo_jax.plan.constants import VALUES
from dapo_jax.pods import slices

TRAFFIC = Traffic(prompt=200, response=5000)
BEFORE = {"decode_beside": 1.0, "keys_hbm": 0.9}  # until 2026-11-24
LARGER = {"rollout.cache_fraction": 0.25}
ROWS = (
    ("v5p-256", LARGER, BEFORE),
    ("v5p-256", LARGER, {}),
    ("v5p-256", {}, {}),
    ("v5p-256", {"loss.old_logprobs": "reuse"}, {}),
    ("v5p-512", {}, {}),
    ("2xv5p-256", {}, {}),
    ("v6e-256", {}, {}),
    ("tpu7x-128", {}, {}),
)
FLAGS = {"only": Flag("tpu7x", "", "rows of slices with this in their name")}


def measure(args) -> list[Table]:
    phases = "prefill", "decode", "tail", "old log-probs", "update", "evaluation"
    table = Table("slice", "set", "constants", *phases, "others", "minutes", "from", "to")
    usual = dict(VALUES)
    for name, fields, other in (x for x in ROWS if args.only in x[0]):
        config, pod = presets.dapo_math("32B"), slices.parse(name)
        config.update(fields)
        VALUES.update(usual | other)
        shape, sizes = network(config), validation.resolve_mesh(config, pod.devices)
        assert not mistakes(config, shape, pod)
        step = planner.expected(config, shape, sizes, pod, TRAFFIC)["step"]
        seconds = [step["parts"][x] for x in phases]
        seconds.append(step["expected_s"] - sum(seconds))
        minutes = [f"{step[x] / 60:.1f}" for x in ("expected_s", "low_s", "high_s")]
        said = " ".join(f"{k}={v}" for k, v in fields.items())
        named = "of before" if other else ""
        table.row(name, said, named, *(f"{x:,.0f}" for x in seconds), *minutes)
    return [table]
