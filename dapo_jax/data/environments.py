"""Environments of the package `verifiers` as problems: `data.train=verifiers:ID`.

ID is an installed taskset, as in `eval ID` of that package (verifiers.v1, `Taskset` and `Task`).
Here a task is one question and one answer, scored without a runtime: what needs tools, a container,
a user or several agents is refused, as it would be scored too low in silence.
"""

import functools
import inspect
import json
import pathlib
import tempfile
from typing import Any

from dapo_jax import gate

PREFIX = "verifiers:"


class Unsuitable(ValueError):
    """What an environment needs and is not here."""


@functools.cache
def tasks(name: str) -> dict[str, Any]:
    """Key -> task of an environment, in its order. ValueError: it is not installed, or not of one
    turn without a runtime; one line that begins with its name."""
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ValueError(f"{name}: needs pip install 'dapo_jax[verifiers]' ({error})") from error
    with gate.reading(name):
        ident = name.removeprefix(PREFIX)
        kind, config = loaders.taskset_class(ident), loaders.taskset_config_type(ident)
        taskset = kind(config(id=ident))
        if loaders.environment_class(ident) is not vf.SingleAgentEnv:
            raise Unsuitable("has an Env of its own, and only one agent is here")
        if not taskset.bounded:
            raise Unsuitable("has no end; name a finite taskset")
        if kind.toolsets is not vf.Taskset.toolsets and kind.toolsets(taskset.config):
            raise Unsuitable("has tools")
        found = {task.key: _suitable(task, vf.Task) for task in taskset}
        if not found:
            raise Unsuitable("has no tasks")
    return found


def _suitable(task, base: type):
    """The task. Unsuitable: one turn without a runtime cannot score it."""
    kind, where = type(task), f"task {task.data.idx}"
    scores = [*task.hooks("reward"), *task.hooks("metric")]
    scores += [judge.score for judge in task.plugged_judges()]
    for function in scores:
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            raise Unsuitable(f"{where}: {function.__name__} needs a runtime to score")
    for hook in ("setup", "finalize"):
        if getattr(kind, hook) is not getattr(base, hook):
            raise Unsuitable(f"{where}: its {hook} needs a runtime")
    if kind.NEEDS_CONTAINER or kind.toolsets(task.config):
        raise Unsuitable(f"{where} needs a container or tools")
    if not task.data.prompt:
        raise Unsuitable(f"{where} has no prompt: a user begins")
    return task


def messages(task) -> list[dict[str, str]]:
    """The prompt of a task as a chat of texts. Unsuitable: it holds something else."""
    data = task.data
    said = [("system", data.system_prompt)] if data.system_prompt else []
    asked = [("user", data.prompt)] if isinstance(data.prompt, str) else data.prompt
    said += [x if isinstance(x, tuple) else (x.role, x.content) for x in asked]
    if not all(isinstance(content, str) for _, content in said):
        raise Unsuitable(f"task {data.idx}: its prompt is not text alone")
    return [{"role": role, "content": content} for role, content in said]


def file(name: str) -> pathlib.Path:
    """The source file of an environment, whose hash resume compares."""
    return pathlib.Path(inspect.getfile(type(next(iter(tasks(name).values())))))


@functools.cache
def rows(name: str) -> pathlib.Path:
    """A JSONL file with a row for each task, in a folder of this process. Column `task` is its key;
    the answer is its data's `answer`, where there is one."""
    folder = tempfile.mkdtemp(prefix="environment_")
    path = pathlib.Path(folder, name.removeprefix(PREFIX).replace("/", "_") + ".jsonl")
    with gate.reading(name), path.open("w") as lines:
        for key, task in tasks(name).items():
            answer = getattr(task.data, "answer", None)
            row = {"prompt": messages(task), "answer": "-" if answer is None else answer}
            lines.write(json.dumps(row | {"task": key, "data_source": name}, default=str) + "\n")
    return path
