"""What a problem file holds: `python -m dapo_jax.data.problems inspect FILE...`."""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal

import numpy as np

from dapo_jax import bars
from dapo_jax.data import problems, prompts, references, rows, tokenizer as tokenizers


def inspect(
    paths: Sequence[str], tokenizer: str, chat_template: str, how: problems.Reading
) -> Iterator[str]:
    """The lines that `inspect` prints. Lengths are in tokens, without a tokenizer in characters."""
    if chat_template and not tokenizer:
        raise ValueError("--chat_template needs --tokenizer")
    tok = tokenizers.load(tokenizer, chat_template) if tokenizer else None
    read, report = problems.read(paths, "skip", how)
    if how.columns and not report.mapped:
        raise ValueError(f"--columns: no row of {paths[0]} has all of these columns")
    chat = bool(tok and tok.template)
    render = tok.render_chat if chat else prompts.plain_text
    texts = [render(p.messages) for p in read]
    shown = bars.bar(texts, desc="encoding", **rows.BAR)
    lengths = [len(tok.encode(text) if tok else text) for text in shown]
    integers = [p.answer for p in read if re.fullmatch(r"-?[0-9]+", p.answer)]
    low, high = (f(integers, key=Decimal, default="none") for f in (min, max))

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
    yield f"answers     {low} .. {high}" + (f", and {others:,} that are no integers" * bool(others))
    yield f"{'tokens' if tok else 'characters':<11} " + "  ".join(
        f"p{q} {np.percentile(lengths, q, method='higher')}" for q in (0, 50, 90, 99, 100)
    )
    for p, text in zip(read[:3], texts[:3], strict=True):
        form = "in the chat template" if chat else "as plain text"
        yield f"\n--- problem {p.id}, answer {p.answer}, {form}\n{text}"


def main(argv: Sequence[str] | None = None) -> int:
    cli = argparse.ArgumentParser(prog="python -m dapo_jax.data.problems")
    cli.add_argument("command", choices=["inspect"])
    cli.add_argument("files", nargs="+", metavar="FILE")
    cli.add_argument("--tokenizer", default="", help="tokenizer.json, *.model or their folder")
    cli.add_argument("--chat_template", default="", help="Jinja file")
    cli.add_argument("--columns", default="", help="as config.data.columns")
    cli.add_argument("--template", default="", help="as config.data.template")
    cli.add_argument("--any", action="store_true", help="answers that are no integers too")
    args = cli.parse_args(argv)
    try:
        takes = references.any_answer if args.any else references.integer
        template = prompts.template(args.template)
        how = problems.Reading(takes, problems.columns(args.columns), template)
        for line in inspect(args.files, args.tokenizer, args.chat_template, how):
            print(prompts.visible(line), flush=True)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough; leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
