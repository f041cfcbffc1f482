"""python -m dapo_jax.evaluate: agreement with training, restarts, what it reads and refuses."""

import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from dapo_jax import config, convert, evaluate, parallel
from dapo_jax.checkpoint import checkpoint
from dapo_jax.dapo.state import State
from dapo_jax.evaluation import scores
from dapo_jax.log import metrics
from dapo_jax.model import hf, qwen2
from dapo_jax.run import policy

sys.path.insert(0, str(Path(__file__).parent / "data"))
from tiny_config import __file__ as CONFIG, get_config as tiny


@pytest.fixture(scope="module")
def result(run) -> dict:
    """Its evaluation at the config's own settings."""
    return evaluate.evaluate_checkpoint(tiny(), run)


@pytest.mark.slow
def test_agrees_with_training(run, result):
    """At both settings that training evaluates, number for number."""
    (record,) = metrics.read(run / "metrics.jsonl")
    c = tiny()
    c.eval.top_p = 1.0
    for tag, got in (("", evaluate.evaluate_checkpoint(c, run)), ("_top_p0.7", result)):
        assert got["settings"]["policy"] == f"{run}/checkpoints step 0"
        assert got["sets"].keys() == {"heldout", "harder"}
        for name, s in got["sets"].items():
            here = {"avg@k": s["avg@k"], "maj@k": s["maj@k"], "pass@k": s["pass@"]["8"]}
            here |= {f: s[f] for f in ("length_mean", "truncated_frac")} if not tag else {}
            prefix = f"eval/{name}{tag}/"
            assert {k[len(prefix) :]: v for k, v in record.items() if k.startswith(prefix)} == here
    assert any(s["avg@k"] for s in result["sets"].values()), "only zeros were compared"


def test_report(run, result):
    """The JSON says what the files of samples say."""
    heldout = json.loads(json.dumps(result))["sets"]["heldout"]
    rows = [json.loads(x) for f in Path(heldout["samples"]).glob("b*") for x in f.open()]
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
    for name, row in table.items():
        mine = [r for r in rows if r["problem"] == name]
        assert row["correct"] == sum(r["correct"] for r in mine)
        assert row["length_mean"] == np.mean([r["tokens"] for r in mine])
        assert {r["gold"] for r in mine} == {row["gold"]}
    text = list(scores.lines("heldout", heldout))
    assert len(text) == 6 and "48 problems x 8 samples" in text[0]
    assert list(scores.lines("heldout", heldout, rows=True))[:6] == text
    assert len(list(scores.lines("heldout", heldout, rows=True))) == 7 + 48


def test_stop_strings_end_responses_early(run, result):
    """The same samples up to the token that completes a text; such a row is not truncated."""
    c = tiny()
    c.eval.stop_strings, c.eval.max_problems = "7|h|4", 8
    got = evaluate.evaluate_checkpoint(c, run)["sets"]["heldout"]
    c.eval.stop_strings = ""
    whole = evaluate.evaluate_checkpoint(c, run)["sets"]["heldout"]
    assert got["samples"] != whole["samples"]
    pairs = list(zip(*(samples(x["samples"]) for x in (got, whole)), strict=True))
    cut = [(a, b) for a, b in pairs if a["tokens"] < b["tokens"]]
    assert 8 < len(cut) < len(pairs) == 64
    for a, b in pairs:
        assert b["response"].startswith(a["response"])
        assert re.search("[7h4]", b["response"]) or a == b
        assert not re.search("[7h4].", a["response"].replace(" ", ""))
    assert not any(a["truncated"] for a, _ in cut) and any(b["truncated"] for _, b in cut)


def samples(folder: str) -> list[dict]:
    """The rows of a folder, by problem and sample."""
    rows = [json.loads(x) for f in Path(folder).glob("b*") for x in f.open()]
    return sorted(rows, key=lambda r: (r["problem"], r["sample"]))


@pytest.mark.slow
def test_killed_half_way(shell, run, result, tmp_path):
    """SIGKILL between two batches, then the same command: nothing is sampled twice, and the numbers
    are those of a run that nobody disturbed."""
    out = tmp_path / "out.json"
    command = ["-m", "dapo_jax.evaluate", f"--config={CONFIG}", f"--checkpoint={run}"]
    command += [f"--json={out}", f"--data=heldout={run}/data/heldout.jsonl"]
    # As this process has it. NPROC: see conftest.py.
    env = {"JAX_NUM_CPU_DEVICES": str(len(jax.devices())), "NPROC": "16"}
    quiet = [os.devnull] * 2
    for attempt in itertools.count():  # until the signal comes in time, however busy the machine
        workdir = tmp_path / f"work_{attempt}"
        process = shell.start(*command, f"--workdir={workdir}", logs=quiet, env=env)
        try:
            while process.poll() is None and not written(workdir):
                time.sleep(0.002)
        finally:
            process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
        kept = written(workdir)
        if 0 < len(kept) < 24:  # batches of 16 / 8 problems
            break

    done = shell.python(*command, f"--workdir={workdir}", **env)
    assert done.returncode == 0, done.stderr
    assert "heldout: 48 problems x 8 samples" in done.stdout
    now = written(workdir)
    assert len(now) == 24 and kept.items() <= now.items()
    heldout = json.loads(out.read_text())["sets"]["heldout"]
    expected = json.loads(json.dumps(result["sets"]["heldout"]))
    assert heldout | {"samples": ""} == expected | {"samples": ""}


def written(workdir: Path) -> dict[Path, int]:
    """Files of samples and when each was last changed."""
    return {f: f.stat().st_mtime_ns for f in workdir.glob("eval/*/*/batch_*.jsonl")}


class Sampled(Exception):
    pass


@pytest.fixture
def no_sampling(monkeypatch):
    def refuse(*args, **kwargs):
        raise Sampled

    monkeypatch.setattr(evaluate, "evaluate", refuse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    dict(k=4, top_p=0.5, temperature=0.5, max_problems=3, max_response_tokens=9,
         stop_strings="7").items(),
)  # fmt: skip
def test_other_settings_do_not_mix(run, result, no_sampling, field, value):
    assert evaluate.evaluate_checkpoint(tiny(), run) == result  # all of it from the files
    c = tiny()
    setattr(c.eval, field, value)
    with pytest.raises(Sampled):
        evaluate.evaluate_checkpoint(c, run)


def test_other_weights_do_not_mix(run, result, no_sampling, tmp_path):
    _, params = convert.load_params(run)
    params["embed"] = params["embed"].at[7, 5].add(1e-7)
    convert.save_params(tmp_path / "near", qwen2.shape_from_config(tiny()), params)
    with pytest.raises(Sampled):
        evaluate.evaluate_checkpoint(tiny(), run, str(tmp_path / "near"))


@pytest.mark.slow
def test_same_weights_in_other_forms(run, result, no_sampling, tmp_path):
    """The samples of a policy serve all its copies: its weights are recognised bit by bit."""
    copy, there = tmp_path / "hf", tmp_path / "orbax"
    assert convert.main(["to-hf", str(run), str(copy), "--dtype=float32"]) == 0
    assert convert.main(["to-orbax", str(copy), str(there)]) == 0
    c = tiny()
    c.tokenizer.path = str(run / "data" / "tokenizer.model")
    for given in (copy, there, run / "checkpoints", run / "checkpoints" / "0"):
        got = evaluate.evaluate_checkpoint(c, run, str(given))
        assert got["sets"] == result["sets"]
        assert got["settings"]["policy"].startswith(str(given).removesuffix("/0"))


def test_without_a_config_it_is_the_run_s(run, tmp_path):
    assert policy.config_of_run(str(run)) == tiny()
    assert policy.config_of_run("") is policy.config_of_run(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match=r"/config\.json: not a run's; name a config file: --con"):
        policy.config_of_run(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eval.k": 0}, "config.eval.k: 0 is too small, at least 1"),
        (
            {"reward.verifier": "strict"},
            "config.reward.verifier: 'strict' is not one of dapo, integer, boxed",
        ),
        ({"eval.files": "{tmp}/empty.jsonl"}, "empty.jsonl: no rows in this file"),
        ({"eval.files": "{tmp}/b.jsonl"}, "b.jsonl: no such file"),
        ({"eval.files": "x/y={tmp}/empty.jsonl"}, "'x/y' cannot name a folder of samples"),
        ({"data.train": "a.jsonl"}, "no problems to evaluate on; give --data=FILE"),
        ({"model.hidden_size": 64}, "step 0: blocks.attn_norm is [1, 32] there and [1, 64]"),
    ],
)
def test_refused(run, tmp_path, fields, message):
    (tmp_path / "empty.jsonl").touch()
    c = tiny()
    named = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in fields.items()}
    c.update(named)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        evaluate.evaluate_checkpoint(c, run)
    assert "\n" not in str(error.value)


def test_no_checkpoint(run, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in it; train there first, or name one"):
        evaluate.evaluate_checkpoint(tiny(), tmp_path)
    with pytest.raises(ValueError, match="none: no such directory"):
        evaluate.evaluate_checkpoint(tiny(), run, str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no checkpoint in it"):
        evaluate.evaluate_checkpoint(tiny(), run, str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_command_line_refusals(shell, tmp_path):
    """One line and exit code 1, through the real command."""
    command = ("-m", "dapo_jax.evaluate", f"--config={CONFIG}", f"--workdir={tmp_path}/run")
    done = shell.python(*command, "--k=0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: config.eval.k: 0 is too small")
    assert done.stderr.count("\n") == 1


def test_restore_params(tmp_path):
    """The chosen step of several, without the optimizer, laid out over a mesh as asked for."""
    shape = qwen2.shape_from_config(tiny())
    trees = [qwen2.init(shape, jax.random.key(i)) for i in range(2)]
    with checkpoint.manager(tmp_path, keep=2) as manager:
        for step, params in enumerate(trees):
            state = State(params, {"mu": params}).count(step=10 * step)
            checkpoint.save(manager, state, {})
    rules = config.base().sharding.train.to_dict()
    mesh = Mesh(np.array(jax.devices()).reshape(1, -1, 1), parallel.AXES)
    shardings = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)
    like = qwen2.abstract(shape)
    for step, expected in ((None, trees[1]), (10, trees[1]), (0, trees[0])):
        params = flatten_dict(checkpoint.restore_params(tmp_path, like, shardings, step))
        assert params.keys() == flatten_dict(expected).keys()
        for name, x in flatten_dict(expected).items():
            np.testing.assert_array_equal(params[name], x)
            assert params[name].sharding == flatten_dict(shardings)[name]
    with pytest.raises(ValueError, match=r"no step 5; it has 0, 10$"):
        checkpoint.restore_params(tmp_path, like, shardings, 5)
    untied = shape._replace(tie_embeddings=False)
    more = parallel.shardings(qwen2.metadata(untied, "axes"), mesh, rules)
    with pytest.raises(ValueError, match=r"step 10: \w+ is absent there and \[.*\] by this config"):
        checkpoint.restore_params(tmp_path, qwen2.abstract(untied), more)


@pytest.mark.slow
def test_aime_with_the_real_tokenizer(assets, tmp_path):
    """The paper's evaluation file on a random Qwen2.5: from a Hugging Face directory to a 0."""
    c = tiny()
    c.model.vocab_size, c.model.tie_embeddings = 151936, True
    shape = qwen2.shape_from_config(c)
    params = qwen2.init(shape, jax.random.key(0))
    hf.save(tmp_path / "model", shape, params, tokenizer_dir=assets / "tokenizer")
    c.model.path = str(tmp_path / "model")
    c.tokenizer.chat = True
    c.tokenizer.chat_template = str(assets / "tokenizer" / "chat_template_qwen2.5_instruct.jinja")
    c.data.max_prompt_tokens, c.data.on_long = 384, "left_truncate"
    c.rollout.max_response_tokens = c.reward.overlong_buffer_tokens = 4
    c.rollout.chunk, c.reward.verifier = 4, "dapo"
    shutil.copy(assets / "math" / "dapo_aime-2024_original.parquet", tmp_path / "aime.parquet")
    c.eval.files, c.eval.max_problems, c.eval.k = f"aime24={tmp_path}/aime.parquet", 4, 2
    aime = evaluate.evaluate_checkpoint(c, tmp_path / "work")["sets"]["aime24"]
    assert (aime["problems"], aime["avg@k"], aime["maj@k"]) == (4, 0.0, 0.0)
    assert aime["avg@k_interval95"] == (0.0, 0.0) and aime["unparsed_frac"] == 1.0
    assert all(0 <= int(row["gold"]) <= 999 for row in aime["per_problem"])
