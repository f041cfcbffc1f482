"""Environments of other packages as problems: `data.train=verifiers:ID`, `tinker:MODULE:NAME`.

ID is an installed taskset, as in `eval ID` of `verifiers` (verifiers.v1, `Taskset` and `Task`).
MODULE:NAME is what gives an RLDataset of `tinker-cookbook`, whose environments are `ProblemEnv`.
Here a task is one question and one answer, scored without a runtime: what needs tools, a container,
a user or several agents is refused, as it would be scored too low in silence.
"""

import asyncio
import functools
import importlib
import inspect
import json
import pathlib
import tempfile
import types
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Any, NamedTuple

from dapo_jax import gate

TINKER = "tinker:"
PREFIX = ("verifiers:", TINKER)  # a name begins with one of them


class Unsuitable(ValueError):
    """What an environment needs and is not here."""


@functools.cache
def tasks(name: str) -> dict[str, Any]:
    """Key -> task of an environment, in its order. ValueError: it is not installed, or not of one
    turn without a runtime; one line that begins with its name."""
    if name.startswith(TINKER):
        return _questions(name)
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ValueError(f"{name}: needs pip install 'dapo_jax[verifiers]' ({error})") from error
    with gate.reading(name):
        ident = name.partition(":")[2]
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


class Question(NamedTuple):
    """A problem of `tinker-cookbook`."""

    kind: type  # of its environments
    data: types.SimpleNamespace  # as that of a task of `verifiers`
    environment: Callable[[], Awaitable]  # a new one, for one response, which is a text


def _questions(name: str) -> dict[str, Question]:
    """`tasks`, of tinker-cookbook, by their questions. In place of a renderer: prompts stay
    messages, and a stop token has ended each response."""
    try:
        from tinker_cookbook.renderers.base import ParseTermination
        from tinker_cookbook.rl import problem_env, types as rl
    except ImportError as error:
        raise ValueError(f"{name}: needs pip install 'dapo_jax[tinker]' ({error})") from error
    said = lambda text: ({"role": "assistant", "content": text}, ParseTermination.STOP_SEQUENCE)
    prompted = dict(get_stop_sequences=list, build_generation_prompt=lambda messages: messages)
    kinds = rl.EnvGroupBuilder, problem_env.ProblemGroupBuilder
    plain = {problem_env.ProblemEnv.step, *(kind.compute_group_rewards for kind in kinds)}

    async def environment(group):
        one = (await group.make_envs())[0]
        if {getattr(type(one), "step", None), type(group).compute_group_rewards} - plain:
            raise Unsuitable(f"{type(one).__name__} is no ProblemEnv whose responses score alone")
        one.renderer = types.SimpleNamespace(parse_response=said, **prompted)
        return one

    async def read() -> dict[str, Question]:
        module, _, made = name.removeprefix(TINKER).partition(":")
        data, found = getattr(importlib.import_module(module), made)(), {}
        data = (await data())[0] if isinstance(data, rl.RLDatasetBuilder) else data
        for group in (group for i in range(len(data)) for group in data.get_batch(i)):
            one = await environment(group)
            asked = [(m["role"], m["content"]) for m in (await one.initial_observation())[0]]
            about = dict(idx=len(found), prompt=asked, answer=one.get_reference_answer())
            about = types.SimpleNamespace(system_prompt=None, **about)
            ask = functools.partial(environment, group)
            found[one.get_question()] = Question(type(one), about, ask)
        return found

    with gate.reading(name), futures.ThreadPoolExecutor(1) as thread:  # a notebook's has a loop
        if not (found := thread.submit(asyncio.run, read()).result()):
            raise Unsuitable("has no problems")
        return found


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
    first = next(iter(tasks(name).values()))
    return pathlib.Path(inspect.getfile(getattr(first, "kind", type(first))))


@functools.cache
def rows(name: str) -> pathlib.Path:
    """A JSONL file with a row for each task, in a folder of this process. Column `task` is its key;
    the answer is its data's `answer`, where there is one."""
    folder = tempfile.mkdtemp(prefix="environment_")
    path = pathlib.Path(folder, name.partition(":")[2].replace("/", "_") + ".jsonl")
    found = tasks(name)
    with gate.reading(name), path.open("w") as lines:
        for key, task in found.items():
            answer = getattr(task.data, "answer", None)
            row = {"prompt": messages(task), "answer": "-" if answer is None else answer}
            lines.write(json.dumps(row | {"task": key, "data_source": name}, default=str) + "\n")
    return path
