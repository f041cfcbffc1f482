"""The table of tags against a real run: all that a run can write is in the table, and the other way
round, in metrics.jsonl and in TensorBoard."""

import json
import pathlib
import time

import numpy as np
import pytest
import stubbed_train
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import _clean_tag

from dapo_jax import config, train
from dapo_jax.log import goodput, metrics, tags

# Of a graded reward of one's own: test_own_reward.py; of accelerators: test_hardware.py; of
# responses that outlive steps: test_carried.py.
OWN = {"scored", "parts", "missed", "device", "aged"}


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
    """Two steps with everything on that writes a tag."""
    workdir = tmp_path_factory.mktemp("everything")
    c = config.base()
    c.steps, c.eval.every, c.checkpoint.every = 2, 0, 0
    c.eval.k, c.eval.max_problems, c.data.embedded_problems = 2, 8, 4
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 4, 4, 2
    c.rollout.slots, c.rollout.prefill_prompts, c.rollout.max_response_tokens = 16, 8, 16
    c.reward.overlong_buffer_tokens, c.loss.kl_coef, c.log.text_every = 4, 0.1, 1
    c.loss.importance, c.loss.importance_cap, c.loss.positive_coef = "token_mask", 5.0, 0.1
    c.critic.enabled, c.critic.pretrain_steps = True, 0
    c.guard.entropy_max = 0.1  # random weights are far above
    c.curriculum.band_high = 0.9
    c.mesh.fsdp, c.mesh.tensor = 4, 2
    c.log.alarm_command = f"tee -a {workdir}/told"
    train.train(c, workdir, score=stubbed_train.JUDGE, hooks=train.Hooks(profile=2))
    return workdir, c


def test_each_record_holds_what_the_table_says(everything):
    workdir, _ = everything
    first, second, last = metrics.read(workdir / "metrics.jsonl")
    for record, kinds in (
        (first, {"record", "start", "evaluation", "majority"}),
        (second, set(tags.WHEN) - OWN - {"start", "evaluation", "majority", "again"}),
        (last, set(tags.WHEN) - OWN - {"start"}),
    ):
        there = {tags.family(t) for t in record if t != "step"}
        assert there == {name for name, t in tags.TAGS.items() if t.when in kinds}


def test_tensorboard_holds_every_tag_with_its_definition(everything):
    """Scalars, histograms and texts, at the step and with the value of metrics.jsonl."""
    workdir, c = everything
    points, described = {}, {}
    for event in events(workdir):
        for v in event.summary.value:
            points[event.step, v.tag] = v
            described.setdefault(v.tag, v.metadata.summary_description)
    wanted = set()
    for record in metrics.read(workdir / "metrics.jsonl"):
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
                edges = tags.edges(tag, len(value), c.rollout.max_response_tokens)
                assert [point.histo.min, *point.histo.bucket_limit] == pytest.approx(edges)
            else:
                assert point.simple_value == np.float32(value)
            assert described[name] == tags.describe(tag) != ""
    samples = {(step, "samples/text_summary") for step in (1, 2)}
    assert points.keys() == wanted | samples


def test_a_record_s_time_is_that_of_its_points(everything):
    workdir, _ = everything
    times = {r["step"]: r["time/wall"] for r in metrics.read(workdir / "metrics.jsonl")}
    assert list(times.values()) == sorted(times.values()) and 0 <= time.time() - times[0] < 10**5
    assert {(e.step, e.wall_time) for e in events(workdir) if e.summary.value} == set(times.items())


def test_a_step_is_traced(everything):
    """The second, its rollout and its update, and no other."""
    workdir, _ = everything
    traced = {p.relative_to(workdir / "profile").parts[0] for p in workdir.rglob("*.xplane.pb")}
    assert traced == {"step_000002_rollout", "step_000002_update"}
    assert all(p.stat().st_size > 1000 for p in workdir.rglob("*.xplane.pb"))


def test_the_alarm_command_gets_the_alarms(everything):
    workdir, _ = everything
    deadline = time.monotonic() + 60
    while not (workdir / "told").exists() or not (workdir / "told").read_text().endswith("}"):
        assert time.monotonic() < deadline  # the run did not wait for the command
        time.sleep(0.05)
    first, _ = json.JSONDecoder().raw_decode((workdir / "told").read_text())
    assert abs(first.pop("time") - time.time()) < 10**5
    (_, record, _) = metrics.read(workdir / "metrics.jsonl")
    told = {"workdir": str(workdir), "step": 1, "in_row": 1, "alarms": record["alarms"]}
    assert first == told


def test_events_say_where_time_went(everything):
    """Phases in order, and a goodput of the whole that is the file's."""
    workdir, _ = everything
    events = [json.loads(x) for x in (workdir / "events.jsonl").read_text().splitlines()]
    a_step = ["rollout", "update", "step", "save"]
    begin = ["start-up", "resume", "evaluation", "save"]
    assert [e["event"] for e in events] == [
        *begin, *a_step, *a_step[:3], "evaluation", "save", "leave"
    ]  # fmt: skip
    assert events[-1]["finished"] is True
    ledger = goodput.read(workdir / "events.jsonl")
    assert ledger.steps.keys() == {1, 2} and ledger.lost["compile"] > 0
    assert ledger.evaluated.keys() == {0, 2}
    parts = (ledger.steps, ledger.evaluated, ledger.lost)
    total = sum(sum(part.values()) for part in parts)
    assert total == pytest.approx(events[-1]["time"] - events[0]["time"], abs=0.01)
    for record in metrics.read(workdir / "metrics.jsonl")[1:]:
        shares = [v for t, v in record.items() if t.startswith(("time/goodput", "time/lost/"))]
        assert sum(shares) == pytest.approx(1) and 0 < record["time/goodput"] < 1


def test_families():
    assert tags.family("eval/aime24/avg@k") == "eval/<set>/avg@k"
    assert tags.family("source/openai/gsm8k/accuracy") == "source/<data_source>/accuracy"
    assert tags.family("reward_part/format") == "reward_part/<name>"
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


def test_edges():
    assert tags.edges("sampling/groups_by_correct", 3, 20) == [-0.5, 0.5, 1.5, 2.5]
    assert tags.edges("response/length_hist", 4, 20) == [0, 5, 10, 15, 20]
    assert len(tags.edges("policy/entropy_hist", 16, 20)) == 16 + 1
