"""Responses of several turns (`rollout.turns` > 0): lines 2 to 8 of Algorithm 1, with replies.

A row that ends its turn by a stop token gives its slot back and is handed to `reward.reply`
(reward/tools.py says what that is). A reply's tokens join the row as tokens that were not drawn:
their log-prob is recorded as inf, by which packing, loss and metrics leave them out. The row then
goes on as a request with a prefix, as rows that outlive steps do. Uniforms belong to places in the
row, replies among them, so that samples are the same however the schedule goes. Replies are data:
`watch.store` keeps each, and a step that is done again is given what the first was. In several
processes the main one asks.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax import parallel
from dapo_jax.algorithm import Algorithm
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.reward import Grade
from dapo_jax.dapo.state import State
from dapo_jax.reward import asking, grading
from dapo_jax.reward.functions import Failed
from dapo_jax.reward.tools import ASSISTANT, Reply
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import UNWATCHED, Engine, Part, Request, Response, Stats, Store, Watch

_MARK = "turn-of-the-policy"  # stands for a turn's text in a chat template


def apply(config, algorithm: Algorithm) -> Algorithm:
    """The algorithm whose responses have several turns, where `rollout.turns` is set."""
    if not config.rollout.turns:
        return algorithm
    inner, waited = algorithm.sample, []

    def sample(algorithm, text, machine, stream, state: State):
        waited.clear()
        problem = lambda position: text.train.problems[stream[position]]
        return inner(
            algorithm, text, talking(config, machine, text, problem, waited), stream, state
        )

    def remember(text, stream, state: State, batch: Collected) -> tuple[State, dict]:
        return state, metrics(batch) | {"time/replies_s": sum(waited)}

    return algorithm._replace(sample=sample, remember=(*algorithm.remember, remember))


def talking(config, machine, text, problem: Callable | None = None, waited: list | None = None):
    """`machine` (build.Machine) whose engine draws responses of several turns, if the config says
    so; as it is where it does so already. problem: stream position -> problem; None = as evaluation
    numbers its own (by their ids). waited: gets the seconds of each wait for replies."""
    if not config.rollout.turns or isinstance(machine.engine, Talking):
        return machine
    budget = Budget(config.rollout.turns, config.rollout.reply_tokens, config.tokenizer.chat)
    waited = [] if waited is None else waited
    evals = (p for data in text.evals.values() for p in data.problems)
    problem = problem or {int(p.id[:8], 16) & 0x7FFFFFFF: p for p in evals}.__getitem__
    asker = Asker(text.judge, problem, machine.watch.store, waited)
    return machine._replace(engine=Talking(machine.engine, text.tokenizer, budget, asker))


def metrics(batch: Collected) -> dict[str, float]:
    """Counts over all responses that were drawn this step."""
    if not (rows := [r for g in batch.drawn for r in g.responses]):
        return {}
    replies = [int((np.diff((~r.drawn).astype(int), prepend=0) > 0).sum()) for r in rows]
    return {
        "turns/mean": 1 + np.mean(replies),
        "turns/replied_frac": np.mean([n > 0 for n in replies]),
        "turns/reply_tokens": np.mean([len(r.tokens) - r.length for r in rows]),
        "turns/errors": sum(isinstance(r.grade, Failed) for r in rows),
    }


class Budget(NamedTuple):
    """What one response may ask for."""

    replies: int  # most of them
    tokens: int  # most TOKENS of a reply's text
    chat: bool  # whether the chat template renders replies


def rendered(tokenizer, budget: Budget, reply: Reply) -> list[int]:
    """Token ids of a reply behind a turn that a stop token has ended, up to where the policy goes
    on: the text alone or, with `budget.chat`, all that the chat template writes there. Special
    tokens that the text spells are such tokens, as in every prompt. ValueError: the template does
    not render that role behind an assistant's message, or the tokenizer makes no token of it."""
    most = budget.tokens
    text, role = reply.text[: 64 * most], reply.role  # characters: a flood is not encoded
    ids = tokenizer.encode(text)
    if len(ids) > most:
        ids = ids[:most]
        text = tokenizer.decode(ids)
    if budget.chat:
        said = tokenizer.render_chat((("user", "."), (ASSISTANT, _MARK), (role, text)))
        ends = [tokenizer.token(i) for i in tokenizer.stop_ids]
        rest = said.partition(_MARK)[2]
        if not (end := next((e for e in ends if e and rest.startswith(e)), "")):
            raise ValueError(
                f"tokenizer.chat_template: a stop token does not follow the assistant's text where"
                f" a message of role {role!r} comes behind it; replies need a template with turns"
            )
        ids = tokenizer.encode(rest.removeprefix(end))
    if not ids:
        raise ValueError(f"reward.reply: {reply.text!r:.40} has no token; a reply needs one")
    return ids


class Asker(NamedTuple):
    """Who answers turns, and what keeps the answers."""

    judge: grading.Judge
    problem: Callable[[int], Any]  # stream position -> problem
    store: Store
    waited: list[float]  # seconds

    def ask(self, draw: Draw, rows: Sequence["Row"], texts: Sequence[tuple]) -> list:
        """A Reply, Grade, Failed or None for each row. texts: their transcripts. ValueError: one
        failed, and `reward.on_error` is 'stop'. A collective."""
        names = [_name(draw, row, self.problem(row.request.stream)) for row in rows]
        kept = [self.store.recall(name) for name in names]
        missing = [i for i, payload in enumerate(kept) if payload is None]
        jobs = [(self.problem(rows[i].request.stream), texts[i]) for i in missing]

        def answers() -> list[str]:
            judge = self.judge
            limits = judge.settings.concurrency, judge.settings.timeout_s
            here = lambda: asking.replies(judge.reply, jobs, *limits)
            said = judge.pool.grade(jobs) if judge.pool else here()
            new = [json.dumps(_plain(x)) for x in said]
            answered = dict(zip((names[i] for i in missing), new, strict=True))
            for i, x in zip(missing, said, strict=True):
                if isinstance(x, Failed) and judge.miss is None:  # it ends the run: asked again
                    del answered[names[i]]
            # Before anybody uses one of them: what was used is never asked again.
            self.store.keep({name: x.encode() for name, x in answered.items()})
            asking.bear(judge, said)
            return new

        if missing:
            began = time.perf_counter()
            for i, payload in zip(missing, parallel.of_main_process(answers), strict=True):
                kept[i] = payload
            self.waited.append(time.perf_counter() - began)
        return [_from_plain(json.loads(payload)) for payload in kept]


def _name(draw: Draw, row: "Row", problem) -> bytes:
    """Which turn an answer belongs to: whose row, and all its tokens."""
    request = row.request
    about = repr((draw, request.stream, request.sample, request.top_p, problem.id)).encode()
    ids = np.array([len(request.prompt), *request.prompt, *row.tokens], np.int64)
    return b"reply" + hashlib.sha256(about + ids.tobytes()).digest()


_KINDS = {kind.__name__: kind for kind in (Reply, Grade, Failed)}


def _plain(said) -> list | None:
    """[kind, fields] as JSON values."""
    if said is None:
        return None
    said = said._replace(error=None) if isinstance(said, Failed) else said
    return [type(said).__name__, said._asdict()]


def _from_plain(plain: list | None):
    return plain and _KINDS[plain[0]](**plain[1])


def grade(response: Response) -> Grade | Failed | None:
    """What a reply said that ended a response which several steps drew."""
    return _from_plain(json.loads(response.note)["grade"]) if response.note else None


class Row:
    """One response in the making: turns that are over, replies, and the turn that is drawn."""

    def __init__(self, request: Request, index: int):
        """index: of the request, as the caller counts. What its note says is as `note` wrote it."""
        note = json.loads(request.note or '{"said": [], "begun": 0}')
        self.request, self.index, self.grade = request, index, None
        self.tokens = [int(t) for t in request.prefix]  # up to the end of a whole turn, or reply
        self.numbers: list[tuple[np.ndarray, np.ndarray]] = []  # log-probs, entropies
        self.said = [(role, text) for role, text in note["said"]]  # the transcript
        self._begun = note["begun"]  # where the turn does, in `tokens`
        self._parts: list[Part] = []  # of the turn

    replies = property(lambda self: len(self.said) // 2)
    turn = property(lambda self: self.tokens[self._begun :])

    def note(self) -> bytes:
        """What a later step has to know beside the tokens."""
        note = {"said": self.said, "begun": self._begun, "grade": _plain(self.grade)}
        return json.dumps(note).encode()

    def add(self, part: Part) -> Part:
        """The part of the whole row, `ended` if its turn has. A row that is made again brings its
        turn from 0 on."""
        start = len(self.tokens) - len(self.request.prefix) + part.start
        self._parts = [*(self._parts if part.start else []), part]
        if part.ended:
            tokens, logps, entropies = zip(*(p[2:5] for p in self._parts), strict=True)
            self._join(np.concatenate(tokens), np.concatenate(logps), np.concatenate(entropies))
            self._parts = []
        return part._replace(index=self.index, start=start)

    def reply(self, reply: Reply, ids: list[int], part: Part) -> tuple[Request, Part]:
        """The request that goes on behind it, and the turn's last part with it."""
        self.said.append((reply.role, reply.text))
        new = np.full(len(ids), np.inf, np.float32), np.zeros(len(ids), np.float32)
        self._join(ids, *new)
        self._begun = len(self.tokens)
        both = zip(part[2:5], (np.array(ids, np.int32), *new), strict=True)
        part = Part(*part[:2], *map(np.concatenate, both), False, self.note())
        return self.request._replace(prefix=list(self.tokens)), part

    def _join(self, tokens, logps: np.ndarray, entropies: np.ndarray) -> None:
        self.tokens += [int(t) for t in tokens]
        self.numbers.append((logps, entropies))

    def response(self, stop_ids: Sequence[int]) -> Response:
        logps, entropies = map(np.concatenate, zip(*self.numbers, strict=True))
        truncated = self.tokens[-1] not in stop_ids
        tokens = np.array(self.tokens, np.int32)
        return Response(tokens, logps, entropies, truncated, grade=self.grade)


class Talking(NamedTuple):
    """An engine as `build.Machine` uses one, whose responses have several turns."""

    engine: Engine
    tokenizer: Any  # data.tokenizer.Tokenizer
    budget: Budget
    asker: Asker

    slots = property(lambda self: self.engine.slots)
    chunk = property(lambda self: self.engine.chunk)
    stop_ids = property(lambda self: self.engine.stop_ids)

    def decode_params(self, params, keep: bool = True):
        return self.engine.decode_params(params, keep)

    def generate(
        self,
        decode_params,
        requests: Sequence[Request],
        draw: Draw,
        watch: Watch = UNWATCHED,
        *,
        cut: Any = None,
        feed: Callable[[list[Part]], Sequence[Request] | None] | None = None,
        on_tokens: Callable | None = None,
    ) -> tuple[list[Response], Stats]:
        """As `Engine.generate`; a response is all turns and replies of a row, together at most as
        long as one. Rows of one chunk wait for one another's replies. feed: gets a reply with the
        turn's last part; with it no responses come back. on_tokens: with whole responses, at the
        end. ValueError: `cut` is set."""
        if cut:
            raise ValueError("config.eval.stop_strings: turns end by stop tokens; leave it empty")
        longest = draw.max_tokens or self.engine.response_tokens
        rows = [Row(request, i) for i, request in enumerate(requests)]
        of = list(rows)  # by number of the engine's request

        def answer(parts: list[Part]) -> list[Request] | None:
            told = {part.index: part for part in (of[part.index].add(part) for part in parts)}
            whole = [rows[i] for i, part in told.items() if part.ended]
            ended = [row for row in whole if row.tokens[-1] in self.stop_ids]
            new = []
            for row in ended:
                row.said.append((ASSISTANT, self.tokenizer.decode(row.turn)))
            answers = self.asker.ask(draw, ended, [tuple(row.said) for row in ended])
            for row, said in zip(ended, answers, strict=True):
                if not isinstance(said, Reply):
                    row.grade = said
                    told[row.index] = told[row.index]._replace(note=row.note())
                    continue
                ids = rendered(self.tokenizer, self.budget, said)
                room = (row.request.limit or longest) - len(row.tokens) - len(ids)
                if row.replies < self.budget.replies and room > 0:
                    request, told[row.index] = row.reply(said, ids, told[row.index])
                    new.append(request)
                    of.append(row)
            more = feed([*told.values()]) if feed else ()
            if more is None:
                return None
            others = [Row(request, len(rows) + i) for i, request in enumerate(more)]
            rows.extend(others)
            of.extend(others)
            return [*new, *more]

        _, stats = self.engine.generate(decode_params, requests, draw, watch, feed=answer)
        responses = [] if feed else [row.response(self.stop_ids) for row in rows]
        for i, response in enumerate(responses if on_tokens else ()):
            on_tokens(i, 0, response.tokens, response.logps)
        return responses, stats
