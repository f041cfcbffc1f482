"""README.md tells the truth about what can be checked by a machine: flags, fields, files, names."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from dapo_jax import config

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text() + "".join(
    (ROOT / "configs" / f"{name}.py").read_text().split('"""')[1]
    for name in ("quickstart", "quickstart_grpo", "dapo_math_tiny")
)


def test_every_config_field_exists():
    fields = set(re.findall(r"--config\.([\w.]+)=", TEXT))
    fields |= set(re.findall(r"\bc\.(\w+\.\w+)", TEXT))
    assert fields and fields <= set(config.SCHEMA)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (dapo_jax[\w.]+)", TEXT))))
def test_every_flag_exists(module):
    commands = re.findall(rf"python -m {module}\b([^\n]*(?:\\\n[^\n]*)*)", TEXT)
    flags = {f for c in commands for f in re.findall(r"--(\w+)(?:=|\s|$)", c)} - {"config"}
    said = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    words = {c.split()[0] for c in commands if re.match(r"\s+[a-z]", c)}  # subcommands
    for word in words:
        extra = subprocess.run(
            [sys.executable, "-m", module, word, "--help"], capture_output=True, text=True
        )
        said.stdout += extra.stdout + extra.stderr
    assert not [f for f in flags | words if f not in said.stdout + said.stderr]


def test_every_named_place_exists():
    places = set(re.findall(r"(?:launch|configs|benchmarks)/\w+\.\w+", TEXT))
    assert places and not [p for p in places if not (ROOT / p).exists()]
    for test in re.findall(r"`(test_\w+)`", TEXT):
        assert (ROOT / "tests" / f"{test}.py").exists(), test


@pytest.mark.parametrize("file, name", re.findall(r"`([\w/]+)\.py: (\w+)`", TEXT))
def test_every_named_function_exists(file, name):
    assert hasattr(importlib.import_module(f"dapo_jax.{file.replace('/', '.')}"), name)
