"""Figures: what is drawn is what was logged, every axis has a name, nothing global is touched."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.lab.dynamics import plots, verl
from dapo_jax.lab.dynamics.logs import Run
from dapo_jax.lab.experiments import ink
from dapo_jax.log import tags

STEPS = np.arange(1, 31)


def ours(name="ours", seed=0):
    rng = np.random.default_rng(seed)
    lists = ("_hist", "by_pass_rate", "alarms")
    scalars = [t for t in tags.TAGS if "<" not in t and not t.endswith(lists)]
    scalars += ["source/a/accuracy", "source/b/accuracy"]
    found = {tag: (STEPS, rng.random(len(STEPS))) for tag in scalars}
    found |= {"optim/updates": (STEPS, 8.0 * STEPS), "spent/tokens": (STEPS, 1000.0 * STEPS)}
    for of, start in (("heldout", 0.1), ("hard", 0.1), ("heldout_top_p0.7", 0.2)):
        found[f"eval/{of}/avg@k"] = np.array([0, 20]), np.array([start, 0.9])
    return Run(name, found)


@pytest.fixture
def theirs():
    names = ("actor/entropy", "actor/pg_clipfrac", "actor/grad_norm", "response_length/mean")
    names += ("train/num_gen_batches", "timing_s/gen", "timing_s/update_actor")
    made, of = verl.translate({n: (STEPS, np.random.default_rng(1).random(30)) for n in names})
    made["response/length_mean"] = STEPS, np.full(30, 900.0)
    return Run("verl", made, of=of)


TABLES = ("SAMPLING", "CURRICULUM", "VALUES", "CLIPPING", "TRUNCATION", "TIME")
FIGURES = {t: functools.partial(plots.lines, panels=getattr(plots, t)) for t in TABLES}
ALONE = ("dynamics", "filter_accuracy", "headline", "generalization", "scaling")
FIGURES |= {name: getattr(plots, name) for name in ALONE}
FIGURES |= {
    "map": lambda runs: plots.group_heatmap((STEPS, np.ones((30, 9))), "a"),
    "difficulty": lambda runs: plots.difficulty((STEPS, np.ones((30, 11))), "a"),
    "phrases": lambda runs: plots.phrases({"wait": (STEPS, STEPS / 30, STEPS * 2.0)}),
}
UNIT = r"share|tokens|nats|reward|seconds|probability|rounds|problems|of \d|no unit"


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_has_a_label_with_its_unit(name, theirs, tmp_path):
    for runs in ([ours(), theirs], [Run("nothing", {})], []):
        figure = FIGURES[name](runs)
        if len(runs) == 2:
            figure.savefig(tmp_path / "x.png", dpi=30)
            assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
        for ax in figure.axes if runs else ():
            assert ax.get_xlabel() or "colorbar" in ax.get_label()
            assert re.search(UNIT, ax.get_ylabel()), ax.get_ylabel()


def drawn(figure, title, label):
    ax = next(a for a in figure.axes if a.get_title() == title)
    return next(line.get_data() for line in ax.lines if line.get_label() == label)


@pytest.mark.parametrize(
    ("figure", "title", "label", "tag"),
    [
        (plots.dynamics, "Entropy", "a", "policy/entropy"),
        (plots.dynamics, "Evaluation", "a, heldout", "eval/heldout/avg@k"),
        (FIGURES["TRUNCATION"], "Percentiles of length, drawn", "a, 90%", "response/length_p90"),
        (plots.generalization, "Training and hard", "a, training", "reward/accuracy"),
        (plots.filter_accuracy, "By source of the problem, drawn", "a, b", "source/b/accuracy"),
    ],
)
def test_lines_are_what_was_logged(figure, title, label, tag):
    run, other = ours("a"), ours("b", 1)
    found = drawn(figure([run, other], window=1), title, label)
    np.testing.assert_array_equal(found, run.series[tag])


@pytest.mark.parametrize("even", [True, False])
def test_seeds_are_averaged_where_all_of_them_are(even):
    (ax,) = ink.panels(1, 1)[1]
    at = np.array([[0.0, 4, 8, 12], [4.0, 8, 10, 16]])
    ink.over_seeds(ax, [(x, 2 * x) for x in at], "a", "red", even)
    x, y = ax.lines[0].get_data()
    assert 4 <= x[0] < 4.2 and x[-1] == 12 and y.tolist() == pytest.approx((2 * x).tolist())


@pytest.mark.parametrize("window", [1, 3, 9, 99])
def test_smooth_against_a_loop(window):
    values = np.random.default_rng(0).normal(size=40)
    values[[3, 4, 20]] = np.nan
    around = [values[max(i - window // 2, 0) : i + window // 2 + 1] for i in range(40)]
    wanted = [v if np.isnan(v) else np.nanmean(of) for v, of in zip(values, around, strict=True)]
    np.testing.assert_allclose(ink.smooth(values, window), wanted)


def test_panels_that_no_run_has_logged_are_left_out():
    plain = {t: s for t, s in ours().series.items() if "importance" not in t}
    assert [len(FIGURES["CLIPPING"]([r]).axes) for r in (Run("plain", plain), ours())] == [3, 5]


def test_other_axes():
    run = ours()
    seconds = np.cumsum(run.series["time/step_s"][1])
    wanted = {"step": [0, 10, 30], "updates": [0, 80, 240], "tokens": [0, 10_000, 30_000]}
    wanted["seconds"] = [0, seconds[9], seconds[29]]
    for axis, want in wanted.items():
        np.testing.assert_allclose(plots.x_of(run, np.array([0, 10, 30]), axis), want)
    x, _ = drawn(plots.dynamics([run], "tokens"), "Evaluation", "ours, heldout")
    np.testing.assert_allclose(x, [0, 20_000])
    assert plots.x_of(Run("none", {}), STEPS, "tokens") is None
    with pytest.raises(ValueError, match="x = 'epochs': must be one of step, updates"):
        plots.dynamics([run], "epochs")


def test_like_with_like(theirs):
    """Beside a run that knows the entropy of trained tokens only, the others show theirs."""
    figure = plots.dynamics([ours(), theirs], window=1)
    for name, run in (("ours", ours()), ("verl", theirs)):
        _, y = drawn(figure, "Entropy", f"{name} (trained tokens)")
        np.testing.assert_array_equal(y, run.series["policy/batch_entropy"][1])
    assert drawn(figure, "Response length", "verl (trained batch)")
    assert figure.axes[0].get_yscale() == "log"  # 900 tokens beside 1
    own = Run("older", {"policy/entropy": (STEPS, STEPS / 30)})  # which has no other
    figure = plots.dynamics([own, theirs], window=1)
    assert drawn(figure, "Entropy", "older") and drawn(figure, "Entropy", "verl (trained tokens)")


@pytest.mark.parametrize(
    ("name", "references"), [("aime24", 3), ("AIME-2024", 3), ("aime_2024_en", 3), ("aime25", 0)]
)
def test_the_paper_s_first_figure(name, references):
    """It shows the setting at top-p .7, and the paper's scores where the set is AIME 2024."""
    found = {"optim/updates": (STEPS, 16.0 * STEPS)}
    for i, score in enumerate(("avg@k", "pass@k", "maj@k"), 1):
        found[f"eval/{name}/{score}"] = np.array([0, 20]), np.array([0.9, 0.9])
        found[f"eval/{name}_top_p0.7/{score}"] = np.array([0, 20]), np.array([0.1, 0.2 * i])
    figure = plots.headline([Run("a", found)])
    (ax,) = figure.axes
    assert ax.get_title() == f"{name}, top-p 0.7" and ax.get_xlabel() == "gradient updates"
    for i, score in enumerate(("avg@k", "pass@k", "maj@k"), 1):
        x, y = drawn(figure, ax.get_title(), f"a, {score}")
        assert (x.tolist(), y.tolist()) == ([0, 320], [0.1, 0.2 * i])
    lines = [line.get_ydata()[0] for line in ax.lines if line.get_color() == "gray"]
    assert lines == [0.30, 0.47, 0.50][:references] and len(ax.texts) == references


def test_maps_show_shares():
    table = np.array([[1, 2, 1], [0, 0, 4], [0, 0, 0]])
    mesh = plots.group_heatmap((np.array([1, 2, 5]), table)).axes[0].collections[0]
    np.testing.assert_allclose(mesh.get_array(), [[0.25, 0, 0], [0.5, 0, 0], [0.25, 1, 0]])
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0.5, 1.5, 4.5, 5.5]
    rates = np.zeros((2, 11))  # the unsolved, and one row for each tenth
    rates[0, 0], rates[1, [0, 10]] = 4, (1, 3)
    mesh = plots.difficulty((np.array([1, 2]), rates)).axes[0].collections[0]
    np.testing.assert_allclose(mesh.get_array()[:, 0], np.arange(11) == 0)
    borders = list(tags.edges("curriculum/by_pass_rate", 0, 0))
    assert mesh.get_coordinates()[:, 0, 1].tolist() == borders


def test_every_panel_shows_tags_and_pyplot_is_not_imported():
    """Matplotlib is imported where figures are drawn, not where one trains, who waits for it;
    pyplot, which keeps figures alive, nowhere."""
    shown = {tag for panels in plots.PANELS.values() for p in panels for tag in p.lines}
    assert all(tags.family(t) for t in shown - {"policy/clip_frac"})  # which is verl's alone
    drawing = {"plots.py", "figures.py", "ink.py", "study.py"}
    for file in Path(plots.__file__).parents[2].rglob("*.py"):
        names = re.findall(r"^\s*(?:from|import)\s+(matplotlib[\w.]*)", file.read_text(), re.M)
        draws = file.name in drawing or file.parent.name == "lab"
        assert (not names or draws) and "matplotlib.pyplot" not in names, file
