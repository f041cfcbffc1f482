"""The race: the same base, problems and updates for dapo_jax, TRL and google-tunix, one core each.

    pip install -r benchmarks/requirements-peers.txt ...       # see that file; a venv of its own
    python benchmarks/race.py --seeds=3 --out=runs/race        # about 45 minutes; resumes

Every racer is a process of its own, pinned to one core with one thread, from an empty compilation
cache, with its own documented settings at their best (benchmarks/racers/). One runs at a time, and
nothing else of the race on its core. CPU-seconds are those of the whole process, all threads, from
its start: imports, loading and compiling included, writing weights for evaluation not. Evaluation
(128 held-out problems x 4 samples, T=1, every 5 rollout steps) is done by the judge, in this
process on the other cores, alike for all. A run ends once the mean of three readings has reached
the goal, or after `--steps` rollout steps, whose CPU-seconds are then a lower bound.

The base is made by the trainer's warm-up, cut short (`--skill_steps`): from the quickstart's own
base 10 rollout steps reach the goal, and the race would be one of compilers.

Writes OUT/race.md and OUT/race.json; finished runs are kept in OUT.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
RACERS = ROOT / "benchmarks" / "racers"
sys.path[:0] = [str(RACERS)]

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

# racer -> script, arm, title; in the table's order
OURS = "ours"
LIST = {
    OURS: ("ours.py", "dapo", "dapo_jax"),
    "fixed": ("ours.py", "fixed", "dapo_jax without Dynamic Sampling"),
    "tunix": ("with_tunix.py", "", "google-tunix DAPOLearner"),
    "trl": ("with_trl.py", "", "TRL GRPOTrainer, loss_type='dapo'"),
}
LR = 3e-4  # of everybody; ours reaches the goal later with 6e-4 (43 against 40 CPU-s, seed 100)
HEADING = "## The race"
PACKAGES = {
    "ours": ("jax", "jaxlib", "flax"),
    "tunix": ("google-tunix", "jax", "flax"),
    "trl": ("trl", "torch", "transformers", "accelerate"),
}


def command(racer: str) -> list[str]:
    script, arm, _ = LIST[racer]
    return [sys.executable, str(RACERS / script), f"--arm={arm}"]


def run(
    racer: str,
    seed: int,
    lr: float,
    steps: int,
    goal: float,
    base: pathlib.Path,
    out: pathlib.Path,
    judge,
) -> dict:
    """One run with its readings judged while it goes on; kept in `out` when it is whole."""
    import judge as judge_lib
    import report
    from tqdm import tqdm

    from dapo_jax.data import files

    result = out / "result.json"
    settings = {"racer": racer, "seed": seed, "lr": lr, "steps": steps, "goal": goal}
    if result.exists():
        found = json.loads(result.read_text())
        if found["settings"] != settings:
            raise ValueError(f"{out}: was made with {found['settings']}; choose another --out")
        return found
    shutil.rmtree(out, ignore_errors=True)  # of an interrupted run
    out.mkdir(parents=True)
    arguments = [f"--base={base}", f"--out={out}", f"--seed={seed}", f"--steps={steps}"]
    arguments += [f"--lr={lr}"]
    arguments += [f"--core={max(CORES)}"] if CORES else []
    with (out / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*command(racer), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=judge_lib.environment(ROOT),
        )
    bar = tqdm(total=steps, desc=f"{racer}, seed {seed}", unit="step", dynamic_ncols=True)
    readings = []
    try:
        with bar:
            while True:
                over = process.poll() is not None  # asked before the files, which are then whole
                for note in notes(out)[len(readings) :]:
                    folder = out / "weights" / f"step_{note['step']:06d}"
                    if not readings:
                        judge.require_base(folder)
                    readings.append(note | {"accuracy": judge.accuracy(folder)})
                    shutil.rmtree(folder)
                    bar.update(note["step"] - bar.n)
                    bar.set_postfix_str(f"held-out {readings[-1]['accuracy']:.3f}")
                    if report.reached(readings, goal, report.MEAN).held:
                        (out / "stop").touch()
                if over:
                    break
                time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    complete = readings and (readings[-1]["step"] == steps or (out / "stop").exists())
    if process.returncode or not complete:
        raise RuntimeError(f"{racer}, seed {seed}: ended with {process.returncode}; {out}/log.txt")
    found = {"settings": settings, "readings": readings, "summary": report.summary(readings, goal)}
    files.write_json(result, found)
    return found


def notes(out: pathlib.Path) -> list[dict]:
    """The readings taken so far; a line that is being written does not count yet."""
    path = out / "readings.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "race")
    parser.add_argument("--steps", type=int, default=400, help="rollout steps allowed to a run")
    parser.add_argument("--goal", type=float, default=0.8, help="held-out accuracy at T=1")
    parser.add_argument("--racers", default=",".join(LIST), help="comma-separated")
    parser.add_argument("--lr", type=float, default=LR, help="learning rate of all")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--base_seed", type=int, default=0)
    parser.add_argument("--skill_steps", type=int, default=520, help="warm-up of the base: skill")
    parser.add_argument("--habit_steps", type=int, default=160, help="and habit, see config.py")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    racers = args.racers.split(",")
    if unknown := set(racers) - set(LIST):
        parser.error(f"--racers: {', '.join(sorted(unknown))}; known: {', '.join(LIST)}")
    if len(CORES) > 1:  # the last core is the race's
        os.sched_setaffinity(0, CORES - {max(CORES)})
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import judge as judge_lib
    import report

    out = args.out.absolute()
    base = out / "base"
    out.mkdir(parents=True, exist_ok=True)
    warmup = {
        "supervised_warmup.optimizer": "adam",
        "supervised_warmup.skill_steps": args.skill_steps,
        "supervised_warmup.skill_lr": 3e-3,
        "supervised_warmup.habit_steps": args.habit_steps,
        "supervised_warmup.habit_lr": 1.5e-3,
    }
    judge_lib.make_base(base, ROOT, warmup, args.base_seed)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for seed in seeds:
        judge_lib.write_order(base, seed, args.steps * 32)
    gaps = judge_lib.logits_gap(
        base, {r: command(r) for r in [OURS, *racers] if r != "fixed"}, judge_lib.environment(ROOT)
    )
    for name, gap in gaps.items():
        print(f"largest |difference| of a logit, {name} from ours, same file: {gap:.1e}")
        if not gap < 1e-3:
            raise SystemExit(f"error: {name} does not compute the same model")

    judge = judge_lib.Judge(base)
    found = {name: [] for name in racers}
    for seed in seeds:
        for name in racers:
            folder = out / f"{name}_{seed}"
            found[name].append(run(name, seed, args.lr, args.steps, args.goal, base, folder, judge))
    titles = {name: LIST[name][2] for name in racers}
    runs = {name: [r["summary"] for r in of] for name, of in found.items()}
    packages = dict.fromkeys(p for r in racers for p in PACKAGES.get(r, ()))
    text = f"{results.made_by(*packages)}\n\n"
    text += report.table(runs, OURS, titles, args.goal) + "\n" + report.notes(racers)
    if args.write:
        results.write(HEADING, f"{HEADING}\n\n{text}")
    (out / "race.md").write_text(text)
    (out / "race.json").write_text(json.dumps({"gaps": gaps, "runs": found}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
