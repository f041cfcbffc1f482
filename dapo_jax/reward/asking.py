"""The user's functions are asked: for a grade, or for a reply to a turn (tools.py). No JAX."""

import sys
from collections.abc import Callable, Iterable, Sequence

from dapo_jax.dapo.reward import Grade
from dapo_jax.data.problems import Problem
from dapo_jax.reward import functions
from dapo_jax.reward.functions import Failed, Rewards
from dapo_jax.reward.tools import Reply

CAUSES_PRINTED = 5  # of misses; each host's log has its own


def answer(named: Rewards, problem: Problem, response, limit_s: float):
    """The grade of a response, the grades of all to a problem (texts), or the answer to a
    transcript (pairs of role and text). limit_s: for an async function."""
    if response and isinstance(response[0], tuple):
        (said,) = replies(named.reply, [(problem, response)], 1, limit_s)
    else:
        (said,) = functions.attempts(named.score, [(problem, response)], 1, limit_s)
    return said


def replies(reply: Callable, jobs: Sequence[tuple], at_once: int, limit_s: float) -> list:
    """What `reply` answers to each (problem, transcript), or why it failed, in order. An async one
    is asked as an async reward is: `functions.attempts`."""
    here = lambda reply, *job: replied(reply, job[0], reply(*job))

    async def later(reply, *job):
        return replied(reply, job[0], await reply(*job))

    return functions.attempts(reply, jobs, at_once, limit_s, here, later)


def replied(reply: Callable, problem: Problem, given) -> Reply | Grade | None:
    """What `reply` gave for a turn. NoGrade: it is no answer."""
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
    """Warn of what failed. ValueError: something failed and `judge`, a `Judge`, has no `miss`."""
    bad = [x for x in said if isinstance(x, Failed)]
    if bad and judge.miss is None:
        first = min(bad, key=lambda failed: failed.temporary)  # rather one that needs a remedy
        why = f"{first.why} (config.reward.on_error='miss' counts such responses)"
        raise ValueError(why) from first.error
    for failed in bad:
        if failed.cause not in judge.causes and len(judge.causes) < CAUSES_PRINTED:
            judge.causes.add(failed.cause)
            print(f"warning: {failed.why}; it counts as a miss", file=sys.stderr, flush=True)
