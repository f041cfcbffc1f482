"""Samples: read in both forms, shown without letting a hostile one do anything, counted."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, strategies as st

from dapo_jax.lab.dynamics import browse, tokens

OLD = {
    "position": 3, "problem": "p1", "prompt": "1 + 1 ?", "response": "Wait 2 Answer: 2",
    "answer": "2", "correct": True, "tokens": 5, "truncated": False, "mean_entropy": 0.25,
}  # fmt: skip
NEW = OLD | {
    "source": "sums", "extracted": "2", "reward": 1,
    "pieces": ["Wait", "2", "Answer:", "2", "</s>"],
    "entropies": [1.0, 0.0, 0.2, 0.05, 0], "logps": [-1.0, -0.001, -0.2, 0.0, 0.0],
}  # fmt: skip


def put(folder, step, rows):
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_both_forms_are_read(tmp_path):
    put(tmp_path, 1, [OLD, OLD | {"correct": False, "problem": "p2"}])
    put(tmp_path, 12, [NEW, NEW | {"truncated": True, "extracted": None}])
    (tmp_path / "rollouts" / "step_000012.jsonl.tmp").write_text("no sample")
    found = browse.read(str(tmp_path))
    # As `log.report.samples` writes them of a run with a graded reward.
    graded = {k: x for k, x in NEW.items() if k != "correct"} | {"extracted": None, "reward": 0.5}
    put(tmp_path, 13, [graded, graded | {"truncated": True}])
    of_graded = browse.read(str(tmp_path), {13})
    assert [s.kind for s in of_graded] == ["graded", "truncated"]
    assert browse.choose(of_graded, kinds=["graded"]) == of_graded[:1]
    assert "graded</b>: step 13" in browse.page(of_graded)
    assert tokens.problems(str(tmp_path)) == [(NEW["prompt"], NEW["answer"])]
    kinds = [(1, "right"), (1, "wrong"), (12, "right"), (12, "truncated")]
    assert [(s.step, s.kind) for s in found] == kinds
    assert found[0].pieces == () and math.isnan(found[0].reward) and found[0].source == ""
    assert found[2].pieces == tuple(NEW["pieces"]) and found[2].reward == 1.0
    assert found[3].extracted is None
    assert browse.read(str(tmp_path), {12}) == found[2:]
    assert browse.steps(str(tmp_path)) == [1, 12, 13]
    with pytest.raises(ValueError, match=f"^{tmp_path}/rollouts: no rollouts/ in it"):
        browse.read(f"{tmp_path}/rollouts")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": True}, "tokens is 'True', no int"),
        ({"correct": 1}, "correct is '1', no bool"),
        ({"pieces": "abc"}, "pieces is no list"),
        ({"pieces": [1] * 5}, "pieces is '1', no str"),
        ({"entropies": [0.1]}, "pieces, entropies, logps, drawn have different lengths"),
        ({"drawn": [1]}, "pieces, entropies, logps, drawn have different lengths"),
        ({"drawn": [True] * 5}, "drawn is 'True', no int"),
        ("[]", "no JSON object"),
        ('{"problem": "x"}', "no 'prompt'; rows of a run's rollouts/ have it"),
    ],
)
def test_rows_that_are_no_samples(tmp_path, change, message):
    put(tmp_path, 7, [NEW])
    with (tmp_path / "rollouts" / "step_000007.jsonl").open("a") as file:
        file.write(change if isinstance(change, str) else json.dumps(NEW | change))
    with pytest.raises(ValueError) as error:
        browse.read(str(tmp_path))
    assert str(error.value) == f"{tmp_path}/rollouts/step_000007.jsonl:2: {message}"


def made(step, problem="p", **change):
    row = browse.Sample(step, problem, "q", "Wait no", "1", 10, False, 0.5, True)
    return row._replace(**change)


def test_problems_seen_again_come_first():
    samples = [made(i, f"p{i}") for i in range(1, 21)] + [made(30, "p4"), made(31, "p9")]
    assert list(browse.by_problem(samples))[:2] == ["p4", "p9"]
    chosen = browse.choose(samples, most=6)
    assert [s.step for s in chosen if s.problem == "p4"] == [4, 30]
    steps = [s.step for s in chosen if s.problem not in ("p4", "p9")]
    assert len(steps) == 4 and steps[0] == 1 and steps[-1] == 20  # spread over the run
    assert browse.choose(samples, kinds=["truncated"]) == []
    assert len(browse.choose(samples, most=100)) == len(samples)


def test_a_few_of_a_run_are_chosen_without_the_tokens_of_all(tmp_path, monkeypatch):
    for step in range(1, 9):
        put(tmp_path, step, [NEW | {"problem": f"p{step % 6}"}, NEW | {"problem": f"p{step + 9}"}])
    path, made = str(tmp_path), browse.choose
    want = made(browse.read(path), 4)
    monkeypatch.setattr(browse, "choose", lambda rows, most: [*map(bare, made(rows, most))])

    def bare(sample):
        assert sample.pieces == sample.logps == ()
        return sample

    assert browse.few(path, 4) == want and len({s.problem for s in want}) == 4


ALLOWED = {"div", "span", "b", "h3", "details", "summary", "table", "tr", "td", "th"}


def safe(page) -> tuple[list[tuple[str, dict]], str]:
    """What a browser would make of a page: its tags with attributes, and its text."""
    tags, text = [], []
    parser = HTMLParser(convert_charrefs=True)
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.handle_data = text.append
    parser.feed(page)
    parser.close()
    assert {tag for tag, _ in tags} <= ALLOWED
    assert {a for _, of in tags for a in of} <= {"style", "class", "title", "open"}
    assert not re.search(r"url\(|expression|@import|javascript", str(tags))
    assert "tex2jax_ignore mathjax_ignore" in page  # no formula is typeset
    assert all(x in "\n\t" or x.isprintable() for x in page)
    page.encode()  # no half of a surrogate pair
    return tags, "".join(text)


def everywhere(text):
    """A sample that has `text` wherever a file can put one."""
    texts = dict.fromkeys(("prompt", "response", "answer", "source", "extracted"), text)
    return made(1, text, pieces=(text,) * 2, entropies=(0.5, 0.1), logps=(-0.1, -0.2), **texts)


def test_equal_answers_are_shown_once_with_their_number():
    answer = lambda *words: tokens.Answer(
        " ".join(words), None, False, [tokens.Token(w, -0.5, 0.1, []) for w in words]
    )
    _, shown = safe(tokens.page("q", [answer("a", "b"), answer("a", "c"), answer("a", "b")]))
    assert re.findall(r"(\d) x 2 tokens", shown) == ["2", "1"] and "right" not in shown


def test_who_wrote_what_is_told(tmp_path):
    """A reply's tokens have a color and a title of their own, in both pages."""
    put(tmp_path, 1, [NEW | {"drawn": [1, 0, 0, 1, 1]}])
    (sample,) = browse.read(str(tmp_path))
    spans = browse.spans(sample)
    assert [title == browse.REPLY for *_, title in spans] == [False, True, True, False, False]
    seen = [tokens.Token(p, -0.5, 0.1, [], n != 1) for n, p in enumerate(("a", "<b>", "c"))]
    answer = tokens.Answer("a<b>c", None, False, seen)
    assert answer.mean_entropy == pytest.approx(0.1)
    blue = f"background:{browse.shade(-1)}"
    for page, replies in (
        (browse.page([sample]), ["2", "Answer:"]), (tokens.page("q", [answer]), ["<b>"])
    ):  # fmt: skip
        tags, shown = safe(page)
        marked = [of for tag, of in tags if of.get("title") == browse.REPLY]
        assert [of["style"] for of in marked] == [blue] * len(replies) and browse.REPLY in shown
        assert all(text in shown for text in replies)
    rows = [of.get("style", "") for tag, of in safe(tokens.table(seen))[0] if tag == "tr"]
    assert [blue in style for style in rows] == [False, False, True, False]


@given(st.text(st.characters(exclude_categories=()), max_size=40))
@example("<script>alert(1)</script>")
@example("\"><img src=x onerror='alert(1)'>")
@example("</div></details><h1>free</h1> &lt;b&gt; &amp;")
@example("$\\href{javascript:alert(1)}{x}$ \\(x\\)")
@example("\x1b[2J \x07 \x00 \u202eright to left\u2066 line\nend\r\u2028 \ud800 half")
def test_any_text_stays_text(text):
    sample = everywhere(text)
    bare = sample._replace(pieces=(), entropies=(), logps=())
    for page, times in (
        (browse.page([sample], title=text), 5),
        (browse.page([bare]), 4),
        (browse.html("answers", text, [(sample, 2)]), 4),
        (tokens.table([tokens.Token(text, -0.1, 0.5, [(text, 0.9)])]), 0),
    ):
        assert safe(page)[1].count(browse.visible(text)) >= times


def test_the_tokens_are_colored_by_entropy(tmp_path):
    put(tmp_path, 1, [NEW])
    pieces, nats, titles = zip(*browse.spans(*browse.read(str(tmp_path))), strict=True)
    assert "".join(pieces) == "Wait 2 Answer: 2</s>"  # its blanks are back
    assert list(nats) == NEW["entropies"] and titles[0] == "1.000 nats, probability 0.3679"
    assert browse.shade(1.0) == f"rgba(230,110,0,{0.85 / browse.HOT:.3f})"
    assert browse.shade(99) == browse.shade(browse.HOT) and "0.000" in browse.shade(math.nan)
    tags, _ = safe(browse.page(browse.read(str(tmp_path))))
    titled = [attrs["style"] for _, attrs in tags if "title" in attrs]
    assert titled == [f"background:{browse.shade(x)}" for x in nats]


def test_pieces_of_characters_are_joined():
    broken = "\N{REPLACEMENT CHARACTER}"
    pieces = ["a", broken, broken, "b", "c", "<end>"]
    assert browse.aligned(pieces, "a 好b c") == ["a", broken, " 好", "b", " c", "<end>"]
    assert browse.aligned(["x", "y"], "") == ["x", "y"]
    assert browse.aligned(["f", "4", "g"], "f 4 g") == ["f", " 4", " g"]


def test_phrases_are_counted():
    samples = [
        made(1, response="Wait, wait. However, 2.", tokens=10),
        made(1, response="The answer waits: 2", tokens=30),
        made(1, response="wait wait wait", tokens=3, truncated=True),
        made(5, response="Let's double-check. Let me verify it; alternatively, 3", tokens=50),
    ]
    found = browse.reflection(samples)
    names = ["any of these", "wait", "however", "alternatively", "let me check", "double-check"]
    assert list(found) == names
    plain = {k: (s.tolist(), a.tolist(), r.tolist()) for k, (s, a, r) in found.items()}
    assert plain["wait"] == ([1, 5], [0.5, 0.0], [50.0, 0.0])
    assert plain["double-check"] == ([1, 5], [0.0, 1.0], [0.0, 20.0])
    assert plain["any of these"] == ([1, 5], [0.5, 1.0], [75.0, 60.0])
    assert list(browse.reflection(samples, {"the": "the"})) == ["the"]
    assert browse.reflection([made(1, response="2")]) == {} == browse.reflection([])
