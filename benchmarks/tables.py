"""Results as pages: `python -m benchmarks tables` writes docs/results/ and README.md's table.

A result is `benchmarks/results/NAME.json` (harness.py writes it); TOPICS says which page shows it.
"""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness import RESULTS, ROOT

PAGES = ROOT / "docs" / "results"


class Topic(NamedTuple):
    title: str
    results: tuple[str, ...]  # in the page's order


TOPICS = {
    "learning": Topic(
        "What it learns, and how quickly",
        (
            "ladder", "quickstart", "quickstart_own_base", "quickstart_time",
            "quickstart_lora", "recipes", "recipes_losses", "curricula", "staleness_quickstart",
            "staleness_ladder", "vapo_ladder", "vapo", "vapo_chains", "credit", "credit_ladder",
            "turns", "turns_guess", "earlier",
        ),
    ),
    "mechanisms": Topic(
        "What each technique does", ("mechanisms", "mechanism_measures", "mechanism_bases")
    ),
    "rungs": Topic(
        "A task for telling the rungs apart",
        ("rungs", "rungs_recipes", "rungs_recipes_beside", "rungs_rates", "rungs_parts",
         "rungs_parts_arms", "rungs_parts_beside", "rungs_without", "rungs_without_arms",
         "rungs_without_beside", "score", "rungs_base", "rungs_levels"),
    ),
    "speed": Topic(
        "Speed on a CPU",
        (
            "race", "sampler", "update", "half_billion", "attention_kernel",
            "cache_dtype", "checkpoint_cost", "drafts_kept", "drafts",
        ),
    ),
    "gpu": Topic("On a GPU", ("gpu", "gpu_parts", "gpu_kernels", "gpu_memory", "gpu_bits")),
    "pods": Topic(
        "On pods, by the compiler and the cost model",
        (
            "pod_step", "pod_plan", "pod_traffic", "pod_plan_values", "pod_traffic_values",
            "pod_steps_values", "pod_staleness", "pod_plan_lora", "pod_traffic_lora",
        ),
    ),
    "diagnosis": Topic(
        "What `lab diagnose` finds",
        ("diagnose", "diagnose_more", "diagnose_first", "diagnose_second", "diagnose_runs",
         "diagnose_more_runs"),
    ),
    "safety": Topic("Interruptions and faults", ("faults", "start", "chaos")),
}  # fmt: skip


# README.md's table; {RESULT | ROW | COLUMN} stands for a cell.
HEADLINES = [
    (
        "rungs, after 640 updates",
        "**{rungs | +dynamic_sampling | right with room}**",
        "naive GRPO {rungs | grpo | right with room}, the rung below DAPO"
        " {rungs | +token_loss | right with room}",
    ),
    (
        "ladder, after 0.74 M tokens",
        "{ladder | +dynamic_sampling | accuracy after 0.74 M tokens}"
        " (earlier {earlier | ladder, 11-21: +dynamic_sampling | at equal tokens},"
        " {earlier | ladder, 11-23: +dynamic_sampling | at equal tokens})",
        "naive GRPO {ladder | grpo | accuracy after 0.74 M tokens}"
        " (earlier {earlier | ladder, 11-21: grpo | at equal tokens},"
        " {earlier | ladder, 11-23: grpo | at equal tokens}), the rung below DAPO"
        " {ladder | +token_loss | accuracy after 0.74 M tokens}",
    ),
    (
        "quickstart, after 480 updates",
        "**{quickstart | DAPO | at 480 updates}**",
        "naive GRPO {quickstart | naive GRPO | at 480 updates}",
    ),
    (
        "quickstart, after 0.20 M tokens",
        "{quickstart | DAPO | at 0.20 M tokens}"
        " (earlier {earlier | quickstart, 11-23: DAPO | at equal tokens})",
        "naive GRPO {quickstart | naive GRPO | at 0.20 M tokens}"
        " (earlier {earlier | quickstart, 11-23: naive GRPO | at equal tokens})",
    ),
]


def read(name: str) -> dict:
    """The result `name`. FileNotFoundError: there is none."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def section(result: dict) -> str:
    """One result as Markdown, from its heading on."""
    versions = ", ".join(f"{package} {v}" for package, v in result["versions"].items())
    commit = result["commit"] and f"commit {result['commit'][:7]}"
    made = [f"`{result['command']}`", result["date"], commit, result["machine"], versions]
    parts = [f"## {result['title']}", "; ".join(filter(None, made)) + ".", result["about"]]
    parts += [markdown(result["columns"], result["rows"])]
    parts += ["\n".join(f"- {note}" for note in result["notes"])]
    parts += [f"![{text}](../../benchmarks/figures/{file})" for file, text in result["figures"]]
    return "\n\n".join(filter(None, parts))


def page(topic: Topic) -> str:
    made = "<!-- Made by `python -m benchmarks tables` from benchmarks/results/. Edit those. -->"
    return "\n\n".join([made, f"# {topic.title}", *map(section, map(read, topic.results))]) + "\n"


def cell(name: str, row: str, column: str) -> str:
    """Returns a cell of the row that begins with `row`, without bold marks and leading zeros.
    StopIteration, ValueError: no such row, column."""
    result = read(name)
    cells = next(cells for cells in result["rows"] if cells[0] == row)
    text = cells[result["columns"].index(column)].replace("*", "")
    return re.sub(r"(?<!\d)0(?=\.\d)", "", text)


def readme_table() -> str:
    """The block of README.md from its mark `<!-- RESULTS: ... -->` to the end of the table."""
    fill = lambda text: re.sub(r"\{(.+?) \| (.+?) \| (.+?)\}", lambda m: cell(*m.groups()), text)
    rows = [tuple(map(fill, row)) for row in HEADLINES]
    first, ratio = (row[1:] for row in read("race")["rows"][:2])  # of ours, fixed, tunix, TRL
    seconds = [x.split(":")[0].replace("*", "") for x in first]
    times = [x.split()[0].replace("*", "") for x in ratio]
    peers = f"google-tunix {seconds[2]} ({times[2]}), TRL {seconds[3]} ({times[3]})"
    rows.append(("race, CPU-s to an accuracy of 0.8", f"**{seconds[0]}**", peers))
    head = ("held-out accuracy at T=1, five seeds (rungs 16); CPU-seconds, three", "DAPO here")
    mark = "<!-- RESULTS: rungs; ladder; quickstart; earlier; race -->\n"
    return mark + markdown((*head, "compared with"), rows)


def rendered() -> dict[pathlib.Path, str]:
    """File -> its text, of all that is made from the results."""
    readme = ROOT / "README.md"
    block = re.compile(r"<!-- RESULTS: .+? -->\n(?:\|.*\n)+")
    text = block.sub(lambda _: readme_table() + "\n", readme.read_text(encoding="utf-8"), count=1)
    pages = {PAGES / f"{name}.md": page(topic) for name, topic in TOPICS.items()}
    return pages | {readme: text}


def write() -> None:
    PAGES.mkdir(exist_ok=True)
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
