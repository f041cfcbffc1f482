"""A run writes all that is in the table of tags, and nothing else, also to TensorBoard."""

import json
import pathlib
import time

import numpy as np
import pytest
import stubbed_train
from ports import wait_until
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import _clean_tag
from test_train import small

from dapo_jax import config, train
from dapo_jax.log import goodput, metrics, tags, tensorboard as board

# Of a graded reward of one's own: test_own_reward.py; of accelerators: test_hardware.py; of
# responses that outlive steps: test_carried.py; of drafts: test_drafts.py; of turns: test_turns.py;
OWN = {"scored", "parts", "missed", "device", "aged", "drafts", "turns", "chosen", "cov", "ess"}
# the last three: test_over_batch.py.


def events(workdir: pathlib.Path) -> list[Event]:
    """A record is length, its checksum, event, its checksum."""
    out = []
    for file in (workdir / "tensorboard").glob("events*"):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            out.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return out


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("everything")
    c = small(2)
    c.checkpoint.every, c.data.embedded_problems, c.log.text_every = 0, 4, 1
    c.loss.importance, c.loss.importance_cap, c.loss.positive_coef = "token_mask", 5.0, 0.1
    c.loss.kl_coef, c.critic.enabled, c.critic.pretrain_steps = 0.1, True, 0
    c.guard.entropy_max = 0.1  # random weights are far above
    c.curriculum.band_high = 0.9
    c.log.alarm_command = f"tee -a {workdir}/told"
    train.train(c, workdir, score=stubbed_train.JUDGE, hooks=train.Hooks(profile=2))
    return workdir


def test_each_record_holds_what_the_table_says(everything):
    first, second, last = metrics.read(everything / "metrics.jsonl")
    for record, kinds in (
        (first, {"record", "start", "evaluation", "majority"}),
        (second, set(tags.WHEN) - OWN - {"start", "evaluation", "majority", "again"}),
        (last, set(tags.WHEN) - OWN - {"start"}),
    ):
        there = {tags.family(t) for t in record if t != "step"}
        assert there == {name for name, t in tags.TAGS.items() if t.when in kinds}


def test_tensorboard_holds_every_tag_with_its_definition(everything):
    """Scalars, histograms and texts, at the step and with the time and value of metrics.jsonl."""
    records = metrics.read(everything / "metrics.jsonl")
    times = {r["step"]: r["time/wall"] for r in records}
    assert list(times.values()) == sorted(times.values()) and 0 <= time.time() - times[0] < 10**5
    points, described, wanted = {}, {}, set()
    for event in events(everything):
        for v in event.summary.value:
            if v.tag == "custom_scalars__config__":  # test_layout.py
                continue
            points[event.step, v.tag] = v
            described.setdefault(v.tag, v.metadata.summary_description)
            assert event.wall_time == times[event.step]
    for record in records:
        for tag, value in record.items():
            name = f"{tag}/text_summary" if tag == "alarms" else _clean_tag(tag)
            if tag in ("step", "time/wall"):
                continue
            wanted.add((record["step"], name))
            point = points[record["step"], name]
            if tag == "alarms":
                assert point.tensor.string_val[0].decode() == "\n\n".join(value)
            elif isinstance(value, list):
                assert list(point.histo.bucket) == value and point.histo.num == sum(value)
                edges = tags.edges(tag, len(value), longest=16)
                assert [point.histo.min, *point.histo.bucket_limit] == pytest.approx(edges)
            else:
                assert point.simple_value == np.float32(value)
            assert described[name] == tags.describe(tag) != ""
    samples = {(step, "samples/text_summary") for step in (1, 2)}
    assert points.keys() == wanted | samples


def test_a_step_is_traced(everything):
    traces = list((everything / "profile").rglob("*.xplane.pb"))
    assert {p.parts[-5] for p in traces} == {"step_000002_rollout", "step_000002_update"}
    assert all(p.stat().st_size > 1000 for p in traces)


def test_the_alarm_command_gets_the_alarms(everything):
    told = everything / "told"  # the run did not wait for the command
    wait_until(lambda: told.exists() and told.read_text().endswith("}"))
    first, _ = json.JSONDecoder().raw_decode(told.read_text())
    assert abs(first.pop("time") - time.time()) < 10**5
    (_, record, _) = metrics.read(everything / "metrics.jsonl")
    told = {"workdir": str(everything), "step": 1, "in_row": 1, "alarms": record["alarms"]}
    assert first == told


def test_events_say_where_time_went(everything):
    events = [json.loads(x) for x in (everything / "events.jsonl").read_text().splitlines()]
    a_step = ["rollout", "update", "step", "save"]
    begin = ["start-up", "resume", "evaluation", "save"]
    assert [e["event"] for e in events] == [
        *begin, *a_step, *a_step[:3], "evaluation", "save", "leave"
    ]  # fmt: skip
    assert events[-1]["finished"] is True
    ledger = goodput.read(everything / "events.jsonl")
    assert ledger.steps.keys() == {1, 2} and ledger.lost["compile"] > 0
    assert ledger.evaluated.keys() == {0, 2}
    for record in metrics.read(everything / "metrics.jsonl")[1:]:
        shares = [v for t, v in record.items() if t.startswith(("time/goodput", "time/lost/"))]
        assert sum(shares) == pytest.approx(1) and 0 < record["time/goodput"] < 1


def test_families():
    assert tags.family("source/openai/gsm8k/accuracy") == "source/<data_source>/accuracy"
    for unknown in ("eval/avg@k", "eval/x/std", "policy/entropy2", "step"):
        with pytest.raises(KeyError, match="not in dapo_jax/log/tags.md"):
            tags.family(unknown)
        assert tags.describe(unknown) == ""


def test_the_table_is_whole():
    """No empty cell, and no word that only one cell knows."""
    for name, tag in tags.TAGS.items():
        assert all(tag) and tag.when in tags.WHEN, name
    lines = tags.markdown().splitlines()
    assert len(lines) == len(tags.TAGS) + 2
    assert {line.replace("\\|", "").count("|") for line in lines} == {9}


ROW = dict(correct=True, truncated=False, reward=0.5, tokens=3, mean_entropy=0.25, answer="7")
ROW |= dict(prompt="p q", response="x\n**y**", extracted="7")


def test_samples_are_markdown_that_leaves_a_response_as_it_is(tmp_path):
    long = ROW | dict(correct=False, truncated=True, reward=-2.0, response="z" * 5000)
    out = board.Board(tmp_path / "tensorboard", config.base())
    out.samples(4, [ROW, long, {"reward": [1], "response": [2], "prompt": {"a": 1}}])
    out.samples(5, [])
    out.close()
    ((step, v),) = ((e.step, v) for e in events(tmp_path) for v in e.summary.value)
    first, second, third = v.tensor.string_val[0].decode().split("\n\n---\n\n")
    assert (step, v.tag) == (4, "samples/text_summary")
    head = "**right**, reward 0.5, tokens 3, mean_entropy 0.25; answer 7, found 7"
    assert first == f"{head}\n\n    p q\n\n    x\n    **y**"
    assert second.startswith("**wrong, truncated**, reward -2.0, ")
    assert "[3,000 characters]" in second and second.count("z") == 2000
    assert third.startswith("**wrong**, reward [1], tokens None, mean_entropy None; answer None")
    assert third.endswith("\n\n    {'a': 1}\n\n    [2]")
