"""What `plan` says about guesses: tokens of a pass against a simulation, seconds by hand."""

import json
import re

import numpy as np
import pytest
from scripts import ROOT

from dapo_jax.config import presets, validation
from dapo_jax.plan import drafts, gpus, roofline
from dapo_jax.plan.constants import VALUES
from dapo_jax.plan.roofline import Call, Scene
from dapo_jax.plan.shapes import network
from dapo_jax.plan.simulate import Traffic
from dapo_jax.pods import slices
from dapo_jax.rollout.drafts import Counts

POD = slices.parse("v5p-256")


def of_32b(**rollout):
    c = presets.dapo_math("32B")
    c.rollout.draft_tokens = 4
    c.rollout.update(rollout)
    return c, Scene(c, network(c), validation.resolve_mesh(c, POD.devices), POD)


@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.9])
def test_tokens_of_a_pass_are_those_that_are_drawn(acceptance):
    """Rows whose guesses are right at random; a broken number of guesses is a mean of rows."""
    rng, rows = np.random.default_rng(0), 200_000
    for guesses in (0, 1, 2.25, 4):
        own = np.floor(guesses) + (np.arange(rows) % 100 < 100 * (guesses % 1))
        right = rng.random((rows, 5)) < acceptance
        kept = np.minimum(np.cumprod(right, 1).sum(1), own)
        want = 1 + kept.mean()
        got = drafts.per_pass(acceptance, np.array([guesses, 0.0]))
        assert got[0] == pytest.approx(want, abs=6 * kept.std() / rows**0.5 + 1e-12)
        assert got[1] == 1


def call(slots=64):
    """Full slots while requests wait, 16 rows a shard in a program of `slots`, and one row."""
    row = np.array([256.0, 16.0, 1.0])
    steps = np.array([128.0, 100.0, 50.0])
    numbers = (row * 5 * steps, row * 40 * steps, row * steps)
    return Call(steps, np.array([True, False, False]), 3, np.array([256, slots, slots]), *numbers)


def test_seconds_by_hand():
    """In 64 places 16 rows have three guesses each, one row has four, and full slots have none."""
    config, scene = of_32b()
    k = VALUES | {"host_chunk": 1e-4, "host_row": 0.0}
    slow = drafts.slowed(scene, k)
    assert slow["ours.block.v5p"] == 1.15 * k["ours.block.v5p"] and slow["ici.v5p"] == k["ici.v5p"]
    token = sum(roofline.decode(call(), scene, slow).values())
    drawn = np.array([1, 1 + 0.5 + 0.25 + 0.125, 1.9375])
    phases, tokens, passes = drafts.sampling(call(), scene, k, config, 0.5, True)
    assert phases["decode"] == pytest.approx(token[0])
    assert phases["tail"] == pytest.approx(token[1] / drawn[1] + token[2] / drawn[2])
    assert phases["host"] == pytest.approx(1e-4 * (1 + 100 / drawn[1] + 50 / drawn[2]))
    assert tokens == 150 and passes == pytest.approx(100 / drawn[1] + 50 / drawn[2])
    # No visit of the host: as if it took no time between passes.
    alone, *_ = drafts.sampling(call(), scene, k, config, 0.5, False)
    assert alone["tail"] == phases["tail"] and alone["host"] == pytest.approx(3e-4)
    # A visit that takes longer than what guesses gain: none is made.
    phases, tokens, passes = drafts.sampling(call(), scene, VALUES, config, 0.5, True)
    want, _ = roofline.sampling(call(), scene, drafts.slowed(scene, VALUES))
    assert phases == pytest.approx(want) and tokens == passes == 150


def test_places_of_their_own_take_time():
    """512 places a shard: full slots have one guess each, by a program of so many rows."""
    config, scene = of_32b()
    config.rollout.draft_places = 512 * scene.sizes.shards
    k = VALUES | {"host_chunk": 0.0, "host_row": 0.0}
    phases, *_ = drafts.sampling(call(), scene, k, config, 0.9, True)
    wide = call()._replace(slots_C=np.full(3, 512))
    slow = drafts.slowed(scene, k)
    pass_C = sum(roofline.decode(wide, scene, slow).values())
    token_C = sum(roofline.decode(call(), scene, slow).values())
    many = 1 + sum(0.9**n for n in range(1, 5))
    got = [min(token_C[0], pass_C[0] / 1.9), *np.minimum(token_C, pass_C / many)[1:]]
    assert phases["decode"] == pytest.approx(got[0])
    assert phases["tail"] == pytest.approx(sum(got[1:]))


def test_mistakes_are_one_line():
    config, _ = of_32b()
    traffic = Traffic(256, 5120)
    for shares in (["1"], [".4", "x"], ["0"], ["-.5"]):
        with pytest.raises(ValueError, match="--draft_acceptance: .*wants shares below 1"):
            drafts.compared(config, POD, traffic, shares)
    with pytest.raises(ValueError, match="for GPUs"):
        drafts.compared(config, gpus.parse("h100-8"), traffic, [".4"])
    config.rollout.draft_tokens = 0
    with pytest.raises(ValueError, match="set --config.rollout.draft_tokens"):
        drafts.compared(config, POD, traffic, [".4"])


def logged(path, *steps):
    """A log of steps of (passes, rows, drafted, kept)."""
    lines = []
    for i, (passes, rows, verified, kept) in enumerate(steps):
        counts = Counts(passes, rows, (verified, 0, 1), (kept, 0, 1))
        lines.append(json.dumps({"step": i, "alarms": ["x"], **counts.metrics()}))
    path.write_text("\n".join([*lines, '{"step": 9, "dra']))
    return str(path)


def test_acceptance_from_a_run_s_log(tmp_path, monkeypatch):
    """By hand: of each row 3 guesses, of which .6, .36 and .216 are kept; the last steps count, a
    line that was cut off does not. A plan takes them beside numbers."""
    rows = 100_000
    kept = round(rows * (0.6 + 0.36 + 0.216))
    old, step = (5, 50, 100, 1), (7, rows, 3 * rows - 1, kept - 1)
    file = logged(tmp_path / "metrics.jsonl", *[old] * 3, *[(0, 0, 0, 0)], *[step] * drafts.STEPS)
    found = drafts.measured(str(tmp_path))
    assert found.acceptance == pytest.approx(0.6, abs=1e-5) and found.steps == drafts.STEPS
    assert found.guesses == pytest.approx(3) and found.tokens == pytest.approx(2.176)
    assert drafts.measured(file)[1:] == found[1:]
    config, _ = of_32b()
    monkeypatch.setattr(drafts, "without", lambda *_: ())  # the slow test's
    made = lambda config, scene, k, acceptance, visited: drafts.Drafted(
        acceptance, visited, *[1.0] * 5
    )
    monkeypatch.setattr(drafts, "drafted", made)
    got = drafts.compared(config, POD, Traffic(256, 5120), [".4", file])
    assert [x["acceptance"] for x in got["drafts"][1:3]] == [0.4, found.acceptance]
    assert got["runs"] == [found._replace(run=file)._asdict()]
    assert got["text"][0] == (
        f"{file}: 0.60 of guessed tokens are right, those before them being so: 3.00 guesses of a"
        " row gave 2.18 tokens a pass in its last 10 steps with passes"
    )


def test_a_log_that_tells_no_acceptance_is_one_line(tmp_path):
    config, _ = of_32b()
    for steps, said in (([], "nothing was guessed"), ([(3, 5, 8, -1)], "no guess was right")):
        file = logged(tmp_path / "metrics.jsonl", *steps)
        with pytest.raises(ValueError, match=f"{file}: {said} in it; wants the log of a run"):
            drafts.compared(config, POD, Traffic(256, 5120), [str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty': wants shares below 1, as .4,.5,.6, or a run's"):
        drafts.measured(str(tmp_path / "empty"))


@pytest.mark.slow
def test_the_table_of_the_docs():
    """docs/drafts.md: what the command there prints."""
    text = (ROOT / "docs/drafts.md").read_text()
    config, _ = of_32b()
    shares = re.search(r"--draft_acceptance=(\S+)", text)[1].split(",")
    cap, prompt = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    got = drafts.compared(config, POD, Traffic(prompt // 8, cap // 4), shares)
    rows = [x for x in got["drafts"] if x["acceptance"]]
    assert len(rows) == 2 * len(shares)
    for x in got["drafts"]:
        cells = [f"{x['tail']:,.0f}", f"{x['evaluation']:,.1f}", f"{x['host']:,.0f}"]
        cells += [f"{x['step']:,.0f}", f"{x['tokens']:.2f}"]
        assert " | ".join(cells) in text
