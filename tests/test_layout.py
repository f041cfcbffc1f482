"""Panels of the dashboards: each tag of the tables stands in one, and so does each of a run."""

import re
import sys
from types import SimpleNamespace

import pytest
from tensorboardX.proto.layout_pb2 import Layout
from test_tags import events
from test_train import small

from dapo_jax.log import layout, metrics, tags, tensorboard as board

RECORD = {t: 1.0 for t in tags.TAGS if not tags.LISTS.fullmatch(t) and "<" not in t} | {
    "eval/a_b/avg@k": 0.5, "eval/a_b_top_p0.7/avg@k": 0.5, "eval/c/maj@k": 1, "time/lost/away": 0,
    "source/my set/accuracy": 1, "source/d(1)/score": 1, "reward_part/x/y": 1, "step": 1,
    "critic/long/return_mean": 1, "drafts/drafted/own": 1, "of/another version": 1, "alarms": ["a"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    writer = board.Board(tmp_path / "tensorboard", small(1))
    for step in (0, 1, 2):
        writer.record(RECORD | {"step": step})
    writer.close()
    return tmp_path


def charts(there: Layout) -> dict[tuple[str, str], list[str]]:
    return {
        (section.title, chart.title): list(chart.multiline.tag)
        for section in there.category
        for chart in section.chart
    }


def test_every_scalar_of_the_tables_is_in_one_panel():
    found = [n for of in layout.panels().values() for names in of.values() for n in names]
    lists = {"alarms", "response/length_hist", "policy/entropy_hist", "sampling/groups_by_correct"}
    lists |= {"curriculum/by_pass_rate"}
    assert len(found) == len(set(found)) and {*found} == {*tags.TAGS} - lists - {"time/wall"}
    for of in layout.panels().values():
        for title, names in of.items():
            units = {tags.TAGS[n].unit for n in names}
            assert len(units) == 1 and title.endswith(f"[{units.pop()}]")
    sizes = [len(names) for of in layout.panels().values() for names in of.values()]
    assert max(sizes) <= 8 and 10 <= len(layout.panels()) <= 16
    assert all("/" in name for name in found)  # W&B and MLflow make their sections of that word


def test_the_layout_in_the_file_finds_each_logged_tag_once(folder):
    points, layouts = set(), []
    for event in events(folder):
        for v in event.summary.value:
            if v.tag == "custom_scalars__config__":
                assert v.metadata.plugin_data.plugin_name == "custom_scalars"
                layouts.append(Layout.FromString(v.tensor.string_val[0]))
            elif v.HasField("simple_value"):
                points.add(v.tag)
    (there,) = layouts
    found = charts(there)
    for tag in points - {"of/another_version"}:
        panels = [key for key, patterns in found.items() for p in patterns if re.match(p, tag)]
        assert len(panels) == 1, (tag, panels)
    for key, patterns in found.items():  # none is empty
        assert any(re.match(p, tag) for p in patterns for tag in points), key
    lengths = found["Response", "response [tokens]"]
    assert len(lengths) == 7 and lengths[0] == "response/length_mean$"
    scores = found["Evaluation", "eval/<set>/avg@k [share]"]
    assert [t for t in sorted(points) if re.match(scores[0], t)] == [
        "eval/a_b/avg_k", "eval/a_b_top_p0.7/avg_k"
    ]  # fmt: skip


def test_what_a_run_does_not_log_has_no_panel(tmp_path):
    found = layout.summary_of({"policy/loss", "reward/mean", "of/another"}).value[0]
    there = charts(Layout.FromString(found.tensor.string_val[0]))
    assert there == {
        ("Reward", "reward [reward]"): ["reward/mean$"],
        ("Policy", "policy/loss [1]"): ["policy/loss$"],
    }


def test_panels_of_wandb_are_over_rollout_steps(tmp_path, monkeypatch):
    """By a stand-in that does as its client: a number has the axis that was defined before it came,
    and needs its value in the same call; a glob is a beginning and one asterisk."""
    axes, drawn = {}, {}

    def define_metric(name, step_metric=None, hidden=False):
        assert "*" not in name[:-1]
        axes[name] = step_metric

    def log(numbers, step):
        for name, value in numbers.items():
            of = axes[name] if name in axes else axes.get("*")
            drawn.setdefault(name, []).append((numbers[of] if of else step, value))

    calls = dict(define_metric=define_metric, log=log, finish=lambda: None, alert=lambda **_: None)
    client = SimpleNamespace(init=lambda **_: SimpleNamespace(id="w", **calls))
    monkeypatch.setitem(sys.modules, "wandb", client)
    c = small(1)
    c.log.wandb, c.log.tensorboard = "mine", False
    writer = metrics.Writer(tmp_path, -1, c, print)
    for step in (0, 1, 2):
        writer.record(step, {t: float(step) for t in RECORD if t not in ("step", "alarms")})
    writer.close()
    assert axes == {"step": None, "*": "step"}
    assert {*drawn} >= {"policy/loss", "eval/a_b/avg@k", "reward/mean"}
    assert all(points == [(0, 0.0), (1, 1.0), (2, 2.0)] for points in drawn.values())
