"""The paper's ladder, run again: each technique added to naive GRPO, and each left out of DAPO.

    python -m dapo_jax.lab ladder --seeds=5 --out=runs/ladder

Makes one base model, trains from it every rung of `presets.RUNGS` once per seed, one process per
core, and writes OUT/table.md, OUT/table.json and figures. The same command resumes. `--first_seed`
is the seed of the base and of the first run. The setting is configs/ladder.py; `--config=FILE`
takes the rungs of another full-DAPO config, whose model is then the base, and `--jobs=1` trains in
this process, which may be one of several hosts that share OUT. Rungs that were trained elsewhere
(configs/ladder.py:+clip_higher@7B, each with --workdir=OUT/<rung>/seed_<seed>) are put together by
`--report`.

What is compared was fixed before seeds 0 to 4 ran (docs/results/learning.md). The setting was
chosen before, among about ten, on seeds 100 to 102 and with another window of the mean:

- A run's accuracy at equal UPDATES is the mean of its held-out accuracy (T=1, top-p 1) after 4/6,
  5/6 and 6/6 of `steps`. Its accuracy at equal TOKENS is the same mean at 4/6, 5/6 and 6/6 of a
  budget, the fewest tokens that any run which was not stopped early generated. Between evaluations
  the curve is a straight line; after a run that stopped early it stays where it was.
- Rungs without Dynamic Sampling draw fewer tokens per update; they train `--longer` times as many
  steps, and the additional ones count for the comparison at equal tokens only. So the budget is
  what GRPO draws in 2.5 times the compared steps, .74 M tokens here. The quickstart's comparison
  (benchmarks/arms.py) is at .20 M tokens, what GRPO draws in the compared steps alone, with
  lr 3e-4 in place of 5e-4 and 32 tokens per response in place of 20: there GRPO is ahead, here
  DAPO.
- Intervals are 95% t-intervals over seeds, of a mean or of paired differences (same seed, one
  switch). "Ahead" and "behind" mean a paired interval without zero; "disjoint" is said of the two
  unpaired intervals. All `--seeds` seeds count.

There is one base model: what another one would change is not in the intervals.

`--method=vapo` climbs VAPO's ladder (Table 1 of arXiv 2504.05118) instead, from PPO with a value
model up and with each technique left out: the tables, and bars beside the paper's. A step is then
one in which the policy learns, counted behind those of value pre-training, whose tokens count as
any others'; no rung has Dynamic Sampling, so none goes on for longer.
"""

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from dapo_jax import build, parallel
from dapo_jax.config import cli, presets, schema, validation
from dapo_jax.hosts import processes
from dapo_jax.lab.experiments import figures, pool, stats
from dapo_jax.lab.experiments.training import JOBS, SEEDS, run
from dapo_jax.log import metrics
from dapo_jax.model import qwen2

FIRST_SEED = flags.DEFINE_integer("first_seed", 0, "Seed of the base and of each rung's first run.")
BASE_SEED = flags.DEFINE_integer("base_seed", None, "Seed of the base, if not --first_seed.")
OUT = flags.DEFINE_string("out", "runs/ladder", "Directory of the runs, the table and the figures.")
METHOD = flags.DEFINE_enum("method", "dapo", list(presets.LADDERS), "Whose ladder.")
ONLY = flags.DEFINE_list("only", None, "Rungs to run; all, if not given.")
flags.DEFINE_alias("rungs", "only")
STEPS = flags.DEFINE_integer(
    "steps", 0, "Rollout steps compared at equal updates; 0 = the config's."
)
LONGER = flags.DEFINE_float(
    "longer", 2.5, "Steps of rungs without Dynamic Sampling, as a multiple."
)
REPORT = flags.DEFINE_bool("report", False, "Run nothing: put together the runs that OUT holds.")

DAPO = presets.LADDERS["dapo"]
PAPER, FULL = DAPO.paper, DAPO.cumulative[-1]
WINDOW = np.array([4, 5, 6]) / 6


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------


def tasks(
    config, rungs: Sequence[str], seeds: Sequence[int], base_seed: int, longer: float,
    of: presets.Ladder = DAPO,
) -> list[pool.Task]:  # fmt: skip
    """The base model, where `config` has a warm-up that makes one, and every rung once per seed."""
    out, after = [], ()
    if validation.warm_up(config):
        fields = schema.leaves(config) | {"seed": base_seed, "steps": 0}
        out, after = [pool.Task("base", run, (fields,))], ("base",)
    for seed in seeds:
        for name in rungs:
            r = presets.rung(config, name, of)
            r.seed = seed
            r.steps = pretrained(r) + steps_of(r, longer, policy_steps(config))
            out.append(pool.Task(folder(name, seed), run, (schema.leaves(r), *after), after))
    return out


def pretrained(config) -> int:
    """First rollout steps, in which only the value model learns."""
    return config.critic.pretrain_steps if config.critic.enabled else 0


def policy_steps(config) -> int:
    """Rollout steps in which the policy learns."""
    return config.steps - pretrained(config)


def steps_of(rung, longer: float, steps: int) -> int:
    """Rollout steps in which the policy of a rung learns. steps: those compared."""
    alike = rung.dynamic_sampling.enabled or rung.critic.enabled
    return steps if alike else round(steps * longer)


def folder(rung: str, seed: int) -> str:
    return f"{rung}/seed_{seed}"


# ------------------------------------------------------------------------------------------------
# What they show
# ------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """Rung -> one value per seed [seeds]; only rungs all of whose seeds are there."""

    updates: dict[str, np.ndarray]  # accuracy at equal updates
    tokens: dict[str, np.ndarray]  # accuracy at equal tokens
    beside: dict[str, dict[str, np.ndarray]]  # other measures -> rung -> values
    budget: float  # generated tokens at which tokens are equal
    early: list[str]  # runs that stopped before their last step
    of: presets.Ladder = DAPO


# Means over the last third of the compared steps; tokens: all up to the last of them.
BESIDE = {
    "M tokens": "spent/tokens",
    "groups accepted": "sampling/accept_frac",
    "entropy, nats": "policy/entropy",
    "length, tokens": "response/length_mean",
    "truncated": "response/truncated_frac",
    "explained": "critic/explained_variance",  # a column of ladders with value models
}


def read(
    out: pathlib.Path, rungs: Mapping[str, int], seeds: Sequence[int]
) -> dict[str, list[list[dict]]]:
    """Rung -> seed -> records of its run; rungs that lack a seed are left out. rungs: name -> steps
    of value pre-training, which are not counted: of them the first record alone is kept."""

    def records(name: str, seed: int) -> list[dict]:
        found, n = metrics.read(out / folder(name, seed) / "metrics.jsonl"), rungs[name]
        kept = [r for r in found if not 0 < r["step"] < n]
        return [r | {"step": max(r["step"] - n, 0)} for r in kept]

    found = {name: [records(name, s) for s in seeds] for name in rungs}
    return {name: runs for name, runs in found.items() if all(runs)}


def accuracy(records: Sequence[dict], tag: str, x: str, end: float) -> float:
    """Mean of the curve of `tag` over `x` at 4/6, 5/6 and 6/6 of `end`."""
    at, values = figures.curve(records, tag, x)
    return float(np.interp(end * WINDOW, at, values).mean())


def summarize(
    runs: Mapping[str, Sequence[Sequence[dict]]],
    tag: str,
    steps: int,
    wanted: Mapping[str, int],
    first_seed: int = 0,
    of: presets.Ladder = DAPO,
) -> Summary:
    """steps: rollout steps at equal updates; wanted: rung -> steps it was to train."""

    def each(value) -> dict[str, np.ndarray]:
        return {name: np.array([value(r) for r in found]) for name, found in runs.items()}

    def beside(tag):
        if tag == "spent/tokens":
            return each(lambda r: np.interp(steps, *figures.curve(r, tag, "step")) / 1e6)
        late = lambda r: [x[tag] for x in r if steps * 2 / 3 < x["step"] <= steps and tag in x]
        return each(lambda r: np.mean(late(r) or np.nan))

    measures = {name: beside(tag) for name, tag in BESIDE.items()}
    last = {(n, s): r[-1] for n, found in runs.items() for s, r in enumerate(found, first_seed)}
    early = [folder(*run) for run, r in last.items() if r["step"] < wanted[run[0]]]
    spent = {folder(*run): r.get("spent/tokens", 0) for run, r in last.items()}
    budget = min((n for run, n in spent.items() if run not in early), default=min(spent.values()))
    return Summary(
        each(lambda r: accuracy(r, tag, "step", steps)),
        each(lambda r: accuracy(r, tag, "spent/tokens", budget)),
        {name: of for name, of in measures.items() if not np.isnan([*of.values()]).all()},
        budget,
        early,
        of,
    )


def verdict(after: str, before: str, values: Mapping[str, np.ndarray]) -> str:
    """One sentence on two rungs, from the numbers."""
    a, b = (stats.interval(values[name]) for name in (after, before))
    difference = stats.paired(values[after], values[before])
    numbers = f"{a} against {b}, paired difference {signed(difference)}"
    if np.isnan(difference.half):
        return f"{after} and {before}: {numbers}; one seed tells nothing of seed noise"
    if not stats.excludes_zero(difference):
        return f"{after} and {before} are not told apart: {numbers}"
    word = "ahead of" if difference.mean > 0 else "behind"
    kind = "disjoint" if stats.apart(a, b) else "overlapping"
    return f"{after} is {word} {before}: {numbers}, {kind} 95% intervals"


def signed(x: stats.Interval) -> str:
    return f"{'+' if x.mean >= 0 else ''}{x}"


def pairs(rungs: Sequence[str], of: presets.Ladder = DAPO) -> list[tuple[str, str]]:
    """(after, before) of all that is compared: the whole, each step, each technique left out."""
    ladder = of.cumulative
    told = [(ladder[-1], ladder[0]), *zip(ladder[1:], ladder, strict=False)]
    told += [(ladder[-1], name) for name in of.leave_one_out[:-1]]
    return [(a, b) for a, b in told if a in rungs and b in rungs]


# ------------------------------------------------------------------------------------------------
# Table
# ------------------------------------------------------------------------------------------------


def markdown(s: Summary, steps: int, updates: int, scale: str, seeds: int) -> str:
    tokens = f"{s.budget / 1e6:.2f} M"
    parts = [
        f"# The ladder, {seeds} seed{'s' * (seeds > 1)}",
        f"Ours: {scale}. The paper's: Qwen2.5-32B, AIME 2024, avg@32. Another model, task and"
        " scale: the columns stand side by side for the order of the techniques, not for their"
        " sizes.",
        "Mean and 95% t-interval over seeds; a change is paired by seed, against the rung above it"
        f" or, left out, against {s.of.full} ({s.of.cumulative[-1]}). How:"
        " dapo_jax/lab/experiments/ladder.py.",
        "\n".join(table(s, steps, updates, tokens)),
        f"At equal updates ({updates:,}):",
        "\n".join(f"- {verdict(a, b, s.updates)}" for a, b in pairs(list(s.updates), s.of)),
        f"At equal tokens ({tokens}):",
        "\n".join(f"- {verdict(a, b, s.tokens)}" for a, b in pairs(list(s.tokens), s.of)),
    ]
    if s.early:
        parts.append(f"Stopped before their last step: {', '.join(s.early)}.")
    return "\n\n".join(p for p in parts if p) + "\n"


def table(s: Summary, steps: int, updates: int, tokens: str) -> list[str]:
    columns = [
        "rung", "paper", f"accuracy after {updates:,} updates", "change",
        f"accuracy after {tokens} tokens", "change", *s.beside,
    ]  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    ladder = s.of.cumulative
    below = dict(zip(ladder[1:], ladder, strict=False))
    below |= dict.fromkeys(s.of.leave_one_out, ladder[-1])
    for name in s.updates:
        row = [name, str(s.of.paper.get(name, ""))]
        for values in (s.updates, s.tokens):
            other = below.get(name)
            change = signed(stats.paired(values[name], values[other])) if other in values else ""
            row += [str(stats.interval(values[name])), change]
        row += [f"{of[name].mean():.3g}" for of in s.beside.values()]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def as_json(s: Summary, steps: int, scale: str) -> dict:
    """Everything in the table, and each seed's values."""

    def plain(x: stats.Interval) -> dict:
        return {"mean": x.mean, "half": None if np.isnan(x.half) else x.half}

    def both(values):
        return {
            name: plain(stats.interval(v)) | {"seeds": v.tolist()} for name, v in values.items()
        }

    def changes(values):
        return [
            {"after": a, "before": b, **plain(stats.paired(values[a], values[b]))}
            for a, b in pairs(list(values), s.of)
        ]

    beside = {
        what: {name: None if np.isnan(v.mean()) else v.mean() for name, v in of.items()}
        for what, of in s.beside.items()
    }
    return {
        "scale": scale,
        "paper": dict(s.of.paper),
        "steps": steps,
        "budget_tokens": s.budget,
        "stopped_early": s.early,
        "equal_updates": both(s.updates),
        "equal_tokens": both(s.tokens),
        "changes_equal_updates": changes(s.updates),
        "changes_equal_tokens": changes(s.tokens),
        "beside": beside,
    }


def report(
    config, out: pathlib.Path, rungs: Sequence[str], seeds: Sequence[int], longer: float,
    of: presets.Ladder = DAPO,
) -> str:  # fmt: skip
    """Write table.md, table.json and figures (one, of VAPO's ladder) of the runs in `out`; returns
    the table. Raises ValueError where no rung is complete."""
    configs = {name: presets.rung(config, name, of) for name in rungs}
    runs = read(out, {name: pretrained(c) for name, c in configs.items()}, seeds)
    if not runs:
        all_of = f"all of seeds {seeds[0]} to {seeds[-1]}"
        raise ValueError(f"{out}: no rung of {', '.join(rungs)} has {all_of}")
    tag = evaluation_tag(config)
    steps = policy_steps(config)
    wanted = {name: steps_of(configs[name], longer, steps) for name in runs}
    summary = summarize(runs, tag, steps, wanted, seeds[0], of)
    updates = steps * config.optim.minibatches
    text = markdown(summary, steps, updates, describe(config), len(seeds))
    (out / "table.md").write_text(text)
    (out / "table.json").write_text(json.dumps(as_json(summary, steps, describe(config)), indent=2))
    if of is DAPO:
        figures.draw(runs, summary.updates, summary.tokens, PAPER, tag, steps, out)
    else:
        colors = dict.fromkeys(of.cumulative, "#7b9acc") | {of.cumulative[-1]: "#c1121f"}
        bars = figures.ladder(summary.updates, summary.tokens, of.paper, colors)
        bars.savefig(out / "ladder.png", dpi=130)
    return text


def evaluation_tag(config) -> str:
    sets = build.named_files(config.eval.files) or {"heldout": ""}
    return f"eval/{next(iter(sets))}/avg@k"


def describe(config) -> str:
    """The scale of a run, in words."""
    model = (
        config.model.path
        or f"a Qwen2.5 of {qwen2.param_count(qwen2.shape_from_config(config)):,} parameters"
    )
    data = config.data.train or "the embedded chained arithmetic"
    return f"{model} on {data}, avg@{config.eval.k}"


def start():
    """The config whose rungs are run: that of --config or configs/ladder.py, with the overrides."""
    if cli.FILE.present:
        return cli.CONFIG.value
    config = presets.vapo_ladder_task() if METHOD.value == "vapo" else presets.ladder_task()
    cli.apply(config, cli.CONFIG.overrides)
    return config


def main() -> None:
    config, out = start(), pathlib.Path(OUT.value)
    of = presets.LADDERS[METHOD.value]
    if STEPS.value:
        config.steps = STEPS.value + pretrained(config)
    same = {of.leave_one_out[-1]: of.cumulative[-2]}
    rungs = list(dict.fromkeys(same.get(n, n) for n in ONLY.value or of.rungs))
    if LONGER.value < 1:
        raise ValueError(f"--longer: {LONGER.value} is less than once")
    first = FIRST_SEED.value
    seeds, base = range(first, first + (SEEDS.value or 5)), BASE_SEED.value
    todo = tasks(config, rungs, seeds, first if base is None else base, LONGER.value, of)
    with contextlib.ExitStack() as after:
        if JOBS.value == 1 and not REPORT.value:
            after.enter_context(processes.joined())
        if not REPORT.value:
            out.mkdir(parents=True, exist_ok=True)
            try:
                pool.run_all(todo, out, JOBS.value, "ladder")
            except RuntimeError as error:
                cli.fail(str(error))
        if JOBS.value != 1 or REPORT.value or parallel.is_main_process():
            print(report(config, out, rungs, seeds, LONGER.value, of))


if __name__ == "__main__":
    cli.run(main)
