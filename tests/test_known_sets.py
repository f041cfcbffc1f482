"""Sets of the hub that docs/own_data.md names: rows with their columns become problems with their
own answers. The rows are made up. And downloads from a hub that is not always there."""

import hashlib
import io
import json
import re
import urllib.request
from collections import Counter
from types import SimpleNamespace

import hub
import pytest
from pages import DOCS
from tables import write_rows

from dapo_jax import config, gate, plan
from dapo_jax.data import problems, prompts, published, references, rows
from dapo_jax.model import hf, hf_format

TABLE = re.findall(
    r"^\| `([\w-]+/[^`@:]+)[^`]*` \| (.*) \|$", (DOCS / "own_data.md").read_text(), re.M
)
Q, FRACTION = "Find x.", "\\frac{1}{2}"
SOLUTION = {f"r1_solution_{i}": "So \\boxed{3}." for i in (1, 2, 3)}
SKYWORK = {
    "data_source": "train-math-deepscaler", "prompt": [{"content": Q, "role": "user"}],
    "ability": "math", "reward_model": {"ground_truth": '["\\\\frac{1}{2}"]', "style": "rule"},
    "extra_info": {"index": 0, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 4}},
}  # fmt: skip
ROWS = {
    "DeepMath-103K": ({"question": Q, "final_answer": FRACTION} | SOLUTION, FRACTION),
    "Skywork-OR1-RL-Data": (SKYWORK, FRACTION),
    "Polaris-Dataset-53K": ({"problem": Q, "answer": FRACTION, "difficulty": "1/8"}, FRACTION),
    "Big-Math-RL-Verified": (
        {"problem": Q, "answer": "033", "source": "a", "domain": ["a"], "llama8b_solve_rate": 0.4},
        "033",
    ),
    "BeyondAIME": ({"problem": Q, "answer": 7}, "7"),
    "hmmt_feb_2026": ({"problem_idx": 1, "problem": Q, "answer": "$x$"}, "$x$"),
}  # fmt: skip


def test_the_page_names_them():
    assert [name.split("/")[1] for name, _ in TABLE] == list(ROWS)


@pytest.mark.parametrize(("name", "advice"), TABLE, ids=lambda x: x.split("/")[-1][:20])
def test_rows_are_problems_with_their_own_answers(name, advice, tmp_path):
    """By what the page sets beside the name, in both kinds of files that the hub has."""
    row, answer = ROWS[name.split("/")[1]]
    listed = re.search(r"`data\.columns=([^`]+)`", advice)
    template = "boxed" if "data.template=boxed" in advice else ""
    how = problems.Reading(
        references.any_answer,
        problems.columns(listed[1] if listed else ""),
        prompts.template(template),
    )
    for kind in ("a.jsonl", "a.parquet"):
        (found,), report = problems.read(write_rows(tmp_path / kind, [row]), how=how)
        assert (found.answer, report.refused, report.conflicts) == (answer, (), ())
        asked = prompts.in_template(Q, how.template) if template else (("user", Q),)
        assert found.messages == asked


def test_sets_that_bring_the_words_of_a_template_are_asked_as_they_are():
    words = prompts.TEMPLATES["boxed"]
    for name in ("aime26", "hmmt25"):
        pinned, protocol = published.evaluated(name)
        assert protocol.template == "plain" and "data.template=plain" in pinned.note
        said = prompts.in_template(words.replace("{problem}", Q), prompts.TEMPLATES["plain"])
        assert said == prompts.in_template(Q, words)


# --- A hub that is away for a while ---


class Cut(bytes):
    """A body whose connection ends before it does."""

    def __len__(self):
        return super().__len__() + 9


class Flaky(dict):
    """What is served; each path fails at first, as often as `times` says: no answer, or half."""

    def __init__(self, times: int, half: bool = False):
        super().__init__()
        self.times, self.half, self.asked = times, half, Counter()

    def get(self, path):
        self.asked[path] += 1
        if self.asked[path] > self.times or path not in self:
            return super().get(path)
        if self.half:
            return Cut(self[path][:5])
        raise BrokenPipeError  # the server's thread ends, and the connection with it


@pytest.fixture
def waited(monkeypatch):
    """Seconds that were waited, in place of waiting."""
    out = []
    monkeypatch.setattr(gate, "time", SimpleNamespace(sleep=out.append))
    return out


@pytest.fixture
def flaky(monkeypatch, tmp_path):
    """Makes the hub, and the host of the pinned sets, such a server."""
    servers = []

    def make(times: int, half: bool = False):
        servers.append(hub.serving(served := Flaky(times, half)))
        url, _ = servers[-1].__enter__()
        hub.asked_at(url, tmp_path / "hub", monkeypatch)
        monkeypatch.setenv("DAPO_JAX_DATA_HOST", url)
        monkeypatch.setattr(hub.http.server.ThreadingHTTPServer, "handle_error", lambda *_: None)
        hub.put(served, "me/sums", {"a.jsonl": b'{"problem": "q", "answer": 3}'})
        return served

    yield make
    for server in servers:
        server.__exit__(None, None, None)


def test_a_data_set_of_a_hub_that_is_away_comes_later(flaky, waited, capsys):
    """The client asks anew by itself while a body comes; what it gives up is tried again here."""
    flaky(2)
    (file,) = rows.find("me/sums:a.jsonl")
    assert file.read_bytes() == b'{"problem": "q", "answer": 3}' and waited == [1, 5]
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if line.startswith("warning: me/sums:a.jsonl: ")]
    assert [line.split("; ")[-1] for line in told] == ["again in 1 s", "again in 5 s"]


@pytest.mark.parametrize("half", [False, True])
def test_a_pinned_set_whose_host_breaks_off(half, flaky, waited, tmp_path):
    served = flaky(3, half)
    served["/x/y.jsonl"] = body = b"0123456789"
    pinned = published.Set("y.jsonl", "x/y.jsonl", hashlib.sha256(body).hexdigest(), "")
    path, there = published.fetch(pinned, tmp_path)
    assert path.read_bytes() == body and not there and waited == [1, 5, 15]


class Breaks(io.BytesIO):
    def read(self):
        raise ValueError("half of it")


def test_a_fetch_that_breaks_closes_what_it_has_opened(monkeypatch, tmp_path):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **how: answer)
    answer = Breaks()
    with pytest.raises(ValueError, match="not to be had: half of it"):
        published.fetch(published.Set("y.jsonl", "x/y.jsonl", "", ""), tmp_path)
    assert answer.closed


def test_the_shape_of_a_model_of_a_hub_that_is_away_comes_later(flaky, waited):
    """For a plan, too, that fetches its config.json alone."""
    shape = plan.published("Qwen/Qwen2.5-0.5B")._replace(num_layers=3)
    served, c = flaky(3), config.base()
    body = json.dumps(hf_format.config_json(shape, "float32")).encode()
    c.model.path, served["/me/tiny/resolve/main/config.json"] = "me/tiny", body
    assert plan.network(c).num_layers == 3 and waited == [1, 5, 15]


def test_the_tries_have_an_end_and_what_is_not_there_is_not_waited_for(
    flaky, waited, tmp_path, monkeypatch
):
    served = flaky(9)
    served["/x/y.jsonl"] = b"0"
    pinned = published.Set("y.jsonl", "x/y.jsonl", "", "")
    with pytest.raises(ValueError, match="y.jsonl: not to be had: ") as error:
        published.fetch(pinned, tmp_path)
    assert waited == list(gate.WAITS_S) and "\n" not in str(error.value)
    waited.clear()
    with pytest.raises(ValueError, match="not to be had: HTTP Error 404"):
        published.fetch(pinned._replace(source="x/none"), tmp_path)
    with pytest.raises(ValueError, match="me/sums:none.jsonl: no such file, and not to be had"):
        rows.find("me/sums:none.jsonl")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for find in (lambda: rows.find("me/other:a.jsonl"), lambda: hf.resolve("me/model")):
        with pytest.raises(ValueError):
            find()
    assert not waited


def test_which_answers_of_a_server_are_of_the_moment():
    of = lambda code: urllib.error.HTTPError("u", code, "", None, None)
    codes = (400, 401, 403, 404, 408, 410, 429, 500, 503)
    assert [n for n in codes if gate.away(of(n))] == [408, 429, 500, 503]
    assert gate.away(ConnectionResetError()) and gate.away(TimeoutError())
    assert not gate.away(ValueError()) and not gate.away(FileNotFoundError())
    try:
        raise FileNotFoundError from TimeoutError()
    except FileNotFoundError as error:
        assert gate.away(error)
