"""The embedded task: its answers, splits, files, tokenizer and warm-up traces."""

import collections
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from dapo_jax.data import arithmetic, problems, tokenizer
from dapo_jax.data.arithmetic import HABIT, HARDER_LEVELS, RL_LEVELS, SKILL, SPLITS, Style, traces


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=arithmetic.tokenizer_model())


def chain(prompt: str) -> str:
    """A problem without its letters."""
    return re.sub(r"[a-z] ", "", prompt)


def worked(prompt: str) -> tuple[list[str], list[int]]:
    """Labels and running values, by reading the prompt without the module's help."""
    first, *rest = re.findall(r"([a-z]) ([-+]? ?\d+)", prompt)
    labels, values = [first[0]], [int(first[1])]
    for label, step in rest:
        labels.append(label)
        values.append(values[-1] + int(step.replace(" ", "")))
    return labels, values


def right_answer(prompt: str) -> str:
    return str(worked(prompt)[1][-1])


def split_of(prompt: str) -> str:
    walk = np.array([worked(prompt)[1]])
    (split,) = (s for s in SPLITS if arithmetic._in_split(walk, s)[0])
    return split


@pytest.mark.parametrize("split", SPLITS)
def test_problems_are_right_and_in_range(split):
    found = arithmetic.problems(600, (1, 2, 5, 15), seed=3, split=split)
    assert collections.Counter(p.k for p in found) == {1: 150, 2: 150, 5: 150, 15: 150}
    for p in found:
        labels, values = worked(p.prompt)
        assert p.answer == str(values[-1])
        assert len(values) == p.k + 1
        assert all(0 <= v <= 20 for v in values)
        assert all(1 <= abs(b - a) <= 5 for a, b in itertools.pairwise(values))
        assert "".join(labels) in "abcdefghijklmnop" * 2
        assert len(p.prompt.split()) == arithmetic.prompt_length(p.k)
        assert split_of(p.prompt) == split
    assert {v for p in found for v in worked(p.prompt)[1]} == set(range(21))
    assert {p.prompt[0] for p in found} == set("abcdefghijklmnop")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_count_is_the_size_of_the_space(k):
    walks = arithmetic._all_walks(k)
    assert len(np.unique(walks, axis=0)) == len(walks)
    assert arithmetic.count(k) == len(walks) * 16
    assert k > 1 or len(walks) == 21 * 10 - 2 * (1 + 2 + 3 + 4 + 5)


@pytest.mark.parametrize("k", [1, 2])
def test_the_splits_share_out_every_problem_there_is(k):
    """Asking for all of a level returns all: disjoint, without duplicates, and nothing is lost."""
    sets, chains = {}, {}
    for split in SPLITS:
        size = int(arithmetic._in_split(arithmetic._all_walks(k), split).sum()) * 16
        sets[split] = {p.prompt for p in arithmetic.problems(size, (k,), 0, split)}
        chains[split] = set(map(chain, sets[split]))
        assert len(sets[split]) == size
        with pytest.raises(ValueError, match=f"hold only {size} distinct {split} problems"):
            arithmetic.problems(size + 1, (k,), 0, split)
    for found, total in ((sets, arithmetic.count(k)), (chains, arithmetic.count(k) // 16)):
        assert len(set.union(*found.values())) == sum(map(len, found.values())) == total


def test_split_shares_are_near_their_share_of_the_buckets():
    walks = arithmetic._all_walks(4)  # 132,002 walks: a 6 sigma band is 0.006
    for split, buckets in SPLITS.items():
        assert abs(arithmetic._in_split(walks, split).mean() - len(buckets) / 8) < 0.006


def test_a_level_that_runs_out_gives_all_and_the_larger_levels_fill_up():
    held = arithmetic.problems(1000, (1, 3), seed=0, split="heldout")
    sizes = collections.Counter(p.k for p in held)
    walks = arithmetic._all_walks(1)
    assert sizes[1] == arithmetic._in_split(walks, "heldout").sum() * 16 < 500
    assert sizes[3] == 1000 - sizes[1]
    assert len({p.prompt for p in held}) == 1000


def test_problems_depend_on_the_seed_alone_and_mix_levels_and_answers():
    first = arithmetic.problems(4096, RL_LEVELS, seed=0)
    assert first == arithmetic.problems(4096, reversed(RL_LEVELS), seed=0)
    assert first != arithmetic.problems(4096, RL_LEVELS, seed=8)
    ks = [p.k for p in first]
    assert all(set(ks[i : i + 50]) == set(RL_LEVELS) for i in range(0, 4000, 50))
    answers = collections.Counter(p.answer for p in first)
    assert len(answers) == 21 and max(answers.values()) / 4096 < 0.08  # no constant scores well


REFUSED = [(dict(levels=x), "levels: .* must lie in 1..15") for x in ((), (0,), (2, 16), (-1, 2))]
REFUSED += [
    (dict(style=Style(*style)), "traces: probabilities ")
    for style in ((0, 0, 0, 0, 1.1), (0, 0, -0.1), (0, 0, 0.9, 0.2), (0, 0, 0, 0, 0, 1.0))
]


@pytest.mark.parametrize(("fields", "wrong"), REFUSED)
def test_impossible_problems_and_traces_are_refused(fields, wrong):
    with pytest.raises(ValueError, match=f"^{wrong}.*$"):
        traces(5, **fields)
    if "levels" in fields:
        with pytest.raises(ValueError, match=f"^{wrong}.*$"):
            arithmetic.problems(5, fields["levels"], 0)
    with pytest.raises(ValueError, match="split must be one of"):
        arithmetic.problems(5, (2,), 0, split="test")


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


def steps(trace: arithmetic.Trace) -> list[tuple[str, int, int]]:
    """(label, value, repeats) of each pair written out."""
    found = re.findall(r"([a-p]) (\d+)((?: Wait \1 \2)*)", trace.response)
    return [(label, int(value), text.count("Wait")) for label, value, text in found]


def test_flawless_traces_are_the_worked_solution():
    for t in traces(300, (1, 3, 6), style=Style()):
        labels, values = worked(t.prompt)
        pairs = [f"{label} {value}" for label, value in zip(labels, values, strict=True)]
        assert t.response == " ".join([*pairs, "Answer:", right_answer(t.prompt)])
        assert t.ends
        assert len(t.response.split()) + 1 == 2 * (len(pairs) - 1) + 5


@pytest.mark.parametrize("style", [SKILL, HABIT, Style(0.2, 0.1, 0.3, 0.1, 0.2, 0.3)])
def test_kinds_occur_as_often_as_the_style_says(style):
    n = 8000
    # A ramble may fill 200 tokens with a chance of 0.3 ** 60: what does not end is a loop.
    made = list(traces(n, (2, 3, 4, 5), seed=5, style=style, cap=200))
    share = collections.Counter(map(kind, made))
    for name in ("careful", "direct", "skip", "loop"):
        assert abs(share[name] / n - getattr(style, name)) < 0.025  # 4.5 sigma at most
    # Breaking off is even over the operations left undone: of k, on average (k + 1) / 2.
    left = [len(worked(t.prompt)[0]) - len(steps(t)) for t in made if kind(t) == "skip"]
    even = np.mean([(k + 1) / 2 for k in (2, 3, 4, 5)])
    assert abs(np.mean(left) - even) < 0.15
    for t in made:
        said = t.response.split()[-1]
        if kind(t) in ("plain", "skip"):
            assert int(said) == steps(t)[-1][1]
        elif kind(t) in ("careful", "direct"):
            assert said == right_answer(t.prompt)


@pytest.mark.parametrize("slip", [0.1, 0.35])
def test_slips_are_wrong_results_that_the_working_goes_on_from(slip):
    made = list(traces(4000, (2, 3, 4, 5), seed=6, style=Style(slip=slip)))
    slipped = steps_made = 0
    for t in made:
        _, right = worked(t.prompt)
        paper = [value for _, value, _ in steps(t)]
        assert len(paper) == len(right) and paper[0] == right[0]
        for i in range(1, len(right)):
            due = min(max(paper[i - 1] + right[i] - right[i - 1], 0), 20)
            slipped += paper[i] != due
            assert 0 <= paper[i] <= 20 and abs(paper[i] - due) <= 5
            steps_made += 1
        assert t.ends and t.response.endswith(f"Answer: {paper[-1]}")
    assert abs(slipped / steps_made - slip) < 0.02  # 14,000 steps: 5 sigma


def test_rambling_is_geometric():
    made = list(traces(4000, (2, 3), seed=8, style=Style(ramble=0.4), cap=500))
    repeats = np.array([r for t in made for _, _, r in steps(t)[1:]])
    assert all(steps(t)[0][2] == 0 for t in made)  # only results are repeated, not the start
    for times in (1, 2, 3):
        assert abs((repeats >= times).mean() - 0.4**times) < 0.025
    assert all(t.response.endswith(f"Answer: {right_answer(t.prompt)}") for t in made)


def test_careful_traces_check_every_result_and_never_slip():
    for t in traces(300, (1, 2, 4), seed=1, style=Style(careful=1.0, slip=0.9)):
        labels, values = worked(t.prompt)
        k = len(labels) - 1
        assert t.response.split()[0] == "Wait" and len(t.response.split()) + 1 == 5 * k + 6
        assert [s[:2] for s in steps(t)] == list(zip(labels, values, strict=True))
        assert [s[2] for s in steps(t)] == [0] + [1] * k
    # With rambling, at least the one check.
    for t in traces(300, (2,), seed=1, style=Style(careful=1.0, ramble=0.5), cap=200):
        assert min(s[2] for s in steps(t)[1:]) >= 1


def test_the_cap_counts_the_end_of_sequence():
    exact = 2 * 5 + 5
    for cap, ends in ((exact, True), (exact - 1, False), (4, False)):
        for t in traces(20, (5,), style=Style(), cap=cap):
            assert t.ends is ends
            assert len(t.response.split()) == (exact - 1 if ends else cap)
    for t in traces(200, style=Style(loop=1.0), cap=32):
        assert not t.ends and len(t.response.split()) == 32 and "Answer:" not in t.response


def test_traces_are_of_the_train_split_depend_on_the_seed_alone_and_mix_the_levels():
    assert {split_of(t.prompt) for t in traces(3000, (1, 2, 6, 8), seed=2)} == {"train"}
    first = list(traces(500, seed=4))
    assert first == list(traces(500, seed=4)) != list(traces(500, seed=5))
    ks = collections.Counter(len(worked(t.prompt)[0]) - 1 for t in first)
    assert ks == dict.fromkeys(range(1, 6), 100)


def test_files_have_the_verl_schema_and_the_readers_accept_them(tmp_path):
    files = arithmetic.write(tmp_path / "new" / "folder", seed=1)
    seen = set()
    sets = (("train", 4096, RL_LEVELS), ("heldout", 128, RL_LEVELS), ("harder", 64, HARDER_LEVELS))
    for split, size, levels in sets:
        path = getattr(files, split)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        prompts = [row["prompt"][0]["content"] for row in rows]
        assert rows == [
            {
                "data_source": "variable_chain",
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "MATH",
                "reward_model": {"ground_truth": right_answer(prompt), "style": "rule"},
                "extra_info": {"index": i, "k": prompt.count(" ") // 3},
            }
            for i, prompt in enumerate(prompts)
        ]
        assert {split_of(prompt) for prompt in prompts} == {split}
        assert {row["extra_info"]["k"] for row in rows} == set(levels)
        assert len(set(prompts)) == len(rows) == size and not seen & set(prompts)
        seen |= set(prompts)
        read, report = problems.read(path)
        assert len(read) == size and not report.duplicates and not report.refused
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
    arithmetic.write(tmp_path, seed=2, train=200, heldout=20, harder=5)
    changed = [p.read_bytes() != before[p] for p in files]
    assert changed == [True, True, True, False]  # the tokenizer has no seed


def test_another_process_writes_the_same_bytes(tmp_path):
    """Other string hashing, other folder: nothing of the process leaks into the files."""
    code = "import sys; from dapo_jax.data import arithmetic; arithmetic.write(sys.argv[1], 3, 300)"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "there")],
        check=True,
        cwd=Path(arithmetic.__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": "123"},
    )
    for path in arithmetic.write(tmp_path / "here", 3, 300):
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes()


def test_tokenizer_has_48_pieces_in_the_documented_order(pieces, tmp_path):
    assert len(pieces) == 48
    assert (pieces.unk_id(), pieces.eos_id(), pieces.bos_id(), pieces.pad_id()) == (0, 1, -1, -1)
    words = arithmetic.vocabulary()
    assert [pieces.id_to_piece(i) for i in range(2, 48)] == ["▁" + word for word in words]
    assert words[:21] == [str(v) for v in range(21)]
    assert words[-4:] == [f"<spare{i}>" for i in range(4)]
    arithmetic.write_tokenizer(tmp_path / "tokenizer.model")
    loaded = tokenizer.load(tmp_path)
    assert loaded.vocab_size == 48 and loaded.stop_ids == {1}
    text = "f 4 g 6 h 3 Answer: 3"
    assert loaded.decode([*loaded.encode(text), 1]) == text


def test_every_text_round_trips_one_token_a_word(pieces):
    found = [p for split in SPLITS for p in arithmetic.problems(300, (1, 2, 6, 8), 0, split)]
    every = Style(careful=0.3, direct=0.2, skip=0.2, loop=0.1, slip=0.3, ramble=0.3)
    made = [t for style in (SKILL, HABIT, every) for t in traces(500, style=style)]
    texts = [p.prompt for p in found] + [text for t in made for text in (t.prompt, t.response)]
    used = set()
    for text, ids in zip(texts, pieces.encode(texts), strict=True):
        assert pieces.unk_id() not in ids and len(ids) == len(text.split())
        assert pieces.decode(ids) == text == pieces.decode([*ids, pieces.eos_id()])
        used |= set(ids)
    assert used == set(range(2, 44))  # every word of the task, no spare one
