"""The host half of sampling: any number of requests through a fixed number of slots.

Continuous batching: between chunks of tokens the host takes finished responses out and puts waiting
requests into the freed slots. Rows get cache pages as they grow. When a shard's pages run out, its
youngest rows are evicted and made again later, to the same tokens. The samples of a prompt share
its full pages, and get a copy of the last, partly filled one.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax import parallel
from dapo_jax.model import kernels, paged
from dapo_jax.parallel import Call
from dapo_jax.rollout import balance, sampler
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.response import UNWATCHED, Part, Response, Stats, Store, Watch, total
from dapo_jax.rollout.schedule import Request, Row, Schedule, rungs

__all__ = ["Draw", "Engine", "Request", "Response", "Stats", "Store", "Watch"]


class SamplerCalls(NamedTuple):
    """The sampler's large programs with abstract arguments: weights, the pool, smaller ones."""

    prefill: Call
    decode: dict[str, Call]  # `Draw.mode`, or 'MODE, N slots' of the last rows -> program
    others: dict[str, Call]  # of `balance.calls`


class Engine:
    """Owns the slots. `generate` is a pure function of (params, requests, draw)."""

    def __init__(
        self, shape, mesh, rules, settings, *, prompt_tokens, response_tokens, stop_ids, dtype
    ):
        """settings: config.rollout, of which the batch's sizes are not read. prompt_tokens,
        response_tokens: the longest, in TOKENS, evaluation's among them. ValueError: slots that the
        mesh cannot divide."""
        slots, device = settings.slots, mesh.devices.flat[0]
        # On a GPU a scan would copy the weights of each layer out of their stack for each token.
        shape = shape._replace(scan_layers=shape.scan_layers and device.platform != "gpu")
        with parallel.mesh_scope(mesh, rules):
            self.shards = parallel.axis_size("batch")
            by_kernel = device.platform == "tpu" or parallel.runs_triton()
        if slots < 1 or slots % self.shards:
            devices = f"{self.shards}, the devices that slots are spread over"
            raise ValueError(f"rollout.slots={slots}: must be a multiple of {devices}")
        self.slots, self.chunk = slots, min(settings.chunk, response_tokens)
        self.prompt_tokens, self.response_tokens = prompt_tokens, response_tokens
        self.prefill_rows = -(-settings.prefill_prompts // self.shards)  # a call and shard
        self.resumes = settings.staleness + settings.turns > 0  # whether requests may have a prefix
        window = prompt_tokens + response_tokens * self.resumes  # that prefill looks back over
        self.prefill_tokens = min(settings.prefill_tokens, -(-window // 8) * 8)
        self.shape, self.stop_ids = shape.merged, tuple(sorted(stop_ids))
        self.mesh, self.rules, self.dtype = mesh, rules, dtype
        self._fraction = settings.cache_fraction
        sizes = dict(slots=slots, shards=self.shards, row_tokens=prompt_tokens + response_tokens)
        sizes |= dict(page_tokens=settings.page_tokens, fraction=self._fraction)
        sizes |= dict(cores=getattr(device, "num_cores", 1), queries=1 + settings.draft_tokens)
        quantized = settings.cache_dtype == "int8"
        platform = device.platform if by_kernel else "cpu"  # an older GPU reads pages as a CPU does
        self.geometry = paged.geometry(self.shape, platform, quantized=quantized, **sizes)
        fixed = dict(prompt_tokens=window, chunk=self.chunk, stop_ids=self.stop_ids, dtype=dtype)
        self._make = functools.partial(sampler.programs, shape, mesh, (*rules.items(),), **fixed)
        self.programs = self._make(self.geometry)
        self._axes = parallel.shardings(sampler.SLOT_AXES, mesh, rules)
        self._prompt_axes = parallel.shardings(paged.PROMPT_AXES, mesh, rules)
        self.rungs = rungs(slots, self.shards) if self.geometry.by_kernel else ()
        self.widths = self.rungs  # rows of decode programs beside that of all slots
        self.mover = balance.mover(self.geometry, mesh, rules)
        self.by_rows = kernels.choose(mesh, self.shape, dtype).rows_apart
        self._pool = None  # its geometry, and the arrays

    def decode_params(self, params, keep: bool = True):
        """Training layout -> decode layout and compute dtype; once a rollout. The cache gives way.
        keep: False = `params` are not wanted any more, and the weights are held once."""
        self.release()
        weights = self.programs.weights
        return (weights.to_decode_layout if keep else weights.take)(params)

    def calls(self, params) -> SamplerCalls:
        """To compile ahead or for other devices. params: anything with the weights' shapes."""
        slots, batch, rows = self.slots, self.prefill_rows * self.shards, self.geometry.row_pages
        number = lambda *size, dtype=np.int32: jax.ShapeDtypeStruct(size, dtype)
        weights = jax.eval_shape(self.programs.weights.to_decode_layout, params)
        weights = parallel.sharded(weights, self.programs.weights.layout)
        pool = jax.eval_shape(lambda: paged.new_pool(self.geometry, self.dtype))
        pool = parallel.sharded(pool, paged.pool_sharding(self.geometry, self.mesh, self.rules))

        def per_slot(size):
            numbers = dict.fromkeys(sampler.Slots._fields, number(size))
            numbers["top_p_S"] = number(size, dtype=np.float32)
            numbers |= dict(active_S=number(size, dtype=bool), table_SxR=number(size, rows))
            return parallel.for_program(sampler.Slots(**numbers), self._axes)

        prompts = number(batch, self.prefill_tokens), number(batch, rows), number(batch), number()
        prompts = parallel.for_program(paged.Prompts(*prompts), self._prompt_axes)
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        settings = (key, number(dtype=np.float32))
        settings = parallel.for_program(settings, parallel.replicated(self.mesh))
        n = sampler.asked_every(self.geometry, self.chunk)
        turn = "token of all slots" if n == 1 else f"{n} tokens of all slots"
        sizes = {"": slots} | {f", {n} slots": n for n in self.widths}
        decode = {
            mode + name: Call(program, (weights, pool, per_slot(size), *settings), turn)
            for mode, program in self.programs.decode.items()
            for name, size in sizes.items()
        }
        others = balance.calls(self.mover, self.mesh, pool)
        return SamplerCalls(Call(self.programs.prefill, (weights, pool, prompts)), decode, others)

    def require_memory(self, params, limit: int) -> None:
        """Raise ValueError if weights and cache alone exceed `limit` bytes per device, and say what
        would not. params: anything with the shapes of the model's weights."""
        weights, pool = map(parallel.bytes_on_device, self.calls(params).prefill.arguments[:2])
        if weights + pool <= limit:
            return
        gib = lambda n: f"{n / 2**30:.3g} GiB"
        fits = f"the sampler does not fit: its weights take {gib(weights)} and its cache"
        fits += f" {gib(pool)} of a device's {gib(limit)}; "
        if weights > limit:
            raise ValueError(fits + "the weights alone need more devices along mesh.tensor")
        room = (limit - weights) / pool  # in whole slots of the same cache
        slots = int(self.slots * room) // self.shards * self.shards
        ways = [f"rollout.slots={slots}"] * (slots > 0)
        if self.geometry.reader != "rows":
            ways.append(f"rollout.cache_fraction={self._fraction * room:.2g}")
        raise ValueError(fits + "what would: " + " or ".join(ways or ["shorter responses"]))

    def release(self) -> None:
        """Give the cache's memory back; the next `generate` makes it again. Responses that outlive
        a step (variants/staleness.py) are prefilled again, as their keys are of older weights."""
        self._pool = None

    def generate(
        self,
        decode_params,
        requests: Sequence[Request],
        draw: Draw,
        watch: Watch = UNWATCHED,
        *,
        on_tokens: Callable[[int, int, np.ndarray, np.ndarray], None] | None = None,
        cut: Callable[[np.ndarray], int] | None = None,
        feed: Callable[[list[Part]], Sequence[Request] | None] | None = None,
        wanted: Callable[[Sequence[Response | None]], int] | None = None,
    ) -> tuple[list[Response], Stats]:
        """Responses in the order of the requests, without their prefixes. What `watch.store` has is
        not drawn again. ValueError: an empty or overlong prompt, ids outside the vocabulary.

        Called after each chunk:
        on_tokens: with (request index, start, its tokens from there on, their log-probs); from 0
            again where a row was evicted.
        cut: with all tokens of a row; a number n > 0 ends the response there, with n tokens.
        feed: with what was drawn (of a row that was evicted again from 0), and what the store had;
            its requests join the queue. None ends the call: who has not ended gets None.
        wanted: with the responses so far. The requests from the number on that it returns end a
            chunk later, mostly without a response; their tokens do not count in `Stats.tokens`.
        """
        slots, limit = self.slots, draw.max_tokens or self.response_tokens
        if self.by_rows and not feed:
            # A token takes its time by rows: hardly more of them than requests, in few sizes, as
            # each compiles. A stored response counts, or a replay would decode otherwise.
            step = max(8, 2 ** len(requests).bit_length() // 8)
            slots = min(max(-(-len(requests) // step), 1) * step, slots)
        g = self._sized(slots)
        programs = self.programs if g == self.geometry else self._make(g)
        pages = dict(pages=g.pages, page_tokens=g.page_tokens, fixed=g.reader == "rows")
        schedule = Schedule((), slots, self.shards, self.chunk, limit, **pages)
        table_SxR = np.zeros((slots, g.row_pages), np.int32)
        asked: list[Request] = []
        responses: list[Response | None] = []  # to each of `asked`
        steps = replayed = chunks = evicted = most = 0  # most: requests that are wanted
        tokens = lambda: sum(len(r.tokens) for r in responses[:most] if r)

        def ask(new: Sequence[Request] | None) -> bool:
            """Queue the requests that the store has no response to. `feed` gets the others as whole
            responses, and may bring more. False: it ends the call."""
            nonlocal replayed, most
            while new:
                self._check(new, limit)
                stored = []
                for request, response in zip(new, watch.store.get(new, draw), strict=True):
                    if response is None:
                        own = request.draw or draw
                        said = request._replace(draw=own, top_p=request.top_p or own.top_p)
                        said = said._replace(limit=request.limit or own.max_tokens)
                        schedule.waiting.append((len(asked), said))
                    else:
                        stored.append(Part(len(asked), 0, *response[:3], True))
                        replayed += len(response.tokens)
                    asked.append(request)
                    responses.append(response)
                new = feed(stored) if feed and stored else ()
            most = wanted(responses) if wanted else len(asked)
            if wanted:
                schedule.waiting = deque(entry for entry in schedule.waiting if entry[0] < most)
            return new is not None

        def hand_over(ends: list[tuple[Row, bool, int]]) -> bool:
            """Done while the next chunk runs, which it does not change. False: that is the last."""
            parts = (row.parts[-1]._replace(ended=ended) for row, ended, _ in ends)
            more = feed([*parts]) if feed else ()
            for row, ended, end in ends:
                response = self._response(row, end) if ended else None
                if on_tokens:
                    part, end = row.parts[-1], len(response.tokens) if response else row.emitted
                    n = max(end - part.start, 0)  # `cut` may end it before this chunk
                    on_tokens(row.index, end - n, part.tokens[:n], part.logps[:n])
                if response:
                    responses[row.index] = response
                    watch.store.put(asked[row.index], draw, response)
            watch.check()
            watch.progress(sum(ended for _, ended, _ in ends))
            return ask(more)

        if not ask(requests) or not schedule:
            return responses, total([])._replace(tokens=tokens(), replayed=tokens())
        settings = functools.lru_cache(4)(functools.partial(self._settings, draw.temperature))
        if self._pool and self._pool[0] != g:
            self.release()
        pool = self._pool[1] if self._pool else programs.new_pool()
        self._pool = None  # donated from here on; kept again when the queue is empty
        prefill = functools.partial(programs.prefill, decode_params)
        ends = None  # of the chunk before: (row, whether it ended, by `cut` at which token)
        while schedule or ends is not None:
            if not schedule:
                if not hand_over(ends):  # it may bring more
                    break
                ends = None
                continue
            evicted += schedule.grow()
            new, copies = schedule.admit()
            pool = self._prefill(prefill, pool, schedule, new)
            pool = programs.copy_pages(pool, *self._copied(copies)) if copies else pool
            pool = balance.even(self.mover, self.mesh, pool, schedule)
            doing, there = self._slots(schedule, table_SxR)
            mode = draw._replace(top_p=min(row.request.top_p for row, _ in there)).mode
            seeds = {i: row.request.draw.seed for row, i in there}
            each = range(len(doing.token_S) if len({*seeds.values()}) > 1 else 1)
            how = settings(tuple(seeds.get(i, there[0][0].request.draw.seed) for i in each))
            doing = parallel.to_program(doing, self._axes)
            pool, out = programs.decode[mode](decode_params, pool, doing, *how)
            if ends is not None and not hand_over(ends):
                break
            out = parallel.to_host(out)

            chunks += 1
            steps += int(out.count_S.max()) * len(out.count_S)
            ends = []
            for row, drawn, active in self._drawn(out, there):
                row.parts.append(Part(row.index, row.emitted, *drawn, False))
                row.emitted += len(drawn[0])
                row.token = int(drawn[0][-1])
                end = cut(np.concatenate([part.tokens for part in row.parts])) if cut else 0
                ended = end > 0 or not active
                ends.append((row, ended, end))
                if ended or row.index >= most:
                    schedule.release(row.slot)
        self._pool = g, pool
        peak = schedule.peak / self.geometry.pages
        return responses, Stats(tokens(), steps, chunks, evicted, peak, min(replayed, tokens()))

    def _sized(self, slots: int) -> paged.Geometry:
        """A pool for a call of fewer slots: a fourth of all pages, or a sixteenth ..., if that is
        enough. To fill all of it with zeros takes seconds, and for each size programs compile."""
        pages, enough = self.geometry.pages, slots * (self.geometry.row_pages + 1)
        while self.geometry.reader == "pages" and slots < self.slots and enough <= pages // 4:
            pages //= 4
        return self.geometry._replace(pages=pages)

    def _check(self, requests, limit):
        if not 1 <= limit <= self.response_tokens:
            raise ValueError(f"max_tokens={limit}: this sampler holds 1 to {self.response_tokens}")
        longest, last = self.prompt_tokens, self.shape.vocab_size - 1
        for i, r in enumerate(requests):
            most, ids = (r.limit or limit) - 1 if self.resumes else 0, (*r.prompt, *r.prefix)
            if not 0 <= r.limit <= limit:
                wrong = f"limit {r.limit}, this call allows 0 to {limit}"
            elif not 1 <= len(r.prompt) <= longest:
                wrong = f"prompt of {len(r.prompt)} tokens, this sampler takes 1 to {longest}"
            elif len(r.prefix) > most:
                wrong = f"prefix of {len(r.prefix)} tokens, at most {most}"
            elif min(ids) < 0 or max(ids) > last:
                wrong = f"token id outside 0..{last}; is this the model's tokenizer?"
            else:
                continue
            raise ValueError(f"request {i}: {wrong}")

    # --- to the device --------------------------------------------------------------------------

    def _slots(
        self, schedule: Schedule, table_SxR: np.ndarray
    ) -> tuple[sampler.Slots, list[tuple[Row, int]]]:
        """What the rows do next, in NumPy, and `Schedule.places`. table_SxR: of all slots as the
        last chunk had it; is brought up to date."""
        size, places = schedule.places(self.rungs)
        there, place = zip(*places, strict=True)
        for row in there:
            table_SxR[row.slot, row.tabled : len(row.pages)] = row.pages[row.tabled :]
            row.tabled = len(row.pages)

        def of(values, dtype=np.int32, empty=0):
            out_S = np.full((size, *np.shape(values)[1:]), empty, dtype)
            out_S[list(place)] = values
            return out_S

        slots = sampler.Slots(
            token_S=of([row.token for row in there]),
            position_S=of([row.position for row in there]),
            emitted_S=of([len(row.request.prefix) + row.emitted for row in there]),
            limit_S=of([len(row.request.prefix) + row.limit for row in there]),
            stream_S=of([row.request.stream for row in there]),
            sample_S=of([row.request.sample for row in there]),
            top_p_S=of([row.request.top_p for row in there], np.float32, empty=1),
            active_S=of(True, bool),
            table_SxR=of(table_SxR[[row.slot for row in there]]),
        )
        return slots, places

    def _prefill(self, prefill: Callable, pool, schedule: Schedule, new: list[int]):
        """Run the prompts of the slots `new`, each shard its own, in chunks of tokens."""
        T, R, n = self.prefill_tokens, self.geometry.row_pages, self.prefill_rows
        rows = schedule.rows
        queues = [[s for s in new if schedule.shard(s) == k] for k in range(self.shards)]
        while any(queues):
            batch = [s for q in queues for s in (q[:n] + [None] * n)[:n]]
            queues = [q[n:] for q in queues]
            prompts = [() if s is None else rows[s].prompt[:-1] for s in batch]
            length_B = np.array([len(p) for p in prompts], np.int32)
            width = -(-int(length_B.max()) // T) * T
            tokens_BxW = np.zeros((len(batch), width), np.int32)
            table_BxR = np.zeros((len(batch), R), np.int32)
            for i, (s, prompt) in enumerate(zip(batch, prompts, strict=True)):
                tokens_BxW[i, : len(prompt)] = prompt
                if s is not None:
                    table_BxR[i, : len(rows[s].pages)] = rows[s].pages
            for start in range(0, width, T):
                tokens_BxT = tokens_BxW[:, start : start + T]
                chunk = paged.Prompts(tokens_BxT, table_BxR, length_B, np.int32(start))
                chunk = parallel.to_program(chunk, self._prompt_axes)
                pool = prefill(pool, chunk)
        return pool

    def _settings(self, temperature: float, seeds: tuple[int, ...]):
        """Key data of the one seed, or of one a row, and what divides the logits."""
        known = {x: np.asarray(jax.random.key_data(jax.random.key(x))) for x in {*seeds}}
        keys = np.stack([known[x] for x in seeds]) if len(seeds) > 1 else known[seeds[0]]
        said = keys, np.float32(temperature or 1.0)
        return parallel.to_program(said, parallel.replicated(self.mesh))

    def _copied(self, copies):
        source_S = np.zeros(self.slots, np.int32)
        target_S = np.full(self.slots, self.geometry.pages, np.int32)  # out of range: no copy
        for s, source, target in copies:
            source_S[s], target_S[s] = source, target
        return parallel.to_program((source_S, target_S), self._axes.token_S)

    def _drawn(self, out: sampler.Chunk, there) -> list[tuple[Row, list[np.ndarray], bool]]:
        """Each row's tokens, log-probs and entropies of a chunk, and whether it goes on."""
        count_S, active_S = out.count_S.tolist(), out.active_S.tolist()
        of_row = lambda i: [x[i, : count_S[i]].copy() for x in out[:3]]
        return [(row, of_row(i), active_S[i]) for row, i in there]

    def _response(self, row: Row, end: int) -> Response:
        """The response of a row that has ended. end: its tokens if `cut` ended it, else 0."""
        columns = zip(*((p.tokens, p.logps, p.entropies) for p in row.parts), strict=True)
        tokens, logps, entropies = (np.concatenate(x)[: end or None] for x in columns)
        truncated = not end and int(tokens[-1]) not in self.stop_ids
        return Response(tokens, logps, entropies, truncated)
