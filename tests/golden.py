"""Tiny whole runs whose bits a refactoring has to keep: the safety net under moves of modules.

    python tests/golden.py check                    # against golden_runs.json, about two minutes
    python tests/golden.py check --against=COMMIT   # against a work tree of it; on any machine
    python tests/golden.py check --at_once=8        # so many of these runs beside one another
    python tests/golden.py record                   # this machine's entry of golden_runs.json

A run is a command, and what is compared are the files that it leaves: nothing of dapo_jax is
imported here, so that modules may move. Bits depend on the processor and on the versions of what
computes, so an entry belongs to one `machine`. A new config field changes `config` alone.
"""

import argparse
import collections
import concurrent.futures
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import tensorstore

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENTRIES = pathlib.Path(__file__).with_suffix("").with_name("golden_runs.json")

# Flags behind configs/quickstart.py. The warm-up leaves most problems wrong: groups are mixed.
EVERY = """
    steps=6 eval.every=4 eval.k=2 eval.max_problems=16 checkpoint.every=3 optim.minibatches=2
    supervised_warmup.skill_steps=120 supervised_warmup.habit_steps=20 data.embedded_problems=256
    rollout.groups=6 rollout.group_size=4 rollout.slots=32"""
RUNS = {
    "quickstart": "",
    # As presets.vapo and configs/vapo.py.
    "vapo": """critic.enabled=True critic.pretrain_steps=1 critic.lr=1e-3 critic.length_alpha=1.5
        loss.positive_coef=.1 dynamic_sampling.enabled=False reward.overlong_penalty=0
        optim.share_prompts=False guard.explained_min=0""",
    "stale": """rollout.staleness=1 rollout.chunk=2 rollout.slots=12 loss.importance_cap=5
        loss.old_logprobs=recompute""",
    "curriculum": """data.embedded_problems=40 curriculum.pass_rate_cap=.5
        curriculum.revisit_epochs=1 curriculum.band_low=.1 curriculum.band_high=.9
        curriculum.temperature_schedule=cosine curriculum.temperature_steps=4
        curriculum.temperature_end=.8 loss.old_logprobs=recompute""",
    # With a reference model, and groups that wait for the next step.
    "lora": """model.lora.rank=4 optim.lr=3e-3 loss.kl_coef=.01 dynamic_sampling.surplus=carry
        rollout.groups=4""",
    # What else is switched: objective, importance, advantages, length, schedule.
    "others": """loss.objective=gspo loss.clip_low=.01 loss.clip_high=.02 loss.positive_coef=.1
        loss.normalizer=sequence loss.overlong_filter=group loss.old_logprobs=recompute
        loss.importance=sequence_mask loss.importance_cap=3 loss.entropy_coef=.01
        advantage.scale=none advantage.leave_one_out=True advantage.whiten=True
        optim.schedule=linear optim.decay_steps=3 rollout.max_response_tokens=12""",
}
HEADLINES = """optim/updates sampling/accept_frac reward/mean policy/entropy policy/loss
    optim/grad_norm eval/heldout/avg@k critic/value_loss policy/ref_kl staleness/parked_tokens
    curriculum/temperature"""
# Tags of when and on which machine a step ran: clocks, what is per second, shares of a device.
# The schedule's shares, perf/slot_occupancy and perf/cache_peak, are counts and stay.
CLOCKS = ("time/", "perf/tokens", "perf/mfu", "perf/hbm")


def digest(x) -> str:
    data = x if isinstance(x, bytes) else json.dumps(x, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:12]


def machine() -> dict:
    """What decides the bits of one program: the processor as LLVM sees it, cores, versions."""
    file = pathlib.Path("/proc/cpuinfo")
    lines = file.read_text().split("\n\n")[0].splitlines() if file.exists() else []
    cpu = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    flags = re.findall(r"\b(?:s?sse|avx|amx|fma|f16c|bmi|gfni)\w*", cpu.get("flags", ""))
    packages = ("jax", "jaxlib", "numpy", "flax", "optax")
    return {
        "cpu": " ".join(cpu.get(k, "?") for k in ("vendor_id", "cpu family", "model", "stepping")),
        "flags": digest(sorted(flags)),
        "cores": os.cpu_count(),
    } | {p: importlib.metadata.version(p) for p in packages}


def train(root: pathlib.Path, name: str, workdir: pathlib.Path) -> dict[str, dict]:
    """Run it by the code under `root`. Part -> what it has, by name -> digest; programs -> count;
    headlines -> values."""
    flags = [f"--config.{flag}" for flag in f"{EVERY} {RUNS[name]}".split()]  # the last one counts
    command = [sys.executable, "-m", "dapo_jax.train", "--config=configs/quickstart.py"]
    set_here = {"JAX_PLATFORMS": "cpu", "JAX_LOG_COMPILES": "1", "PYTHONPATH": str(root)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    kept |= {k: v for k, v in os.environ.items() if k == "JAX_COMPILATION_CACHE_DIR"}
    command += [f"--workdir={workdir}", *flags]
    done = subprocess.run(command, cwd=root, env=kept | set_here, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: exit status {done.returncode}\n{done.stdout}{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    if not records[-1]["optim/updates"] or not any(r.get("sampling/accept_frac") for r in records):
        sys.exit(f"{name}: nothing was learned, so that it shows nothing")
    columns = collections.defaultdict(list)
    for record in records:
        for tag, value in record.items():
            if not tag.startswith(CLOCKS):
                columns[tag].append((record["step"], value))
    parts = {"metrics": {tag: digest(column) for tag, column in columns.items()}}
    for part in ("rollouts", "eval", "data"):
        parts[part] = {p.name: digest(p.read_bytes()) for p in (workdir / part).iterdir()}
    for step in sorted(p for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()):
        saved = json.loads((step / "state" / "metadata").read_text())
        del saved["versions"]
        saved = {f"state/{k}": digest(v) for k, v in saved.items() if k != "config"}
        found = saved | arrays(step, "arrays") | arrays(step, "carried")
        parts[f"checkpoint {step.name}"] = found
    parts["config"] = json.loads((workdir / "config.json").read_text())
    programs = re.findall(r"Compiling (\S+) with global shapes", done.stderr)
    headlines = {t: float(f"{records[-1][t]:.5g}") for t in HEADLINES.split() if t in records[-1]}
    return parts | {"programs": collections.Counter(programs), "headlines": headlines}


def side_by_side(names: list[str], runs: pathlib.Path, at_once: int) -> Iterator[tuple[str, dict]]:
    """Each name with what `train` finds. The next `at_once` begin when all before them have ended,
    so that a failure leaves none running."""
    for first in range(0, len(names), at_once):
        batch = names[first : first + at_once]
        folders = [runs / f"{first + i}.{name}" for i, name in enumerate(batch)]
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            yield from zip(batch, pool.map(train, [ROOT] * len(batch), batch, folders), strict=True)


def arrays(step: pathlib.Path, item: str) -> dict[str, str]:
    """Name -> dtype, shape and bytes of all that a checkpoint's item holds."""
    store = {"driver": "ocdbt", "base": f"file://{step / item}/"}
    keys = [k.decode() for k in tensorstore.KvStore.open(store).result().list().result()]
    found = {}
    for name in (k.removesuffix("/.zarray") for k in keys if k.endswith("/.zarray")):
        spec = {"driver": "zarr", "kvstore": store | {"path": name}}
        x = tensorstore.open(spec, read=True).result().read().result()
        found[f"{item}/{name}"] = digest(f"{x.dtype} {x.shape} ".encode() + x.tobytes())
    return found


def short(run: dict[str, dict]) -> dict:
    """What golden_runs.json keeps of a run. Names of programs may change, not their number."""
    kept = {"programs": sum(run["programs"].values()), "headlines": run["headlines"]}
    return {part: digest(names) for part, names in run.items() if part not in kept} | kept


def difference(old, new) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{old} -> {new}"
    names = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    show = lambda k: f"{k}: {old.get(k)} -> {new.get(k)}"
    return "; ".join(map(show, names[:6])) + (f"; {len(names)} in all" if names[6:] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("check", "record"))
    parser.add_argument("--against", metavar="COMMIT", help="run this commit too, and compare")
    parser.add_argument("--at_once", type=int, choices=range(1, 65), default=1, metavar="N",
                        help="how many run beside one another")  # fmt: skip
    parser.add_argument("--only", choices=tuple(RUNS), help="this run alone")
    args = parser.parse_args()
    names = [args.only] if args.only else [*RUNS]
    names = (names * args.at_once)[: max(args.at_once, len(names))]
    here, entries = machine(), json.loads(ENTRIES.read_text()) if ENTRIES.exists() else {}
    entry = entries.get(digest(here), {"machine": here, "runs": {}})
    if args.action == "check" and not args.against and not entry["runs"]:
        print(f"no golden entry for this machine; use --against ({here})")
        return 0
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        tree, runs = pathlib.Path(folder, "tree"), pathlib.Path(folder, "runs")
        git = ["git", "-C", str(ROOT), "worktree"]
        against = functools.cache(lambda name: train(tree, name, runs / f"{name}.against"))
        if args.against:
            subprocess.run([*git, "add", "-q", "--detach", tree, args.against], check=True)
        try:
            for name, new in side_by_side(names, runs, args.at_once):
                if args.action == "record":
                    entry["runs"][name] = short(new)
                    print(f"{name}: {json.dumps(short(new))}", flush=True)
                    continue
                old = against(name) if args.against else None
                was, now = short(old) if old else entry["runs"].get(name, {}), short(new)
                parts = [p for p in was.keys() | now.keys() if was.get(p) != now.get(p)]
                differ += len(parts)
                print(f"{name}: {'DIFFERS' if parts else 'the same bits'}", flush=True)
                for part in sorted(parts):
                    a, b = (x[part] for x in (old, new)) if old else (was.get(part), now.get(part))
                    print(f"    {part}: {difference(a, b)}", flush=True)
        finally:
            if args.against:
                subprocess.run([*git, "remove", "--force", tree], check=True)
    if args.action == "record":
        text = json.dumps(entries | {digest(here): entry}, indent=1, sort_keys=True)
        ENTRIES.write_text(text + "\n")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
