"""What a step of 32B takes on pods by the cost model of `plan`: before, as shipped, with options.

    python -m benchmarks pod_step --full        all rows, ten minutes; arithmetic, no TPU

On v5p-256 each row by the constants of before has one of AS_WAS less, down to the shipped config.
"""

from benchmarks.harness import Flag, Table
from dapo_jax.config import presets, schema, validation
from dapo_jax.plan import Traffic, mistakes, network, planner, staleness, step
from dapo_jax.plan.constants import VALUES
from dapo_jax.plan.layouts import changed
from dapo_jax.plan.roofline import Scene
from dapo_jax.pods import slices

TRAFFIC = Traffic(prompt=200, response=5000)
BEFORE = {"decode_beside": 1.0, "keys_hbm": 0.9}  # until 2026-11-24
AS_WAS = {
    "rollout.cache_fraction": 0.25, "rollout.prefill_tokens": 512, "optim.last_row_tokens": 0,
    "dynamic_sampling.surplus": "drop", "model.remat": "attention",
}  # fmt: skip
LARGE = {"rollout.slots": 8192, "rollout.cache_fraction": 0.416}
SLICES = {"v5p-256": {}, "v5p-512": LARGE, "2xv5p-256": LARGE, "v6e-256": {}, "tpu7x-128": {}}
REUSE, INT8 = planner.OPTIONS
STALE = {"rollout.staleness": 1, "loss.importance_cap": 5.0}
SLOTS = 3072  # of a stale step, at most; that many draw a batch in the longest response's time
FLAGS = {"only": Flag("tpu7x", "", "rows of slices with this in their name")}


def measure(args) -> list[Table]:
    phases = "prefill", "decode", "tail", "old log-probs", "update", "evaluation"
    heads = *phases, "others", "minutes", "from", "to", "W8A8 at most, s"
    table, usual, known = Table("slice", "set", "constants", *heads), dict(VALUES), {}
    for name in (x for x in SLICES if args.only in x):
        base = changed(presets.dapo_math("32B-v6e" if "v6e" in name else "32B"), SLICES[name])
        pod, was = slices.parse(name), range(len(AS_WAS) if name == "v5p-256" else 0)
        usually = schema.leaves(base)
        rows = [(dict([*AS_WAS.items()][i:]), BEFORE) for i in was] + [({}, BEFORE)]
        rows += [(fields, {}) for fields in ({}, REUSE, INT8, STALE, INT8 | STALE)]
        for fields, other in rows:
            config = changed(base, fields)
            VALUES.update(usual | other)
            shape, sizes = network(config), validation.resolve_mesh(config, pod.devices)
            assert not mistakes(config, shape, pod)
            s = Scene(config, shape, sizes, pod)
            if stale := config.rollout.staleness:
                s = s.replaced(sizes=s.sizes._replace(slots=min(SLOTS, s.sizes.slots)))
            key = s.sizes, config.dynamic_sampling.surplus, stale
            if key not in known:
                carried = stale and staleness.carrying(config, TRAFFIC, s, stale)[0]
                known[key] = carried or dict(rollouts=step.simulated(config, TRAFFIC, s.sizes))
            how = dict(eval_problems=TRAFFIC.eval_problems, rollouts=known[key]["rollouts"])
            work = step.work(config, TRAFFIC, s, **how)._replace(**known[key])
            timer = step.timer(config, work, s)
            now, spread = timer(VALUES), step.spread(timer)
            others = now.seconds - sum(seconds := [now.phases[x] for x in phases])
            minutes = (x / 60 for x in (now.seconds, spread["low_s"], spread["high_s"]))
            said = " ".join(f"{k}={v}" for k, v in fields.items() if v != usually[k])
            cells = *(f"{x:,.0f}" for x in (*seconds, others)), *(f"{x:.1f}" for x in minutes)
            saved = f"{now.decoding['products'] / 2:.0f}"
            table.row(name, said, "of before" * bool(other), *cells, saved)
    return [table]
