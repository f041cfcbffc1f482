"""The host half of sampling: any number of requests through a fixed number of slots.

Continuous batching: between chunks of decoded tokens the host takes finished responses out and puts
waiting requests into the freed slots, so that a long response never holds the others up. The
samples of one prompt that start together share one prefill.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax import parallel
from dapo_jax.rollout import sampler


class Request(NamedTuple):
    """One response to draw. (stream, sample) name its random numbers, see rollout/draw.py."""

    prompt: Sequence[int]  # token ids, 1 to prompt_tokens of them
    stream: int  # position of the problem in its stream
    sample: int  # index in its group


class Response(NamedTuple):
    """Token ids with the stop token, if there was one; lengths are numbers, never inferred."""

    tokens: np.ndarray  # int32 [n]
    logps: np.ndarray  # float32 [n], at temperature, before any nucleus cut
    entropies: np.ndarray  # float32 [n], nats
    truncated: bool  # ended by the length limit and not by a stop token


class Stats(NamedTuple):
    tokens: int  # response tokens drawn
    slot_steps: int  # slot x decode step, busy or idle
    chunks: int

    @property
    def occupancy(self) -> float:
        return self.tokens / max(self.slot_steps, 1)


class Engine:
    """Owns the slots. `generate` is a pure function of (params, requests, seed, draw settings)."""

    def __init__(
        self,
        shape,
        mesh,
        rules,
        *,
        slots: int,
        prompt_tokens: int,
        response_tokens: int,
        chunk: int,
        prefill_prompts: int,
        stop_ids: Sequence[int],
        dtype,
    ):
        self.slots, self.chunk = slots, min(chunk, response_tokens)
        self.prompt_tokens, self.response_tokens = prompt_tokens, response_tokens
        self.prefill_prompts = prefill_prompts
        self.vocab_size = shape.vocab_size
        self.stop_ids = tuple(sorted(stop_ids))
        self.mesh = mesh
        self.programs = sampler.programs(
            shape,
            mesh,
            rules,
            slots=slots,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            chunk=self.chunk,
            stop_ids=self.stop_ids,
            dtype=dtype,
        )
        self._state = None

    def decode_params(self, params):
        """Training layout -> decode layout and compute dtype; once a rollout."""
        return self.programs.to_decode_layout(params)

    def generate(
        self,
        decode_params,
        requests: Sequence[Request],
        *,
        seed: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_response_tokens: int = 0,
        progress: Callable[[int], None] = lambda finished: None,
    ) -> tuple[list[Response], Stats]:
        """Responses in the order of the requests. `progress` is called with newly finished counts.

        Raises ValueError for an empty or overlong prompt, or token ids outside the vocabulary.
        """
        limit = max_response_tokens or self.response_tokens
        self._check(requests, limit)
        mode = "greedy" if temperature == 0 else "full" if top_p >= 1 else "top_p"
        rep = parallel.replicated(self.mesh)
        key = np.asarray(jax.random.key_data(jax.random.key(seed)))
        settings = (key, np.float32(temperature or 1.0), np.float32(top_p))
        settings = parallel.to_device(settings, rep)
        state = self.programs.new_slots() if self._state is None else self._state
        self._state = None  # donated from here on; kept again when the queue is empty

        parts = [[] for _ in requests]
        truncated = np.zeros(len(requests), bool)
        owner_S = np.full(self.slots, -1)  # request of each slot, -1 = free
        waiting, drawn, steps, chunks = 0, 0, 0, 0
        while waiting < len(requests) or (owner_S >= 0).any():
            free = np.flatnonzero(owner_S < 0)[: len(requests) - waiting]
            owner_S[free] = np.arange(waiting, waiting + len(free))
            waiting += len(free)
            state = self._refill(decode_params, state, requests, owner_S, free, limit)

            state, out = self.programs.decode[mode](decode_params, state, *settings)
            out = parallel.to_host(out)
            busy = np.flatnonzero(owner_S >= 0)
            for s in busy:
                n = out.count_S[s]
                parts[owner_S[s]].append(
                    (out.token_SxN[s, :n], out.logp_SxN[s, :n], out.entropy_SxN[s, :n])
                )
            done = busy[~out.active_S[busy]]
            last = out.token_SxN[done, out.count_S[done] - 1]
            truncated[owner_S[done]] = ~np.isin(last, self.stop_ids)
            owner_S[done] = -1
            drawn += int(out.count_S[busy].sum())
            steps += int(out.count_S.max()) * self.slots
            chunks += 1
            progress(len(done))
        self._state = state
        responses = [
            Response(*(np.concatenate(x) for x in zip(*p, strict=True)), bool(t))
            for p, t in zip(parts, truncated, strict=True)
        ]
        return responses, Stats(drawn, steps, chunks)

    def _check(self, requests, limit):
        if not 1 <= limit <= self.response_tokens:
            raise ValueError(
                f"max_response_tokens={limit}: this sampler holds 1 to {self.response_tokens}"
            )
        for i, r in enumerate(requests):
            if not 1 <= len(r.prompt) <= self.prompt_tokens:
                raise ValueError(
                    f"request {i}: prompt of {len(r.prompt)} tokens, this sampler takes 1 to"
                    f" {self.prompt_tokens}"
                )
            if min(r.prompt) < 0 or max(r.prompt) >= self.vocab_size:
                raise ValueError(
                    f"request {i}: token id outside 0..{self.vocab_size - 1}; is this the model's"
                    " tokenizer?"
                )

    def _refill(self, params, state, requests, owner_S, free, limit):
        """Start the requests that `owner_S` gives the slots `free`, P distinct prompts a call."""
        rows: dict[tuple, list[int]] = {}  # prompt -> the slots of its samples
        for s in free:
            rows.setdefault(tuple(requests[owner_S[s]].prompt), []).append(int(s))
        groups = list(rows.values())
        for start in range(0, len(groups), self.prefill_prompts):
            batch = groups[start : start + self.prefill_prompts]
            state = self.programs.prefill(
                params, state, self._pack(requests, owner_S, batch, limit)
            )
        return state

    def _pack(self, requests, owner_S, groups: list[list[int]], limit: int) -> sampler.Refill:
        zeros = lambda: np.zeros(self.slots, np.int32)  # noqa: E731
        refill = sampler.Refill(
            np.zeros((self.prefill_prompts, self.prompt_tokens), np.int32),
            np.full(self.slots, self.slots, np.int32),  # S: out of range, dropped
            *(zeros() for _ in range(6)),
        )
        i = 0
        for row, slots in enumerate(groups):
            prompt = requests[owner_S[slots[0]]].prompt
            refill.tokens_PxT[row, : len(prompt) - 1] = prompt[:-1]
            for s in slots:
                request = requests[owner_S[s]]
                refill.slot_S[i], refill.row_S[i] = s, row
                refill.token_S[i], refill.position_S[i] = prompt[-1], len(prompt) - 1
                refill.limit_S[i] = limit
                refill.stream_S[i], refill.sample_S[i] = request.stream, request.sample
                i += 1
        return parallel.to_device(refill, parallel.replicated(self.mesh))
