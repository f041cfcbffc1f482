"""The paper's ladder, run again: each technique added to naive GRPO, and each left out of DAPO.

    python -m dapo_jax.lab ladder --seeds=5 --out=runs/ladder

Makes one base model, trains from it every rung of `presets.LADDERS` once per seed, one process per
core, and writes OUT/table.md, OUT/table.json and figures. The same command resumes. The setting is
configs/ladder.py; `--config=FILE` takes the rungs of another full-DAPO config. `--report` puts
together rungs that were trained elsewhere, each with --workdir=OUT/<rung>/seed_<seed>.

What is compared was fixed before seeds 0 to 4 ran (docs/results/learning.md):

- A run's accuracy at equal UPDATES is the mean of its held-out accuracy (T=1, top-p 1) after 4/6,
  5/6 and 6/6 of `steps`. Its accuracy at equal TOKENS is the same mean at 4/6, 5/6 and 6/6 of a
  budget, the fewest tokens that any run which was not stopped early generated. Between evaluations
  the curve is a straight line; after a run that stopped early it stays where it was.
- Rungs without Dynamic Sampling draw fewer tokens per update; they train `LONGER` times as many
  steps, and the additional ones count for the comparison at equal tokens only.
- Intervals are 95% t-intervals over seeds, of a mean or of paired differences (same seed, one
  switch). "Ahead" and "behind" mean a paired t-test at 5%, corrected by Holm for all comparisons of
  the ladder at that place. What another base model would change is not in them.

`--method=vapo` climbs VAPO's ladder (Table 1 of arXiv 2504.05118) instead. Steps are counted behind
those of value pre-training, whose tokens count; no rung goes on for longer.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from dapo_jax import build
from dapo_jax.config import cli, presets, schema, validation
from dapo_jax.data import files
from dapo_jax.lab.experiments import figures, pool, stats, training
from dapo_jax.lab.experiments.training import SEEDS, run
from dapo_jax.log import metrics
from dapo_jax.model import qwen2

OUT = flags.DEFINE_string("out", "runs/ladder", "Directory of the runs, the table and the figures.")
METHOD = flags.DEFINE_enum("method", "dapo", list(presets.LADDERS), "Whose ladder.")
ONLY = flags.DEFINE_list("only", None, "Rungs to run; all, if not given.")
REPORT = flags.DEFINE_bool("report", False, "Run nothing: put together the runs that OUT holds.")

DAPO = presets.LADDERS["dapo"]
WINDOW = np.array([4, 5, 6]) / 6
LONGER = 2.5  # times the steps, of rungs without Dynamic Sampling


def tasks(
    config, rungs: Sequence[str], seeds: Sequence[int], of: presets.Ladder = DAPO
) -> list[pool.Task]:
    """The base model, where `config` has a warm-up that makes one, and every rung once per seed."""
    out, after = [], ()
    if validation.warm_up(config):
        fields = schema.leaves(config) | {"seed": 0, "steps": 0}
        out, after = [pool.Task("base", run, (fields,))], ("base",)
    for seed in seeds:
        for name in rungs:
            r = presets.rung(config, name, of)
            steps = pretrained(r) + steps_of(r, policy_steps(config))
            fields = schema.leaves(r) | {"seed": seed, "steps": steps}
            out.append(pool.Task(folder(name, seed), run, (fields, *after), after))
    return out


def pretrained(config) -> int:
    """First rollout steps, in which only the value model learns."""
    return config.critic.pretrain_steps if config.critic.enabled else 0


def policy_steps(config) -> int:
    """Rollout steps in which the policy learns."""
    return config.steps - pretrained(config)


def steps_of(rung, steps: int) -> int:
    """Rollout steps in which the policy of a rung learns. steps: those compared."""
    alike = rung.dynamic_sampling.enabled or rung.critic.enabled
    return steps if alike else round(steps * LONGER)


def folder(rung: str, seed: int) -> str:
    return f"{rung}/seed_{seed}"


# Means over the last third of the compared steps; tokens: all up to the last of them.
BESIDE = {
    "M tokens": "spent/tokens",
    "groups accepted": "sampling/accept_frac",
    "entropy, nats": "policy/entropy",
    "length, tokens": "response/length_mean",
    "truncated": "response/truncated_frac",
    "explained": "critic/explained_variance",  # a column of ladders with value models
}
Records = Sequence[Mapping[str, Any]]  # of one run's metrics.jsonl
Values = Mapping[str, Sequence[float]]  # rung -> one value per seed


def accuracy(records: Records, tag: str, x: str, end: float) -> float:
    """Mean of the curve of `tag` over `x` at 4/6, 5/6 and 6/6 of `end`."""
    at, values = figures.curve(records, tag, x)
    return float(np.interp(end * WINDOW, at, values).mean())


def summarize(
    runs: Mapping[str, Sequence[Records]], tag: str, steps: int, wanted: Mapping[str, int],
    seeds: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """What table.json holds: every number of the table, and each seed's. tag: held-out accuracy;
    steps: rollout steps at equal updates; wanted: rung -> steps it was to train."""
    last = {(n, s): r[-1] for n in runs for s, r in zip(seeds, runs[n], strict=True)}
    early = [run for run, r in last.items() if r["step"] < wanted[run[0]]]
    spent = {run: r.get("spent/tokens", 0) for run, r in last.items()}
    budget = min([n for run, n in spent.items() if run not in early] or spent.values())

    def at(x: str, end: float) -> Values:
        return {n: [accuracy(r, tag, x, end) for r in found] for n, found in runs.items()}

    def beside(records: Records, tag: str) -> float:
        """NaN where the run has not logged it."""
        if tag == "spent/tokens":
            return np.interp(steps, *figures.curve(records, tag, "step")) / 1e6
        late = [r[tag] for r in records if steps * 2 / 3 < r["step"] <= steps and tag in r]
        return np.mean(late or np.nan)

    means = {
        what: {n: metrics.number(np.mean([beside(r, tag) for r in rs])) for n, rs in runs.items()}
        for what, tag in BESIDE.items()
    }
    return {
        "steps": steps,
        "budget_tokens": budget,
        "stopped_early": [folder(*run) for run in early],
        "equal_updates": at("step", steps),
        "equal_tokens": at("spent/tokens", budget),
        "beside": {what: xs for what, xs in means.items() if set(xs.values()) != {None}},
    }


def verdict(after: str, before: str, values: Values, differ: bool) -> str:
    """One sentence on two rungs, from the numbers. differ: see `stats.differ`."""
    a, b = (stats.interval(values[name]) for name in (after, before))
    difference = stats.paired(values[after], values[before])
    numbers = f"{a} against {b}, paired difference {difference:+.3f}"
    if np.isnan(difference.half):
        return f"{after} and {before}: {numbers}; one seed tells nothing of seed noise"
    if not differ:
        return f"{after} and {before} are not told apart: {numbers}"
    word = "ahead of" if difference.mean > 0 else "behind"
    kind = "disjoint" if stats.apart(a, b) else "overlapping"
    return f"{after} is {word} {before}: {numbers}, {kind} 95% intervals"


def pairs(rungs: Sequence[str], of: presets.Ladder = DAPO) -> list[tuple[str, str]]:
    """(after, before) of all that is compared: the whole, each step, each technique left out."""
    ladder = of.cumulative
    told = [(ladder[-1], ladder[0]), *zip(ladder[1:], ladder, strict=False)]
    told += [(ladder[-1], name) for name in of.leave_one_out[:-1]]
    return [(a, b) for a, b in told if a in rungs and b in rungs]


def places(s: Mapping[str, Any], minibatches: int) -> dict[str, Values]:
    """The two places where rungs are compared, in words -> accuracies there."""
    return {
        f"{s['steps'] * minibatches:,} updates": s["equal_updates"],
        f"{s['budget_tokens'] / 1e6:.2f} M tokens": s["equal_tokens"],
    }


def verdicts(values: Values, of: presets.Ladder) -> list[str]:
    """A sentence on each of `pairs`."""
    compared = pairs(list(values), of)
    sure = stats.differ([np.subtract(values[a], values[b]) for a, b in compared])
    return [verdict(a, b, values, yes) for (a, b), yes in zip(compared, sure, strict=True)]


def table(s: Mapping[str, Any], minibatches: int, of: presets.Ladder) -> list[list[str]]:
    """The cells of a `summarize`: names of the columns, and a row a rung."""
    equal = places(s, minibatches)
    below = dict(zip(of.cumulative[1:], of.cumulative, strict=False))
    below |= dict.fromkeys(of.leave_one_out, of.cumulative[-1])
    heads = [head for place in equal for head in (f"accuracy after {place}", "change")]
    rows = [["rung", "paper", *heads, *s["beside"]]]
    for name in s["equal_updates"]:
        cells = [name, str(of.paper.get(name, ""))]
        for values in equal.values():
            other = values.get(below.get(name, ""))
            change = "" if other is None else f"{stats.paired(values[name], other):+.3f}"
            cells += [str(stats.interval(values[name])), change]
        means = (beside[name] for beside in s["beside"].values())
        rows.append([*cells, *("nan" if x is None else f"{x:.3g}" for x in means)])
    return rows


def markdown(s: Mapping[str, Any], scale: str, minibatches: int, of: presets.Ladder = DAPO) -> str:
    """A `summarize` for people. scale: of the runs, in words."""
    rows = table(s, minibatches, of)
    seeds = len(next(iter(s["equal_updates"].values())))
    head, *lines = [f"| {' | '.join(row)} |" for row in rows]
    parts = [
        f"# The ladder, {seeds} seed{'s' * (seeds > 1)}",
        f"Ours: {scale}. The paper's: Qwen2.5-32B, AIME 2024, avg@32. Another model, task and"
        " scale: the columns stand side by side for the order of the techniques, not for their"
        " sizes.",
        "Mean and 95% t-interval over seeds; a change is paired by seed, against the rung above it"
        f" or, left out, against {of.full} ({of.cumulative[-1]}). How:"
        " dapo_jax/lab/experiments/ladder.py.",
        "\n".join([head, "|" + "---|" * len(rows[0]), *lines]),
    ]
    for place, values in places(s, minibatches).items():
        if said := [f"- {sentence}" for sentence in verdicts(values, of)]:
            parts += [f"After {place}:", "\n".join(said)]
    if s["stopped_early"]:
        parts.append(f"Stopped before their last step: {', '.join(s['stopped_early'])}.")
    return "\n\n".join(parts) + "\n"


def held_out(config) -> str:
    """The tag of the accuracy that rungs are compared by."""
    sets = build.named_files(config.eval.files) or {"heldout": ""}
    return f"eval/{next(iter(sets))}/avg@k"


def compare(
    config, records_of: Callable[[str], Records], rungs: Sequence[str], seeds: Sequence[int],
    of: presets.Ladder = DAPO,
) -> tuple[dict[str, list[Records]], dict[str, Any]]:  # fmt: skip
    """(rung -> records of each seed's run, their `summarize`); rungs that lack a seed are left out.
    Steps are counted behind those of value pre-training, of which the first record alone is kept.
    records_of: those of a `folder`. ValueError: no rung is complete."""
    configs = {name: presets.rung(config, name, of) for name in rungs}
    found = {name: [records_of(folder(name, s)) for s in seeds] for name in rungs}
    runs, steps = {}, policy_steps(config)
    for name in (name for name in rungs if all(found[name])):
        n = pretrained(configs[name])
        runs[name] = [
            [r | {"step": max(r["step"] - n, 0)} for r in run if not 0 < r["step"] < n]
            for run in found[name]
        ]
    if not runs:
        raise ValueError(
            f"no rung of {', '.join(rungs)} has all of seeds {seeds[0]} to {seeds[-1]}"
        )
    wanted = {name: steps_of(configs[name], steps) for name in runs}
    return runs, summarize(runs, held_out(config), steps, wanted, seeds)


def report(
    config, out: pathlib.Path, rungs: Sequence[str], seeds: Sequence[int], of: presets.Ladder = DAPO
) -> str:
    """Write table.md, table.json and figures (one, of VAPO's ladder) of the runs in `out`; returns
    the table. ValueError: no rung is complete."""
    records_of = lambda run: metrics.read(out / run / "metrics.jsonl")
    runs, found = compare(config, records_of, rungs, seeds, of)
    parameters = qwen2.param_count(qwen2.shape_from_config(config))
    model = config.model.path or f"a Qwen2.5 of {parameters:,} parameters"
    data = config.data.train or "the embedded chained arithmetic"
    scale = f"{model} on {data}, avg@{config.eval.k}"
    text = markdown(found, scale, config.optim.minibatches, of)
    (out / "table.md").write_text(text)
    files.write_json(out / "table.json", {"scale": scale} | found)
    drawn = {"ladder": figures.bars(places(found, config.optim.minibatches), of)}
    if of is DAPO:
        drawn |= figures.curves(runs, held_out(config), policy_steps(config))
    for name, figure in drawn.items():
        figure.savefig(out / f"{name}.png", dpi=130)
    return text


def main() -> None:
    of, out = presets.LADDERS[METHOD.value], pathlib.Path(OUT.value)
    if cli.FILE.present:
        config = cli.CONFIG.value
    else:  # configs/ladder.py
        config = presets.ladder_task() if of is DAPO else presets.vapo_ladder_task()
        cli.apply(config, cli.CONFIG.overrides)
    same = {of.leave_one_out[-1]: of.cumulative[-2]}
    rungs = list(dict.fromkeys(same.get(n, n) for n in ONLY.value or of.rungs))
    seeds = range(SEEDS.value or 5)
    if not REPORT.value:
        training.run_all(tasks(config, rungs, seeds, of), out, "ladder")
    print(report(config, out, rungs, seeds, of))


if __name__ == "__main__":
    cli.run(main)
