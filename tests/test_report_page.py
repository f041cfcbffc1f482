"""A run's page: all of it in one file, nothing fetched, and no text that becomes markup."""

import json
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from dapo_jax.lab import compare, report
from dapo_jax.lab.dynamics.logs import Run

HOSTILE = '</td></svg><script>alert(1)</script><img src="http://x" onerror=alert(1)>'
ROW = {
    "problem": HOSTILE, "prompt": HOSTILE, "response": HOSTILE, "answer": HOSTILE, "tokens": 1,
    "truncated": False, "mean_entropy": 0.1, "correct": True, "pieces": [HOSTILE],
    "entropies": [0.1], "logps": [-0.1],
}  # fmt: skip


def with_two_steps(run, workdir, alarm: str, sample: dict) -> None:
    """A copy of the run in which two steps and a sample follow."""
    shutil.copytree(run, workdir)
    old = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[0])
    with (workdir / "metrics.jsonl").open("a") as file:
        for step in (1, 2):
            new = {"step": step, "reward/mean": 0.5, "sampling/accept_frac": 0.25 * step}
            file.write(json.dumps(old | new | {"alarms": [alarm]}) + "\n")
    (workdir / "rollouts").mkdir(exist_ok=True)
    (workdir / "rollouts" / "step_000001.jsonl").write_text(json.dumps(sample) + "\n")


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.fetched, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        names = {"src", "href", "xlink:href", "srcset", "action", "data"}
        self.fetched += [v for k, v in attrs if k in names and not (v or "").startswith("#")]
        self.fetched += [k for k, _ in attrs if k.startswith("on")]


def test_the_page_is_whole_and_fetches_nothing(run, tmp_path, capsys):
    workdir = tmp_path / "a run & <b>"
    with_two_steps(run, workdir, HOSTILE, ROW)
    out = tmp_path / "r.html"
    assert report.main([str(workdir), str(run), f"--out={out}"]) == 0
    assert str(out) in capsys.readouterr().out
    found, text = Page(), out.read_text()
    found.feed(text)
    assert {"svg", "table", "details"} <= set(found.tags) and not found.fetched
    assert not {"script", "img", "iframe", "link", "b>"} & set(found.tags)
    drawn = report.curves(compare.read([str(workdir), str(run)]))
    assert [*drawn][:3] == ["Scores", "Dynamics", "What Dynamic Sampling finds"]
    assert found.tags.count("svg") == sum(map(len, drawn.values())) and "alert(1)" in text
    for said in ("2 times from step 1 to 2, last: &lt;/td&gt;", "eval.max_problems",
                 "&#39;integer&#39;", "reward.verifier"):  # fmt: skip
        assert said in text
    ids = [line for line in text.split('id="')[1:] if line.startswith("p")]
    clips = [x.partition('"')[0] for x in ids if len(x.partition('"')[0]) == 11]
    assert len(clips) == len(set(clips))  # of several figures in one page


def test_a_clock_without_numbers_tells_no_day():
    about = lambda walls: report.about(
        compare.Column("a", [Run("a", {"time/wall": (np.array([1, 2]), np.array(walls))})], None)
    )
    assert about([np.nan, np.nan]) == "a log without a config"
    assert about([86400.0, np.nan]).endswith("last record 1970-01-02 00:00 UTC")


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        report.main([str(tmp_path)])
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")
    with pytest.raises(SystemExit):
        report.main([str(tmp_path), "--samples=-5"])
    assert capsys.readouterr().err == "error: --samples=-5: wants 0 or more\n"
