"""python -m dapo_jax.evaluate; avg@k, maj@k and pass@k against their definitions."""

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from data.tiny_config import get_config as tiny

from dapo_jax import convert, evaluate, parallel
from dapo_jax.evaluation import scores
from dapo_jax.log import metrics
from dapo_jax.run import policy


def evaluated(workdir, given="", **fields) -> dict:
    """fields: of `eval`, or by their whole names, where they differ from the run's."""
    c = tiny()
    c.update({n if "." in n else f"eval.{n}": value for n, value in fields.items()})
    return evaluate.evaluate_checkpoint(c, workdir, str(given))


@pytest.fixture(scope="module")
def result(run) -> dict:
    return evaluated(run)


@pytest.mark.slow
def test_agrees_with_training(run, result):
    """At both settings that training evaluates, number for number."""
    (record,) = metrics.read(run / "metrics.jsonl")
    for tag, got in (("", evaluated(run, top_p=1.0)), ("_top_p0.7", result)):
        assert got["settings"]["policy"] == f"{run}/checkpoints step 0"
        assert got["sets"].keys() == {"heldout", "harder"}
        for name, s in got["sets"].items():
            here = {"avg@k": s["avg@k"], "maj@k": s["maj@k"], "pass@k": s["pass@"]["8"]}
            here |= {f: s[f] for f in ("length_mean", "truncated_frac")} if not tag else {}
            prefix = f"eval/{name}{tag}/"
            assert {k[len(prefix) :]: v for k, v in record.items() if k.startswith(prefix)} == here
    assert any(s["avg@k"] for s in result["sets"].values()), "only zeros were compared"


def test_report(run, result):
    heldout = json.loads(json.dumps(result))["sets"]["heldout"]
    rows = samples(heldout["samples"])
    assert len(rows) == 48 * 8 and {len(r) for r in rows} == {8}
    assert heldout["avg@k"] == np.mean([r["correct"] for r in rows])
    assert heldout["pass@"]["1"] == pytest.approx(heldout["avg@k"])
    assert list(heldout["pass@"]) == [str(k) for k in range(1, 9)]
    assert heldout["unparsed_frac"] == np.mean([r["extracted"] is None for r in rows])
    for score in ("avg@k", "maj@k"):
        low, high = heldout[f"{score}_interval95"]
        assert low <= heldout[score] <= high
    table = {row["id"]: row for row in heldout["per_problem"]}
    assert len(table) == 48
    votes, passed = [], [scores.pass_at_k(8, row["correct"], 3) for row in table.values()]
    for name, row in table.items():
        mine = [r for r in rows if r["problem"] == name]
        votes.append(scores.majority(*([r[of] for r in mine] for of in ("correct", "extracted"))))
        assert row["correct"] == sum(r["correct"] for r in mine)
        assert row["length_mean"] == np.mean([r["tokens"] for r in mine])
        assert {r["gold"] for r in mine} == {row["gold"]}
    assert heldout["maj@k"] == pytest.approx(np.mean(votes)) and 0 < heldout["maj@k"] < 1
    assert heldout["pass@"]["3"] == pytest.approx(np.mean(passed))
    text = list(scores.lines("heldout", heldout, rows=True))
    assert len(text) == 3 + 48 and list(scores.lines("heldout", heldout)) == text[:2]
    assert "48 problems x 8 " in text[0] and f"8: {heldout['pass@']['8']:.4f}" in text[1]


@pytest.mark.slow
def test_stop_strings_end_responses_early(run, result):
    """The same samples up to the token that completes a text; such a row is not truncated."""
    found = (evaluated(run, stop_strings=x, max_problems=8)["sets"] for x in ("7|h|4", ""))
    got, whole = (sets["heldout"]["samples"] for sets in found)
    assert got != whole
    pairs = list(zip(samples(got), samples(whole), strict=True))
    cut = [(a, b) for a, b in pairs if a["tokens"] < b["tokens"]]
    assert 8 < len(cut) < len(pairs) == 64
    for a, b in pairs:
        assert b["response"].startswith(a["response"])
        assert re.search("[7h4]", b["response"]) or a == b
        assert not re.search("[7h4].", a["response"].replace(" ", ""))
    assert not any(a["truncated"] for a, _ in cut) and any(b["truncated"] for _, b in cut)


def samples(folder: str) -> list[dict]:
    rows = [json.loads(x) for f in Path(folder).glob("b*") for x in f.open()]
    return sorted(rows, key=lambda r: (r["problem"], r["sample"]))


def test_cut_off_half_way(run, result, tmp_path):
    """Batches are written whole or not at all: with some of them the same command samples the
    others, and the numbers are those of a run that nobody disturbed."""
    shutil.copytree(run / "eval", tmp_path / "eval")
    files = sorted(tmp_path.glob("eval/heldout/*/batch_*.jsonl"))
    kept = {f: f.stat().st_mtime_ns for f in files[::2]}
    assert 1 < len(kept) < len(files)
    for file in files[1::2]:
        file.unlink()
    again = evaluated(tmp_path, run)["sets"]["heldout"]
    assert again | {"samples": ""} == result["sets"]["heldout"] | {"samples": ""}
    assert {f: f.stat().st_mtime_ns for f in kept} == kept


@pytest.fixture
def no_sampling(monkeypatch):
    refuse = Mock(side_effect=NotImplementedError("something was sampled"))
    monkeypatch.setattr(evaluate, "evaluate", refuse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    dict(k=4, top_p=0.5, temperature=0.5, max_problems=3, max_response_tokens=9,
         stop_strings="7").items(),
)  # fmt: skip
def test_other_settings_do_not_mix(run, result, no_sampling, field, value):
    assert evaluated(run) == result  # all of it from the files
    with pytest.raises(NotImplementedError):
        evaluated(run, **{field: value})


def test_settings_of_replies_and_tags_do_not_mix(run, no_sampling, tmp_path):
    turns = {"rollout.turns": 2, "reward.reply": "guess"}
    others = [("rollout.turns", 3), ("rollout.reply_tokens", 9), ("reward.reply", "calculator"),
              ("reward.format_tags", "x")]  # fmt: skip
    for fields in ({}, turns, *(turns | dict([other]) for other in others)):
        with pytest.raises(NotImplementedError):
            evaluated(tmp_path, run, **fields)
    assert len([*tmp_path.glob("eval/heldout/*/settings.json")]) == 6


def test_weights_are_known_by_their_bits(run, result, no_sampling, tmp_path):
    """The samples of a policy serve all its copies, and no other policy."""
    shape, params = convert.load_params(run)
    convert.save_params(tmp_path / "same", shape, params)
    got = evaluated(run, tmp_path / "same")
    assert got["sets"] == result["sets"] and got["settings"]["policy"] == f"{tmp_path}/same step 0"
    params["embed"] = params["embed"].at[7, 5].add(1e-7)
    convert.save_params(tmp_path / "near", shape, params)
    with pytest.raises(NotImplementedError):
        evaluated(run, tmp_path / "near")


def test_without_a_config_it_is_the_run_s(run, tmp_path):
    assert policy.config_of_run(str(run)) == tiny()
    assert policy.config_of_run("") is None
    with pytest.raises(ValueError, match=r"no run \(no config.json\) in it; name a config"):
        policy.config_of_run(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match=r"/config\.json: not a run's; name a config file: --con"):
        policy.config_of_run(str(tmp_path))


@pytest.mark.parametrize("place", ["", "@0", "/checkpoints", "/checkpoints@0", "/checkpoints/0"])
def test_the_config_of_a_checkpoint_is_found_before_processes_meet(place, run, monkeypatch):
    flag = SimpleNamespace(checkpoint=f"{run}{place}")
    monkeypatch.setattr(evaluate, "flags", SimpleNamespace(FLAGS=flag))
    monkeypatch.setattr(parallel, "of_main_process", Mock(side_effect=NotImplementedError))
    assert evaluate.config_of_policy() == tiny()


def test_no_checkpoint(run, tmp_path):
    for where, given, wrong in (
        (tmp_path, "", "no checkpoint in it; train there first"),
        (run, tmp_path / "none", "none: no such directory"),
        (run, tmp_path, "no checkpoint in it"),
    ):
        with pytest.raises(ValueError, match=wrong):
            evaluated(where, given)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            share = np.mean([any(s) for s in itertools.combinations(samples, k)])
            assert scores.pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)
    assert scores.pass_at_k(10_000, 1, 5_000) == 0.5  # nothing overflows


@pytest.mark.parametrize(
    ("answers", "right", "score"),
    [("773", "7", 1), ("733", "7", 0), ("73", "7", 1 / 2), ("735573", "5", 1 / 3), ("---7", "7", 1),
     ("--", "7", 0), ("33", "7", 0)],
)  # fmt: skip
def test_majority(answers, right, score):
    """A tie counts by its right share; '-', no answer, is no vote."""
    found = [None if a == "-" else a for a in answers]
    value = np.array([[a == right for a in found]])
    assert scores.majority(value[0], found) == pytest.approx(score)
    length = np.ones(value.shape)
    read = scores.Scores(value, [found], [right], length > 1, length, [])
    told = scores.summary(read, ["q"])
    assert told["maj@k"] == read.headline()["maj@k"] == pytest.approx(score)
    told = scores.summary(read._replace(answers=[[None] * len(found)]), ["q"])
    assert ("maj@k" in told) == (not value.any()) and "pass@" in told


@pytest.mark.parametrize(
    ("last", "what"),
    [("\0\n", "line 2 is damaged"), ('{"prob', "does not hold 2 samples of each problem")],
)
def test_a_batch_that_is_short_of_samples_is_named(tmp_path, last, what):
    """By a damaged line, or one that was cut off while it was copied: it is to be made again."""
    path = tmp_path / "batch_000001.jsonl"
    path.write_text('{"problem": "q"}\n' + last)
    with pytest.raises(ValueError) as error:
        scores.finished(tmp_path, 2)
    assert str(error.value).startswith(f"{path}: {what}; remove the file: the same command")
