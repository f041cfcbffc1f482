"""Mistakes on the command line end in one clear line and a non-zero code."""

import os
import re
import sys

import pytest
from scripts import ROOT, bash

from dapo_jax import gate
from dapo_jax.checkpoint import checkpoint, workdir
from dapo_jax.config import cli, schema
from dapo_jax.run import policy


@pytest.fixture
def train(shell, tmp_path):
    command = ("-m", "dapo_jax.train", f"--config={ROOT}/configs/quickstart.py")
    return lambda *arguments: shell.python(*command, *arguments, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workdir=w", "--config.rollout.groups=0"],
         "config.rollout.groups: 0 is too small, at least 1"),
        ([], ".*--workdir"),
        (["--workdir=mine"], ".*mine.* is a file"),
        (["--workdir=w", "--group_size=4"], ".*'; did you mean --config.rollout.group_size?"),
        (["--workdir=w", "--confg.optim.lr=1"], "no flag --confg.optim.lr; did you mean --c"),
    ],
    ids=lambda value: None if isinstance(value, list) else re.sub(r"\W", "", value)[-20:],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments, says, train, tmp_path):
    (tmp_path / "mine").write_text("a file")
    done = train(*arguments)
    assert done.returncode and "Traceback" not in done.stderr + done.stdout
    assert re.match(f"error: {says}", done.stderr.strip().splitlines()[-1]), done.stderr
    assert done.stderr.count("error: ") == 1
    assert (tmp_path / "mine").read_text() == "a file"
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


BASE = "from dapo_jax import config\ndef get_config():\n  c = config.base()\n  "
BROKEN = {
    "def get_config(:": "line 1: SyntaxError: ",
    "def get_config():\n  assert 1 == 2": "line 2: AssertionError",
    "def get_config():\n  return get_config()": "line 2: nested too deeply",
    "def get_config():\n  raise SystemExit(3)": "line 2: SystemExit: 3",
    "def get_config():\n  return open('/nope')": "line 2: No such file",
    "a\0b": "SyntaxError: source code string cannot contain null bytes",
    "x = " + "(" * 3000: "line 1: SyntaxError: too many nested parentheses",
    **({"x = " + "-" * 5000 + "1": ": nested too deeply"} if sys.version_info < (3, 13) else {}),
    "x = 1": "it defines no get_config()",
    "def get_config():\n  return 5": "get_config() returned a int, not the config",
    BASE + "c.optim.learning_rate = 1": "line 4: config.optim.learning_rate: no such field; did",
    BASE + "raise MemoryError": "line 4: asks for more memory than there is",
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
    assert done.returncode == 1
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
    made = cli.overrides(given, bad := [])
    assert not bad and made == {
        "seed": 3, "optim.lr": 1e-4, "optim.offload": False, "steps": 2, "log.tensorboard": True
    }  # fmt: skip
    given = [("seed", None), ("optim.lr", "x" * 99), ("log.tensorboard", "2"), ("model", "3")]
    assert cli.overrides(given, bad) == {}
    words = "wants a value: --c", "wants float, got '", "wants bool, got '2", "no such field; it "
    assert [line.partition(": ")[2][:18] for line in bad] == [*words]
    assert bad[-1].endswith("is a section, with model.path, model.vocab_size, model.hidden_size")


def test_home_is_expanded_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert cli.expand("~/a,x=~/b=c,/c~,~/d=e") == "/home/me/a,x=/home/me/b=c,/c~,/home/me/d=e"
    made = schema.base()
    cli.apply(made, dict.fromkeys(schema.PATHS, "~/a"))
    assert len(schema.PATHS) == 9
    assert {schema.leaves(made)[name] for name in schema.PATHS} == {"/home/me/a"}


@pytest.mark.parametrize("command", ["train", "evaluate", "sample", "plan"])
def test_help_lists_the_own_flags_with_defaults(command, shell):
    done = shell.python("-m", f"dapo_jax.{command}", "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"python -m dapo_jax.{command} --" in done.stdout
    for word in ("--config ", "(default: configs/quickstart.py)", "--workdir", "--helpfields"):
        assert word in done.stdout
    own = dict(train="--allow_config_change", evaluate="--top_p", sample="--probs", plan="--room")
    assert own[command] in done.stdout
    assert "absl" not in done.stdout and "log_dir" not in done.stdout


def test_helpfields_lists_every_field(shell):
    lines = shell.python("-m", "dapo_jax.train", "--helpfields").stdout.splitlines()
    assert lines == [f"{n} = {f.default!r}   {f.doc}" for n, f in schema.SCHEMA.items()]


def test_a_reader_of_the_help_may_have_seen_enough():
    piped = 'set -o pipefail; "$0" -m dapo_jax.train --helpfields | head -1'
    done = bash("-c", piped, sys.executable, PYTHONPATH=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("place", ["file:///x", "foo://x", "http://127.0.0.1:1/x"])
def test_a_place_of_no_known_kind(place, tmp_path):
    readers = (workdir.open_workdir, checkpoint.steps, policy.config_of_run, policy.find_given)
    for reader in readers:
        with pytest.raises(ValueError, match=f"{place}: no kind of place that is known"):
            reader(place)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="Is a directory: .*; name a config file: --config=FILE"):
        policy.config_of_run(str(tmp_path))


def test_a_stream_that_the_caller_closed_is_there():
    code = "import os, dapo_jax; [os.fstat(number) for number in range(3)]"
    closed = '"$0" -c "$1" dapo_jax <&- >&- 2>&-'
    assert bash("-c", closed, sys.executable, code, PYTHONPATH=ROOT).returncode == 0


def test_what_a_native_library_prints_does_not_stand_beside_its_error(capfd):
    with gate.hushed():
        os.write(2, b"progress\n")
    told = pytest.raises(ValueError, match="^f row 3: cannot be read: KeyError: 'x'$")
    with told, gate.reading("f", "row 3"), gate.hushed():
        os.write(2, b"thread 'main' panicked at\n")
        raise KeyError("x")
    with gate.hushed():
        os.write(2, b"after\n")
    assert capfd.readouterr().err == "progress\nafter\n"
    with pytest.raises(KeyboardInterrupt), gate.reading("f"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("ulimit -n 24", "this shell allows 24 open files, a run needs 64: ulimit -n 1024"),
        ("ulimit -v 1500000", "this shell allows 1,536,000,000 bytes of address space, a run"),
        ("export JAX_PLATFORMS=bogus", "JAX_PLATFORMS=bogus: jax finds no such device here"),
    ],
)
def test_a_shell_in_which_nothing_can_run(before, says, tmp_path):
    command = f"exec {sys.executable} -m dapo_jax.train --workdir={tmp_path}/w"
    done = bash("-c", f"{before}; {command}")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {says}"), done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_an_interrupt_while_a_command_imports_ends_it(tmp_path):
    """In a library that would pass over it."""
    (tmp_path / "absl.py").write_text("""import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException:
    pass""")
    path = f"{tmp_path}:{ROOT}"
    done = bash("-c", f"exec {sys.executable} -m dapo_jax.train", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_interrupt_within_the_garbage_collector_ends_the_process():
    code = """import gc, time
from dapo_jax.config import cli
def interrupt(phase, info):
    raise KeyboardInterrupt
def main():
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(60)
cli.run(main)"""
    done = bash("-c", f'exec {sys.executable} -c "$0"', code)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
