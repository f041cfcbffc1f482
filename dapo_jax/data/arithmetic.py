"""The embedded task, `variable chain`: arithmetic that a tiny model can learn by RL in minutes.

    prompt     f 4 g + 2 h - 3 ?          f is 4, g is f + 2, h is g - 3: what is h?
    response   f 4 g 6 h 3 Answer: 3      (then end-of-sequence)

A problem with k operations is a walk of k legal moves (add or subtract 1..`MAX_OPERAND`, stay
within 0..`MAX_VALUE`) under consecutive letters. The letters cost one token each and buy
learnability: to compute `h` the model looks up `h` in the prompt and the pair it has just written.
Every word is one token; a flawless response has 2k + 5 tokens, including end-of-sequence.

A hash of the walk, without its letters, assigns every possible problem to one of three splits.
Train, held-out and harder problems are therefore disjoint for any seeds and levels, a held-out
problem is never a train problem with other letters, and warm-up traces use only the train split.
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece

from dapo_jax.data import files

ANSWER, WAIT, PLUS, MINUS, ASK = "Answer:", "Wait", "+", "-", "?"

WARMUP_LEVELS = (1, 2, 3, 4, 5)
RL_LEVELS = (2, 3, 4, 5, 6)  # k=6 is first met in RL
HARDER_LEVELS = (8,)  # never trained

SPLITS = {"train": (2, 3, 4, 5, 6, 7), "heldout": (0,), "harder": (1,)}  # -> hash buckets, of 8

MAX_VALUE, MAX_OPERAND = 20, 5
LABELS = "abcdefghijklmnop"  # used cyclically from a random start


class Problem(NamedTuple):
    prompt: str
    answer: str
    k: int  # operations


class Trace(NamedTuple):
    prompt: str
    response: str
    ends: bool  # False: cut at the cap, so no end-of-sequence may be trained after it


class Style(NamedTuple):
    """Probabilities that describe how warm-up traces are written; all 0 = flawless working.

    The first four are per trace and exclude one another; others are plain working. The first token
    tells `careful` and `direct` apart, so that they can be counted without a judge."""

    careful: float = 0.0  # opens with `Wait`, repeats every result once as a check, never slips
    direct: float = 0.0  # the right answer without working: a tiny model learns it only roughly
    skip: float = 0.0  # stops before a uniformly drawn operation; the last value is the answer
    loop: float = 0.0  # repeats the result of a uniformly drawn operation without end
    slip: float = 0.0  # per operation: a wrong result, from which the working continues
    ramble: float = 0.0  # per operation: `Wait` and the result again; then once more (geometric)


# The two phases of a warm-up. The skill comes first, from nearly clean traces: it appears suddenly,
# and among many slips it may not appear at all. The habit then makes it rare without unlearning it.
SKILL = Style(skip=0.05, loop=0.01, slip=0.01, ramble=0.05)
HABIT = Style(skip=0.90, loop=0.02, slip=0.03, ramble=0.05)


def count(k: int) -> int:
    """How many distinct problems with k operations exist, all splits together (exact)."""
    value = np.arange(MAX_VALUE + 1)
    distance = np.abs(value[:, None] - value)
    legal = ((distance > 0) & (distance <= MAX_OPERAND)).astype(object)  # integers of any size
    return int(np.linalg.matrix_power(legal, k).sum()) * len(LABELS)


def problems(n: int, levels: Sequence[int], seed: int, split: str = "train") -> list[Problem]:
    """n distinct problems of a split, shuffled, as evenly spread over the levels as possible.

    A level (number of operations) with too few problems gives all of them, and the larger levels
    make up the difference. ValueError: all levels together have fewer than n."""
    levels = sorted(set(levels))
    rng = np.random.default_rng([seed, list(SPLITS).index(split)])
    found = []
    for i, k in enumerate(levels):
        found += _distinct(rng, (n - len(found)) // (len(levels) - i), k, split)
    if len(found) < n:
        there = f"{len(found)} distinct {split} problems, not {n}"
        advice = "ask for fewer or add a larger level"
        raise ValueError(f"problems: levels {levels} hold only {there}: {advice}")
    return [found[i] for i in rng.permutation(n)]


def _distinct(rng, n: int, k: int, split: str) -> list[Problem]:
    """n distinct problems with k operations, or all there are if that is fewer."""
    total = count(k)
    # Drawing goes on until n have been found: not for a space that is small or half used up.
    if total < 100_000 or 2 * n > total * len(SPLITS[split]) / 8:
        walks = _all_walks(k)
        walks = walks[_in_split(walks, split)]
        rows, starts = np.divmod(rng.permutation(len(walks) * len(LABELS))[:n], len(LABELS))
        return list(map(_problem, starts.tolist(), walks[rows].tolist()))
    found = {}  # a dict keeps the order of drawing, so the result does not depend on string hashing
    while len(found) < n:
        walks = _walks(rng, n, k, split)
        starts = rng.integers(len(LABELS), size=n)
        found.update((p.prompt, p) for p in map(_problem, starts.tolist(), walks.tolist()))
    return list(found.values())[:n]


def _walks(rng, n: int, k: int, split: str) -> np.ndarray:
    """n random walks of a split, repeats possible: even start, even legal moves. int64 [n, k+1]."""
    kept = np.empty((0, k + 1), np.int64)
    while True:
        walks = rng.integers(MAX_VALUE + 1, size=(n + 16, 1))
        for _ in range(k):
            walks = np.hstack([walks, _move(rng, walks[:, -1:])])
        kept = np.concatenate([kept, walks[_in_split(walks, split)]])
        if len(kept) >= n:
            return kept[:n]


def _move(rng, value: np.ndarray) -> np.ndarray:
    """The results of one legal operation on each value, evenly drawn; never the value itself."""
    low = -np.minimum(value, MAX_OPERAND)
    step = low + rng.integers(np.minimum(MAX_VALUE - value, MAX_OPERAND) - low)
    return value + step + (step >= 0)  # steps from 0 on move up by one: 0 is no operation


def _all_walks(k: int) -> np.ndarray:
    """Every walk of k operations. int64 [count, k+1]."""
    step = np.arange(-MAX_OPERAND, MAX_OPERAND + 1)
    walks = np.arange(MAX_VALUE + 1)[:, None]
    for _ in range(k):
        value = walks[:, -1:] + step
        row, column = np.nonzero((value >= 0) & (value <= MAX_VALUE) & (step != 0))
        walks = np.hstack([walks[row], value[row, column][:, None]])
    return walks


def _in_split(walks: np.ndarray, split: str) -> np.ndarray:
    """Which walks belong to the split: bool [n]. The hash is the finaliser of SplitMix64."""
    code = np.zeros(len(walks), np.uint64)
    for column in walks.astype(np.uint64).T:
        code = code * np.uint64(MAX_VALUE + 1) + column
    code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.isin((code ^ (code >> np.uint64(31))) % np.uint64(8), SPLITS[split])


def _problem(start: int, walk: Sequence[int]) -> Problem:
    names = (LABELS * 2)[start : start + len(walk)]
    words = [names[0], str(walk[0])]
    for name, (before, after) in zip(names[1:], pairwise(walk), strict=True):
        words += [name, PLUS if after > before else MINUS, str(abs(after - before))]
    return Problem(" ".join([*words, ASK]), str(walk[-1]), len(walk) - 1)


def traces(
    n: int, levels: Sequence[int] = WARMUP_LEVELS, seed=0, style: Style = SKILL, cap: int = 32
) -> Iterator[Trace]:
    """n imperfect solutions to train problems, evenly spread over the levels, made when reached.

    Problems may repeat: the smallest levels have fewer than a warm-up needs. A response of more
    than `cap` tokens, including end-of-sequence, is cut at `cap` and does not end."""
    levels = sorted(set(levels))
    rng = np.random.default_rng([seed, len(SPLITS)])  # a stream that no set of problems uses
    rows = []
    for i, k in enumerate(levels):
        rows += _level_draws(rng, (n - len(rows)) // (len(levels) - i), k, style, cap)
    return (_trace(cap, *rows[i]) for i in rng.permutation(n))


def _level_draws(rng, n: int, k: int, style: Style, cap: int) -> list[tuple]:
    """The random draws for n traces of one level: the arguments of `_trace`."""
    walks = _walks(rng, n, k, "train")
    starts = rng.integers(len(LABELS), size=n)

    bounds = np.cumsum([style.careful, style.direct, style.skip, style.loop])
    kind = np.searchsorted(bounds, rng.random(n), side="right")  # index into bounds; 4: plain
    careful, direct, skip, loop = (kind == i for i in range(4))

    # The written values: each follows from the written value before it, clipped after a slip.
    slips = (rng.random((n, k)) < style.slip) & ~careful[:, None]
    paper = walks.copy()
    for i in range(k):
        right = np.clip(paper[:, i] + walks[:, i + 1] - walks[:, i], 0, MAX_VALUE)
        paper[:, i + 1] = np.where(slips[:, i], _move(rng, right), right)

    # Operations written out: those before the stop, those up to the one that loops, or all.
    done = np.select([skip, loop], [rng.integers(k, size=n), rng.integers(1, k + 1, size=n)], k)
    answer = np.where(direct, walks[:, -1], paper[np.arange(n), done])

    repeats = np.minimum(rng.geometric(1 - style.ramble, size=(n, k)) - 1, cap)
    repeats = np.maximum(repeats, careful[:, None])
    repeats[np.flatnonzero(loop), done[loop] - 1] = cap
    done[direct] = -1

    columns = (starts, walks, paper, done, answer, repeats, careful)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _trace(cap: int, start, walk, paper, done, answer, repeats, careful) -> Trace:
    names = (LABELS * 2)[start : start + len(walk)]
    words = [WAIT] if careful else []
    if done >= 0:
        words += [names[0], str(paper[0])]
    for i in range(1, done + 1):
        step = [names[i], str(paper[i])]
        words += step + [WAIT, *step] * repeats[i - 1]
    words += [ANSWER, str(answer)]
    return Trace(_problem(start, walk).prompt, " ".join(words[:cap]), len(words) < cap)


class Files(NamedTuple):
    train: Path
    heldout: Path
    harder: Path
    tokenizer: Path


def write(
    directory: str | os.PathLike, seed=0, train: int = 4096, heldout: int = 128, harder: int = 64
) -> Files:
    """Write the three problem files (JSON lines, one verl/DAPO row a line) and the tokenizer.

    The same arguments give the same bytes. A file that already has these bytes is not touched; any
    other is replaced atomically, so that several processes may call this at the same time."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    made = Files(*(directory / f"{s}.jsonl" for s in SPLITS), directory / "tokenizer.model")
    sets = ((train, RL_LEVELS), (heldout, RL_LEVELS), (harder, HARDER_LEVELS))
    for path, split, (n, levels) in zip(made[:3], SPLITS, sets, strict=True):
        write_problems(path, problems(n, levels, seed, split))
    write_tokenizer(made.tokenizer)
    return made


def write_problems(path: Path, made: Sequence[Problem]) -> None:
    """Write one file of problems as `write` does."""
    rows = (
        {
            "data_source": "variable_chain",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "MATH",
            "reward_model": {"ground_truth": problem.answer, "style": "rule"},
            "extra_info": {"index": index, "k": problem.k},
        }
        for index, problem in enumerate(made)
    )
    _keep_or_write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _keep_or_write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        files.write(path, content)


def write_tokenizer(path: Path) -> None:
    """Write a SentencePiece word model as `write` does: one token per word; 0 is <unk>, 1 is </s>,
    the end-of-sequence. The bytes are the same for one version of the sentencepiece package."""
    words = [*map(str, range(MAX_VALUE + 1)), *LABELS, PLUS, MINUS, ASK, ANSWER, WAIT]
    # Spare words, which no text contains, round the vocabulary up to a multiple of 8 (48), so that
    # the embedding divides evenly over a mesh.
    words += [f"<spare{i}>" for i in range(-(len(words) + 2) % 8)]
    # The trainer ranks words by frequency: each occurs once more than the next.
    corpus = (" ".join([word] * (len(words) - i)) for i, word in enumerate(words))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus,
        model_writer=model,
        **dict(model_type="word", vocab_size=len(words) + 2, normalization_rule_name="identity"),
        **dict(unk_id=0, eos_id=1, bos_id=-1, pad_id=-1),  # -1: no such token
        character_coverage=1.0,  # the default drops the rarest letters, and with them words
        **dict(num_threads=1, minloglevel=2),  # silent but for errors
    )
    _keep_or_write(path, model.getvalue())
