"""mechanisms.md, mechanisms.json and one figure per technique, from the effects and their runs."""

import pathlib
import platform
from collections.abc import Mapping

from dapo_jax.data import files
from dapo_jax.lab.experiments import stats, techniques
from dapo_jax.lab.experiments.effects import Contrast, Effect, Runs
from dapo_jax.lab.experiments.techniques import overlong_filter

LABELS = {overlong_filter.BASE: "before training"}
LABELS |= {name: arm.label for name, arm in techniques.ARMS.items()}


def write(out: pathlib.Path, found: Mapping[str, Effect], runs: Runs, seconds: float) -> str:
    """Write all files into `out`; returns the summary for the console."""
    for name in found:
        techniques.ALL[name].figure(runs).savefig(out / f"{name}.png", dpi=130)
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
        f"{len(runs.base_of)} RL seeds per arm over {len(per_base)} base seeds"
        f" ({', '.join(f'{n} from base {b}' for b, n in per_base.items())}); arms paired by seed."
        " Intervals: mean +- half of the 95% t-interval over seeds, with the differences between"
        " bases in it. **decides**: as experiments/techniques/ has it; the rest is as found.",
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
    return [LABELS.get(name, name) for name in (x.after_name, x.before_name)]


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
                lines.append(f"- {x.measure}, {LABELS.get(name, name)}: {numbers}")
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
