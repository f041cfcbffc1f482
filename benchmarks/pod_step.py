"""What a step of 32B takes on pods by the cost model of `plan`: before, as shipped, with options.

    python -m benchmarks pod_step --full        all rows, fifteen minutes; arithmetic, no TPU

On v5p-256 each row by the constants of before has one of AS_WAS less, down to the shipped config.
Two tables more: what a value model adds to a step, and what responses that outlive steps save.
"""

from collections.abc import Mapping, Sequence

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
ONE_CALL = {"eval.with_rollout": True}  # not with staleness
OPTIONS = {}, ONE_CALL, ONE_CALL | REUSE, ONE_CALL | INT8, STALE, INT8 | STALE
SLOTS = 3072  # of a stale step, at most; that many draw a batch in the longest response's time
OLDER = "v5p-256", "v6e-256"  # slices whose steps are simulated with responses that outlive them
FLAGS = {"only": Flag("tpu7x", "", "rows of slices with this in their name")}


def base(name: str):
    """The shipped config of 32B for a slice."""
    return changed(presets.dapo_math("32B-v6e" if "v6e" in name else "32B"), SLICES[name])


def expected(config, name: str, with_staleness=False):
    """A step on a slice that holds the config, by the plan; `planner.plan` would search as well."""
    pod = slices.parse(name)
    given = config, network(config), validation.resolve_mesh(config, pod.devices), pod, TRAFFIC
    return planner.expected(*given, with_staleness)["step"]


def measure(args) -> list[Table]:
    wanted = [x for x in SLICES if args.only in x]
    return [steps(wanted), with_values(wanted), with_staleness(wanted)]


def sampling(phases: Mapping[str, float]) -> float:
    """Seconds of all phases in which the sampler works or waits."""
    return sum(phases[x] for x in ("prefill", "decode", "tail", "host"))


def with_values(names: Sequence[str]) -> Table:
    """DAPO beside VAPO, whose value model takes an update and a forward pass of its own."""
    parts = "old log-probs", "update", "values", "update of values"
    table = Table("slice", "method", "step", "sampling", *parts, "others", name="pod_steps_values")
    for name in (x for x in names if "v5p" in x):
        for method, config in (("DAPO", base(name)), ("VAPO", presets.vapo(base(name)))):
            found = expected(config, name)
            drawn, seconds = sampling(found["parts"]), [found["parts"].get(x, 0.0) for x in parts]
            cells = found["expected_s"], drawn, *seconds, found["expected_s"] - drawn - sum(seconds)
            table.row(name, method, *(f"{x:,.0f}" for x in cells))
    return table


def with_staleness(names: Sequence[str]) -> Table:
    heads = "minutes", "of S = 0", "slots busy", "sampling s", "of it prefill", "age", "oldest"
    heads = "slice", "S", "slots", *heads, "M tokens parked"
    table = Table(*heads, name="pod_staleness")
    for name in (x for x in OLDER if x in names):
        first, *_ = aged = expected(base(name), name, with_staleness=True)["staleness"]
        for a in aged:
            ages = f"{a['mean']:.2f}", a["oldest"], f"{a['parked'] / 1e6:.1f}"
            cells = f"{a['seconds'] / 60:.1f}", f"{a['seconds'] / first['seconds']:.2f}"
            drawn, prefill = sampling(a["phases"]), a["phases"]["prefill"]
            cells += f"{a['occupancy']:.0%}", f"{drawn:.0f}", f"{prefill:.0f}"
            told = ages if a["staleness"] else ("-",) * 3
            table.row(name, a["staleness"], f"{a['slots']:,}", *cells, *told)
    return table


def steps(names: Sequence[str]) -> Table:
    phases = "prefill", "decode", "tail", "old log-probs", "update", "evaluation"
    heads = *phases, "others", "minutes", "from", "to", "W8A8 at most, s"
    table, usual, known = Table("slice", "set", "constants", *heads), dict(VALUES), {}
    for name in names:
        pod, usually = slices.parse(name), schema.leaves(base(name))
        rows = [dict([*AS_WAS.items()][i:]) for i in range(len(AS_WAS)) if name == "v5p-256"]
        rows = [(x, BEFORE) for x in rows] + [(x, y) for x in OPTIONS for y in (BEFORE, {})]
        for fields, other in rows:
            config = changed(base(name), fields)
            VALUES.update(usual | other)
            shape, sizes = network(config), validation.resolve_mesh(config, pod.devices)
            assert not mistakes(config, shape, pod)
            s = Scene(config, shape, sizes, pod)
            if stale := config.rollout.staleness:
                s = s.replaced(sizes=s.sizes._replace(slots=min(SLOTS, s.sizes.slots)))
            how = config.dynamic_sampling.surplus, config.eval.with_rollout, s.last_row_tokens
            if (key := (s.sizes, stale, *how)) not in known:
                more = staleness.carrying(config, TRAFFIC, s, stale)[0] if stale else {}
                work = step.work(config, TRAFFIC, s, rollouts=more.get("rollouts"))
                known[key] = work._replace(**more)
            timer = step.timer(config, known[key], s)
            now, spread = timer(VALUES), step.spread(timer)
            others = now.seconds - sum(seconds := [now.phases[x] for x in phases])
            minutes = (x / 60 for x in (now.seconds, spread["low_s"], spread["high_s"]))
            said = " ".join(f"{k}={v}" for k, v in fields.items() if v != usually[k])
            cells = *(f"{x:,.0f}" for x in (*seconds, others)), *(f"{x:.1f}" for x in minutes)
            saved = f"{now.decoding['products'] / 2:.0f}"
            table.row(name, said, "of before" * bool(other), *cells, saved)
    VALUES.update(usual)
    return table
