"""What logging costs a run of the quickstart, as a share of the steps' own CPU time.

    taskset -c 0 python benchmarks/logging_cost.py [--steps=60] [--write]

One run of configs/quickstart.py, base model included, with its defaults: metrics.jsonl, TensorBoard
with histograms and texts, text samples with every token, alarms, the console. Counted: the CPU time
of the main thread in all that computes, writes and prints metrics, from the second step on (the
first compiles), against the CPU time of all threads in the rollout steps. Not counted: entropies
and sums that the jitted programs return anyway. Waiting for the disk (fsync) is no CPU time, so the
share of the wall time stands beside it.
"""

import argparse
import functools
import importlib.util
import os
import pathlib
import platform
import tempfile
import time

import jax
import results

from dapo_jax import train
from dapo_jax.log import guards, metrics, report

ROOT = pathlib.Path(__file__).parent.parent
HEADING = "## Logging"
LIMIT = 0.02

# Part -> (module or class, name) of what belongs to it. None calls another one.
PARTS = {
    "numbers of what was drawn": [(metrics, "rollout_metrics")],
    "numbers of the updates": [(metrics, "update_metrics")],
    "alarms": [(guards, "remember"), (guards, "count_alarms")],
    "text samples": [(metrics.Writer, "lines")],
    "files and TensorBoard": [(metrics.Writer, "record")],
    "console": [(report.Progress, "update")],
}


class Clock:
    """CPU and wall seconds of the calls of what it wraps, while `on`."""

    on = False

    def __init__(self, cpu_clock):
        self.cpu, self.wall, self.calls, self._cpu_clock = 0.0, 0.0, 0, cpu_clock

    def around(self, function):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            cpu, wall = self._cpu_clock(), time.perf_counter()
            out = function(*args, **kwargs)
            if Clock.on:
                self.cpu += self._cpu_clock() - cpu
                self.wall += time.perf_counter() - wall
                self.calls += 1
            return out

        return timed


class Steps(Clock):
    """Of the rollout steps, from the second one on: `train.Hooks` tell when one begins and ends."""

    def __init__(self):
        super().__init__(time.process_time)

    def begin(self, phase: str) -> None:
        if phase == "rollout":
            self._began = self._cpu_clock(), time.perf_counter()

    def end(self, state, record) -> None:
        if Clock.on:
            self.cpu += self._cpu_clock() - self._began[0]
            self.wall += time.perf_counter() - self._began[1]
            self.calls += 1
        Clock.on = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "configs" / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    c = quickstart.get_config()
    c.steps, c.eval.every, c.checkpoint.every = args.steps, 0, 0

    clocks = {name: Clock(time.thread_time) for name in PARTS}
    for name, places in PARTS.items():
        for owner, attribute in places:
            setattr(owner, attribute, clocks[name].around(getattr(owner, attribute)))
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        hooks = train.Hooks(phase=steps.begin, step=steps.end)
        train.train(c, pathlib.Path(folder) / "run", hooks=hooks)
        size = {p.name: _bytes(p) for p in (pathlib.Path(folder) / "run").iterdir()}

    cpu = steps.cpu + sum(k.cpu for k in clocks.values())
    wall = steps.wall + sum(k.wall for k in clocks.values())
    lines = ["| part | ms a step | share of CPU time | of wall time |", "|---|---|---|---|"]
    total = Clock(time.thread_time)
    for name, k in clocks.items():
        total.cpu, total.wall = total.cpu + k.cpu, total.wall + k.wall
        lines.append(_row(name, k, steps.calls, cpu, wall))
    lines.append(_row("all logging", total, steps.calls, cpu, wall))
    share = total.cpu / cpu
    text = (
        f"{HEADING}\n\n`taskset -c 0 python benchmarks/logging_cost.py --steps={args.steps}`:"
        f" {steps.calls + 1} steps of the quickstart, {cpu / steps.calls * 1e3:.0f} CPU ms a step"
        f" on {len(os.sched_getaffinity(0))} core of {platform.machine()}, jax {jax.__version__}."
        f" All logging takes {share:.2%} of the CPU time (at most {LIMIT:.0%} is wanted). Written:"
        f" metrics.jsonl {size['metrics.jsonl'] / 1e3:.0f} kB, tensorboard"
        f" {size['tensorboard'] / 1e3:.0f} kB, rollouts {size['rollouts'] / 1e3:.0f} kB.\n\n"
        + "\n".join(lines)
    )
    print(text)
    if args.write:
        results.write(HEADING, text)
    if share > LIMIT:
        raise SystemExit(f"logging takes {share:.2%} of a step, more than {LIMIT:.0%}")


def _bytes(path: pathlib.Path) -> int:
    return sum(p.stat().st_size for p in [path, *path.rglob("*")] if p.is_file())


def _row(name: str, k: Clock, steps: int, cpu: float, wall: float) -> str:
    return f"| {name} | {k.cpu / steps * 1e3:.2f} | {k.cpu / cpu:.2%} | {k.wall / wall:.2%} |"


if __name__ == "__main__":
    main()
