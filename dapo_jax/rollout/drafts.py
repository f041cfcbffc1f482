"""Guesses of the tokens that a row draws next, from what siblings, earlier calls and the row itself
have; and how many of them a pass should verify. docs/drafts.md has the whole in one drawing.

A token is the inverse CDF of the logits at the uniform number of its position (rollout/draw.py). A
guess is right exactly if that draw gives it, so guesses decide how soon a token comes, never which.
Nothing here looks at a clock: every host of a pod makes the same guesses.
"""

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.gate import ConfigError
from dapo_jax.model import paged_queries
from dapo_jax.rollout import sampler
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.schedule import Row
from dapo_jax.rollout.settings import Rollout

SOURCES = ("siblings", "own", "history")  # of like matches the first is taken
GRAMS = (3, 1)  # least tokens of a match: 3 or, where nothing matches 3, 1
LONGEST = 12  # tokens over which a match is compared, at most
LATEST = 8  # places of a gram that are looked at, the latest ones
LEAST = 0.1  # a token that is less probable to be kept is not worth a place
KEPT = 2**24  # tokens of all problems, 4 bytes each, beyond which the oldest is forgotten


class Draft(NamedTuple):
    """Guessed tokens behind those that a row has."""

    tokens: tuple[int, ...]
    source: str  # of SOURCES
    match: int  # tokens before the guess that are like those of its source, up to LONGEST


NONE = Draft((), "own", 0)


class Counts(NamedTuple):
    """Drafted tokens that a pass verified, and those that were kept, by source."""

    passes: int = 0  # verification passes
    rows: int = 0  # rows in them: each draws one token at least
    drafted: tuple[int, ...] = (0,) * len(SOURCES)
    accepted: tuple[int, ...] = (0,) * len(SOURCES)
    near_ties: int = 0  # tokens drawn, by a pass or not, that rounding could make others

    @property
    def tokens_per_row(self) -> float:
        """Tokens that a row drew in a pass; 1 without drafts."""
        return 1 + sum(self.accepted) / max(self.rows, 1)

    def __add__(self, other: "Counts") -> "Counts":
        plus = lambda a, b: tuple(map(sum, zip(a, b, strict=True)))
        return Counts(*(plus(a, b) if isinstance(a, tuple) else a + b
                        for a, b in zip(self, other, strict=True)))  # fmt: skip

    def __radd__(self, nothing: int) -> "Counts":
        return self  # of `sum`

    def metrics(self) -> dict[str, float]:
        """Tags of log/tags.md."""
        by_source = {
            f"drafts/{what}/{source}": n
            for what in ("drafted", "accepted")
            for source, n in zip(SOURCES, getattr(self, what), strict=True)
        }
        passes = {"drafts/passes": self.passes, "drafts/tokens_per_row": self.tokens_per_row}
        return passes | by_source | {"drafts/near_ties": self.near_ties}


class Text:
    """Tokens of one response, behind the last ones of its prompt; or those of the prompt."""

    def __init__(self, call: int):
        self.call = call  # in which it was drawn
        self.tokens = array("i")


class Problem:
    """What is known of one prompt's responses, and where each gram of them ends."""

    def __init__(self, prompt: Sequence[int]):
        self.prompt, self.texts = Text(0), []
        self.prompt.tokens.extend(prompt)
        self.texts.append(self.prompt)
        self.close()

    def close(self) -> None:
        """Drop the index, which takes fifty times the memory of the indexed tokens."""
        self._ends: dict[tuple[int, ...], list[tuple[Text, int]]] | None = None

    def open(self, call: int, head: Sequence[int]) -> Text:
        """A response that begins with `head`. Of older ones those of the latest call stay."""
        if self._ends is None:
            last = max(text.call for text in self.texts)
            self.texts = [t for t in self.texts if t.call == last or t is self.prompt]
            self._ends = defaultdict(list)
            for text in self.texts:
                self._index(text, 0)
        self.texts.append(Text(call))
        self.extend(self.texts[-1], head)
        return self.texts[-1]

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        start = len(text.tokens)
        text.tokens.extend(tokens)
        self._index(text, start)

    def _index(self, text: Text, start: int) -> None:
        for n in GRAMS:
            for end in range(max(start + 1, n), len(text.tokens) + 1):
                self._ends[tuple(text.tokens[end - n : end])].append((text, end))

    def draft(self, text: Text, most: int) -> Draft:
        """At most `most` tokens to follow `text`: what follows the place that has the longest part
        of its end in common. Of like ones the first of SOURCES counts, and then the latest."""
        mine, best, rank = text.tokens, NONE, (0, 0)
        if most < 1:
            return NONE
        for gram in GRAMS:
            for other, end in reversed(self._ends.get(tuple(mine[-gram:]), ())[-LATEST - 1 :]):
                if end == len(other.tokens):
                    continue  # nothing follows, as where the text finds itself
                n, theirs = gram, other.tokens
                while n < min(LONGEST, end, len(mine)) and theirs[end - 1 - n] == mine[-1 - n]:
                    n += 1
                own = other is text or other is self.prompt
                source = "own" if own else "siblings" if other.call == text.call else "history"
                if (n, -SOURCES.index(source)) > rank:
                    rank = n, -SOURCES.index(source)
                    best = Draft(tuple(theirs[end : end + most]), source, n)
            if best.tokens:
                break
        return best

    def __len__(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


class Drafts:
    """The guesses of an engine, which outlive its calls: an epoch later they are of the same
    problems. most: tokens of a guess. cost: time of a pass, in those of a step without guesses."""

    def __init__(self, most: int, cost: float = 1.0, kept: int = KEPT):
        self.most, self.cost, self.kept = most, cost, kept
        self._problems: OrderedDict[tuple[int, ...], Problem] = OrderedDict()
        self._call = 0
        self._seen = defaultdict(lambda: [1, 2])  # (source, match) -> tokens right, looked at
        self.begin()

    def begin(self) -> None:
        """A new call: what was drawn before is history."""
        self._call += 1
        self._texts: dict[int, tuple[Problem, Text]] = {}  # of the request with this index
        self.counts = Counts()
        for problem in self._problems.values():
            problem.close()
        known = sum(map(len, self._problems.values()))
        while known > self.kept:
            known -= len(self._problems.popitem(last=False)[1])

    def open(self, index: int, prompt: Sequence[int], prefix: Sequence[int] = ()) -> None:
        """The request `index` begins, or begins again: an evicted row's tokens are known."""
        prompt = tuple(prompt)
        if prompt not in self._problems:
            self._problems[prompt] = Problem(prompt)
        problem = self._problems[prompt]
        self._problems.move_to_end(prompt)
        head = (*prompt[1 - GRAMS[0] :], *prefix)  # so that a response's first tokens are guessed
        self._texts[index] = problem, problem.open(self._call, head)

    def draft(self, index: int, most: int) -> Draft:
        """What the request draws next, `most` tokens at most."""
        problem, text = self._texts[index]
        return problem.draft(text, min(most, self.most))

    def drew(self, index: int, draft: Draft, tokens: Sequence[int]) -> int:
        """Keeps what was drawn where `draft` was guessed, whether a pass verified it or not, and
        returns how many of its tokens were right."""
        problem, text = self._texts[index]
        looked = min(len(draft.tokens), len(tokens))
        right = next((i for i in range(looked) if draft.tokens[i] != tokens[i]), looked)
        seen = self._seen[draft.source, draft.match]
        seen[0] += right
        seen[1] += min(right + 1, looked)
        problem.extend(text, tokens)
        return right

    def chance(self, draft: Draft) -> float:
        """The share of the tokens of such drafts that were right, those before them being so."""
        right, looked = self._seen[draft.source, draft.match]
        return right / looked

    def choose(
        self,
        drafts: Sequence[Draft],
        shards: Sequence[int],
        programs: Sequence[tuple[int, float]],
    ) -> tuple[int, list[int]] | None:
        """The program that draws most tokens for its time, and how many tokens of each row's draft
        it verifies, those that are most likely kept. None: steps without guesses draw more. shards:
        of the rows; programs: (places a shard, time in those of a step), the narrowest first."""
        worth, best, found = [], float(len(drafts)), None
        for i, draft in enumerate(drafts):
            chance = self.chance(draft)
            worth += [(chance ** (n + 1), -i) for n in range(len(draft.tokens))]
        worth = [(kept, -i) for kept, i in sorted(worth, reverse=True) if kept >= LEAST]
        for wide, cost in programs:
            spare = {k: wide - rows for k, rows in Counter(shards).items()}
            counts, expected = [0] * len(drafts), float(len(drafts))
            for kept, i in worth:
                if spare[shards[i]]:
                    spare[shards[i]] -= 1
                    counts[i] += 1
                    expected += kept
            gain = expected / cost
            if any(counts) and (gain > best if found else gain >= best):
                best, found = gain, (wide, counts)
        return found

    def count(self, drafts: Sequence[Draft], kept: Sequence[int]) -> None:
        """A pass verified these drafts, one of each row, and kept so many tokens of each."""
        drafted, accepted = [0] * len(SOURCES), [0] * len(SOURCES)
        for draft, n in zip(drafts, kept, strict=True):
            drafted[SOURCES.index(draft.source)] += len(draft.tokens)
            accepted[SOURCES.index(draft.source)] += n
        self.counts += Counts(1, len(drafts), tuple(drafted), tuple(accepted))


def kind(settings: Rollout) -> type[Engine]:
    """The engine that a config asks for."""
    return DraftEngine if settings.draft_tokens else Engine


class DraftEngine(Engine):
    """An engine that may draw several tokens of a row at once: where guesses are worth it, a step
    of the decode program takes each as a row of its own, at the next positions of the same pages.
    All keys of a row are written before any is read, so that a guess is read by those behind it.
    Keys of wrong guesses lie beyond the row's end, where nobody looks, until they are overwritten.
    """

    def __init__(self, shape, mesh, rules, settings, **fixed):
        """As `Engine`. ConfigError: more guesses than the keys' reader takes, or uneven shards."""
        super().__init__(shape, mesh, rules, settings, **fixed)
        g = self.geometry
        most = paged_queries.most(g.page_tokens, g.quantized) - 1
        if g.reader == "kernel" and settings.draft_tokens > most:
            raise ConfigError(
                f"config.rollout.draft_tokens: {settings.draft_tokens} guesses, and the TPU kernel"
                f" takes {most} of a row in pages of {g.page_tokens} tokens; set {most} or less"
            )
        if settings.draft_places % self.shards:
            raise ConfigError(
                f"config.rollout.draft_places: {settings.draft_places} is not divisible by"
                f" {self.shards}, the devices that slots are spread over"
            )
        self.drafts = Drafts(settings.draft_tokens, settings.draft_cost)
        self._places = settings.draft_places
        each = (n // self.shards for n in (self.slots, *self.rungs))
        wide = {places * self.shards for n in each for places, _ in self._programs(n)}
        self.widths += tuple(sorted(wide - {self.slots, *self.rungs}))

    def generate(self, decode_params, requests, draw, *watch, **hooks):
        """`Engine.generate`: the same responses, and counts of guesses in `Stats.drafts`."""
        self.drafts.begin()
        self._patience = 1  # tokens until the next look for guesses that pay
        responses, stats = super().generate(decode_params, requests, draw, *watch, **hooks)
        return responses, stats._replace(drafts=self.drafts.counts)

    def _slots(self, schedule, table_SxR):
        slots, there = super()._slots(schedule, table_SxR)
        rows = [row for row, _ in there]
        shard_of = [schedule.shard(row.slot) for row in rows]
        for row in rows:
            if not row.emitted:
                self.drafts.open(row.index, row.request.prompt, row.request.prefix)
        programs = self._programs(len(slots.token_S) // self.shards)
        # A row has pages, and a response room, for so many tokens beyond the next.
        most = [min(self.chunk, row.limit - row.emitted) - 1 for row in rows]
        most = most if len(rows) < programs[-1][0] * self.shards else [0] * len(rows)
        guesses = [self.drafts.draft(row.index, n) for row, n in zip(rows, most, strict=True)]
        self._guesses, self._verified = guesses, None
        if found := self.drafts.choose(guesses, shard_of, programs):
            self._patience = 1
            return self._spread(slots, there, *found)
        until = slots.emitted_S + self._patience
        self._patience = min(2 * self._patience, self.chunk)
        return slots._replace(limit_S=np.minimum(slots.limit_S, until)), there

    def _programs(self, each: int) -> list[tuple[int, float]]:
        """(places a shard, cost) of what a pass may run where a step has `each` rows a shard: all
        of `rollout.draft_places`, or half of those beyond slots in half of the time beyond."""
        own, most, cost = self.slots // self.shards, self._places // self.shards, self.drafts.cost
        if most < own + 2:
            return [(max(each, most), cost)]
        half = (own + most) // 2
        return [(half, 1 + (cost - 1) * (half - own) / (most - own)), (most, cost)]

    def _spread(self, slots: sampler.Slots, there, wide: int, counts: list[int]):
        """The same with `counts` guessed tokens behind the one of each row, in `wide` places a
        shard; all of them draw one token. A row's places lie side by side, in order: the TPU kernel
        knows them by that."""
        each = len(slots.token_S) // self.shards
        free = [k * wide for k in range(self.shards)]
        empty = lambda name, x: np.full(
            (self.shards * wide, *x.shape[1:]), name == "top_p_S", x.dtype
        )
        out = sampler.Slots(*map(empty, slots._fields, slots))
        places = []
        self._verified = []  # of each row: its guesses that are looked at, and their places
        for (row, i), guess, n in zip(there, self._guesses, counts, strict=True):
            first, tokens = free[i // each], guess.tokens[:n]
            of = slice(first, first + 1 + n)
            for x, y in zip(out, slots, strict=True):
                x[of] = y[i]
            out.token_S[of][1:] = tokens
            out.position_S[of] += np.arange(1 + n)
            out.emitted_S[of] += np.arange(1 + n)
            free[i // each] += 1 + n
            places.append((row, first))
            self._verified.append((guess._replace(tokens=tokens), range(first + 1, of.stop)))
        return out._replace(limit_S=out.emitted_S + 1), places

    def _drawn(self, out: sampler.Chunk, there):
        drawn = super()._drawn(out, there)
        if self._verified is not None:
            drawn = [
                (row, self._kept(out, [i, *places], guess.tokens), False)
                for (row, i), (guess, places) in zip(there, self._verified, strict=True)
            ]
            kept = [len(columns[0]) - 1 for _, columns, _ in drawn]
            self.drafts.count([guess for guess, _ in self._verified], kept)
        for (row, columns, _), (_, i), guess in zip(drawn, there, self._guesses, strict=True):
            near = self._near(out, i, len(columns[0]))
            self.drafts.counts += Counts(near_ties=int(near.sum()))
            self.drafts.drew(row.index, guess, columns[0].tolist())
        return [(row, columns, self._going(row, columns[0])) for row, columns, _ in drawn]

    def _near(self, out: sampler.Chunk, i: int, n: int) -> np.ndarray:
        """bool [n]: which tokens of the row at place i are near ties (near_ties.py). Those that no
        pass drew count too: they read keys that passes wrote."""
        return out.near_SxN[i, :n] if self._verified is None else out.near_SxN[i : i + n, 0]

    def _going(self, row: Row, tokens: np.ndarray) -> bool:
        """Whether a row goes on behind `tokens`: the program stops where the host looks."""
        return int(tokens[-1]) not in self.stop_ids and row.emitted + len(tokens) < row.limit

    def _kept(self, out: sampler.Chunk, places: list[int], guess: Sequence[int]):
        """What was drawn at a row's places, up to the first that the guess does not go on with,
        or that ends the response."""
        tokens = out.token_SxN[places, 0].tolist()
        goes_on = [a == b and a not in self.stop_ids for a, b in zip(tokens, guess, strict=False)]
        n = 1 + next((i for i, on in enumerate(goes_on) if not on), len(goes_on))
        return [x[places[:n], 0] for x in out[:3]]
