"""Published problem sets, and answers made into integers.

    python -m dapo_jax.data prepare [NAME ...] [--out=DIR]     fetch, check, read
    python -m dapo_jax.data integers IN OUT.jsonl              a/b -> a + b and the like

`prepare` without a name lists the sets. Each file comes from one commit of a public repository and
is refused unless its SHA-256 is the one below.
"""

import argparse
import hashlib
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dapo_jax import gate
from dapo_jax.data import files, integers, problems, prompts

HOST = "https://raw.githubusercontent.com"


class Set(NamedTuple):
    file: str  # as it is called here
    source: str  # repository/commit/path
    sha256: str
    note: str  # rows, and what to set


# fmt: off
SETS = {
    "dapo-math-17k": Set("dapo-math-17k.parquet", "MasterVito/SvS/9fd8f35375b31b8632b52e715296c264a3ad4176/data/dapo_math_17k.parquet", "246ae23df97c9eae8126cb4da780e9a0a31d10110e16eed144bcecbf2132d535", "the 17,917 problems once each, without the paper's wording: data.template=dapo, data.on_bad=skip (5 damaged answers)"),
    "aime24": Set("aime24.parquet", "BytedTsinghua-SIA/DAPO/33fe3176f0bb212588e84fc8ccf50dd554975144/eval/aime-2024.parquet", "12154e38a716d12db5731f9a022ae69a610c4f7d0e0dcc04e902887a686877e7", "the paper's file: 30 problems x 32"),
    "aime25": Set("aime25.jsonl", "inclusionAI/AReaL/1b0306631b01becc329af59df560efb754be34af/evaluation/data/aime25/test.jsonl", "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331", "30 problems"),
    "gsm8k-train": Set("gsm8k-train.jsonl", "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/train.jsonl", "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465", "7,473 problems"),
    "gsm8k-test": Set("gsm8k-test.jsonl", "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/test.jsonl", "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14", "1,319 problems"),
    "math500": Set("math500.jsonl", "hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/examples/simplelr_math_eval/data/math500/test.jsonl", "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132", "500 problems, 312 with integer answers: reward.verifier=boxed or math takes all"),
    "amc23": Set("amc23.jsonl", "QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/evaluation/data/amc23/test.jsonl", "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4", "40 problems"),
}
# fmt: on
FAMILIES = {"gsm8k": ("gsm8k-train", "gsm8k-test")}


def prepare(name: str, out: Path, say: Callable[[str], None], host: str = "") -> None:
    """Fetch a set, or all of a family, into `out`; a file that is there and whole is kept.
    ValueError: no such set, nothing to be had, or not the file that was pinned."""
    if name not in SETS and name not in FAMILIES:
        raise ValueError(f"{name}: no such set; there are {', '.join([*SETS, *FAMILIES])}")
    for each in FAMILIES.get(name, (name,)):
        pinned = SETS[each]
        path = out / pinned.file
        there = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == pinned.sha256
        if not there:
            url = f"{host or os.environ.get('DAPO_JAX_DATA_HOST') or HOST}/{pinned.source}"
            with (
                gate.reading(url, what="not to be had"),
                urllib.request.urlopen(url, timeout=60) as f,
            ):
                data = f.read()
            if (found := hashlib.sha256(data).hexdigest()) != pinned.sha256:
                raise ValueError(f"{url}: is another file: SHA-256 {found}, not {pinned.sha256}")
            out.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(path.name + ".tmp")
            draft.write_bytes(data)
            draft.replace(path)
        read, report = problems.read(path, "skip", problems.Reading(problems.any_answer))
        say(
            f"{path}: {len(read)} problems of {report.rows} rows, SHA-256 as pinned"
            f"{' (was there)' if there else ''}; {pinned.note}"
        )


def transform(source: str, out: Path, say: Callable[[str], None]) -> None:
    """The problems of `source` whose answers are integers or become some, as json lines of problem,
    answer, original_answer and data_source. ValueError: there are none."""
    read, report = problems.read(
        source, "skip", problems.Reading(problems.any_answer, template="{problem}")
    )
    lines, left = [], []
    for p in read:
        made = integers.asked(prompts.plain_text(p.messages), p.answer)
        if made is None:
            left.append(p)
            continue
        row = dict(problem=made.problem, answer=made.answer, original_answer=p.answer)
        lines.append(json.dumps(row | {"data_source": p.source}, ensure_ascii=False) + "\n")
    if not lines:
        raise ValueError(f"{source}: no answer is an integer or becomes one")
    files.write(out, "".join(lines))
    changed = sum(json.loads(x)["answer"] != json.loads(x)["original_answer"] for x in lines)
    say(
        f"{out}: {len(lines)} problems, of {changed} the answer was transformed; {len(left)} left out, {len(report.refused)} rows refused"
    )
    for p in left[:5]:
        say(f"    problem {p.id}: {p.answer[:80]}")


def main(argv: Sequence[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        prog="python -m dapo_jax.data", description=__doc__.split("\n")[0]
    )
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
