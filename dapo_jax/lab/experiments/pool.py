"""Many independent runs, one process per core; a finished run is kept and not made again.

A task is a module-level function that works in a folder of its own and returns plain JSON values.
Its result is `folder/result.json`, beside the arguments that gave it, written whole or not at all;
what it prints goes to `folder/log.txt`. The same call after an interruption makes only what is
missing, and a task that is a training run resumes where it was cut off.
"""

import contextlib
import graphlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from dapo_jax import bars
from dapo_jax.data import files

# What started processes inherit, unless the user has set it; the reasons: launch/quickstart.sh.
_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class Task(NamedTuple):
    """`work(folder, *arguments)`; `folder` is relative to the experiment's directory and names the
    task; arguments are plain JSON values. `after`: folders of tasks whose results it needs."""

    folder: str
    work: Callable[..., Any]
    arguments: tuple = ()
    after: tuple[str, ...] = ()


def run_all(
    tasks: Sequence[Task], out: str | pathlib.Path, jobs: int = 0, desc: str = "runs"
) -> dict[str, Any]:
    """Folder -> result of every task. jobs: processes, each pinned to one core where the system can
    (0: one per core); with 1 the tasks run in this process.

    Raises RuntimeError naming the log of a task that failed, once the running ones have ended, and
    ValueError, before anything runs, where `out` holds a result made with other arguments or tasks
    share a folder, wait for each other, or wait for a folder that no task makes.
    """
    out, in_order = pathlib.Path(out), _in_order(tasks)
    results = {t.folder: _read(out, t) for t in tasks if _path(out, t).exists()}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    jobs = jobs or len(cores) or os.cpu_count() or 1
    waiting = [t for t in (in_order if jobs == 1 else tasks) if t.folder not in results]
    with bars.bar(total=len(tasks), initial=len(results), desc=desc, unit="run") as bar:
        if jobs == 1:
            for task in waiting:
                results[task.folder] = _work(out, task, quiet=False)
                bar.update()
        elif waiting:
            _run_pool(out, waiting, results, min(jobs, len(waiting)), bar)
    return {t.folder: results[t.folder] for t in tasks}


def _run_pool(out, waiting: list[Task], results: dict, jobs: int, bar) -> None:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a started JAX
    cores = context.Queue()
    for core in range(jobs):
        cores.put(core)
    running = {}
    start = dict(mp_context=context, initializer=_start, initargs=(cores, os.getpid()))
    with _environment(out / "xla"), futures.ProcessPoolExecutor(jobs, **start) as pool:
        while waiting or running:
            ready = [t for t in waiting if all(a in results for a in t.after)]
            for task in ready[: jobs - len(running)]:
                waiting.remove(task)
                running[pool.submit(_work, out, task, True)] = task
            for future in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
                task = running.pop(future)
                if error := future.exception():
                    what = str(error) or type(error).__name__
                    log = out / task.folder / "log.txt"
                    raise RuntimeError(f"{task.folder}: {what} (see {log})") from error
                results[task.folder] = future.result()
                bar.set_postfix_str(task.folder)
                bar.update()


def _in_order(tasks: Sequence[Task]) -> list[Task]:
    """Each task after those it waits for. ValueError: they cannot be put in order."""
    by_folder = {t.folder: t for t in tasks}
    if len(by_folder) < len(tasks):
        twice = sorted({t.folder for t in tasks if by_folder[t.folder] is not t})
        raise ValueError(f"run_all: several tasks want the folder {', '.join(twice)}")
    if unknown := {a for t in tasks for a in t.after} - by_folder.keys():
        raise ValueError(f"run_all: tasks wait for {', '.join(sorted(unknown))}, which none makes")
    try:
        order = graphlib.TopologicalSorter({t.folder: t.after for t in tasks}).static_order()
        return [by_folder[folder] for folder in order]
    except graphlib.CycleError as error:
        raise ValueError(f"run_all: {', '.join(error.args[1])} wait for each other") from error


@contextlib.contextmanager
def _environment(compiled: pathlib.Path) -> Iterator[None]:
    """Set what the processes inherit; afterwards this process has its own environment again.
    compiled: folder of the programs that XLA has compiled, which all share."""
    wanted = _ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": str(compiled.absolute())}
    new = {k: v for k, v in wanted.items() if k not in os.environ}
    os.environ |= new
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def _start(cores, parent: int) -> None:
    """Pin a new process to one core before it starts JAX, so that runs do not share threads."""
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    core = cores.get()
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[core % len(mine)]})


def _leave_with(parent: int) -> None:
    """End this process once the one that started it is gone. A training run saves at the first
    SIGTERM; by the next it has saved."""
    while True:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)


def _work(out: pathlib.Path, task: Task, quiet: bool) -> Any:
    """The task's result, which is written. quiet: what it prints goes to its log."""
    folder = out / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    if quiet:
        with (folder / "log.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    try:
        result = task.work(folder, *task.arguments)
    except BaseException:
        if quiet:
            traceback.print_exc()  # into the log
        raise
    files.write_json(_path(out, task), {"arguments": task.arguments, "result": result})
    return json.loads(json.dumps(result))


def _path(out: pathlib.Path, task: Task) -> pathlib.Path:
    return out / task.folder / "result.json"


def _read(out: pathlib.Path, task: Task) -> Any:
    record = json.loads(_path(out, task).read_text())
    wanted = json.loads(json.dumps(task.arguments))
    if record["arguments"] != wanted:
        differ = "; ".join(_differences(record["arguments"], wanted))
        remedy = "choose another directory, or remove this one"
        raise ValueError(f"{out / task.folder}: was made with other settings ({differ}); {remedy}")
    return record["result"]


def _differences(old: list, new: list) -> Iterator[str]:
    """What differs, argument by argument, and field by field in a mapping."""
    for a, b in itertools.zip_longest(old, new):
        fields = isinstance(a, dict) and isinstance(b, dict)
        pairs = {f"{k} ": (a.get(k), b.get(k)) for k in [*a, *b]} if fields else {"": (a, b)}
        yield from (f"{k}{x!r}, now {y!r}" for k, (x, y) in pairs.items() if x != y)
