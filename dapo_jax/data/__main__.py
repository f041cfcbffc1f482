"""Command line: fetch published problem sets, and turn answers into integers.

    python -m dapo_jax.data prepare [NAME ...] [--out=DIR]     fetch, check, read
    python -m dapo_jax.data integers IN OUT.jsonl              a/b -> a + b and the like

`prepare` without a name lists the sets (`published.py`).
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dapo_jax.data import files, integers, problems, prompts, references
from dapo_jax.data.published import SETS, prepare


def transform(source: str, out: Path, say: Callable[[str], None]) -> None:
    """Write the problems of `source` whose answers are integers, or can be made into integers, to
    `out`, as JSON lines of problem, answer, original_answer and data_source. ValueError: there is
    no such problem."""
    how = problems.Reading(references.any_answer, template="{problem}")
    read, report = problems.read(source, "skip", how)
    lines, left, changed = [], [], 0
    for p in read:
        made = integers.asked(prompts.plain_text(p.messages), p.answer)
        if made is None:
            left.append(p)
            continue
        changed += made.answer != p.answer
        row = dict(problem=made.problem, answer=made.answer, original_answer=p.answer)
        lines.append(json.dumps(row | {"data_source": p.source}, ensure_ascii=False) + "\n")
    if not lines:
        raise ValueError(f"{source}: no answer is an integer or becomes one")
    files.write(out, "".join(lines))
    say(
        f"{out}: {len(lines)} problems, of {changed} the answer was transformed;"
        f" {len(left)} left out, {len(report.refused)} rows refused"
    )
    for p in left[:5]:
        say(f"    problem {p.id}: {p.answer[:80]}")


def main(argv: Sequence[str] | None = None) -> int:
    about = __doc__.split("\n")[0]
    cli = argparse.ArgumentParser(prog="python -m dapo_jax.data", description=about)
    commands = cli.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("prepare", help="fetch published sets and check their SHA-256")
    fetch.add_argument("names", nargs="*", metavar="NAME")
    fetch.add_argument("--out", default="data", help="folder")
    change = commands.add_parser("integers", help="answers into integers, as the paper does")
    change.add_argument("source", metavar="IN")
    change.add_argument("out", metavar="OUT.jsonl")
    args = cli.parse_args(argv)
    try:
        if args.command == "integers":
            transform(args.source, Path(args.out), print)
        for name in args.names if args.command == "prepare" else ():
            prepare(name, Path(args.out), print)
        if args.command == "prepare" and not args.names:
            print("\n".join(f"{name:<14} {s.note}" for name, s in SETS.items()))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
