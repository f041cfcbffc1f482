"""Mistakes on the command line end in one clear line and a non-zero code."""

import json
import os
from pathlib import Path

import pytest

from dapo_jax import gate
from dapo_jax.checkpoint import checkpoint, workdir
from dapo_jax.config import cli, schema

ROOT = Path(__file__).parent.parent


@pytest.fixture
def train(shell):
    command = ("-m", "dapo_jax.train", f"--config={ROOT}/configs/quickstart.py")
    return lambda *arguments: shell.python(*command, *arguments)


@pytest.fixture
def refused(train):
    """Of a command line: the one error line."""

    def refused(*arguments) -> str:
        done = train(*arguments)
        assert done.returncode not in (0, None)
        assert "Traceback" not in done.stderr + done.stdout
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("error: "), done.stderr
        assert done.stderr.count("error: ") == 1
        return last

    return refused


def test_unknown_field_gets_the_nearest_names(refused, tmp_path):
    error = refused(f"--workdir={tmp_path}", "--config.optim.learing_rate=1e-6")
    assert error.startswith("error: config.optim.learing_rate: no such field; did you mean ")
    assert "optim.lr" in error
    assert list(tmp_path.iterdir()) == []


def test_wrong_type_names_the_field(refused, tmp_path):
    error = refused(f"--workdir={tmp_path}", "--config.rollout.groups=many")
    assert "rollout.groups" in error and "many" in error


def test_out_of_range_names_the_field(refused, tmp_path):
    error = refused(f"--workdir={tmp_path}", "--config.rollout.groups=0")
    assert error.startswith("error: config.rollout.groups: 0 is too small, at least 1")
    assert list(tmp_path.iterdir()) == []


def test_missing_workdir(refused):
    assert "--workdir" in refused()


def test_workdir_that_is_a_file(refused, tmp_path):
    file = tmp_path / "run"
    file.write_text("mine")
    error = refused(f"--workdir={file}")
    assert str(file) in error and "is a file" in error
    assert file.read_text() == "mine"


def test_unwritable_workdir(refused):
    if not Path("/proc").is_dir():
        pytest.skip("no /proc: no directory that even root cannot write")
    error = refused("--workdir=/proc/nope/run")
    assert "--workdir=/proc/nope/run: cannot be written" in error


def test_problems_without_integer_answers(refused, tmp_path):
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


def test_unknown_flag_and_stray_argument_are_named(refused, tmp_path):
    assert "worksdir" in refused(f"--worksdir={tmp_path}")
    assert "'stray'" in refused(f"--workdir={tmp_path}", "stray")


def test_config_files_that_cannot_be_used(refused, tmp_path):
    error = refused(f"--workdir={tmp_path}", f"--config={tmp_path}/none.py")
    assert f"{tmp_path}/none.py" in error and "No such file" in error
    file = tmp_path / "typo.py"
    start = "from dapo_jax import config\ndef get_config():\n  c = config.base()\n"
    file.write_text(start + "  c.optim.lr = 'fast'\n  return c\n")
    error = refused(f"--workdir={tmp_path}", f"--config={file}")
    assert "fast" in error or "lr" in error
    file.write_text(start + "  c.optim.learing_rate = 1.0\n  return c\n")
    assert "learing_rate" in refused(f"--workdir={tmp_path}", f"--config={file}")


BROKEN = {
    "def get_config(:": "line 1: SyntaxError: ",
    "import nothing_there": "line 1: ModuleNotFoundError: ",
    "def get_config():\n  return confg": "line 2: NameError: ",
    "def get_config():\n  assert 1 == 2": "line 2: AssertionError",
    "def get_config():\n  return 1 / 0": "line 2: ZeroDivisionError: division by zero",
    "def get_config():\n  return get_config()": "line 2: nested too deeply",
    "def get_config():\n  raise SystemExit(3)": "line 2: SystemExit: 3",
    "def get_config():\n  return open('/nope')": "line 2: No such file",
    "a\0b": "SyntaxError: source code string cannot contain null bytes",
    "x = " + "(" * 3000: "line 1: SyntaxError: too many nested parentheses",
    "from dapo_jax import config\nget_config = lambda: config.base().optim": "returned a Optim",
    "x = 1": "it defines no get_config()",
    "def get_config():\n  return 5": "get_config() returned a int, not the config",
    "from dapo_jax import config\ndef get_config():\n  c = config.base()\n"
    "  c.optim.learning_rate = 1\n  return c": "line 4: config.optim.learning_rate: no such field",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_config_file_is_one_line_with_its_number(text, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        cli.load(str(file))
    assert str(error.value).startswith(str(file)) and BROKEN[text] in str(error.value)
    assert "\n" not in str(error.value)


def test_all_that_is_wrong_is_told_at_once(train, tmp_path):
    (tmp_path / "c.py").write_text("import nothing_there")
    done = train(f"--config={tmp_path}/c.py", "--config.lrr=1", "--config.steps=x", "stray")
    assert [line.split(": ")[0:2] for line in done.stderr.splitlines()] == [
        ["error", "config.lrr"],
        ["error", "config.steps"],
        ["error", "unexpected argument 'stray'; flags are written --name=value"],
        ["error", f"{tmp_path}/c.py line 1"],
    ]


def test_every_form_of_an_override():
    argv = "t --config.seed=3 --config.optim.lr 1e-4 --noconfig.optim.offload -config.steps=2 x"
    rest, given = cli._split([*argv.split(), "--config.log.tensorboard", "--", "--config.seed=4"])
    assert rest == ["t", "x", "--", "--config.seed=4"]
    assert cli.overrides(given, bad := []) == {
        "seed": 3,
        "optim.lr": 1e-4,
        "optim.offload": False,
        "steps": 2,
        "log.tensorboard": True,
    }
    assert not bad


def test_home_is_expanded_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert cli.expand("~/a,x=~/b,/c~,d") == "/home/me/a,x=/home/me/b,/c~,d"
    made = schema.base()
    cli.apply(made, dict.fromkeys(schema.PATHS, "~/a"))
    flat = schema.leaves(made)
    assert {flat[name] for name in schema.PATHS} == {"/home/me/a"}
    assert not [
        n for n, f in schema.SCHEMA.items() if "director" in f.doc and n not in schema.PATHS
    ]


@pytest.mark.parametrize("command", ["train", "evaluate", "sample", "plan"])
def test_help_lists_the_own_flags_with_defaults(command, shell):
    done = shell.python("-m", f"dapo_jax.{command}", "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"python -m dapo_jax.{command} --" in done.stdout
    for word in ("--config ", "(default: configs/quickstart.py)", "--workdir", "--helpfields"):
        assert word in done.stdout
    assert {"evaluate": "--top_p", "sample": "--probs", "plan": "--room"}.get(
        command, "--allow_config_change"
    ) in done.stdout
    assert "absl" not in done.stdout and "log_dir" not in done.stdout


@pytest.mark.parametrize("place", ["file:///x", "foo://x", "http://127.0.0.1:1/x"])
def test_a_place_of_no_known_kind(place):
    for reader in (workdir.open_workdir, checkpoint.steps):
        with pytest.raises(ValueError, match=f"{place}: no kind of place that is known"):
            reader(place)


def test_what_a_native_library_prints_does_not_stand_beside_its_error(capfd):
    with gate.hushed():
        os.write(2, b"progress\n")
    told = pytest.raises(ValueError, match="^f row 3: cannot be read: KeyError: 'x'$")
    with told, gate.reading("f", "row 3"), gate.hushed():
        os.write(2, b"thread 'main' panicked at\n")
        raise KeyError("x")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "progress\nafter\n"
    with pytest.raises(KeyboardInterrupt), gate.reading("f"):
        raise KeyboardInterrupt
