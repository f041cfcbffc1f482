"""The forms in which people write reward functions, told apart by their parameters.

    (problem, response)                                        ours, for one response
    (problem, responses)                                       ours, for all responses to a problem
    (data_source, solution_str, ground_truth, extra_info)      verl's `compute_score`
    (completions, prompts, and columns of the row by name)     TRL's, lists of all responses

Each may be `async def`. Sources: verl's workers/reward_manager/naive.py, TRL's GRPOTrainer.
"""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.dapo.reward import Grade
from dapo_jax.data import prompts
from dapo_jax.data.problems import Problem

ABOUT = (
    "a reward takes (problem, response) or (problem, responses), as verl's (data_source,"
    " solution_str, ground_truth, extra_info), or as TRL's (completions, prompts, columns by name)"
)


class Form(NamedTuple):
    """A reward function and how it is called: with a problem and the text of a response."""

    call: Callable[[Problem, Any], Any]
    by_group: bool = False  # it takes a list of all responses to the problem, and gives a list
    waits: bool = False  # what it returns has to be awaited
    name: str = "a function"  # in messages

    def __call__(self, problem: Problem, response: str | Sequence[str]):
        return self.call(problem, response)


def waits(function: Callable) -> bool:
    """Whether what it returns has to be awaited."""
    if isinstance(function, Form):
        return function.waits
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def of(function: Callable, place: str = "reward:") -> Form:
    """The form of a function. ValueError, which begins with `place`: it takes other parameters."""
    if isinstance(function, Form):
        return function
    later = waits(function)
    name = getattr(function, "__name__", "a function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C code
        return Form(function, False, later, name)
    kinds = [p.kind for p in parameters.values()]
    open_ended = inspect.Parameter.VAR_KEYWORD in kinds
    # Without a default, and to be had by name
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind in (1, 3)}
    takes = lambda given: given if open_ended else {k: given[k] for k in given if k in parameters}
    if "solution_str" in parameters:
        ask, read = lambda problem, text: takes(_as_verl(problem, text)), _of_verl
        good = needed <= {"data_source", "solution_str", "ground_truth", "extra_info"}
    elif "completions" in parameters:
        ask, read = lambda problem, texts: takes(_as_trl(problem, texts)), lambda said: said
        good = not needed & {"completion_ids", "trainer_state"}
    else:
        second = [n for n, p in parameters.items() if p.kind in (0, 1)][1:2]
        good = True
        try:
            inspect.signature(function).bind(None, None)
        except TypeError:
            good = False
        if good:
            return Form(function, second == ["responses"], later, name)
    if not good:
        raise ValueError(f"{place} {name}{inspect.signature(function)} is none: {ABOUT}"[:400])
    if later:

        async def call(problem, response):
            return read(await function(**ask(problem, response)))
    else:

        def call(problem, response):
            return read(function(**ask(problem, response)))

    return Form(call, "completions" in parameters, later, name)


def _as_verl(problem: Problem, response: str) -> dict[str, Any]:
    model = problem.row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    info = problem.row.get("extra_info") or {}
    return {
        "data_source": problem.source,
        "solution_str": response,
        "ground_truth": problem.answer if truth is None else truth,
        "extra_info": dict(info) if isinstance(info, Mapping) else info,
    }


def _of_verl(said: object) -> object:
    """A dict becomes its score; an `acc` of 1 says right, another that it is not, `pred` what was
    read as the answer, and other numbers are parts. Anything else is a grade as it stands, or
    none."""
    if not isinstance(said, Mapping) or "score" not in said:
        return said
    rest = {k: v for k, v in said.items() if k not in ("score", "acc", "pred")}
    parts = {k: float(v) for k, v in rest.items() if isinstance(v, numbers.Real)}  # NumPy's too
    right, answer = said.get("acc"), said.get("pred")
    right = None if right is None else bool(right == 1)
    return Grade(said["score"], right, None if answer is None else str(answer), parts)


def _as_trl(problem: Problem, responses: Sequence[str]) -> dict[str, Any]:
    """Texts where the row's prompt is a text, else chats; a row's columns, once per response."""
    count, answer = len(responses), {"answer": problem.answer}
    prompt: Any = prompts.plain_text(problem.messages)
    completions: list[Any] = list(responses)
    if problem.chat:
        prompt = [{"role": role, "content": content} for role, content in problem.messages]
        completions = [[{"role": "assistant", "content": text}] for text in responses]
    columns = {k: [v] * count for k, v in {**answer, **problem.row}.items()}
    return columns | {"prompts": [prompt] * count, "completions": completions}
