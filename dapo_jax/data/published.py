"""Published problem sets by name: where their files are, and how the papers evaluate on them.

Each file is of one commit of a public repository; under another SHA-256 it is refused. Scores
compare only under the same settings: a set brings its paper's, which flags override.
"""

import hashlib
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dapo_jax import gate
from dapo_jax.data import files, problems, references


class Protocol(NamedTuple):
    """How a set is evaluated."""

    k: int  # samples per problem
    temperature: float
    top_p: float
    max_response_tokens: int
    template: str  # of the prompt (prompts.TEMPLATES)
    verifier: str
    source: str


# k, T and top-p as in section 4.1; 20,480 tokens as in training.
DAPO = Protocol(32, 1.0, 0.7, 20480, "dapo", "dapo", "DAPO, arXiv 2503.14476, section 4.1")
# k from its table of results, the rest from the validation of its training script (github.com/
# thunlp/JustRL). There a model judges as well; AMC23's answers are numbers, which `boxed` compares.
# Some files ask for \boxed{} in these words already, so that the template is `plain`.
JUST_RL = Protocol(32, 0.7, 0.9, 31744, "boxed", "boxed", "JustRL, arXiv 2512.16649")
# Greedy: evaluation/sh/eval.sh and math_eval.py of github.com/QwenLM/Qwen2.5-Math.
QWEN = Protocol(1, 0.0, 1.0, 2048, "boxed", "boxed", "Qwen2.5-Math, arXiv 2409.12122")


class Set(NamedTuple):
    file: str  # as it is called here
    source: str  # repository/commit/path
    sha256: str
    note: str  # rows, and what to set
    protocol: Protocol | None = None  # None = for training


HOST = "https://raw.githubusercontent.com"

# fmt: off
SETS = {
    "dapo-math-17k": Set("dapo-math-17k.parquet", "MasterVito/SvS/9fd8f35375b31b8632b52e715296c264a3ad4176/data/dapo_math_17k.parquet", "246ae23df97c9eae8126cb4da780e9a0a31d10110e16eed144bcecbf2132d535", "17,917 rows, 17,290 prompts, without the paper's wording: data.template=dapo, data.on_bad=skip (5 damaged answers)"),
    "aime24": Set("aime24.parquet", "BytedTsinghua-SIA/DAPO/33fe3176f0bb212588e84fc8ccf50dd554975144/eval/aime-2024.parquet", "12154e38a716d12db5731f9a022ae69a610c4f7d0e0dcc04e902887a686877e7", "the paper's file: 30 problems x 32", DAPO),
    "aime25": Set("aime25.jsonl", "inclusionAI/AReaL/1b0306631b01becc329af59df560efb754be34af/evaluation/data/aime25/test.jsonl", "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331", "30 problems", DAPO),
    "gsm8k-train": Set("gsm8k-train.jsonl", "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/train.jsonl", "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465", "7,473 problems"),
    "gsm8k-test": Set("gsm8k-test.jsonl", "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/test.jsonl", "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14", "1,319 problems", QWEN),
    "math500": Set("math500.jsonl", "hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/examples/simplelr_math_eval/data/math500/test.jsonl", "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132", "500 problems, 312 with integer answers: reward.verifier=boxed or math takes all", JUST_RL._replace(k=4, verifier="math")),
    "amc23": Set("amc23.jsonl", "QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/evaluation/data/amc23/test.jsonl", "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4", "40 problems", JUST_RL),
    "aime26": Set("aime26.jsonl", "jianzhnie/LLMEval/66572ad3f66078c376d777866f6535d3f334b0c8/data/aime26.jsonl", "31fa88574e75103bcfee15811fec860aabd727af5cfe9327756305dbed8f5d70", "30 problems, which ask for \\boxed{}: data.template=plain", JUST_RL._replace(template="plain")),
    "hmmt25": Set("hmmt25.jsonl", "jianzhnie/LLMEval/66572ad3f66078c376d777866f6535d3f334b0c8/data/hmmt25.jsonl", "76ab92434e4121103a54056a451eb3507ab1e03e7d263e7ef14cdf4ea365c099", "February 2025: 30 problems, 14 with integer answers, which ask for \\boxed{}: data.template=plain", JUST_RL._replace(template="plain", verifier="math")),
}
# fmt: on
FAMILIES = {"gsm8k": ("gsm8k-train", "gsm8k-test")}
KNOWN = ", ".join(["gsm8k", *(name for name, s in SETS.items() if s.protocol)])  # to `evaluate`


def evaluated(name: str) -> tuple[Set, Protocol] | None:
    """The set that a name means to `evaluate`, and its settings; None if no set has this name.
    ValueError: the set is for training."""
    listed = [SETS[n] for n in FAMILIES.get(name, (name,)) if n in SETS]
    found = [(pinned, pinned.protocol) for pinned in listed if pinned.protocol]
    if listed and not found:
        raise ValueError(f"{name}: a set for training; those of evaluation are {KNOWN}")
    return found[0] if found else None


def fetch(pinned: Set, folder: Path) -> tuple[Path, bool]:
    """(path of the set's file in `folder`, whether it was there already). The file is fetched
    unless it is there and whole; several processes may do so at once. ValueError: the file cannot
    be fetched, or is not the pinned one."""
    path = folder / pinned.file
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == pinned.sha256:
        return path, True
    url = f"{os.environ.get('DAPO_JAX_DATA_HOST') or HOST}/{pinned.source}"

    def get() -> bytes:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read()

    with gate.reading(url, what="not to be had"):
        data = gate.download(url, get)
    if (found := hashlib.sha256(data).hexdigest()) != pinned.sha256:
        raise ValueError(f"{url}: is another file: SHA-256 {found}, not {pinned.sha256}")
    folder.mkdir(parents=True, exist_ok=True)
    files.write(path, data)
    return path, False


def prepare(name: str, out: Path) -> Iterator[str]:
    """Fetch a set, or all sets of a family, into `out`, and yield a line for each; a file that is
    there and whole is kept. ValueError: no such set; as `fetch`."""
    if name not in SETS and name not in FAMILIES:
        raise ValueError(f"{name}: no such set; there are {', '.join([*SETS, *FAMILIES])}")
    for each in FAMILIES.get(name, (name,)):
        path, there = fetch(SETS[each], out)
        read, report = problems.read(path, "skip", problems.Reading(references.any_answer))
        pinned = "SHA-256 as pinned" + " (was there)" * there
        yield f"{path}: {len(read)} problems of {report.rows} rows, {pinned}; {SETS[each].note}"
