"""The user's functions are asked: for a grade, or for a reply to a turn (tools.py). No JAX."""

import sys
from collections.abc import Callable, Iterable

from dapo_jax.dapo.reward import Grade
from dapo_jax.data.problems import Problem
from dapo_jax.reward import functions
from dapo_jax.reward.functions import Failed, Rewards
from dapo_jax.reward.tools import Reply

CAUSES_PRINTED = 5  # of misses; each host's log has its own


def answer(named: Rewards, problem: Problem, response) -> Reply | Grade | Failed | None:
    """The grade of a response (a text), or the answer to a transcript (a tuple)."""
    if isinstance(response, tuple):
        return functions.attempt(named.reply, problem, response, replied)
    return functions.attempt(named.score, problem, response)


def replied(reply: Callable, problem: Problem, transcript: tuple) -> Reply | Grade | None:
    """What `reply` answers to the last turn of a transcript. NoGrade: it is no answer."""
    given = reply(problem, transcript)
    if given is None or (isinstance(given, Reply) and given.whole()):
        return given
    if not isinstance(given, Grade) or (grade := functions.checked(given)) is None:
        name, shown = getattr(reply, "__name__", "a function"), " ".join(repr(given)[:200].split())
        raise functions.NoGrade(
            f"reward.reply: {name} gave {shown:.80} for a turn on problem {problem.id}; it has to"
            " be Reply(text), a Grade with a finite score, or None (it is over, and judged)"
        )
    return grade


def bear(judge, said: Iterable) -> None:
    """Say what failed. judge: `grading.Judge`. ValueError: something did, and it has no `miss`."""
    for failed in (x for x in said if isinstance(x, Failed)):
        if judge.miss is None:
            why = f"{failed.why} (config.reward.on_error='miss' counts such responses)"
            raise ValueError(why) from failed.error
        if failed.cause not in judge.causes and len(judge.causes) < CAUSES_PRINTED:
            judge.causes.add(failed.cause)
            print(f"warning: {failed.why}; it counts as a miss", file=sys.stderr, flush=True)
