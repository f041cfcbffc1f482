"""Rewards that wait for something: many at a time, in one thread, each with a time limit."""

import asyncio
import concurrent.futures
import contextlib
import functools
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dapo_jax import gate

LATE = object()  # in place of a result: the time limit was reached
BLOCKED_S = 60.0  # how long a coroutine may keep the thread to itself


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The process's event loop for rewards. It stays, as a user's HTTP client belongs to the loop
    in which it was first used; and it has a thread, as a notebook's own thread has a loop."""
    loop = asyncio.new_event_loop()
    # Threads start when they are needed; asyncio's own number is four more than there are cores.
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1024))

    def turn() -> None:
        with gate.running():
            while True:
                with contextlib.suppress(BaseException):  # SystemExit of a task of the user's own
                    loop.run_forever()

    threading.Thread(target=turn, name="reward", daemon=True).start()
    return loop


def all_of(
    ask: Callable[[Any], Awaitable], jobs: Sequence[Any], at_once: int, limit_s: float
) -> list[Any]:
    """`await ask(job)` of each job, in order of the jobs; LATE for one that takes more than
    `limit_s` seconds. At most `at_once` wait together. `ask` must not raise.
    ValueError: a coroutine blocks the thread."""

    async def every() -> list[Any]:
        room = asyncio.Semaphore(at_once)

        async def one(job):
            async with room:
                task = asyncio.ensure_future(ask(job))
                try:
                    await asyncio.wait([task], timeout=limit_s)
                    return task.result() if task.done() else LATE
                finally:  # not awaited: it may refuse to end
                    task.cancel()

        return await asyncio.gather(*map(one, jobs))

    loop = _loop()
    future = asyncio.run_coroutine_threadsafe(every(), loop)
    try:
        while True:
            concurrent.futures.wait([future], timeout=BLOCKED_S)
            if future.done():
                return future.result()
            loop.call_soon_threadsafe((turns := threading.Event()).set)
            if not turns.wait(BLOCKED_S):
                _loop.cache_clear()
                raise ValueError(
                    f"reward: an async reward keeps its thread for more than {BLOCKED_S:g} s"
                    " without an await; use a client that waits (asyncio.to_thread for one that"
                    " does not), or a plain function with config.reward.workers"
                )
    finally:
        future.cancel()


def temporary(error: BaseException | None) -> bool:
    """Whether what failed may work a little later: a connection, a time limit, or a status of HTTP
    that says so, in the error or in one that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        # requests and httpx keep it in the response; aiohttp, openai and urllib in the error.
        for where in (error, getattr(error, "response", None)):
            for status in (getattr(where, n, None) for n in ("status_code", "status", "code")):
                if type(status) is int and (status in (408, 425, 429) or 500 <= status < 600):
                    return True
        error = error.__cause__ or error.__context__
    return False
