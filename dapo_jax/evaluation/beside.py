"""An evaluation beside the first round of the next step: one call of the sampler, which waits once
for the longest responses. Both draw from the same weights, and a response depends on its request
alone: two calls would give the same. What the step has sampled waits here until it begins."""

import time

from dapo_jax import build


class Ahead:
    """What an evaluation has drawn for the next step, and its share of the call's seconds."""

    def __init__(self):
        self._drawn, self.seconds = None, 0.0  # (Collected, Stats); None = nothing

    def machine(self, machine, before: tuple, behind: tuple) -> "Ahead":
        """A machine for one evaluation. before: (algorithm, text), behind: (stream, state) of the
        next step, arguments of `Algorithm.sample` around the machine."""
        self._machine, self.decode_params = machine, machine.decode_params
        self._sample = lambda first: before[0].sample(*before, first, *behind)
        return self

    def sample_groups(self, decode_params, prompts, k, draw, **calls):
        """As `build.Machine.sample_groups`, without stop strings; the step is sampled with it."""
        began, asked = time.perf_counter(), build.requests(prompts, k, calls["top_ps"], draw)
        first = _First(self._machine, decode_params, asked)
        self._drawn = _, stats = self._sample(first)
        if first.tests is None:  # what was carried over fills the batch
            return self._machine.sample_groups(decode_params, prompts, k, draw, **calls)
        seconds, own = time.perf_counter() - began, sum(len(r.tokens) for r in first.tests)
        self.seconds = seconds * stats.tokens / (stats.tokens + own)
        return build.grouped(prompts, k, first.tests), stats._replace(tokens=own)

    def step(self, algorithm):
        """(the algorithm, whose next step begins with what is there, the seconds of that)."""
        drawn, seconds = self._drawn, self.seconds
        self._drawn, self.seconds = None, 0.0
        return algorithm._replace(sample=lambda *_: drawn) if drawn else algorithm, seconds


class _First:
    """A machine that draws an evaluation's requests with those of its first call."""

    def __init__(self, machine, decode_params, asked):
        self._machine, self._asked, self.tests = machine, asked, None  # responses to `asked`
        self.decode_params = lambda params: decode_params

    def sample_groups(self, decode_params, prompts, group_size, draw, **calls):
        machine, n = self._machine, len(self._asked)
        if self.tests is not None:
            return machine.sample_groups(decode_params, prompts, group_size, draw, **calls)
        if wanted := calls.get("wanted"):
            calls["wanted"] = lambda responses: n + wanted(responses[n:])
        asked = [*self._asked, *build.requests(prompts, group_size)]
        drawn, stats = machine.engine.generate(decode_params, asked, draw, machine.watch, **calls)
        self.tests, drawn = drawn[:n], drawn[n:]
        own = stats.tokens - sum(len(r.tokens) for r in self.tests)
        stats = stats._replace(tokens=own, replayed=min(stats.replayed, own))
        return build.grouped(prompts, group_size, drawn), stats
