"""Continue from another run's checkpoint (branch), or from an earlier one of this run (rewind).

A branch also takes that run's metrics; with the same config it computes the same bits.
"""

import pathlib
import shutil
from typing import Any

from absl import flags
from etils import epath

from dapo_jax import parallel
from dapo_jax.build import Text
from dapo_jax.checkpoint import checkpoint, export, resume, workdir as workdir_lib
from dapo_jax.dapo.state import State
from dapo_jax.data import files

REWIND = flags.DEFINE_integer(
    "rewind", None, "Go back to this step's checkpoint and leave; without it the run goes on.", 0
)


def state(
    config, text: Text, source: Any, like: State, shardings: State, local: pathlib.Path | None, say
) -> State:
    """The whole state of a step of another run, source.step under source.steps. local: the workdir
    of the branch, which gets that run's metrics.jsonl. say: prints a line. ValueError: there is no
    whole state of a run with this model."""
    directory, step = source.steps, source.step
    if not directory:
        raise ValueError(f"config.init_state='all': {config.init_from} is no run: it has weights")
    with checkpoint.reader(directory) as m:
        try:
            saved = checkpoint.read_state(m, step)
            same = resume.check(saved, config, resume.inputs(text, config), True, say)
            found = checkpoint.restore(m, step, like, shardings)
            found = found if same else found._replace(by_problem={})
        except checkpoint.Damaged as error:
            raise ValueError(
                f"config.init_from={config.init_from}: {directory} step {step} holds no whole state"
                f" of a run ({error}); config.init_state='weights' needs none"
            ) from error
    there = epath.Path(directory).parent / "metrics.jsonl"
    here = local and local / "metrics.jsonl"
    if here and parallel.is_main_process() and there.exists():
        here.write_bytes(there.read_bytes())
    say(f"a branch of {directory} step {step}")
    return found


def rewind(config, where: str | pathlib.Path, step: int) -> None:
    """Move everything after `step` to WORKDIR/rewound/to_STEP. If interrupted, it can be run again.
    ValueError: `step` has no whole checkpoint."""
    with workdir_lib.hold(where, config.checkpoint.directory) as home:
        if not parallel.is_main_process():
            return
        directory = checkpoint.absolute(config.checkpoint.directory or home.checkpoints)
        checkpoint.find_step(directory, step)
        later = [n for n in checkpoint.numbers(directory) if n > step]  # newest first
        name = files.unused(home.top / workdir_lib.REWOUND / f"to_{step}", "_").name
        aside = home.local / workdir_lib.REWOUND / name
        aside.mkdir(parents=True)
        for file in ("metrics.jsonl", "config.json"):
            if (home.local / file).exists():
                shutil.copy2(home.local / file, aside)
        for file in home.local.glob("*/step_*.jsonl*"):  # of rollouts/ and eval/
            if int(file.name[5:].partition(".")[0]) > step:
                (aside / file.parent.name).mkdir(exist_ok=True)
                shutil.move(file, aside / file.parent.name / file.name)
        # Large ones are renamed where they lie, in a bucket or on a disk that is linked.
        exports = checkpoint.absolute(home.top / workdir_lib.EXPORT)
        moves = [directory / str(n) for n in later]
        moves += [exports / path.name for s, path in export.found(home) if s > step]
        kept = lambda folder: folder.parent / workdir_lib.REWOUND / name / folder.name
        for path in moves:
            kept(path.parent).mkdir(parents=True, exist_ok=True)
            path.rename(kept(path.parent) / path.name)
        workdir_lib.send(home)
    since = f"what was exported and logged since in {home.name}/{workdir_lib.REWOUND}/{name}"
    count = f"{len(later)} later checkpoints"
    print(f"back at step {step}; {count} are kept in {kept(directory)}, {since}")
