"""What the three runs of the race share: their settings, the clock, and how weights leave them.

Imports nothing heavy: what is imported here is charged to everybody.
"""

import argparse
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable

GROUPS, GROUP_SIZE, UPDATES = 32, 8, 8  # prompts a rollout step, responses each, updates
PROMPT_TOKENS, RESPONSE_TOKENS, BUFFER_TOKENS = 24, 32, 12
CLIP_LOW, CLIP_HIGH, B1, B2, CLIP_NORM = 0.2, 0.28, 0.9, 0.95, 1.0
EVERY = 5  # rollout steps between readings


class Clock:
    """CPU-seconds of this process, all threads, from its birth, without the writing of weights.

    `reading` goes into OUT/readings.jsonl: {step, cpu_s, wall_s, tokens, updates, peak_mb}. The
    weights of each reading appear whole in OUT/weights/step_NNNNNN, a Hugging Face directory.
    """

    def __init__(self, out: pathlib.Path):
        self.out = out
        self._cpu_began, self._wall_began = 0.0, time.perf_counter()
        (out / "weights").mkdir(parents=True, exist_ok=True)

    def reading(
        self, step: int, tokens: int, updates: int, save: Callable[[pathlib.Path], None]
    ) -> bool:
        """Notes the clock, then writes the weights by `save(directory)` off the clock. Work in
        flight must have ended. Returns whether to stop: the judge has seen enough."""
        cpu, wall = time.process_time(), time.perf_counter()
        note = {
            "step": step,
            "cpu_s": round(cpu - self._cpu_began, 3),
            "wall_s": round(wall - self._wall_began, 3),
            "tokens": int(tokens),
            "updates": updates,
            "peak_mb": round(peak_mb(), 1),
        }
        folder = self.out / "weights" / f"step_{step:06d}"
        partial = folder.with_suffix(".partial")
        save(partial)
        partial.rename(folder)
        with (self.out / "readings.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        self._cpu_began += time.process_time() - cpu
        self._wall_began += time.perf_counter() - wall
        return (self.out / "stop").exists()


def peak_mb() -> float:
    """Largest resident memory of this process so far, 10^6 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--arm", default="")
    parser.add_argument("--core", type=int, help="the one core to work on")
    parser.add_argument("--logits", type=pathlib.Path, help="only write logits of these token ids")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})  # before anything sizes its thread pools
    return args


def rows(base: pathlib.Path, seed: int, steps: int) -> list[dict[str, str]]:
    """The problems of a run, in the order of its seed: `steps` x GROUPS, {prompt, answer} each."""
    order = json.loads((base / f"order_{seed}.json").read_text())
    texts = json.loads((base / "train.json").read_text())
    if len(order) < steps * GROUPS:
        raise ValueError(f"{base}: the order of seed {seed} holds fewer than {steps} steps")
    return [dict(zip(("prompt", "answer"), texts[i], strict=True)) for i in order[: steps * GROUPS]]
