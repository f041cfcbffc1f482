"""What the tests of the launch scripts share: bash, a checkout to run in, tools that are fake."""

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
THIS_PYTHON = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
FAKES = ROOT / "tests" / "data" / "fakes"
# Of a training, with what every shell on the way could break.
ODD = ["--config=configs/dapo_qwen2_5_7b.py", "--workdir=gs://bucket/x"]
ODD += ['--config.data.train=it\'s $x "y" $(HOME) $$.json']


def bash(*command, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    """Run a command with the caller's JAX, XLA and glibc settings removed, and `env` added."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "GLIBC_", "TF_CPP_"))}
    env = kept | {k: str(v) for k, v in env.items()}
    command = ["bash", *map(str, command)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def on_path(folder: Path) -> str:
    """A PATH that begins with the folder."""
    return f"{folder}:{os.environ['PATH']}"


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def link_tools(folder: Path, *names: str) -> None:
    """Put programs of this machine into a folder that is to be the whole PATH."""
    for name in names:
        (folder / name).symlink_to(shutil.which(name))


def make_checkout(folder: Path) -> Path:
    """A checkout with what the scripts read only, at a path that an unquoted expansion would break;
    its dapo_jax is empty, so that no training's flags are checked."""
    root = folder / "a checkout [with] 'odd' $names"
    shutil.copytree(LAUNCH, root / "launch")
    (root / "dapo_jax/pods").mkdir(parents=True)
    (root / "dapo_jax/__init__.py").write_text("")
    (root / "configs").mkdir()
    configs = ("configs/quickstart.py", "configs/dapo_qwen2_5_7b.py")
    for name in ("requirements.txt", "setup.py", "dapo_jax/pods/slices.txt", *configs):
        shutil.copy(ROOT / name, root / name)
    return root


def make_tools(folder: Path) -> Path:
    """A folder for PATH with a fake uv."""
    executable(folder / "tools/this-python", THIS_PYTHON)
    shutil.copy(FAKES / "uv", folder / "tools")
    return folder / "tools"
