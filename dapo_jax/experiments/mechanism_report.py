"""mechanisms.md, mechanisms.json and a figure an effect, from `effects.Effect`s and their runs."""

import pathlib
import platform
from collections.abc import Mapping, Sequence

import matplotlib.figure
import numpy as np

from dapo_jax.data import files
from dapo_jax.experiments import bandit, bases, effects, snr, stats
from dapo_jax.experiments.effects import Contrast, Effect, Runs

NAMES = {  # of arms, for people
    "mean_sample": "sample mean",
    "mean_token": "token mean",
    "filter_off": "-1 for truncation",
    "filter_loss": "out of the loss",
    "filter_group": "out of loss and group",
    "filter_group_soft": "out of loss and group, soft ramp",
    "ramble_group": "out of loss and group",
    "ramble_group_soft": "out of loss and group, soft ramp",
    "dynamic_off": "off",
    "dynamic_on": "on",
    "base": "before training",
}


def write(out: pathlib.Path, found: Mapping[str, Effect], runs: Runs, seconds: float) -> str:
    """All files into `out`; returns the short of it, for the console."""
    for name in found:
        FIGURES[name](runs).savefig(out / f"{name}.png", dpi=130)
    files.write_json(out / "mechanisms.json", plain(found, runs))
    (out / "mechanisms.md").write_text(markdown(found, runs, seconds))
    lines = [f"{e.name:26s} {'shown' if e.shown else 'NOT shown'}" for e in found.values()]
    return "\n".join([*lines, f"tables and figures: {out}/mechanisms.md"])


def plain(found: Mapping[str, Effect], runs: Runs) -> dict:
    """Every number as JSON values."""
    return {
        "base_of_seed": {str(s): b for s, b in runs.base_of.items()},
        "effects": {
            name: {
                "claim": effect.claim,
                "shown": effect.shown,
                "contrasts": [
                    {
                        "measure": x.measure,
                        "decides": bool(x.expected),
                        "shown": x.shown if x.expected else None,
                        "disjoint": bool(x.disjoint),
                        "paired": _json(x.difference),
                        **{
                            side: {"arm": arm, "interval": _json(stats.interval(v)), "seeds": v}
                            for side, arm, v in (
                                ("after", x.after_name, x.after),
                                ("before", x.before_name, x.before),
                            )
                        },
                    }
                    for x in effect.contrasts
                ],
            }
            for name, effect in found.items()
        },
        "bases": {
            folder: result["levels"]
            for folder, result in runs.results.items()
            if folder.startswith("base_") and "levels" in result
        },
        "cpu_s": {folder: result["cpu_s"] for folder, result in runs.results.items()},
    }


def _json(x: stats.Interval) -> dict[str, float]:
    return {"mean": x.mean, "half": x.half}


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Effect], runs: Runs, seconds: float) -> str:
    per_base = {b: list(runs.base_of.values()).count(b) for b in runs.base_of.values()}
    cpu = sum(result["cpu_s"] for result in runs.results.values())
    lines = [
        "# Mechanism experiments",
        "",
        f"{len(runs.base_of)} RL seeds an arm over {len(per_base)} base seeds"
        f" ({', '.join(f'{n} from base {b}' for b, n in per_base.items())}); arms paired by seed."
        " Intervals: mean +- half of the 95% t-interval over seeds, with the differences between"
        " bases in it. **decides**: fixed before the runs (mechanisms.py); the rest is as found.",
        "",
        f"Runs: {cpu / 60:.1f} CPU-minutes in all, this call {seconds / 60:.1f} minutes"
        f" ({platform.machine()}, {platform.system()}).",
        "",
        "| effect | verdict | deciding contrasts, paired |",
        "|---|---|---|",
    ]
    for effect in found.values():
        deciding = "; ".join(
            f"{x.measure}, {' - '.join(_names(x))}: {signed(x.difference)}"
            for x in effect.contrasts
            if x.expected
        )
        lines.append(f"| {effect.name} | **{verdict(effect)}** | {deciding} |")
    for name, effect in found.items():
        lines += ["", f"## {effect.name}: {verdict(effect)}", "", effect.claim, ""]
        lines += ["| measure | A | B | A | B | A - B, paired | |", "|---|---|---|---|---|---|---|"]
        lines += [_row(x) for x in effect.contrasts]
        lines += ["", f"![{effect.name}]({name}.png)", ""]
        lines += _seeds(effect)
    lines += ["", "## Entropy: as found, nothing claimed", "", *_entropy(found)]
    lines += ["", "## Bases", "", *_bases(runs)]
    return "\n".join(lines) + "\n"


def verdict(effect: Effect) -> str:
    return "shown" if effect.shown else "not shown"


def signed(x: stats.Interval) -> str:
    return f"{x.mean:+.3f} +- {x.half:.3f}"


def _names(x: Contrast) -> list[str]:
    return [NAMES.get(name, name) for name in (x.after_name, x.before_name)]


def _row(x: Contrast) -> str:
    if x.expected:
        remark = f"decides: {'shown' if x.shown else 'not shown'}"
        remark += ", disjoint" if x.disjoint else ", intervals overlap"
    else:
        remark = "excludes 0" if stats.excludes_zero(x.difference) else ""
    after, before = _names(x)
    values = f"{stats.interval(x.after)} | {stats.interval(x.before)}"
    return f"| {x.measure} | {after} | {before} | {values} | {signed(x.difference)} | {remark} |"


def _seeds(effect: Effect) -> list[str]:
    lines = ["Seed by seed (what decides):", ""]
    for x in effect.contrasts:
        if x.expected:
            for name, values in ((x.after_name, x.after), (x.before_name, x.before)):
                numbers = " ".join(f"{v:.3f}" for v in values)
                lines.append(f"- {x.measure}, {NAMES.get(name, name)}: {numbers}")
    return lines


def _entropy(found: Mapping[str, Effect]) -> list[str]:
    """The paper has entropy stay up under Clip-Higher, and grow under the sample mean."""
    lines = [
        "At the paper's scale entropy stays higher with Clip-Higher and grows under the sample"
        " mean. Here:",
        "",
    ]
    for effect in found.values():
        for x in effect.contrasts:
            if x.measure.startswith("entropy"):
                remark = "" if stats.excludes_zero(x.difference) else " (interval holds 0)"
                pair = " - ".join(_names(x))
                lines.append(f"- {x.measure}, {pair}: {signed(x.difference)}{remark}")
    return lines


def _bases(runs: Runs) -> list[str]:
    """What the bases do before any RL: held-out accuracy and, where it has several, styles."""
    lines = [
        "| base | level | accuracy | length (tokens) | careful share | its accuracy | others' |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder, result in runs.results.items():
        for level, m in result.get("levels", {}).items() if folder.startswith("base_") else ():
            cells = (
                f"{m[k]:.2f}" if k in m else ""
                for k in (
                    "accuracy",
                    "length",
                    "careful_share",
                    "careful_accuracy",
                    "other_accuracy",
                )
            )
            lines.append(f"| {folder.removeprefix('base_')} | {level} | {' | '.join(cells)} |")
    return lines


# ------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------


def _axes(columns: int):
    figure = matplotlib.figure.Figure(figsize=(4.6 * columns, 3.4), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, columns))


def _band(ax, x, curves: Sequence[Sequence[float]], label: str) -> None:
    """Mean over seeds and its 95% interval."""
    points = [stats.interval(column) for column in zip(*curves, strict=True)]
    (line,) = ax.plot(x, [p.mean for p in points], label=label)
    low, high = [p.low for p in points], [p.high for p in points]
    ax.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _over_steps(ax, runs: Runs, chosen: Sequence[str], tag: str, unit: str) -> None:
    for arm in chosen:
        curves = runs.each(arm, lambda run: run["series"][tag])
        _band(ax, range(1, len(curves[0]) + 1), curves, NAMES[arm])
    ax.set(xlabel="rollout step", ylabel=unit)
    ax.legend()


def _token_mean(runs: Runs):
    figure, axes = _axes(3)
    pair = ("mean_sample", "mean_token")
    _over_steps(axes[0], runs, pair, effects.LENGTH, "mean response length (tokens)")
    _over_steps(axes[1], runs, pair, effects.CUT, "truncated responses (share)")
    _over_steps(axes[2], runs, pair, effects.ENTROPY, "entropy (nats a token)")
    return figure


def _by_level(ax, runs: Runs, chosen: Sequence[str], measure: str, unit: str) -> None:
    levels = bases.TEST_LEVELS
    for i, arm in enumerate(("base", *chosen)):
        if arm == "base":
            values = [effects.base_accuracy(runs, [k]) for k in levels]
        else:
            values = [runs.each(arm, effects.level(measure, k)) for k in levels]
        points = [stats.interval(v) for v in values]
        x = np.arange(len(levels)) + 0.12 * (i - len(chosen) / 2)
        ax.errorbar(
            x, [p.mean for p in points], [p.half for p in points],
            fmt="o", capsize=3, label=NAMES[arm],
        )  # fmt: skip
    ax.set(xlabel="operations in the problem, k", ylabel=unit, ylim=(0, 1))
    ax.set_xticks(range(len(levels)), [str(k) for k in levels])
    ax.legend(fontsize=8)


def _overlong_filter(runs: Runs):
    figure, axes = _axes(2)
    chosen = ("filter_off", "filter_loss", "filter_group")
    unit = f"held-out accuracy with {bases.ROOM} tokens (share)"
    _by_level(axes[0], runs, chosen, "accuracy", unit)
    _over_steps(axes[1], runs, chosen, effects.CUT, "truncated at 24 tokens (share)")
    return figure


def _soft_punishment(runs: Runs):
    figure, axes = _axes(3)
    ramble = ("ramble_group", "ramble_group_soft")
    _over_steps(axes[0], runs, ramble, effects.LENGTH, "mean response length (tokens)")
    _over_steps(axes[1], runs, ramble, effects.CUT, "truncated responses (share)")
    careful = ("filter_group", "filter_group_soft")
    _over_steps(axes[2], runs, careful, effects.CUT, "truncated responses (share)")
    for ax, base in zip(axes, ("rambling", "rambling", "careful"), strict=True):
        ax.set_title(f"base: {base}")
    return figure


def _dynamic_sampling(runs: Runs):
    figure, axes = _axes(2)
    for arm in ("dynamic_off", "dynamic_on"):
        each = [
            {int(s): e["heldout"]["accuracy"] for s, e in evaluations.items()}
            for evaluations in runs.each(arm, lambda run: run["evaluations"])
        ]
        steps = sorted(each[0])
        _band(axes[0], steps, [[e[s] for s in steps] for e in each], NAMES[arm])
    axes[0].set(xlabel="rollout step (8 updates each)", ylabel="held-out accuracy (share, T=1)")
    for i, way in enumerate(("off", "on")):
        points = [
            stats.interval(
                [runs.results[snr.folder(s)]["steps"][str(step)][way]["snr"] for s in runs.base_of]
            )
            for step in snr.STEPS
        ]
        x = np.arange(len(points)) + 0.35 * (i - 0.5)
        axes[1].bar(
            x, [p.mean for p in points], 0.35, yerr=[p.half for p in points], capsize=3, label=way
        )
    axes[1].set(
        xlabel="weights of the off-arm after rollout step",
        ylabel="gradient's |mean|² / variance",
    )
    axes[1].set_xticks(range(len(snr.STEPS)), [str(s) for s in snr.STEPS])
    for ax in axes:
        ax.legend(title="Dynamic Sampling")
    return figure  # fmt: skip


def _clip_higher(runs: Runs):
    figure, axes = _axes(3)
    for i, bound in enumerate(bandit.CLIP_HIGH):
        curves = [
            curve
            for base in sorted(set(runs.base_of.values()))
            for curve in runs.results[bandit.folder(bound, base)]["curves"].values()
        ]
        label = bandit.label(bound)
        _band(axes[0], range(bandit.ROLLOUTS + 1), [c["rare"] for c in curves], label)
        half = stats.interval([bandit.measures(c)[bandit.HALF] for c in curves])
        axes[1].errorbar([i], [half.mean], [half.half], fmt="o", capsize=4)
        _band(axes[2], range(bandit.ROLLOUTS + 1), [c["entropy"] for c in curves], label)
    axes[0].set(xlabel="rollout (16 updates each)", ylabel="probability of the rare right answer")
    axes[1].set(xlabel="eps_high", ylabel="rollouts to probability .5")
    ticks = [f"{b:g}" if b < 10 else "none" for b in bandit.CLIP_HIGH]
    axes[1].set_xticks(range(len(ticks)), ticks)
    axes[2].set(xlabel="rollout (16 updates each)", ylabel="entropy (nats)")
    axes[0].legend()
    return figure


FIGURES = {
    "token_mean": _token_mean,
    "overlong_filter": _overlong_filter,
    "soft_punishment": _soft_punishment,
    "dynamic_sampling": _dynamic_sampling,
    "clip_higher": _clip_higher,
}
