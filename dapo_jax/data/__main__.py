"""Command line: fetch published problem sets, turn answers into integers, look at problem files.

    python -m dapo_jax.data prepare [NAME ...] [--out=DIR]     fetch, check, read
    python -m dapo_jax.data integers IN OUT.jsonl              a/b -> a + b and the like
    python -m dapo_jax.data inspect FILE... [--tokenizer=DIR]  counts, lengths, the first problems

`prepare` without a name lists the sets (`published.py`).
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np

from dapo_jax import bars, gate
from dapo_jax.data import files, integers, problems, prompts, published, references, rows, tokenizer


def transform(source: str, out: Path) -> Iterator[str]:
    """Write the problems of `source` whose answers are integers, or can be made into integers, to
    `out`, as JSON lines of problem, answer, original_answer and data_source. Yields what became of
    them. ValueError: there is no such problem; another kind of file is meant."""
    if out.suffix != ".jsonl" and out.name.endswith(rows.SUFFIXES):
        raise ValueError(f"{out}: what is written are JSON lines; call it .jsonl")
    how = problems.Reading(references.any_answer, template="{problem}")
    read, report = problems.read(source, "skip", how)
    lines, left, changed = [], [], 0
    for p in read:
        made = integers.asked(prompts.plain_text(p.messages[-1:]), p.answer)  # no system message
        if made is None:
            left.append(p)
            continue
        problem, answer = made
        changed += answer != p.answer
        row = dict(problem=problem, answer=answer, original_answer=p.answer, data_source=p.source)
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    if not lines:
        raise ValueError(f"{source}: no answer is an integer or becomes one")
    files.write(out, "".join(lines))
    left_out = f"{len(left)} left out, {len(report.refused)} rows refused"
    yield f"{out}: {len(lines)} problems, of {changed} the answer was transformed; {left_out}"
    yield from (f"    problem {p.id}: {p.answer[:80]}" for p in left[:5])


def inspect(
    paths: Sequence[str], vocabulary: str, chat_template: str, how: problems.Reading
) -> Iterator[str]:
    """What problem files hold. Lengths are in tokens, without a tokenizer in characters."""
    if chat_template and not vocabulary:
        raise ValueError("--chat_template needs --tokenizer")
    tok = tokenizer.load(vocabulary, chat_template) if vocabulary else None
    read, report = problems.read(paths, "skip", how)
    if how.columns and not report.mapped:
        raise ValueError(f"--columns: no row of {paths[0]} has all of these columns")
    chat = bool(tok and tok.template)
    render = tok.render_chat if chat else prompts.plain_text
    texts = [render(p.messages) for p in read]
    shown = bars.bar(texts, desc="encoding", **rows.BAR)
    lengths = [len(tok.encode(text) if tok else text) for text in shown]
    integers = [p.answer for p in read if re.fullmatch(r"-?[0-9]+", p.answer)]
    span = [f"{f(integers, key=Decimal)}" for f in (min, max) if integers]

    yield f"rows        {report.rows:>9,}"
    yield f"unique      {report.unique:>9,}   distinct prompts"
    yield f"duplicates  {report.duplicates:>9,}   rows that repeat an earlier prompt"
    yield f"conflicts   {len(report.conflicts):>9,}   prompts with different answers, dropped"
    yield from (f"    {conflict}" for conflict in report.conflicts[:3])
    kind = "an integer" if how.takes is references.integer else "an"
    yield f"refused     {len(report.refused):>9,}   rows without a prompt or {kind} answer"
    yield from (f"    {refusal}" for refusal in report.refused[:5])
    yield f"kept        {len(read):>9,}   problems"
    yield f"sources     {', '.join(sorted({p.source for p in read}))}"
    others = len(read) - len(integers)
    said = [" .. ".join(span)] * bool(span) + [f"{others:,} that are no integers"] * bool(others)
    yield f"answers     {', and '.join(said)}"
    yield f"{'tokens' if tok else 'characters':<11} " + "  ".join(
        f"p{q} {np.percentile(lengths, q, method='higher')}" for q in (0, 50, 90, 99, 100)
    )
    for p, text in zip(read[:3], texts[:3], strict=True):
        form = "in the chat template" if chat else "as plain text"
        yield f"\n--- problem {p.id}, answer {p.answer}, {form}\n{text}"


def run(args: argparse.Namespace) -> Iterator[str]:
    """The lines that a command prints."""
    if args.command == "integers":
        yield from transform(args.source, Path(args.out))
    elif args.command == "inspect":
        takes = references.any_answer if args.any else references.integer
        template = prompts.template(args.template)
        how = problems.Reading(takes, problems.columns(args.columns), template)
        yield from inspect(args.files, args.tokenizer, args.chat_template, how)
    elif args.names:
        for name in args.names:
            yield from published.prepare(name, Path(args.out))
    else:
        yield from (f"{name:<14} {s.note}" for name, s in published.SETS.items())


def main(argv: Sequence[str] | None = None) -> int:
    cli = gate.Parser(prog="python -m dapo_jax.data", description=__doc__.split("\n")[0])
    commands = cli.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("prepare", help="fetch published sets and check their SHA-256")
    fetch.add_argument("names", nargs="*", metavar="NAME")
    fetch.add_argument("--out", default="data", help="folder")
    change = commands.add_parser("integers", help="answers into integers, as the paper does")
    change.add_argument("source", metavar="IN")
    change.add_argument("out", metavar="OUT.jsonl")
    look = commands.add_parser("inspect", help="what problem files hold")
    look.add_argument("files", nargs="+", metavar="FILE")
    look.add_argument("--tokenizer", default="", help="tokenizer.json, *.model or their folder")
    look.add_argument("--chat_template", default="", help="Jinja file")
    look.add_argument("--columns", default="", help="as config.data.columns")
    look.add_argument("--template", default="", help="as config.data.template")
    look.add_argument("--any", action="store_true", help="answers that are no integers too")
    try:
        gate.tell(run(cli.parse_args(argv)))
    except (ValueError, OSError) as e:
        print(f"error: {gate.visible(str(e))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
