"""Curves for a paper: what is drawn is what was logged, bands are t-intervals, and every label is
within a figure of a column's width."""

import json
import re

import numpy as np
import pytest
from scipy import stats
from test_plots import STEPS, ours

from dapo_jax.lab import compare, pictures
from dapo_jax.lab.dynamics import plots


def columns(*pools) -> list[compare.Column]:
    return [compare.Column(f"c{i}", list(runs), None) for i, runs in enumerate(pools)]


def band(ax):
    """(x, low, high) of the only shaded band."""
    (shaded,) = ax.collections
    corners = shaded.get_paths()[0].vertices
    x = np.unique(corners[:, 0])
    ends = [corners[corners[:, 0] == at, 1] for at in x]
    return x, np.array([e.min() for e in ends]), np.array([e.max() for e in ends])


def test_runs_of_a_sweep_with_one_seed_are_named_by_what_differs():
    found = compare.names(["s/optim.lr=1/seed_0", "s/optim.lr=2/seed_0"])
    assert found == ["optim.lr=1", "optim.lr=2"]
    assert compare.names(["s/a/seed_0", "s/a/seed_1"]) == ["seed_0", "seed_1"]
    assert compare.names(["s/a/seed_0"]) == ["seed_0"]
    assert compare.names(["a/x", "b"]) == ["a/x", "b"]


def test_the_band_of_seeds_is_the_t_interval():
    runs = [ours("a", seed) for seed in range(3)]
    (panel,) = [p for p in plots.DYNAMICS if "policy/entropy" in p.lines]
    (ax,) = pictures.draw(columns(runs), panel).axes
    values = np.array([r.series["policy/entropy"][1] for r in runs])
    half = stats.t.ppf(0.975, 2) * values.std(0, ddof=1) / np.sqrt(3)
    x, low, high = band(ax)
    np.testing.assert_array_equal(x, STEPS)
    np.testing.assert_allclose(low, values.mean(0) - half)
    np.testing.assert_allclose(high, values.mean(0) + half)


def test_the_band_of_a_run_is_over_the_problems_of_the_set(tmp_path):
    """By hand: means of problems 1, .5, 0 of two draws each; a graded set, a second top-p, and
    lines that are no verdicts beside them."""
    (tmp_path / "eval").mkdir()
    for step in (0, 20):
        rows = [{"set": "s", "top_p": 1.0, "correct": c} for c in ([1, 1], [1, 0], [0, 0])]
        rows += [{"set": "s", "top_p": 0.7, "score": [2.0, x]} for x in (2.0, 4.0)]
        text = "\n".join(map(json.dumps, [*rows, {"set": "s"}, [1]])) + "\n{"
        (tmp_path / "eval" / f"step_{step:06d}.jsonl").write_text(text)
    (tmp_path / "eval" / "step_old.jsonl").write_text("")
    found = pictures.intervals(str(tmp_path))
    assert found.keys() == {"eval/s/avg@k", "eval/s_top_p0.7/avg@k"}
    steps, low, high = found["eval/s/avg@k"]
    half = stats.t.ppf(0.975, 2) * 0.5 / np.sqrt(3)
    assert half > 0.5 and steps.tolist() == [0, 20]  # so that the ends of a share cut it
    assert low.tolist() == [0, 0] and high.tolist() == [1, 1]
    _, low, high = found["eval/s_top_p0.7/avg@k"]
    assert low.tolist() == [2, 2] and high.tolist() == [3, 3]
    assert pictures.intervals(str(tmp_path / "eval" / "step_000000.jsonl")) == {}


def test_a_score_has_its_band_over_updates(tmp_path):
    (tmp_path / "eval").mkdir()
    for step, n in ((0, 4), (20, 12)):
        rows = [{"set": "heldout", "top_p": 1.0, "correct": [i < n]} for i in range(16)]
        file = tmp_path / "eval" / f"step_{step:06d}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
    run = ours()._replace(path=str(tmp_path))
    found = {p.title: p.figure.axes[0] for p in pictures.pictures(columns([run]))}
    x, low, high = band(found["heldout, top-p 1"])
    half = stats.t.ppf(0.975, 15) * np.sqrt(0.25 * 0.75 * 16 / 15) / 4
    assert x.tolist() == [0, 160]
    np.testing.assert_allclose(
        [low, high], [[0.25 - half, 0.75 - half], [0.25 + half, 0.75 + half]]
    )
    (line,) = [x for x in found["heldout, top-p 1"].lines if x.get_label() == "avg@k"]
    assert line.get_ydata().tolist() == [0.1, 0.9] and line.get_xdata().tolist() == [0, 160]
    assert not found["hard, top-p 1"].collections


@pytest.mark.parametrize("pools", [1, 3])
def test_files_at_a_column_s_width(tmp_path, pools):
    """Every axis has a unit, its label lies within the picture, text is text in the PDF."""
    made = columns(*([ours(f"a long name of a run {i}", i)] for i in range(pools)))
    found = list(pictures.pictures(made))
    assert len({p.title for p in found}) == len(found) > 15
    for p in found[:: 1 if pools == 1 else 5]:
        p.figure.draw_without_rendering()
        (ax,) = p.figure.axes
        assert p.figure.get_size_inches().tolist() == [3.3, 2.4]
        assert re.search(r"share|tokens|nats|reward|seconds|probab|rounds|problems|no unit",
                         ax.get_ylabel().replace("\n", " "))  # fmt: skip
        for label in (ax.xaxis.label, ax.yaxis.label):
            box, whole = label.get_window_extent(), p.figure.bbox
            inside = box.y0 >= 0 and box.y1 <= whole.y1 and box.x0 >= 0 and box.x1 <= whole.x1
            assert inside and label.get_fontsize() == 8, p.title
    if pools == 1:
        few = made[0].runs[0]._replace(series={"policy/entropy": (STEPS, STEPS / 30)})
        written = pictures.write(columns([few]), tmp_path / "new" / "folder")
        assert [w.rpartition("/")[2] for w in written] == ["entropy.pdf", "entropy.png"]
        pdf, png = (tmp_path / "new" / "folder" / f"entropy.{k}" for k in ("pdf", "png"))
        assert b"/CIDFontType2" in (text := pdf.read_bytes()) and b"/Type3" not in text
        assert int.from_bytes(png.read_bytes()[16:20], "big") == 990  # 3.3 inches of 300 dots


# --- A sweep over one field ---


def swept(*seeds_of_each) -> list[compare.Column]:
    """A column for each list of last scores, a run for each score."""
    run = lambda n, x: ours(f"{n}/{x}")._replace(
        series={"eval/s/avg@k": (np.array([0, 20]), np.array([0.1, x]))}
    )
    return columns(*([run(n, x) for x in seeds] for n, seeds in enumerate(seeds_of_each)))


def test_a_sweep_over_one_field_is_a_picture_and_a_line(tmp_path):
    """By hand: at step 20 means .2, .8 and .5; the middle one's interval reaches down to .673."""
    wanted = [{"optim.lr": x} for x in (1e-4, 1e-3, 3e-4)]
    made = swept([0.1, 0.3], [0.79, 0.81], [0.49, 0.51])
    half = stats.t.ppf(0.975, 1) * np.array([0.1, 0.01, 0.01])
    text = pictures.over(made, wanted, tmp_path)
    best = "0.800 +- 0.127 at 0.001 is the highest"
    assert half[0] > 1 and text == (
        f"\n\ns/avg@k over optim.lr: {best}; the intervals of 0.0001 reach as high; it is the"
        " largest value, and the best may lie beyond"
    )
    assert (tmp_path / "over_optim_lr.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "over_optim_lr.pdf").exists()
    scores = {"eval/s/avg@k": [[0.1, 0.3], [0.79, 0.81], [0.49, 0.51]]}
    figure = pictures.over_values("optim.lr", [1e-4, 1e-3, 3e-4], scores, "avg@k [share]")
    (ax,) = figure.axes
    (means, _, (bars,)) = ax.containers[0]
    np.testing.assert_allclose(means.get_xydata(), [[1e-4, 0.2], [3e-4, 0.5], [1e-3, 0.8]])
    ends = np.array([s[:, 1] for s in bars.get_segments()])
    order = [0, 2, 1]
    wanted_ends = np.array([0.2, 0.5, 0.8])[:, None] + half[order][:, None] * [-1, 1]
    np.testing.assert_allclose(ends, wanted_ends)
    assert ax.get_xscale() == "log" and [t.get_text() for t in ax.get_xticklabels()] == [
        "0.0001", "0.001", "0.0003"
    ]  # fmt: skip
    assert sorted(y for line in ax.lines if line.get_marker() == "." for y in line.get_ydata()) == (
        sorted(x for seeds in scores["eval/s/avg@k"] for x in seeds)
    )


def test_other_values_stand_in_order_and_what_cannot_be_told_is_said(tmp_path):
    words = [{"loss.objective": x} for x in ("ppo", "gspo")]
    text = pictures.over(swept([0.4], [0.6]), words, tmp_path)
    assert text == (
        "\n\ns/avg@k over loss.objective: 0.600 at gspo is the highest; one seed tells nothing of"
        " chance"
    )
    (ax,) = pictures.over_values("x", [True, False], {"a": [[1.0], [2.0]]}, "a [1]").axes
    assert ax.get_xscale() == "linear"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["True", "False"]
    (ax,) = pictures.over_values("x", [2, 8], {"a": [[1.0], [2.0]]}, "a [1]").axes
    assert ax.get_xscale() == "linear" and ax.get_xticks().tolist() == [2, 8]
    inner = pictures.over(swept([0.1], [0.9], [0.2]), [{"x": x} for x in (1, 2, 3)], tmp_path)
    assert inner.count("\n") == 2 and "beyond" not in inner
    two = [{"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert pictures.over(swept([0.4], [0.6]), two, tmp_path / "none") == ""
    assert pictures.over(swept([0.4]), words[:1], tmp_path / "none") == ""
    silent = [c._replace(runs=[r._replace(series={}) for r in c.runs]) for c in swept([0], [1])]
    assert pictures.over(silent, words, tmp_path / "none") == ""
    assert not (tmp_path / "none").exists()
