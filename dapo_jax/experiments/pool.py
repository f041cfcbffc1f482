"""Many independent runs, one process a core; a finished run is kept and not made again.

A task is a module-level function that works in a folder of its own and returns plain JSON values.
Its result is `folder/result.json`, beside the arguments that gave it, written whole or not at all;
what it prints goes to `folder/log.txt`. The same call after an interruption makes only what is
missing, and a task that is a training run resumes where it was cut off.
"""

import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import queue
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from dapo_jax.run import checkpoint


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
    (0: one a core); 1 works in this process, where a task may be a run on several hosts.

    Raises RuntimeError naming the log of a task that failed, once the running ones have ended, and
    ValueError where `out` holds a result made with other arguments.
    """
    out = pathlib.Path(out)
    results = {t.folder: _read(out, t) for t in tasks if _path(out, t).exists()}
    waiting = [t for t in tasks if t.folder not in results]
    unknown = {a for t in waiting for a in t.after} - {t.folder for t in tasks}
    if unknown:
        raise ValueError(f"run_all: tasks wait for {sorted(unknown)}, which are none")
    jobs = jobs or os.cpu_count() or 1
    bar = tqdm(total=len(tasks), initial=len(results), desc=desc, unit="run", dynamic_ncols=True)
    with bar:
        if jobs == 1:
            for task in _in_order(waiting):
                results[task.folder] = _work(out, task, quiet=False)
                bar.update()
        else:
            _run_pool(out, waiting, results, jobs, bar)
    return {t.folder: results[t.folder] for t in tasks}


def _run_pool(out, waiting: list[Task], results: dict, jobs: int, bar) -> None:
    _environment(out)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a started JAX
    cores = context.Queue()
    for core in range(jobs):
        cores.put(core)
    waiting, running, failed = list(waiting), {}, []
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_pin, initargs=(cores,)
    )
    with pool:
        while waiting or running:
            ready = [] if failed else [t for t in waiting if all(a in results for a in t.after)]
            for task in ready[: jobs - len(running)]:
                waiting.remove(task)
                running[pool.submit(_work, out, task, True)] = task
            if not running:
                break
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                task = running.pop(future)
                if error := future.exception():
                    failed.append(f"{task.folder}: {error} (see {out / task.folder}/log.txt)")
                else:
                    results[task.folder] = future.result()
                    bar.set_postfix_str(task.folder)
                    bar.update()
    if failed:
        raise RuntimeError("\n".join(failed))


def _in_order(tasks: list[Task]) -> list[Task]:
    """Each after those it waits for; raises ValueError for a circle."""
    done, order, left = set(), [], list(tasks)
    names = {t.folder for t in tasks}
    while left:
        ready = [t for t in left if all(a in done or a not in names for a in t.after)]
        if not ready:
            raise ValueError(f"run_all: {[t.folder for t in left]} wait for each other")
        order += ready
        done |= {t.folder for t in ready}
        left = [t for t in left if t not in ready]
    return order


def _environment(out: pathlib.Path) -> None:
    """What processes started from here inherit; nothing that the user has set is changed."""
    settings: Mapping[str, str] = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # why: launch/quickstart.sh
        "JAX_COMPILATION_CACHE_DIR": str((out / "xla").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _pin(cores) -> None:
    """Of a new process, before it starts JAX: one core, so that runs do not share threads."""
    try:
        core = cores.get(timeout=10)
    except queue.Empty:
        return
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[core % len(mine)]})


def _work(out: pathlib.Path, task: Task, quiet: bool) -> Any:
    folder = out / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    if quiet:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    try:
        result = task.work(folder, *task.arguments)
    except BaseException:
        if quiet:
            traceback.print_exc()  # into the log
        raise
    record = {"arguments": task.arguments, "result": result}
    checkpoint.dump_json(_path(out, task), record)
    return json.loads(json.dumps(result))


def _path(out: pathlib.Path, task: Task) -> pathlib.Path:
    return out / task.folder / "result.json"


def _read(out: pathlib.Path, task: Task) -> Any:
    record = json.loads(_path(out, task).read_text())
    if record["arguments"] != json.loads(json.dumps(task.arguments)):
        raise ValueError(
            f"{out / task.folder}: was made with other settings ({record['arguments']} and not"
            f" {list(task.arguments)}); choose another directory, or remove this one"
        )
    return record["result"]
