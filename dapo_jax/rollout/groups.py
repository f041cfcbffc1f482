"""Several responses to each prompt, by one call of the sampler."""

from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.response import UNWATCHED, Response, Stats, Watch
from dapo_jax.rollout.schedule import Request


def sample(
    engine: Engine,
    decode_params,
    prompts: Sequence[tuple[int, Sequence[int]]],
    group_size: int,
    draw: Draw,
    watch: Watch = UNWATCHED,
    top_ps: Sequence[float] = (),
    cut: Callable[[np.ndarray], int] | None = None,
) -> tuple[list[list[Response]], Stats]:
    """G responses to each (stream position, prompt), in the given order. top_ps: of each prompt,
    where they differ from the draw's. watch, cut: as for `Engine.generate`."""
    requests = [
        Request(prompt, position, g, top_p=top_p)
        for (position, prompt), top_p in zip(prompts, top_ps or [0.0] * len(prompts), strict=True)
        for g in range(group_size)
    ]
    responses, stats = engine.generate(decode_params, requests, draw, watch, cut=cut)
    starts = range(0, len(responses), group_size)
    return [responses[i : i + group_size] for i in starts], stats
