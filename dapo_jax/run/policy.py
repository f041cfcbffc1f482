"""Which weights a command line or config means: a run's step, an Orbax directory, or a model."""

import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

from etils import epath

from dapo_jax import build
from dapo_jax.checkpoint import checkpoint, workdir as workdir_lib
from dapo_jax.config import schema
from dapo_jax.hosts import start
from dapo_jax.model import qwen2


class Policy(NamedTuple):
    """Where the weights are: a step of an Orbax directory, or else the model directory."""

    model_dir: pathlib.Path | None  # Hugging Face directory: shape, tokenizer, and maybe weights
    steps: str = ""  # Orbax directory with one directory per step
    step: int | None = None

    def __str__(self):
        return f"{self.steps} step {self.step}" if self.steps else str(self.model_dir)


def find_policy(config, workdir: pathlib.Path | epath.Path, base, given="") -> Policy:
    """The policy that `given` names, else the run's newest checkpoint, else `base`, the directory
    of the config's model. ValueError: there is no checkpoint."""
    if given:
        return find_given(given, base)
    if directory := config.checkpoint.directory:
        return Policy(base, directory, checkpoint.find_step(directory))
    if (workdir / "checkpoints").is_dir():
        return find_given(str(workdir), base)
    if base:
        return Policy(base)
    raise ValueError(f"--workdir={workdir}: no checkpoint in it; train there first")


def find_given(given: str, base: pathlib.Path | None = None) -> Policy:
    """The policy that a command line names (`named`). ValueError: there is no checkpoint."""
    policy = named(given, base)
    if not policy.steps:
        return policy
    return policy._replace(step=checkpoint.find_step(policy.steps, policy.step))


def named(
    given: str, base: pathlib.Path | None = None, resolve: Callable = start.resolve
) -> Policy:
    """Where a command line says that the policy is; step None: the newest there. It asks no other
    process, unless `resolve` does.

    given: a run's workdir or its checkpoints/, both with @STEP for another step than the newest;
    one step's directory; the output of `convert to-orbax`; a Hugging Face directory or hub name.
    base: model directory of a run that holds no model itself."""
    at = re.fullmatch(r"(.+)@(\d+)", given)
    step = int(at[2]) if at and not pathlib.Path(given).exists() else None
    path = workdir_lib.place(os.path.expanduser(given if step is None else at[1]), given)
    weights = "://" not in given and (not path.is_dir() or any(path.glob("*.safetensors")))
    if step is None and weights:
        return Policy(resolve(given))
    if path.name.isdigit() and (path / "arrays").is_dir():
        path, step = path.parent, int(path.name) if step is None else step
    elif (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    return Policy(base, str(path), step)


def load_params(config, machine: build.Machine, policy: Policy) -> qwen2.Params:
    """The policy's parameters in the training layout, with LoRA adapters merged in."""
    if not policy.steps:
        return build.initial_params(config, machine)
    mesh, rules = machine.mesh, machine.trainer.rules
    return checkpoint.restore_merged(policy.steps, machine.shape, mesh, rules, policy.step)


def config_of_run(workdir: str) -> schema.Config | None:
    """The config of the run in `workdir`; None where none is named. ValueError: there is no run."""
    if not workdir:
        return None
    file = workdir_lib.place(workdir, f"--workdir={workdir}") / "config.json"
    if not file.exists():
        why = "no run (no config.json) in it; name a config file: --config=FILE"
        raise ValueError(f"{workdir}: {why}")
    try:
        return schema.of_run(file.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: {error}; name a config file: --config=FILE") from error
