"""Export of the policy as a Hugging Face directory during a run.

WORKDIR/export/step_N equals the output of `convert to-hf` for the checkpoint of step N: bfloat16,
with the run's tokenizer. It appears whole or not at all (in a bucket its config.json comes last). A
failed export does not end the run.
"""

import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable

from etils import epath

from dapo_jax import gate, parallel
from dapo_jax.build import Machine
from dapo_jax.checkpoint.workdir import EXPORT, Workdir
from dapo_jax.dapo.state import State
from dapo_jax.model import hf


def export(config, home: Workdir, machine: Machine, state: State, say: Callable) -> None:
    """Write the export of this step and remove all but the newest `checkpoint.export_keep`. A
    collective: all processes gather the weights, process 0 writes."""
    step, wrong = state.counters.step, ""
    target = home.top / EXPORT / f"step_{step}"
    with tempfile.TemporaryDirectory(prefix="dapo_jax-") as scratch:
        # For a bucket the directory is first made on the local disk.
        local = pathlib.Path(scratch if home.remote else target.parent, target.name)
        try:
            # An export of this step from before a kill; all processes wait until it is removed.
            parallel.of_main_process(lambda: target.rmtree() if target.exists() else None)
            params = machine.trainer.merged(state.params)
            # `build.load_text` writes the tokenizer of the embedded task.
            text = config.tokenizer.path or machine.model_dir or home.local / "data"
            given = tokenizer_folder(text), machine.model_dir, config.tokenizer.chat_template
            hf.save(local, machine.shape, params, "bfloat16", *given)
            if parallel.is_main_process():
                if home.remote:
                    _send(local, target)
                # Exports of later steps, left by a kill before their checkpoint, are not newer.
                older = [path for s, path in found(home) if s <= step]
                unfinished = (home.top / EXPORT).glob("*.partial")  # of a killed process
                for path in [*older[: -config.checkpoint.export_keep], *unfinished]:
                    path.rmtree()
        except Exception as error:  # of a disk, or of a bucket's client
            wrong = gate.describe(error)
    if parallel.any_process(bool(wrong)):
        why = wrong or "on another process"
        say(f"warning: step {step} is not exported to {target}: {why}; training goes on")


def tokenizer_folder(named: str | pathlib.Path) -> pathlib.Path:
    """Where the tokenizer is that a folder, one of its files or a model's name names."""
    path = pathlib.Path(os.path.expanduser(named))
    return path.parent if path.is_file() else hf.resolve(named, weights=False)


def _send(local: pathlib.Path, target: epath.Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(local.iterdir(), key=lambda file: file.name == "config.json"):
        with file.open("rb") as source, (target / file.name).open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 24)


def found(home: Workdir) -> list[tuple[int, epath.Path]]:
    """(step, directory) of each export, in order."""
    folder = home.top / EXPORT
    paths = folder.iterdir() if folder.exists() else ()
    named = ((re.fullmatch(r"step_(\d+)", p.name), p) for p in paths)
    return sorted((int(m[1]), p) for m, p in named if m)
