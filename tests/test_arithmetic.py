"""The embedded task: its answers, splits, files, tokenizer and warm-up traces."""

import collections
import hashlib
import itertools
import json
import os
import re

import numpy as np
import pytest

from dapo_jax.data import arithmetic, problems, tokenizer
from dapo_jax.data.arithmetic import HABIT, HARDER_LEVELS, RL_LEVELS, SKILL, SPLITS, Style, traces

EVERY = Style(careful=0.2, direct=0.1, skip=0.3, loop=0.1, slip=0.2, ramble=0.3)


def worked(prompt: str) -> tuple[list[str], list[int]]:
    """Labels and running values, by reading the prompt without the module's help."""
    first, *rest = re.findall(r"([a-z]) ([-+]? ?\d+)", prompt)
    labels, values = [first[0]], [int(first[1])]
    for label, step in rest:
        labels.append(label)
        values.append(values[-1] + int(step.replace(" ", "")))
    return labels, values


def split_of(prompt: str) -> str:
    walk = np.array([worked(prompt)[1]])
    (split,) = (s for s in SPLITS if arithmetic._in_split(walk, s)[0])
    return split


@pytest.mark.parametrize("split", SPLITS)
def test_problems_are_right_and_in_range(split):
    found = arithmetic.problems(600, (15, 1, 2, 5), seed=3, split=split)
    assert collections.Counter(p.k for p in found) == {1: 150, 2: 150, 5: 150, 15: 150}
    for p in found:
        labels, values = worked(p.prompt)
        assert p.answer == str(values[-1])
        assert len(values) == p.k + 1
        assert all(0 <= v <= 20 for v in values)
        assert all(1 <= abs(b - a) <= 5 for a, b in itertools.pairwise(values))
        assert "".join(labels) in "abcdefghijklmnop" * 2
        assert len(p.prompt.split()) == 3 * p.k + 3
        assert split_of(p.prompt) == split
    assert {v for p in found for v in worked(p.prompt)[1]} == set(range(21))
    assert {p.prompt[0] for p in found} == set("abcdefghijklmnop")
    assert all(len({p.k for p in found[i : i + 50]}) == 4 for i in range(0, 600, 50))  # mixed
    answers = collections.Counter(p.answer for p in found)
    assert max(answers.values()) / 600 < 0.1  # no constant scores well
    assert found != arithmetic.problems(600, (1, 2, 5, 15), seed=4, split=split)


@pytest.mark.parametrize(("k", "total"), [(1, 16 * (21 * 10 - 2 * 15)), (2, 16 * 1610)])
def test_the_splits_share_out_every_problem_there_is(k, total):
    """Asking for all of a level returns all: disjoint, without duplicates, and nothing is lost."""
    assert arithmetic.count(k) == total
    sets, chains = {}, {}
    for split in SPLITS:
        size = int(arithmetic._in_split(arithmetic._all_walks(k), split).sum()) * 16
        sets[split] = {p.prompt for p in arithmetic.problems(size, (k,), 0, split)}
        chains[split] = {re.sub(r"[a-z] ", "", prompt) for prompt in sets[split]}
        assert len(sets[split]) == size
        with pytest.raises(ValueError, match=f"hold only {size} distinct {split} problems"):
            arithmetic.problems(size + 1, (k,), 0, split)
    for found, every in ((sets, total), (chains, total // 16)):
        assert len(set.union(*found.values())) == sum(map(len, found.values())) == every


def test_a_level_that_runs_out_gives_all_and_the_larger_levels_fill_up():
    held = arithmetic.problems(1000, (1, 3), seed=0, split="heldout")
    sizes = collections.Counter(p.k for p in held)
    assert sizes[1] == arithmetic._in_split(arithmetic._all_walks(1), "heldout").sum() * 16 < 500
    assert sizes[3] == 1000 - sizes[1]
    assert len({p.prompt for p in held}) == 1000


def kind(trace: arithmetic.Trace) -> str:
    """careful, direct, loop, skip or plain, read off the text (levels of 2 and more)."""
    labels, _ = worked(trace.prompt)
    words = trace.response.split()
    if words[0] == "Wait":
        return "careful"
    if words[0] == "Answer:":
        return "direct"
    if not trace.ends:
        return "loop"
    return "plain" if labels[-1] in words else "skip"


FINISHED = re.compile(r"(Wait )?(?:([a-p] \d+ )(Wait \2)*)*Answer: \d+")


def steps(trace: arithmetic.Trace) -> list[tuple[str, int, int]]:
    """(label, value, repeats) of each pair written out."""
    found = re.findall(r"([a-p]) (\d+)((?: Wait \1 \2)*)", trace.response)
    return [(label, int(value), text.count("Wait")) for label, value, text in found]


STYLES = [
    Style(), SKILL, HABIT, EVERY, Style(slip=0.1), Style(slip=0.35), Style(ramble=0.4),
    Style(careful=1.0, slip=0.9), Style(careful=0.5, ramble=0.5),
]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_traces_are_written_as_their_style_says(style):
    n, cap = 8000, 200
    # A ramble may fill 200 tokens with a chance of 0.5 ** 60: what does not end is a loop.
    made = list(traces(n, (2, 3, 4, 5), seed=5, style=style, cap=cap))
    kinds, slipped, repeated, left = collections.Counter(map(kind, made)), [], [], []
    for t in made:
        (labels, right), written, said = worked(t.prompt), steps(t), t.response.split()[-1]
        assert not t.ends or FINISHED.fullmatch(t.response)
        paper = [value for _, value, _ in written]
        assert [label for label, _, _ in written] == labels[: len(written)]
        assert not paper or (paper[0] == right[0] and not written[0][2])  # the start is no result
        moves = zip(paper[:-1], right[:-1], right[1:], strict=False)
        due = [min(max(value + after - before, 0), 20) for value, before, after in moves]
        wrong = [value != d for value, d in zip(paper[1:], due, strict=True)]
        assert all(0 <= value <= 20 for value in paper)
        assert all(abs(value - d) <= 5 for value, d in zip(paper[1:], due, strict=True))
        times = [repeats for _, _, repeats in written[1:]]
        match kind(t):
            case "direct":
                assert t.ends and said == str(right[-1]) and not paper
            case "careful":
                assert t.ends and said == str(right[-1]) and paper == right
                assert min(times) >= 1 and (style.ramble or max(times) == 1)
            case "loop":
                slipped += wrong
                assert len(t.response.split()) == cap and "Answer:" not in t.response
            case finished:
                slipped += wrong
                repeated += times
                assert t.ends and t.response.endswith(f"Answer: {paper[-1]}")
                assert len(paper) == len(right) or finished == "skip"
                if finished == "skip":
                    left.append(len(right) - len(paper))
    for name in ("careful", "direct", "skip", "loop"):
        assert abs(kinds[name] / n - getattr(style, name)) < 0.025  # 4.5 sigma at most
    # Breaking off is even over the operations left undone: of k, on average (k + 1) / 2.
    even = np.mean([(k + 1) / 2 for k in (2, 3, 4, 5)])
    assert not left or abs(np.mean(left) - even) < 0.15
    if repeated:
        assert abs(np.mean(slipped) - style.slip) < 0.02
        for count in (1, 2, 3):  # geometric
            assert abs((np.array(repeated) >= count).mean() - style.ramble**count) < 0.025


def test_the_cap_counts_the_end_of_sequence():
    exact = 2 * 5 + 5
    for cap, ends in ((exact, True), (exact - 1, False), (4, False)):
        for t in traces(20, (5,), style=Style(), cap=cap):
            assert t.ends is ends
            assert len(t.response.split()) == (exact - 1 if ends else cap)


def test_traces_are_of_the_train_split_depend_on_the_seed_alone_and_mix_the_levels():
    assert {split_of(t.prompt) for t in traces(3000, (1, 2, 6, 8), seed=2)} == {"train"}
    first = list(traces(500, seed=4))
    assert first == list(traces(500, seed=4)) != list(traces(500, seed=5))
    ks = collections.Counter(len(worked(t.prompt)[0]) - 1 for t in first)
    assert ks == dict.fromkeys(range(1, 6), 100)


def test_files_have_the_verl_schema_and_the_same_bytes_in_every_process(tmp_path):
    """A run that resumes makes its problems again: pinned, whatever the hashes of strings are."""
    files, sha = arithmetic.write(tmp_path / "new" / "folder", 3, 300), hashlib.sha256()
    sets = (("train", 300, RL_LEVELS), ("heldout", 128, RL_LEVELS), ("harder", 64, HARDER_LEVELS))
    for split, size, levels in sets:
        path = getattr(files, split)
        sha.update(path.read_bytes())
        made = arithmetic.problems(size, levels, 3, split)
        rows = [json.loads(line)["extra_info"] for line in path.read_text().splitlines()]
        assert rows == [{"index": i, "k": p.k} for i, p in enumerate(made)]
        found = [(p.messages, p.answer, p.source) for p in problems.read(path)[0]]
        assert found == [((("user", p.prompt),), p.answer, "variable_chain") for p in made]
    assert sha.hexdigest()[:16] == "ab9a7f2cff54aaa7"
    assert {p.name for p in files.train.parent.iterdir()} == {p.name for p in files}  # no drafts


def test_writing_again_touches_nothing_and_repairs_what_differs(tmp_path):
    files = arithmetic.write(tmp_path, seed=1, train=200, heldout=20, harder=5)
    before = {p: p.read_bytes() for p in files}
    for path in files:
        os.utime(path, ns=(1, 1))
    files.heldout.write_text("damaged\n")
    assert arithmetic.write(tmp_path, seed=1, train=200, heldout=20, harder=5) == files
    assert {p: p.read_bytes() for p in files} == before
    assert [p.stat().st_mtime_ns == 1 for p in files] == [True, False, True, True]


def test_tokenizer_has_48_pieces_in_the_documented_order_one_for_each_word(tmp_path):
    arithmetic.write_tokenizer(tmp_path / "tokenizer.model")
    loaded = tokenizer.load(tmp_path)
    assert (loaded.vocab_size, loaded.stop_ids, loaded.unknown_id) == (48, {1}, 0)
    words = [*map(str, range(21)), *"abcdefghijklmnop", "+", "-", "?", "Answer:", "Wait"]
    spare = [f"▁<spare{i}>" for i in range(4)]
    spelled = ["<unk>", "</s>", *("▁" + word for word in words), *spare]
    assert [loaded.token(i) for i in range(48)] == spelled
    used = set()
    for trace in traces(2000, range(1, 9), style=EVERY):
        for text in (trace.prompt, trace.response):
            ids = loaded.encode(text)
            assert len(ids) == len(text.split()) and loaded.decode([*ids, 1]) == text
            used |= set(ids)
    assert used == set(range(2, 44))  # every word of the task, no spare one
