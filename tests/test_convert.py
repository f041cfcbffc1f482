"""python -m dapo_jax.convert: both directions bit for bit, and the check against transformers. Of a
run's workdir: test_export.py."""

import contextlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from data.hf_golden import make as golden
from safetensors.numpy import load_file
from test_hf import CASE, assert_same

from dapo_jax import config, convert, parallel
from dapo_jax.checkpoint import checkpoint
from dapo_jax.model import hf, qwen2


@pytest.fixture
def source(tmp_path) -> Path:
    """A float32 Hugging Face directory with a tokenizer file."""
    directory = golden.write(tmp_path / "source", CASE)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_there_and_back(tmp_path, source, capsys):
    there, back = tmp_path / "orbax", tmp_path / "hf"
    assert convert.main(["to-orbax", str(source), str(there)]) == 0
    command = ["to-hf", str(there), str(back), "--dtype=float32", f"--tokenizer={source}"]
    assert convert.main(command) == 0
    assert f"{back}: 20,612 parameters in float32, tokenizer of {source}" in capsys.readouterr().out
    saved = load_file(back / "model.safetensors")
    for name, x in golden.tensors(CASE).items():
        assert saved[name].tobytes() == x.tobytes(), name
    assert hf.read_shape(back) == hf.read_shape(source)
    assert (back / "tokenizer.json").exists()


@pytest.mark.parametrize("given", ["tokenizer.path", "model.path", "tokenizer file", ""])
def test_a_run_takes_its_own_tokenizer_along(tmp_path, source, monkeypatch, given):
    """And its chat template, and what else is known of its model. The embedded task's tokenizer is
    in the workdir."""
    about = source / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"eos_token_id": 7}))
    own = tmp_path / ("own" if given.startswith("tok") else "source" if given else "run/data")
    own.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (own / name).write_text("its own")
    (template := tmp_path / "chat.jinja").write_text("of the run")
    named = str(own / "tokenizer.json" if given == "tokenizer file" else own)
    fields = {"tokenizer.path": named * ("tok" in given), "model.path": str(source) * bool(given)}
    fields["tokenizer.chat_template"] = str(template) * (given == "model.path")
    steps, state = tmp_path / "run" / "checkpoints", {"config": fields}
    monkeypatch.setattr(convert, "_newest", lambda src: (steps, state))
    shape = hf.read_shape(source)
    params = hf.load_params(source, shape)
    monkeypatch.setattr(convert, "load_params", lambda src: (shape, params))
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "its own"
    if given == "model.path":
        about = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
        assert about["chat_template"] == "of the run"
    assert (tmp_path / "hf" / "chat_template.jinja").exists() == (given != "model.path")
    made = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert made.get("eos_token_id") == (7 if given else None)


def test_a_run_in_a_bucket_is_found_with_its_tokenizer(tmp_path, source, bucket, monkeypatch):
    (bucket / "run" / "checkpoints" / "3").mkdir(parents=True)
    (bucket / "run" / "data").mkdir()
    (bucket / "run" / "data" / "tokenizer.model").write_text("its own")
    shape = hf.read_shape(source)
    params = hf.load_params(source, shape)
    monkeypatch.setattr(convert, "load_params", lambda src: (shape, params))
    monkeypatch.setattr(checkpoint, "find_step", lambda directory: 3)
    monkeypatch.setattr(checkpoint, "reader", contextlib.nullcontext)
    monkeypatch.setattr(checkpoint, "read_json", lambda reader, step: {"config": {"a": 1}})
    assert convert.main(["to-hf", "gs://b/run", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.model").read_text() == "its own"


def test_what_was_saved_in_bfloat16_is_read_in_float32(tmp_path, source):
    convert.main(["to-orbax", str(source), str(tmp_path / "orbax"), "--dtype=bfloat16"])
    shape, params = convert.load_params(tmp_path / "orbax")
    assert shape == hf.read_shape(source)
    assert_same(params, qwen2.cast(hf.load_params(source, shape, dtype="bfloat16"), "float32"))


def test_weights_are_read_over_all_devices_where_these_divide_them(tmp_path):
    shape = qwen2.shape_from_config(config.base())
    params = qwen2.init(shape, jax.random.key(0))
    convert.save_params(tmp_path / "orbax", shape, params)
    _, found = convert.load_params(tmp_path / "orbax")
    assert_same(found, params)
    rules = config.base().sharding.train.to_dict()
    assert found["embed"].sharding.spec == parallel.spec(("vocab", "embed"), rules)
    assert len(found["embed"].sharding.device_set) == 8


@pytest.mark.parametrize(
    "command, message",
    [
        (["to-orbax", "/no/such/dir", "{new}"], "no such directory"),
        (["to-orbax", "{source}", "{source}"], "exists already"),
        (["to-hf", "{source}", "{new}"], "no checkpoint in it; give a run's workdir"),
        (["to-hf", "{new}", "{new}"], "no such directory"),
    ],
)
def test_one_line_errors(tmp_path, source, capsys, command, message):
    with pytest.raises(SystemExit) as e:
        convert.main([word.format(source=source, new=tmp_path / "new") for word in command])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert e.value.code == 1 and last.startswith("error: ") and message in last
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "command, message",
    [
        ("to-orbax source source", "exists already"),
        ("to-hf orbax source", "exists already"),
        ("to-hf orbax new --tokenizer=/no/such", "no such directory"),
    ],
)
def test_weights_are_read_when_all_else_is_there(
    tmp_path, source, capsys, monkeypatch, command, message
):
    convert.main(["to-orbax", str(source), str(tmp_path / "orbax")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hf, "load_params", None)
    monkeypatch.setattr(convert, "load_params", None)
    with pytest.raises(SystemExit):
        convert.main(command.split())
    assert message in capsys.readouterr().err


def test_the_folder_one_stands_in_is_a_destination(tmp_path, source, monkeypatch):
    convert.main(["to-orbax", str(source), str(tmp_path / "orbax")])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert convert.main(["to-hf", "../orbax", "."]) == 0
    assert hf.read_shape(tmp_path / "here") == hf.read_shape(source)


def test_check_without_transformers(source, capsys, monkeypatch):
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    assert convert.main(["check", str(source)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "check needs torch and transformers: pip install -r " in line
    assert (Path(__file__).parents[1] / line.split()[-1]).is_file()


@pytest.mark.parametrize("off, code, word", [(0.0, 0, "agrees"), (0.01, 1, "DISAGREES")])
def test_check_verdict(source, capsys, monkeypatch, off, code, word):
    """The verdict on stand-in logits: our own, with and without an error on one token."""
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: True)

    def stand_in(directory, tokens):
        logits = np.array(hf.load(directory)(tokens))
        logits[0, 5, 7] += off
        return logits

    monkeypatch.setattr(convert, "transformers_logits", stand_in)
    assert convert.main(["check", str(source)]) == code
    assert capsys.readouterr().out.startswith(word)


def test_agreement():
    theirs = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]]))
    assert convert.agreement(theirs + 3.0, theirs) == pytest.approx((3.0, 0.0, 1.0), abs=1e-12)
    ours = np.log(np.array([[[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]]))
    kl = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert convert.agreement(ours, theirs) == pytest.approx((np.log(2), kl, 0.5))
    ours[0, 0, 0] = np.nan
    assert not convert.agreement(ours, theirs).max_kl <= convert.KL_MAX
