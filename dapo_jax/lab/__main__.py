"""`python -m dapo_jax.lab STUDY [FLAG ...]`: runs one of the studies below by its name."""

import runpy
import sys

STUDIES = {
    "compare": ("compare", "runs side by side: tables, intervals and curves"),
    "sweep": ("sweep", "one config at several values and seeds, then compared"),
    "explain": ("explain", "a sample of a kept step, drawn again and taken apart"),
    "inspect": ("before", "before a run: gold answers by its reward, prompts, acceptance"),
    "diagnose": ("diagnose", "why a run goes wrong, with the figure that shows it"),
    "report": ("report", "a run as one HTML file"),
    "ladder": ("experiments.ladder", "from naive GRPO to DAPO, one technique a rung"),
}
USAGE = "usage: python -m dapo_jax.lab STUDY [FLAG ...]\n\n" + "\n".join(
    f"  {name:<12}{what}" for name, (_, what) in STUDIES.items()
)


def main() -> None:
    study = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if study in ("-h", "--help", "--helpshort"):
        print(USAGE)
    elif study not in STUDIES:
        sys.exit(f"error: no study {study!r}\n{USAGE}")
    else:
        runpy.run_module(f"dapo_jax.lab.{STUDIES[study][0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
