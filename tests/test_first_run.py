"""A first run on data of one's own: the sizes that `plan.first` finds for a machine, and README's
ten minutes, typed as they stand there."""

import json
import re

import jax
import pages
import pytest
from scripts import ROOT

from dapo_jax import config
from dapo_jax.config import presets, validation
from dapo_jax.log import metrics
from dapo_jax.plan import first, footprint, report, shapes

SMALL, GB = "Qwen/Qwen2.5-0.5B", footprint.GB


def needs(fields: dict, model: str, devices: int, platform: str) -> float:
    c = presets.one_chip()
    c.update({"model.path": model, **fields})
    config.validate(c, devices)
    sizes = validation.resolve_mesh(c, devices)
    shape = shapes.network(c)
    assert not validation.check_cache(
        c, footprint.cache(c, shape, sizes, platform), sizes
    ) and not validation.check_shape(shape, sizes, c.sharding)
    return max(footprint.peaks(footprint.memory(c, shape, sizes, platform)).values())


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("devices", [1, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("gb", [14.0, 20.0, 70.0])
def test_the_first_choice_that_fits(platform, devices, gb):
    """It is valid on the machine; those that were wanted more do not fit."""
    found = first.Machine("x", platform, devices, gb * GB)
    kind = "tpu" if platform == "tpu" else "gpu"
    try:
        chosen = first.choose(found, SMALL)
    except ValueError as error:
        assert re.match(rf"{SMALL}: needs at least [\d.]+ GB of the {gb} ", str(error))
        wanted = list(first.choices(found))
    else:
        most = needs(chosen.fields, SMALL, devices, kind)
        assert max(chosen.peaks.values()) == most <= found.free
        every = list(first.choices(found))
        wanted = every[: every.index(chosen.fields)]
    assert all(needs(f, SMALL, devices, kind) > found.free for f in wanted)
    assert gb < 70 or not wanted  # where there is room the most is taken


def test_this_machine_and_what_is_refused(tmp_path, capsys, monkeypatch):
    found = first.machine()
    assert (found.platform, found.devices) == ("cpu", len(jax.local_devices())) and found.free > 0
    for n, text in enumerate(("max\n", "1000000\n")):  # of a container
        (tmp_path / str(n)).write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(first, "LIMITS", [tmp_path / x for x in ("none", "0", "1")])
        assert first.machine().free == 0.6e6 / found.devices
    little = first.Machine("x", "gpu", 1, 1e9)
    monkeypatch.setattr(first, "machine", lambda: little)
    out = tmp_path / "mine.py"
    asked = [f"--model={SMALL}", "--train=a.jsonl", f"--out={out}"]
    for wanted in ("needs at least", "is there already; name another by --out"):
        with pytest.raises(SystemExit):
            first.main(asked)
        said = capsys.readouterr().err
        assert wanted in said and said.count("\n") == 1 and "Traceback" not in said
        assert not out.exists() or out.read_text() == "mine"
        out.write_text("mine")


@pytest.mark.parametrize(
    ("given", "sets"),
    [("a.jsonl", "test=a.jsonl"), ("x=a.jsonl,b.jsonl",) * 2, ("a.jsonl,b.jsonl",) * 2, ("", "")],
)
def test_one_file_to_evaluate_on_is_named(given, sets, tmp_path, monkeypatch):
    """Each of several has its own name, as in `eval.files`."""
    monkeypatch.setattr(first, "machine", lambda: first.Machine("x", "gpu", 1, 70 * GB))
    out = tmp_path / "mine.py"
    first.main([f"--model={SMALL}", "--train=t.jsonl", f"--eval={given}", f"--out={out}"])
    assert f'    c.eval.files = "{sets}"\n' in out.read_text()


README = (ROOT / "README.md").read_text()
(TEN,) = re.findall(r"^## Your own data.*?```\n(.*?)```", README, re.S | re.M)
(REWARD,) = re.findall(r"```python\n([^`]*def score[^`]*)```", README)
# What takes ten minutes takes seconds with a model that has seen nothing.
CUT = {
    "steps": 2, "tokenizer.chat": False, "rollout.max_response_tokens": 12, "rollout.chunk": 12,
    "reward.overlong_buffer_tokens": 4, "model.scan_layers": False, "log.tensorboard": False,
}  # fmt: skip


@pytest.mark.slow
def test_ten_minutes(shell, tmp_path):
    """From a user's JSONL and reward to the page of the run."""
    pages.stand_ins(tmp_path, tmp_path / "made")
    for name in ("train.jsonl", "test.jsonl"):
        rows = map(json.loads, (tmp_path / name).read_text().splitlines())
        own = [{"problem": r["question"], "answer": r["answer"].split()[-1]} for r in rows]
        (tmp_path / name).write_bytes(pages.lines(own))
    (tmp_path / "my_reward.py").write_text(REWARD)
    start, *lines = TEN.splitlines()
    assert start == "bash launch/quickstart.sh && source .venv/bin/activate" and len(lines) == 4
    said = []
    for line in lines:
        said.append(pages.typed(shell, tmp_path, line))
        if "plan.first" in line:
            file = tmp_path / "mine.py"
            text = file.read_text().replace("    return c", f"    c.update({CUT})\n    return c")
            file.write_text(text)
    assert "GB while sampling" in said[0] and "gold" in said[1] and "done: 2 steps" in said[2]
    last = metrics.read(tmp_path / "runs" / "mine" / "metrics.jsonl")[-1]
    assert {"reward_part/right", "reward_part/brief", "eval/test/avg@k"} <= last.keys()
    page = (tmp_path / "report.html").read_text()
    assert "my_reward.py:score" in page and page.count("<svg") > 10


def test_a_short_run_is_planned_in_minutes():
    said = {s: report.FILTERS["long"](s) for s in (360, 86400 * 2.5)}
    assert said == {360: "6.0 min", 86400 * 2.5: "2.5 days"}
