"""What saving costs a run of the quickstart: the time the loop waits, and the work behind it.

    python benchmarks/checkpoint_cost.py [--steps=60] [--every=20] [--write]

One run of configs/quickstart.py, base model included. Printed as shares of the rollout steps' own
time in that run, so that the machine's speed and load cancel:
    waits   wall time the loop spends in the saver: copying the state, awaiting the save before
    works   CPU time of all threads for whole saves, measured at rest after the run
"""

import argparse
import pathlib
import runpy
import tempfile

import numpy as np
import results
import timing

from dapo_jax import train
from dapo_jax.checkpoint import saver

ROOT = pathlib.Path(__file__).parent.parent


HEADING = "## Saving"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=0, help="steps; 0 = as the config says")
    parser.add_argument("--saves", type=int, default=20, help="of the measurement at rest")
    parser.add_argument("--write", action="store_true", help="put the figures into RESULTS.md")
    args = parser.parse_args()
    c = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
    c.steps, c.eval.every = args.steps, 0
    every = c.checkpoint.every = args.every or c.checkpoint.every

    steps, after, save = timing.Steps(), timing.Clock(), timing.Clock()
    saver.Saver.after_step = after.around(saver.Saver.after_step)
    with tempfile.TemporaryDirectory() as folder:
        hooks = train.Hooks(phase=steps.phase, step=steps.step)
        train.train(c, pathlib.Path(folder) / "run", hooks=hooks)
        with saver.Saver(pathlib.Path(folder) / "rest", c, {}, print) as at_rest:
            last = save.around(at_rest.last)
            for i in range(args.saves):
                last(steps.state.count(step=i))

    # `after_step` runs after step 0, too, and not after the last; step 1 and the save of step 0,
    # which the second call awaits, compile.
    waits = sum(after.wall[2:]) / sum(steps.wall[1:-1])
    step, work = np.mean(steps.cpu[1:]), np.mean(save.cpu[1:])
    section = (
        f"{HEADING}\n\n{results.made_by('jax', 'orbax-checkpoint')}. {len(steps.wall)} steps of"
        f" {step:.3f} CPU s, every {every} a save of {work:.3f}; the first save, which compiles,"
        f" and its end took {sum(after.wall[:2]):.2f} s. From then on the loop waits {waits:.2%} of"
        f" the steps' wall time, and saves work {work / every / step:.2%} of the steps' CPU time."
    )
    print(section)
    if args.write:
        results.write(HEADING, section)


if __name__ == "__main__":
    main()
