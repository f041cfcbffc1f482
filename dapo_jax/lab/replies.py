"""Replies of a run with turns (`rollout.turns`), for a step that is drawn again (redraw.py).

A reply is somebody else's words: no seed makes it again. It is taken from the run's journal, else
from the rows of rollouts/, which have the tokens of the replies that they show, else it is asked
for once more. What is had so is used by all that one explanation draws.
"""

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.algorithm import Algorithm
from dapo_jax.reward.tools import Reply
from dapo_jax.rollout.engine import Draw, Request, Response, Store
from dapo_jax.variants import choose, turns

_ROLES = ("tool", "user")  # of replies that the rows of rollouts/ tell


class Heard(Store):
    """What is known of the replies of a step. rows: of rollouts/. journal: the run's, or a store
    that keeps nothing. draw: of the step, by which replies are named, also at another cap; None =
    as asked."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], journal: Store, draw: Draw | None = None):
        self.rows, self.draw = [_shown(row) for row in rows], draw
        self._journal, self.asked = journal, {}  # name -> payload, of what was asked for again

    def recall(self, name: bytes) -> bytes | None:
        return self.asked.get(name) or self._journal.recall(name)

    def keep(self, said: Mapping[bytes, bytes]) -> None:
        self.asked |= said

    def note(self) -> list[str]:
        """A line on what had to be asked for again."""
        n = len(self.asked)
        again = f"{n} turns are put to reward.reply again, whose answers the run has not kept"
        return [again] * (n > 0)

    def behind(self, position: int, pieces: list[str]) -> list[str] | None:
        """Texts of the tokens of the reply that the record has behind these tokens of a response;
        []: the response ends there; None: no row says it, or two say different things."""
        n, found = len(pieces), set()
        for at, there, drawn in self.rows:
            if at == position and there[:n] == pieces:
                reply = [*drawn[n:], 1].index(1)
                found.add(tuple(there[n : n + reply]))
        return list(found.pop()) if len(found) == 1 else None


def _shown(row: Mapping[str, Any]) -> tuple[int, list[str], list[int]]:
    """(position, text of each token, whether it was drawn) of a row of rollouts/."""
    pieces = row.get("pieces")
    if not isinstance(pieces, list) or not all(isinstance(x, str) for x in pieces):
        pieces = []
    drawn = row.get("drawn")  # where the response has replies
    whole = isinstance(drawn, list) and len(drawn) == len(pieces)
    return row["position"], pieces, drawn if whole else [1] * len(pieces)


class _Asker:
    """Stands for `turns.Asker`: the record is looked at first."""

    def __init__(self, asker: turns.Asker, heard: Heard, tokenizer, budget: turns.Budget):
        self._asker, self._heard = asker, heard
        self._tokenizer, self._budget = tokenizer, budget
        self._piece = functools.cache(lambda t: tokenizer.decode([t], skip_special=False))

    def ask(self, draw: Draw, rows: Sequence[turns.Row], texts: Sequence[tuple]) -> list:
        said: list = [None] * len(rows)
        known = [self._heard.behind(r.request.stream, self._pieces(r.tokens)) for r in rows]
        for i, pieces in enumerate(known):
            said[i] = self._reply(pieces) if pieces else None
        left = [i for i, reply in enumerate(said) if reply is None]
        asked = [rows[i] for i in left], [texts[i] for i in left]
        for i, answer in zip(left, self._asker.ask(self._heard.draw or draw, *asked), strict=True):
            goes_on = isinstance(answer, Reply)
            said[i] = None if goes_on and known[i] == [] else answer  # the record ends it there
        return said

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._piece(int(t)) for t in ids]

    def _reply(self, pieces: list[str]) -> Reply | None:
        """The reply whose tokens in a response have these texts; None: they do not tell it (parts
        of characters, a template that shows the text otherwise)."""
        roles = _ROLES if self._budget.chat else _ROLES[:1]
        # A tokenizer of words, as the embedded task has, puts blanks between them.
        for whole, role in itertools.product(("".join(pieces), " ".join(pieces)), roles):
            with contextlib.suppress(ValueError):  # the template does not know the role
                before, after = self._frame(role)
                if whole.startswith(before) and whole.endswith(after):
                    reply = Reply(whole[len(before) : len(whole) - len(after)], role)
                    ids = turns.rendered(self._tokenizer, self._budget, reply)
                    if self._pieces(ids) == pieces:
                        return reply
        return None

    def _frame(self, role: str) -> tuple[str, str]:
        """What the chat template writes before and behind the text of a reply."""
        if not self._budget.chat:
            return "", ""
        mark = "words-of-the-reply"
        room = self._budget._replace(tokens=len(mark))
        ids = turns.rendered(self._tokenizer, room, Reply(mark, role))
        before, _, after = self._tokenizer.decode(ids, skip_special=False).partition(mark)
        return before, after


def talking(config, text, machine, stream: Sequence[int], heard: Heard | None = None):
    """`machine` (build.Machine), whose engine gives the replies that are known (None: none are),
    where the config has turns."""
    if not config.rollout.turns:
        return machine
    heard = heard or Heard((), Store())
    machine = machine._replace(watch=machine.watch._replace(store=heard))
    problem = lambda position: text.train.problems[stream[position]]
    engine = turns.talking(config, machine, text, problem).engine
    asker = _Asker(engine.asker, heard, text.tokenizer, engine.budget)
    return machine._replace(engine=engine._replace(asker=asker))


def generate(o, weights, requests: Sequence[Request]) -> list[Response]:
    """The responses to the requests, without their prefixes. o: `redraw.Opened`; weights: as the
    engine decodes by."""
    engine = talking(o.config, o.text, o.machine, o.stream, o.heard).engine
    drawn, _ = engine.generate(weights, requests, o.draw)
    return [r._replace(tokens=r.tokens[-len(r.logps) :]) for r in drawn]


def graded(response: Response) -> Response:
    """A response of earlier steps, with the grade that a reply ended it by, if one did."""
    return response._replace(grade=turns.grade(response))


def method(config, heard: Heard | None) -> Algorithm:
    """`choose.of(config)`, whose samples get the replies that are known."""
    inner = choose.of(config)

    def sample(algorithm, text, machine, stream, state):
        machine = talking(config, text, machine, stream, heard)
        return inner.sample(algorithm, text, machine, stream, state)

    return inner._replace(sample=sample)
