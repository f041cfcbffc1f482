"""Figures: what is drawn is what was logged, every axis has a name, nothing global is touched."""

import collections
import re
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.lab.dynamics import logs, plots, verl
from dapo_jax.lab.dynamics.logs import Run
from dapo_jax.lab.experiments import ink
from dapo_jax.log import tags

STEPS = np.arange(1, 31)


def series(rng, *names):
    return {name: (STEPS, rng.random(len(STEPS))) for name in names}


def ours(name="ours", seed=0):
    rng = np.random.default_rng(seed)
    scalars = [
        t
        for t in tags.TAGS
        if "<" not in t and t != "alarms" and not t.endswith(("_hist", "by_pass_rate"))
    ]
    found = series(rng, *scalars, "source/a/accuracy", "source/b/accuracy")
    found["optim/updates"] = STEPS, 8.0 * STEPS
    found["spent/tokens"] = STEPS, 1000.0 * STEPS
    found["eval/heldout/avg@k"] = found["eval/hard/avg@k"] = np.array([0, 20]), np.array([0.1, 0.9])
    found["eval/heldout_top_p0.7/avg@k"] = np.array([0, 20]), np.array([0.2, 0.9])
    return Run(name, found)


@pytest.fixture
def theirs():
    rng = np.random.default_rng(1)
    names = ("actor/entropy", "actor/pg_clipfrac", "actor/grad_norm", "response_length/mean")
    names += ("train/num_gen_batches", "timing_s/gen", "timing_s/update_actor")
    made, of = verl.translate(series(rng, *names))
    made["response/length_mean"] = STEPS, np.full(30, 900.0)
    return Run("verl", made, of=of)


FIGURES = {
    "dynamics": plots.dynamics,
    "filter": plots.filter_accuracy,
    "sampling": plots.sampling,
    "curriculum": plots.curriculum,
    "values": plots.values,
    "clipping": plots.clipping,
    "headline": plots.headline,
    "generalization": plots.generalization,
    "scaling": plots.scaling,
    "truncation": plots.truncation,
    "time": plots.time_split,
    "map": lambda runs: plots.group_heatmap((STEPS, np.ones((30, 9))), runs[0].name),
    "difficulty": lambda runs: plots.difficulty((STEPS, np.ones((30, 11))), "a"),
    "phrases": lambda runs: plots.phrases({"wait": (STEPS, STEPS / 30, STEPS * 2.0)}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_has_a_label_with_its_unit(name, theirs, tmp_path):
    for runs in ([ours()], [ours(), theirs], [Run("nothing", {})], []):
        figure = FIGURES[name](runs) if runs or name != "map" else None
        if figure is None:
            continue
        if len(runs) == 2:
            figure.savefig(tmp_path / "x.png", dpi=30)
            assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
        drawn = [ax for ax in figure.axes if ax.axison]
        assert drawn or not runs
        for ax in drawn:
            assert ax.get_ylabel() and (ax.get_xlabel() or "colorbar" in ax.get_label())
            unit = r"share|tokens|nats|reward|seconds|probability|rounds|problems|of \d|no unit"
            assert re.search(unit, ax.get_ylabel()), ax.get_ylabel()


def drawn(figure, title, label):
    """(x, y) of the line with this label in the panel with this title."""
    ax = next(a for a in figure.axes if a.get_title() == title)
    return next(line.get_data() for line in ax.lines if line.get_label() == label)


def test_lines_are_what_was_logged():
    run, other = ours("a"), ours("b", 1)
    figure = plots.dynamics([run, other], window=1)
    for name, which in (("a", run), ("b", other)):
        x, y = drawn(figure, "Entropy", name)
        np.testing.assert_array_equal(x, STEPS)
        np.testing.assert_array_equal(y, which.series["policy/entropy"][1])
    x, y = drawn(figure, "Evaluation", "b, heldout")
    assert (x.tolist(), y.tolist()) == ([0, 20], [0.1, 0.9])
    x, y = drawn(plots.clipping([run], window=1), "Clipped tokens", "a, high")
    np.testing.assert_array_equal(y, run.series["policy/clip_high_frac"][1])


def test_the_raw_line_is_under_the_smooth_one():
    run = ours()
    ax = plots.dynamics([run], window=7).axes[2]
    raw, thick = ax.lines
    np.testing.assert_array_equal(raw.get_ydata(), run.series["policy/entropy"][1])
    np.testing.assert_allclose(thick.get_ydata(), ink.smooth(raw.get_ydata(), 7))
    assert raw.get_linewidth() < thick.get_linewidth() and raw.get_color() == thick.get_color()


def test_smooth_against_a_loop():
    values = np.random.default_rng(0).normal(size=40)
    values[[3, 4, 20]] = np.nan
    for window in (1, 3, 9, 99):
        reach = window // 2
        wanted = [
            np.nan if np.isnan(v) else np.nanmean(values[max(i - reach, 0) : i + reach + 1])
            for i, v in enumerate(values)
        ]
        np.testing.assert_allclose(ink.smooth(values, window), wanted)


def test_other_axes():
    run = ours()
    for axis, factor in (("step", 1), ("updates", 8), ("tokens", 1000)):
        at = plots.x_of(run, np.array([0, 10, 30]), axis)
        np.testing.assert_allclose(at, factor * np.array([0, 10, 30]))
    x, _ = drawn(plots.dynamics([run], "tokens"), "Evaluation", "ours, heldout")
    np.testing.assert_allclose(x, [0, 20_000])
    assert plots.x_of(Run("none", {}), STEPS, "tokens") is None
    with pytest.raises(ValueError, match="x = 'epochs': must be one of step, updates"):
        plots.dynamics([run], "epochs")


def test_like_with_like(theirs):
    """Beside a run that knows the entropy of trained tokens only, the others show theirs."""
    tagged = {
        run.name: tag for run, tag, _ in plots.chosen([ours(), theirs], plots.DYNAMICS[2].tags)
    }
    assert tagged == {"ours": "policy/batch_entropy", "verl": "policy/batch_entropy"}
    [(_, tag, label)] = plots.chosen([ours()], plots.DYNAMICS[2].tags)
    assert (tag, label) == ("policy/entropy", "ours")
    figure = plots.dynamics([ours(), theirs])
    assert drawn(figure, "Response length", "verl (trained batch)")
    assert figure.axes[0].get_yscale() == "log"  # 900 tokens beside 1


def test_a_short_run_beside_a_long_one_can_be_told_apart():
    """Five steps beside thirty are too short for dashes: each kind of line ends in its marker."""
    short = Run("short", {t: (x[:5], y[:5]) for t, (x, y) in ours().series.items()})
    figure = plots.clipping([ours("long"), short])
    for name, last in (("long", 30), ("short", 5)):
        markers = {}
        for kind in ("low", "high"):
            ax = figure.axes[0]
            line = next(x for x in ax.lines if x.get_label() == f"{name}, {kind}")
            markers[kind] = line.get_marker()
            assert line.get_xdata()[-1] == last
            assert line.get_markevery() in (1, [last - 1])
        assert len(set(markers.values())) == 2 and "None" not in markers.values()


Drawn = collections.namedtuple("Drawn", "piece logp entropy")
Answer = collections.namedtuple("Answer", "tokens")


def test_token_profile_draws_equal_answers_once_over_the_tokens():
    two, three = ([Drawn(p, -0.5, 0.1) for p in words] for words in (("a", "$b$"), ("a", "c", " ")))
    figure = plots.token_profile([Answer(two), Answer(three), Answer(two)])
    for ax in figure.axes:
        labels = [x.get_label() for x in ax.lines]
        assert labels == ["answer 1, 2 times", "answer 2", "first difference"]
        assert ax.lines[-1].get_xdata() == [2, 2]  # "a" is common
        assert [t.get_text() for t in ax.get_xticklabels()] == ["a", "$b$ | c", " "]
        assert not any(t.get_parse_math() for t in ax.get_xticklabels())
    (left, _) = plots.token_profile([Answer(two)] * 4).axes
    assert [x.get_label() for x in left.lines] == ["answer 1, 4 times"]
    (left, _) = plots.token_profile([Answer(three * 20)]).axes
    assert "$b$" not in [t.get_text() for t in left.get_xticklabels()]


@pytest.mark.parametrize(
    ("name", "references"),
    [("aime24", 3), ("AIME-2024", 3), ("aime_2024_en", 3), ("aime25", 0), ("heldout", 0)],
)
def test_the_paper_s_first_figure(name, references):
    """Of the setting at top-p .7; the paper's scores stand where the set is AIME 2024."""
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
    alone = {t: v for t, v in found.items() if "_top_p" not in t}
    (ax,) = plots.headline([Run("a", alone)]).axes
    assert ax.get_title() == f"{name}, top-p 1" and ax.lines[0].get_ydata()[1] == 0.9


def test_training_stands_beside_each_evaluation_set():
    run = ours()
    figure = plots.generalization([run], window=1)
    assert [a.get_title() for a in figure.axes] == ["Training and heldout", "Training and hard"]
    _, y = drawn(figure, "Training and hard", "ours, training")
    np.testing.assert_array_equal(y, run.series["reward/accuracy"][1])
    _, y = drawn(figure, "Training and hard", "ours, hard")
    assert y.tolist() == [0.1, 0.9]
    smoothed = plots.generalization([run, ours("other", 1)], window=7)
    assert len(smoothed.axes) == 2  # not one for each run
    assert drawn(smoothed, "Training and hard", "ours, hard")[1].tolist() == [0.1, 0.9]


def test_percentiles_of_length_and_weights_where_there_are_any():
    run = ours()
    for p in (50, 90, 99):
        figure = plots.truncation([run], window=1)
        _, y = drawn(figure, "Percentiles of length, drawn", f"ours, {p}%")
        np.testing.assert_array_equal(y, run.series[f"response/length_p{p}"][1])
    figure = plots.clipping([run], window=1)
    for title, label, tag in (
        ("Importance weight", "ours", "importance_mean"),
        ("Weights at their bounds", "ours, at the bound", "importance_capped_frac"),
        ("Weights at their bounds", "ours, zeroed", "importance_zeroed_frac"),
    ):
        np.testing.assert_array_equal(
            drawn(figure, title, label)[1], run.series[f"policy/{tag}"][1]
        )
    plain = Run("plain", {t: s for t, s in run.series.items() if "importance" not in t})
    assert len(plots.clipping([plain]).axes) == 3


def test_time_adds_up():
    ax = plots.time_split([ours()]).axes[0]
    parts = [ours().series[f"time/{n}_s"][1] for n in ("rollout", "update", "eval")]
    top = ax.patches[-1].get_data()
    np.testing.assert_allclose(top.values, np.sum(parts, axis=0))
    shares = [int(s) for s in re.findall(r"(\d+)%", " ".join(p.get_label() for p in ax.patches))]
    assert sum(shares) in (99, 100, 101)


def test_heatmap_shows_shares():
    table = np.array([[1, 2, 1], [0, 0, 4], [0, 0, 0]])
    figure = plots.group_heatmap((np.array([1, 2, 5]), table))
    mesh = figure.axes[0].collections[0]
    np.testing.assert_allclose(mesh.get_array(), [[0.25, 0, 0], [0.5, 0, 0], [0.25, 1, 0]])
    assert plots.edges(np.array([1, 2, 5])).tolist() == [0.5, 1.5, 3.5, 6.5]
    assert plots.edges(np.array([7])).tolist() == [6.5, 7.5]


def test_difficulty_has_a_row_for_the_unsolved_and_one_for_each_tenth():
    table = np.zeros((2, 11))
    table[0, 0], table[1, [0, 10]] = 4, (1, 3)
    mesh = plots.difficulty((np.array([1, 2]), table)).axes[0].collections[0]
    np.testing.assert_allclose(mesh.get_array()[:, 0], np.arange(11) == 0)
    np.testing.assert_allclose(mesh.get_array()[[0, 5, 10], 1], [0.25, 0, 0.75])
    assert mesh.get_coordinates()[:, 0, 1].tolist() == list(tags.RATE_EDGES)


def test_a_real_log_beside_ours(assets):
    path = assets / "train_logs/verl_dapo_rloo_qwen2.5-1.5b_steps.csv"
    run = logs.read(str(path), "verl")
    figure = plots.dynamics([ours(), run], window=1)
    _, y = drawn(figure, "Reward", "verl (trained batch)")
    np.testing.assert_array_equal(y, run.series["reward/mean"][1])
    _, y = drawn(plots.clipping([ours(), run], window=1), "Clipped tokens", "verl, low + high")
    np.testing.assert_array_equal(y, run.series["policy/clip_frac"][1])


def test_every_tag_is_in_the_table():
    found = set(re.findall(r'"((?:\w+/)\w+)"', Path(plots.__file__).read_text()))
    assert len(found) > 15
    assert [tags.family(t) for t in found - {"policy/clip_frac"}]  # which is verl's alone


def test_matplotlib_is_imported_where_figures_are_drawn():
    """Not where one trains, who waits for it; pyplot, which keeps figures alive, nobody imports."""
    drawing = {"plots.py", "figures.py", "ink.py", "effects.py"}
    package = Path(plots.__file__).parent.parent
    for file in package.rglob("*.py"):
        names = re.findall(r"^\s*(?:from|import)\s+(matplotlib[\w.]*)", file.read_text(), re.M)
        assert (not names or file.name in drawing) and "matplotlib.pyplot" not in names, file
