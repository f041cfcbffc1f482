"""The pages of a run and of an explanation in a real browser: Chromium, at a desk's width and at a
telephone's."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest
from test_report_page import with_two_steps

from dapo_jax.lab import explanation, report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
WIDTHS = (1280, 390)
# What a page is like within a frame of each width; the page itself has no script.
LOOK = """
const out = {};
for (const frame of document.querySelectorAll("iframe")) {
  const d = frame.contentDocument, root = d.documentElement;
  out[frame.width] = {
    page: root.scrollWidth, titles: [...d.querySelectorAll("h1,h2,h3")].map(x => x.innerText),
    wide: [...d.querySelectorAll("body *")].filter(x => x.getBoundingClientRect().right >
      root.clientWidth + 1 && !x.closest(".wide,pre,svg,[style*=overflow-x]")).map(
        x => x.outerHTML.slice(0, 80)),
    pictures: [...d.querySelectorAll("svg")].map(x => x.getBoundingClientRect().width),
    words: d.body.innerText,
  };
}
document.body.innerText = "LOOK" + JSON.stringify(out) + "LOOK";
"""
FRAME = '<iframe width="{}" height="800" style="border:0" srcdoc="{}"></iframe>'


@pytest.fixture
def look(tmp_path):
    """What `LOOK` finds on a page, by width, where the browser says nothing in its console."""
    if CHROMIUM is None:
        pytest.skip("no chromium here")

    def seen(page: str) -> dict:
        frames = "".join(FRAME.format(width, html.escape(page)) for width in WIDTHS)
        file = tmp_path / "frames.html"
        script = f"<script>onload = () => {{{LOOK}}}</script>"
        file.write_text(f"<!doctype html><meta charset=utf-8>{frames}{script}")
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
        flags += ("--dump-dom", f"--user-data-dir={tmp_path / 'profile'}")
        done = subprocess.run(
            [CHROMIUM, *flags, file.as_uri()], capture_output=True, text=True, timeout=240,
            env=os.environ | {"HOME": str(tmp_path)},
        )  # fmt: skip
        assert "CONSOLE" not in done.stderr, done.stderr
        _, found, _ = html.unescape(done.stdout).split("LOOK")
        return json.loads(found)

    return seen


def fits(found: dict) -> None:
    """Nothing is wider than the page, but for what scrolls within it."""
    for width in WIDTHS:
        there = found[str(width)]
        assert there["page"] <= width and not there["wide"], (width, there["wide"])


ROW = {
    "step": 1, "problem": "p", "prompt": "x" * 300, "response": "y" * 300, "answer": "z" * 90,
    "tokens": 2, "truncated": False, "mean_entropy": 0.1, "correct": True, "position": 0,
    "pieces": ["y" * 299, "y"], "entropies": [0.1, 2.0], "logps": [-0.1, -0.2],
}  # fmt: skip


@pytest.mark.slow
def test_the_page_of_a_run(run, tmp_path, look):
    """Two runs of which one has alarms, samples and long words."""
    workdir = tmp_path / ("long" * 30)
    with_two_steps(run, workdir, "w" * 400, ROW)
    with (workdir / "events.jsonl").open("a") as file:
        for event, more in (("start-up", {}), ("rollout", {}), ("step", {"step": 1}), ("save", {})):
            file.write(json.dumps({"time": 2e9 + len(event), "event": event} | more) + "\n")
    paths = [str(workdir), str(run)]
    found = look(report.page(paths))
    fits(found)
    wanted = ["Scores", "Alarms", "Curves", "Scores", "What Dynamic Sampling finds", "Cost"]
    wanted += ["Config", "Samples"]
    for width in map(str, WIDTHS):
        titles = iter(found[width]["titles"])
        assert all(name in titles for name in wanted)  # in this order
        assert all(250 < w <= int(width) for w in found[width]["pictures"])
        assert re.search(r"2 times from step 1 to 2, last: w{400}", found[width]["words"])
    assert len(found["390"]["pictures"]) >= 3


@pytest.mark.slow
def test_the_page_of_an_explanation(look):
    sample = dict(sample=0, tokens=2, truncated=False, response=ROW["response"], right=True)
    sample |= dict(score=1.0, overlong_penalty=0.0, reward=1.0, advantage=0.5, entropy=0.1)
    sample |= dict(extracted="3", parts={})
    token = dict(entropy=0.1, logp=-0.1, uniform=0.5, ratio=1.0, weight=0.1, clipped="")
    token |= dict(candidates=[], drawn=None, weights_after_step=0, advantage=0.5, loss=0.1)
    token |= dict(forward_draws_it=True, reply=False)
    out = dict(step=1, problem="p", prompt=ROW["prompt"], answer="3", sample=0)
    pieces = enumerate(ROW["pieces"])
    out |= dict(run="runs/a", tokens=[token | {"token": i, "piece": p} for i, p in pieces])
    record = dict.fromkeys(("of_this_problem", "of_another", "journal"), 1) | {"differences": []}
    out |= dict(record=record, weights_after_step=0, notes=["n" * 200], source="s", position=0)
    out |= dict(samples=[sample] * 4, epoch=0, teaches=True, what_if={})
    found = look(explanation.file(out))
    fits(found)
    assert all("sample 0" in found[str(w)]["titles"] for w in WIDTHS)
