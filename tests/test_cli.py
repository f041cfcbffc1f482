"""Mistakes on the command line end in one clear line and a non-zero code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def train(*arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dapo_jax.train", f"--config={ROOT}/configs/quickstart.py"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(*arguments) -> str:
    """The one error line."""
    done = train(*arguments)
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr + done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: "), done.stderr
    assert done.stderr.count("error: ") == 1
    return last


def test_unknown_field_gets_the_nearest_names(tmp_path):
    error = refused(f"--workdir={tmp_path}", "--config.optim.learing_rate=1e-6")
    assert error.startswith("error: config.optim.learing_rate: no such field; did you mean ")
    assert "optim.lr" in error
    assert list(tmp_path.iterdir()) == []


def test_wrong_type_names_the_field(tmp_path):
    error = refused(f"--workdir={tmp_path}", "--config.rollout.groups=many")
    assert "rollout.groups" in error and "many" in error


def test_out_of_range_names_the_field(tmp_path):
    error = refused(f"--workdir={tmp_path}", "--config.rollout.group_size=1")
    assert error.startswith("error: config.rollout.group_size: 1 is too small, at least 2")
    assert list(tmp_path.iterdir()) == []


def test_missing_workdir():
    assert "--workdir" in refused()


def test_workdir_that_is_a_file(tmp_path):
    file = tmp_path / "run"
    file.write_text("mine")
    error = refused(f"--workdir={file}")
    assert str(file) in error and "is a file" in error
    assert file.read_text() == "mine"


def test_unwritable_workdir():
    if not Path("/proc").is_dir():
        pytest.skip("no /proc: no directory that even root cannot write")
    error = refused("--workdir=/proc/nope/run")
    assert "--workdir=/proc/nope/run: cannot be written" in error


def test_problems_without_integer_answers(tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [{"problem": "1 + 1 ?", "answer": "2"}, {"problem": "a half ?", "answer": "1/2"}]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    tokenizer = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "1": 1, "?": 2}, "unk_token": "</s>"}
    tokenizer.write_text(json.dumps({"model": model, "added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    error = refused(
        f"--workdir={tmp_path}/run",
        f"--config.data.train={file}",
        f"--config.tokenizer.path={tmp_path}",
        "--config.supervised_warmup.skill_steps=0",
        "--config.supervised_warmup.habit_steps=0",
    )
    assert f"{file} row 2" in error and "1/2" in error


def test_unknown_flag_and_stray_argument_are_named(tmp_path):
    assert "worksdir" in refused(f"--worksdir={tmp_path}")
    assert "'stray'" in refused(f"--workdir={tmp_path}", "stray")


def test_config_files_that_cannot_be_used(tmp_path):
    error = refused(f"--workdir={tmp_path}", f"--config={tmp_path}/none.py")
    assert f"{tmp_path}/none.py" in error and "No such file" in error
    file = tmp_path / "typo.py"
    start = "from dapo_jax import config\ndef get_config():\n  c = config.base()\n"
    file.write_text(start + "  c.optim.lr = 'fast'\n  return c\n")
    error = refused(f"--workdir={tmp_path}", f"--config={file}")
    assert "fast" in error or "lr" in error
    file.write_text(start + "  c.optim.learing_rate = 1.0\n  return c\n")
    assert "learing_rate" in refused(f"--workdir={tmp_path}", f"--config={file}")
