"""Runs side by side: what differs, scores where they can be compared, and bad input."""

import json
import math

import pytest

from dapo_jax.config import schema
from dapo_jax.lab import compare
from dapo_jax.lab.experiments import stats


def made(folder, name, steps=60, updates=8, tokens=1000, gain=0.01, fields=None, **more):
    """A workdir whose avg@k is gain * step, evaluated every 10 steps; updates, tokens: per step."""
    home = folder / name
    home.mkdir(parents=True)
    rows = []
    for step in range(steps + 1):
        row = {"step": step}
        if step:
            row |= {"optim/updates": updates * step, "spent/tokens": tokens * step}
            row |= {"response/length_mean": 10 + step, "reward/accuracy": step / 200}
            row |= {"time/step_s": 2.0, "time/goodput": 0.75, "policy/entropy": 1 / step}
        if step % 10 == 0:
            row |= {"eval/heldout/avg@k": gain * step, "time/eval_s": 1.0}
        rows.append(row | more)
    (home / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (home / "config.json").write_text(json.dumps(schema.leaves(schema.base()) | (fields or {})))
    return str(home)


@pytest.fixture
def pair(tmp_path):
    """A long run and a short one that takes four times the tokens and half the updates a step."""
    long = made(tmp_path, "long", fields={"optim.lr": 1e-6})
    return [long, made(tmp_path, "short", 30, 4, 4000, 0.02, {"optim.lr": 3e-6, "steps": 30})]


def test_scores_where_both_have_been(pair):
    found = compare.summary(compare.read(pair))
    assert found["equal"] == {"steps": 30, "updates": 120, "tokens": 60_000}
    a, b = (r["scores"]["eval/heldout/avg@k"] for r in found["runs"])
    assert a["at_equal_steps"] == [pytest.approx(0.3)] and b["at_equal_steps"] == [0.6]
    # 120 updates are 15 steps of the long run, between two evaluations, and 30 of the short one
    assert a["at_equal_updates"] == [pytest.approx(0.15)] and b["at_equal_updates"] == [0.6]
    assert a["at_equal_tokens"] == [0.6] and b["at_equal_tokens"] == [pytest.approx(0.3)]
    assert (a["last"], a["last_step"], b["last"], b["last_step"]) == ([0.6], [60], [0.6], [30])
    with open(f"{pair[0]}/metrics.jsonl", "a") as file:  # best is not last
        file.write(json.dumps({"step": 61, "eval/heldout/avg@k": 0.1}) + "\n")
    worse = compare.summary(compare.read(pair))["runs"][0]["scores"]["eval/heldout/avg@k"]
    assert (worse["best"], worse["best_step"]) == ([0.6], [60])
    assert (worse["last"], worse["last_step"]) == ([0.1], [61])
    first = found["runs"][0]
    assert first["length"] == [10 + 28]  # mean of steps 26 to 30, where the short one ends
    assert first["training_accuracy"] == [pytest.approx(28 / 200)]
    assert (first["time_s"], first["goodput"]) == ([60 * 2.0 + 7], [0.75])


def test_only_fields_that_differ_with_defaults_for_later_ones(pair, tmp_path):
    differ = {"steps": [100, 30], "optim.lr": [1e-6, 3e-6]}
    assert compare.differing(compare.read(pair)) == differ
    file = tmp_path / "short" / "config.json"
    older = json.loads(file.read_text()) | {"mine": 1}  # a field that is no more
    del older["loss.clip_high"]  # one that came later
    file.write_text(json.dumps(older))
    assert compare.differing(compare.read(pair)) == differ


def test_the_table_says_which_rows_are_of_one_length(pair, tmp_path):
    text = compare.table(compare.summary(compare.read(pair)))
    rows = {line.split("  ")[0]: line for line in text.splitlines() if not line.startswith("  ")}
    assert rows["optim.lr"].split() == ["optim.lr", "1e-06", "3e-06"]
    assert rows["steps done"].split()[-2:] == ["60", "30"]
    assert "at 30 steps 0.300 0.600" in " ".join(text.split())
    assert "at 60,000 tokens 0.600 0.300" in " ".join(text.split())
    assert "last, @ its step 0.600 @ 60 0.600 @ 30" in " ".join(text.split())
    assert "These runs have different lengths (30 to 60 steps)" in text
    same = compare.table(compare.summary(compare.read([pair[0], made(tmp_path, "beside")])))
    assert "different lengths" not in same


@pytest.mark.parametrize("width", [40, 80, 200])
def test_many_runs_with_long_values_keep_the_width_and_lose_nothing(tmp_path, width):
    name = "a_name_of_a_run_that_is_long_{}".format
    paths = [made(tmp_path, name(i), fields={"data.train": f"/p{i}/" * 20}) for i in range(7)]
    text = compare.table(compare.summary(compare.read(paths)), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("0.600 @ 60") == 14  # best and last of each
    dense = "".join(text.split())
    assert all(dense.count(f"/p{i}/") for i in range(7))


def test_seeds_are_pooled_where_nothing_else_differs(tmp_path):
    gains = {"slow": (0.004, 0.006), "fast": (0.008, 0.01, 0.012)}
    paths = [
        made(tmp_path, f"{name}/seed_{i}", gain=gain, fields={"seed": i, "optim.lr": len(of)})
        for name, of in gains.items()
        for i, gain in enumerate(of)
    ]
    assert len(compare.read(paths)) == 5
    columns = compare.read(paths, pool_seeds=True)
    assert [(c.name, len(c.runs)) for c in columns] == [("slow", 2), ("fast", 3)]
    found = compare.summary(columns)
    values = found["runs"][1]["scores"]["eval/heldout/avg@k"]["last"]
    assert values == pytest.approx([0.48, 0.6, 0.72])
    text = compare.table(found)
    assert f"{stats.interval(values)} @ 60" in text and "over the runs of a column" in text
    ax = compare.figure(columns).axes[0]  # a thick mean, each seed thin
    ends = [0.3, 0.24, 0.36, 0.6, 0.48, 0.6, 0.72]
    assert [line.get_ydata()[-1] for line in ax.lines] == pytest.approx(ends)
    assert [x.get_linewidth() > 1 for x in ax.lines] == [True, *[False] * 2, True, *[False] * 3]
    assert len(ax.collections) == 1  # an interval from three seeds on: that of two hides the rest


def test_what_a_run_has_not_logged_is_no_number(tmp_path):
    paths = [made(tmp_path, "a"), str(tmp_path / "other.csv")]
    (tmp_path / "other.csv").write_text("step,response/length_mean\n1,5\n2,6\n")
    columns = compare.read(paths)
    found = compare.summary(columns)
    assert found["equal"] == {"steps": 2}  # the other counts neither updates nor tokens
    assert found["runs"][1]["scores"]["eval/heldout/avg@k"]["last"] == [None]
    assert compare.differing(columns) == {}  # it has no config
    assert "nan" not in compare.table(found) and json.dumps(found, allow_nan=False)
    (run, _) = compare.read([made(tmp_path, "null", **{"reward/accuracy": None}), paths[1]])
    assert math.isnan(compare.facts(run.runs[0], 60)["training_accuracy"])
    (tmp_path / "bare.csv").write_text("step,policy/entropy\n1,0.5\n")
    plain = compare.summary(compare.read([paths[1], str(tmp_path / "bare.csv")]))
    assert "No run has been evaluated." in compare.table(plain)


def test_the_command_reads_runs_in_a_bucket(bucket, tmp_path, capsys):
    paths = [made(bucket, name, steps) for name, steps in (("a", 60), ("b", 20))]
    wanted, there = compare.summary(compare.read(paths)), ["gs://b/a", "gs://b/b"]
    files = [f"--json={tmp_path}/x.json", f"--figure={tmp_path}/x.png"]
    assert compare.main([*there, *files]) == 0
    assert capsys.readouterr().out == compare.table(wanted) + "\n"
    found = json.loads((tmp_path / "x.json").read_text())
    assert [r.pop("paths") for r in (*found["runs"], *wanted["runs"])][:2] == [[p] for p in there]
    assert found == wanted and (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_the_figure_draws_what_was_logged_each_run_to_its_end(pair):
    figure = compare.figure(compare.read(pair))
    scores, updates, tokens, train, length, entropy = figure.axes
    for ax, ends in ((scores, (60, 30)), (updates, (480, 120)), (tokens, (60_000, 120_000))):
        long, short, dotted = ax.lines
        assert (long.get_xdata()[-1], short.get_xdata()[-1]) == ends
        assert dotted.get_xdata()[0] == min(ends)
        assert long.get_color() != short.get_color()
    assert scores.lines[1].get_ydata() == pytest.approx([0, 0.2, 0.4, 0.6])
    assert [len(ax.lines) for ax in (train, length, entropy)] == [2, 2, 2]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["long", "short"]
    assert all(ax.get_xlabel() and ax.get_ylabel() for ax in figure.axes)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["{a}"], "{a}: give two runs or more"),
        ([], "the following arguments are required: run"),
        (["{a}", "{b}/../a//"], "{a}: is named twice"),
        (["{a}", "{empty}"], "{empty}: no metrics.jsonl in it"),
        (["{a}", "{b}"], "{b}/config.json: no JSON"),
        (["{a}", "{list}"], "{list}/config.json: not a run's"),
        (["{a}", "foo://x"], "foo://x"),
        (["{a}", "{c}", "--figure=x.doc"], "Format 'doc' is not supported"),
        (["{a}", "{c}", "--figure={empty}/no/x.png"], "No such file or directory"),
    ],
)
def test_bad_input_is_one_line(arguments, wrong, tmp_path, capsys):
    places = {name: made(tmp_path, name) for name in ("a", "b", "c", "list")}
    (tmp_path / "b" / "config.json").write_text('{"seed": 1')
    (tmp_path / "list" / "config.json").write_text("[1]")
    (tmp_path / "empty").mkdir()
    places |= {"empty": str(tmp_path / "empty")}
    with pytest.raises(SystemExit) as left:
        compare.main([a.format(**places) for a in arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 1 and line.startswith("error: ")
    assert wrong.format(**places) in line
