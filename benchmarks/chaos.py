"""A run of 2 slices x 2 hosts to which all happens that happens on spot machines, when it may.

    python -m benchmarks chaos --full [--seed=N] [--keep=FOLDER]

launch/tpu_vm.sh runs a tiny training (random weights, half of all responses accepted) by a gcloud
that stands for Cloud (cloud.py): four real processes on loopback. Nobody helps it. The events:
    preemption      SIGTERM to both hosts of a slice, SIGKILL 10 s later; Cloud takes both slices
    kill            SIGKILL to the training of a host
    hang            SIGSTOP to it
    bucket failure  in the start that follows another event, reads of the bucket fail twice
At the end it must have the bits of the same run left alone: parameters, every sample drawn, metrics
apart from clocks.
"""

import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import jax
import numpy as np

from benchmarks import cloud, harness as benchmark
from benchmarks.harness import Flag
from dapo_jax.log import goodput

sys.path[:0] = [str(cloud.ROOT / "tests"), str(cloud.ROOT / "tests/faults")]
import harness  # noqa: E402
import ports  # noqa: E402

ROOT = cloud.ROOT
GRACE_S = 10.0  # between a slice's SIGTERM and SIGKILL
LIMIT_S = 600.0  # of waiting for the next thing
TOTAL = cloud.SLICES * cloud.HOSTS
FLAGS = {
    "steps": Flag(8, 60),
    "preemptions": Flag(1, 40),
    "kills": Flag(1, 10),
    "hangs": Flag(1, 5),
    "bucket_failures": Flag(1, 5, "each follows another event"),
    "seed": Flag(random.SystemRandom().randrange(2**32), random.SystemRandom().randrange(2**32)),
    "keep": Flag("", "", "a new folder for all that the run leaves, logs included"),
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "NPROC": "4", "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}  # fmt: skip
KINDS = ("preemption", "kill", "hang")
TRAINING = (
    f"--config={ROOT / 'tests/faults/harness.py'}", "--config.eval.every=0",
    "--config.rollout.chunk=2", "--config.mesh.data=2", "--config.mesh.fsdp=2",
    "--config.checkpoint.keep=3", "--config.log.tensorboard=False", "--heartbeat_timeout=10",
)  # fmt: skip


class Run:
    """A training by launch/tpu_vm.sh in the cloud at `folder`; use as a context."""

    def __init__(self, folder: pathlib.Path, programs: pathlib.Path, steps: int):
        """programs: the compiled ones, kept from run to run."""
        self.folder, self.workdir = folder, folder / "b/run"
        environment = cloud.build(folder)
        (folder / "b/xla").symlink_to(programs)
        checkout = folder / "checkout"
        shutil.copytree(ROOT / "launch", checkout / "launch")
        for name in ("requirements.txt", "setup.py"):
            shutil.copy(ROOT / name, checkout / name)
        # Hosts start in their copy: of a folder with a part of the package Python would take that.
        (checkout / "dapo_jax").symlink_to(ROOT / "dapo_jax")
        self._server = subprocess.Popen(
            [sys.executable, cloud.__file__, folder, str(ports.free_port())],
            env=environment | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._server.stdout.readline()
        words = ["run", "--name=n", "--zone=z", "--type=2xv5p-16", "--spot", "--retries=10", "--"]
        checkpoints = f"--config.checkpoint.directory={self.workdir / 'checkpoints'}"
        flags = [*TRAINING, checkpoints, f"--config.steps={steps}", "--workdir=gs://b/run"]
        with (folder / "log").open("wb") as log:
            self.launcher = subprocess.Popen(
                ["bash", checkout / "launch/tpu_vm.sh", *words, *flags],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        for host in self.folder.glob("host_*"):
            self.signal_host(host.name, signal.SIGKILL)
        if self.launcher.poll() is None:
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()
        self._server.stdin.close()
        self._server.wait()

    def life(self, index: int = 0) -> list[dict]:
        """What the trainings of process `index` have told, from the first start on."""
        file = self.folder / f"life_{index}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else ()
        return [json.loads(line) for line in lines]

    def pid(self, index: int) -> int:
        file = self.folder / f"pid_{index}"
        return int(file.read_text() or 0) if file.exists() else 0

    def take_away(self, k: int) -> None:
        """Slice k, and with it the request for both."""
        (self.folder / f"node_{k}").write_text("PREEMPTED\n")
        (self.folder / "request").write_text("SUSPENDED\n")

    def signal_host(self, host: str, number: int) -> None:
        """To all processes there, as the end of a machine does."""
        file = self.folder / host / "dapo_jax/run.pid"
        if file.exists() and (pid := int(file.read_text() or 0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


def alive(pid: int) -> bool:
    return pid > 0 and pathlib.Path(f"/proc/{pid}").exists()


def wait_for(run: Run, holds) -> bool:
    """False where the launcher has ended before. TimeoutError: left to itself, it hangs."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if run.launcher.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came for {LIMIT_S:.0f} s; see {run.folder}/log")
        time.sleep(0.05)
    return True


@dataclass
class Event:
    kind: str
    step: int  # whole steps of the run before it
    bucket: bool  # whether the next start's reads fail
    when: float = 0.0
    exit_s: float = 0.0
    life: int = 0  # the number of process 0 that it ended


def plan(args, rng: random.Random) -> list[Event]:
    kinds = ["preemption"] * args.preemptions + ["kill"] * args.kills + ["hang"] * args.hangs
    rng.shuffle(kinds)
    steps = sorted(rng.randrange(args.steps) for _ in kinds)
    failing = set(rng.sample(range(len(kinds)), args.bucket_failures))
    return [Event(k, s, i in failing) for i, (k, s) in enumerate(zip(kinds, steps, strict=True))]


def moment(run: Run, event: Event, rng: random.Random, begun: int) -> bool:
    """Wait for it; False where the run had ended. begun: rows that earlier starts have written
    in process 0's log."""
    early = rng.random() < 0.1  # while it starts
    delay = rng.uniform(0, 2 if early else 0.05)

    def at_work() -> bool:
        rows = run.life()
        names = {r["what"] for r in rows[begun:]}
        done = max((r["step"] for r in rows if r["what"] == "step"), default=0)
        ready = "start-up" in names if early else names & {"rollout", "chunk"}
        return done >= event.step and bool(ready)

    if not wait_for(run, at_work):
        return False
    if not early:
        until, deadline = len(run.life()) + rng.randint(0, 12), time.monotonic() + 5
        if not wait_for(run, lambda: len(run.life()) >= until or time.monotonic() > deadline):
            return False
    time.sleep(delay)
    return run.launcher.poll() is None


def happen(run: Run, event: Event, rng: random.Random) -> None:
    """Bring it about, and wait until all trainings have ended."""
    before = [run.pid(i) for i in range(TOTAL)]
    if event.bucket:
        for i in range(TOTAL):
            (run.folder / f"fail_{i}").write_text(f"{rng.randint(0, 20)} 2")
    event.when, event.life = time.time(), before[0]
    if event.kind == "preemption":
        k, told_at_once = rng.randrange(cloud.SLICES), rng.random() < 0.5
        hosts = [f"host_{k}_{w}" for w in range(cloud.HOSTS)]
        for host in hosts:
            run.signal_host(host, signal.SIGTERM)
        if told_at_once:
            run.take_away(k)
        taken = before[k * cloud.HOSTS : (k + 1) * cloud.HOSTS]
        while any(map(alive, taken)) and time.time() - event.when < GRACE_S:
            time.sleep(0.02)
        event.exit_s = time.time() - event.when
        if not told_at_once:
            run.take_away(k)
        for host in hosts:
            run.signal_host(host, signal.SIGKILL)
    elif alive(victim := before[rng.randrange(TOTAL)]):
        os.kill(victim, signal.SIGKILL if event.kind == "kill" else signal.SIGSTOP)
    wait_for(run, lambda: not any(map(alive, before)))
    event.exit_s = event.exit_s or time.time() - event.when


def differences(run: Run, alone: Run) -> list[str]:
    """In what a run is not the one that was left alone."""
    a, b = run.workdir, alone.workdir
    step, reached = harness.newest(b), harness.newest(a)
    if reached != step:
        return [f"the last step: {reached} of {step}"]
    weights = lambda run: jax.tree.leaves(harness.weights(run, step))
    params = lambda run: [np.asarray(x).tobytes() for x in weights(run)]
    same = [("the parameters", params(a) == params(b))]
    same.append(("metrics", harness.records(a) == harness.records(b)))
    same.append(("samples", harness.files(a, "rollouts") == harness.files(b, "rollouts")))
    steps = lambda run, i: [(r["step"], r["digest"]) for r in run.life(i) if r["what"] == "step"]
    for i in range(TOTAL):  # also what was done again
        right = set(steps(run, i)) == set(steps(alone, 0))
        same.append((f"process {i}: what it drew, and its state after each step", right))
    return [what for what, equal in same if not equal]


def lost(run: Run) -> dict[int, tuple[int, int]]:
    """Number of process 0 of a life -> (tokens of finished responses that were drawn again, tokens
    of responses that were not finished)."""
    lives, first = collections.defaultdict(lambda: [0, 0, 0]), {}  # again, drawn, finished
    for row in run.life():
        life = lives[row["pid"]]
        life[1] = row["drawn"]
        if row["what"] == "kept":
            life[2] += row["tokens"]
            if (before := first.setdefault(row["key"], row["pid"])) != row["pid"]:
                lives[before][0] += row["tokens"]
    return {pid: (again, drawn - kept) for pid, (again, drawn, kept) in lives.items()}


def back_s(run: Run, event: Event) -> float | None:
    """Seconds from the event to the first rollout, evaluation or update of the next life."""
    work = ("rollout", "evaluation", "update")
    rows = (r for r in run.life() if r["time"] > event.when and r["pid"] != event.life)
    return next((r["time"] - event.when for r in rows if r["what"] in work), None)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else ""


def report(args, run: Run, happened: list[Event], seconds: float) -> benchmark.Table:
    tokens = lost(run)
    table = benchmark.Table(
        "event", "times", "s to exit: median, longest", "s until at work again",
        "finished tokens drawn again", "unfinished ones: median, most",
    )  # fmt: skip
    for kind in KINDS:
        if these := [e for e in happened if e.kind == kind]:
            back = [s for e in these if (s := back_s(run, e)) is not None]
            again, unfinished = zip(*(tokens.get(e.life, (0, 0)) for e in these), strict=True)
            most = f"{statistics.median(unfinished):.0f}, {max(unfinished)}"
            exits = spread([e.exit_s for e in these])
            table.row(kind, len(these), exits, spread(back), sum(again), most)
    failed = [r for i in range(TOTAL) for r in run.life(i) if r["what"] == "failed"]
    starts = len({r["pid"] for r in failed})
    finished = sum(r["tokens"] for r in run.life() if r["what"] == "kept")
    drawn = sum(d for d, _ in tokens.values()) + finished
    table.note(
        f"{args.steps} steps of 4 processes, --seed={args.seed}, {seconds / 60:.0f} minutes;"
        f" {sum(e.bucket for e in happened)} of the starts began with a bucket that fails"
        f" ({len(failed)} operations, in {starts} processes). {drawn:,} tokens of finished"
        " responses."
    )
    table.note(goodput.summary(goodput.read(run.workdir / "events.jsonl")).strip())
    return table


def measure(args) -> list[benchmark.Table]:
    if args.bucket_failures > args.preemptions + args.kills + args.hangs:
        sys.exit("error: --bucket_failures: each follows another event; more than there are")
    print(f"--seed={args.seed}", flush=True)
    rng, happened = random.Random(args.seed), []
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(
            args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        )
        (folder / "xla").mkdir(parents=True)
        with Run(folder / "alone", folder / "xla", args.steps) as alone:
            wait_for(alone, lambda: False)
        if alone.launcher.returncode:
            sys.exit(f"error: the run left alone has failed; see {alone.folder}/log")
        began = time.monotonic()
        print(f"left alone: {args.steps} steps", flush=True)
        with Run(folder / "chaos", folder / "xla", args.steps) as run:
            begun = 0
            for number, event in enumerate(plan(args, rng), 1):
                if not moment(run, event, rng, begun):
                    break
                happen(run, event, rng)
                happened.append(event)
                begun = len(run.life())
                print(
                    f"{time.monotonic() - began:6.0f} s  {number}: {event.kind} in step"
                    f" {event.step + 1}{', then a bucket failure' * event.bucket};"
                    f" all had left after {event.exit_s:.1f} s",
                    flush=True,
                )
            wait_for(run, lambda: False)
        seconds, status = time.monotonic() - began, run.launcher.returncode
        wrong = [f"the launcher's exit status: {status}"] * bool(status)
        wrong = wrong or differences(run, alone)
        table = report(args, run, happened, seconds)
        if wrong:
            log = (run.folder / "log").read_text()
            sys.exit(f"{log[-3000:]}\nerror: not the run left alone: {', '.join(wrong)}")
    table.note("The same bits as the run left alone.")
    return [table]
