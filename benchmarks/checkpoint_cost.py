"""What saving costs a run of the quickstart: the time the loop waits, and the work behind it.

    python benchmarks/checkpoint_cost.py [--steps=60] [--every=20]

One run of configs/quickstart.py, base model included. Printed as shares of the rollout steps' own
time in that run, so that the machine's speed and load cancel:
    waits   wall time the loop spends in the saver: copying the state, awaiting the save before
    works   CPU time of all threads for whole saves, measured at rest after the run
"""

import argparse
import importlib.util
import pathlib
import tempfile
import time

import numpy as np

from dapo_jax import train
from dapo_jax.checkpoint import saver

ROOT = pathlib.Path(__file__).parent.parent


class Clock:
    """The wall and CPU seconds of each call of what it wraps; keeps the last result."""

    def __init__(self, function):
        self.function, self.wall, self.cpu, self.result = function, [], [], None

    def __call__(self, *args):
        wall, cpu = time.perf_counter(), time.process_time()
        self.result = self.function(*args)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return self.result


class Steps:
    """The wall and CPU seconds of each rollout step, and the last state: `train.Hooks` tell."""

    def __init__(self):
        self.wall, self.cpu, self.state = [], [], None

    def begin(self, phase: str) -> None:
        if phase == "rollout":
            self._began = time.perf_counter(), time.process_time()

    def end(self, state, record) -> None:
        self.wall.append(time.perf_counter() - self._began[0])
        self.cpu.append(time.process_time() - self._began[1])
        self.state = state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=0, help="steps; 0 = as the config says")
    parser.add_argument("--saves", type=int, default=20, help="of the measurement at rest")
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "configs" / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    c = quickstart.get_config()
    c.steps, c.eval.every = args.steps, 0
    every = c.checkpoint.every = args.every or c.checkpoint.every

    steps, after = Steps(), Clock(saver.Saver.after_step)
    saver.Saver.after_step = lambda *a, **k: after(*a, *k.values())
    with tempfile.TemporaryDirectory() as folder:
        hooks = train.Hooks(phase=steps.begin, step=steps.end)
        train.train(c, pathlib.Path(folder) / "run", hooks=hooks)
        with saver.Saver(pathlib.Path(folder) / "rest", c, {}, print) as at_rest:
            save = Clock(at_rest.last)
            for i in range(args.saves):
                save(steps.state.count(step=i))

    # `after_step` runs after step 0, too, and not after the last; step 1 and the save of step 0,
    # which the second call awaits, compile.
    waits = sum(after.wall[2:]) / sum(steps.wall[1:-1])
    step, work = np.mean(steps.cpu[1:]), np.mean(save.cpu[1:])
    print(f"{len(steps.wall)} steps of {step:.3f} CPU s, every {every} a save of {work:.3f}")
    print(f"the first save, which compiles, and its end: {sum(after.wall[:2]):.2f} s; from then on")
    print(f"waits: {waits:.2%} of the steps' wall time")
    print(f"works: {work / every / step:.2%} of the steps' CPU time")


if __name__ == "__main__":
    main()
