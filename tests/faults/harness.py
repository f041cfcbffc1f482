"""What the fault tests share: the config, the server that starts runs, the comparison of two."""

import functools
import json
import os
import pathlib
import re
import select
import time
from typing import NamedTuple

import jax
import numpy as np
import typed
from ports import free_port

from dapo_jax import config
from dapo_jax.checkpoint import checkpoint
from dapo_jax.log import metrics
from dapo_jax.model import qwen2

HERE = pathlib.Path(__file__).parent


# The quickstart's parts at a size whose steps take hundredths of a second.
def get_config():
    c = config.base()
    c.steps = 12
    c.model.hidden_size, c.model.intermediate_size, c.model.num_layers = 16, 32, 1
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 4, 2, 8
    c.eval.every, c.eval.k, c.eval.max_problems, c.data.embedded_problems = 3, 2, 8, 64
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 4, 4, 2
    c.rollout.slots, c.rollout.prefill_prompts, c.rollout.max_response_tokens = 16, 8, 16
    c.reward.overlong_buffer_tokens, c.dynamic_sampling.surplus = 4, "carry"
    c.checkpoint.every, c.checkpoint.keep = 2, 3
    return c


class Run(typed.Process):
    """A running process of the server."""

    def __init__(self, server, pid: int, log: pathlib.Path, marks: int):
        super().__init__(server, pid, [log])
        self._log, self._marks, self._partial = log, marks, ""

    def wait_for(self, phase: str, times: int) -> bool:
        """Until the phase has begun so many times; False when the run ends before."""
        deadline = time.monotonic() + 900
        while times > 0:
            assert time.monotonic() < deadline, self.said()
            if not select.select([self._marks], [], [], 1.0)[0]:
                continue
            if not (data := os.read(self._marks, 65536).decode()):
                return False
            *begun, self._partial = (self._partial + data).split("\n")
            times -= begun.count(phase)
        return True

    def _reap(self, how: int) -> int | None:
        running = self.returncode is None
        if running and super()._reap(how) is not None:
            os.close(self._marks)
        return self.returncode

    def said(self) -> str:
        return self._log.read_text()


class Server(typed.Shell):
    """Starts runs of `get_config`, by server.py."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(
            HERE / "server.py",
            JAX_PLATFORMS="cpu",
            PYTHONPATH=f"{HERE.parent.parent}:{HERE.parent}",
            NPROC="16",  # as in conftest.py: a thread pool that does not run dry
            # Of its own: a killed run must not leave half a file to others.
            JAX_COMPILATION_CACHE_DIR=str(folder / "xla"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
            OPENBLAS_NUM_THREADS="1",
            TF_CPP_MIN_LOG_LEVEL="2",
        )
        self._folder, self._started = folder, 0

    def start(self, workdir, *flags: str, module="train", devices=1, faults=(), soon=True) -> Run:
        self._started += 1
        log = self._folder / f"log_{self._started}.txt"
        fifo = self._folder / f"marks_{self._started}"
        os.mkfifo(fifo)
        marks = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        argv = [f"--config={HERE / 'harness.py'}", f"--workdir={workdir}", *flags]
        request = dict(module=module, argv=argv, devices=devices, faults=list(faults), soon=soon)
        return Run(self, self.ask(request | dict(log=str(log), marks=str(fifo))), log, marks)

    def start_all(self, workdir, count: int, *flags: str, port: int = 0, **kwargs) -> list[Run]:
        """The processes of one run, process 0 first."""
        if count == 1:
            return [self.start(workdir, *flags, **kwargs)]
        port = port or free_port()
        return [self.start(workdir, *flags, *meet(port, count, i), **kwargs) for i in range(count)]

    def run(self, workdir, *flags: str, code: int = 0, **kwargs) -> str:
        """A whole run; what it said."""
        run = self.start(workdir, *flags, **kwargs)
        assert run.wait() == code, run.said()
        return run.said()


# Responses of several turns: whoever is asked is a fault of server.py, not the tool that is named.
TURNS = ("rollout.turns=3", "reward.reply=calculator", "rollout.max_response_tokens=32")


class Replies(NamedTuple):
    """What the faults `talks` and `told` have written of a run, however often it was started."""

    asked: list[int]  # by which process, each time
    answered: int  # of these
    kept: list[str]  # the turns whose replies were on disk before they were used

    @property
    def awaited(self) -> int:
        """How often a kill came while a reply was awaited."""
        return len(self.asked) - self.answered


def replies(log: pathlib.Path) -> Replies:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    of = lambda kind: [words for first, *words in lines if first == kind]
    kept = [name for words in of("kept") for name in words]
    return Replies([process for (process,) in of("asked")], len(of("answered")), kept)


def assert_asked_once(said: Replies) -> None:
    """Process 0 asks, and nothing that was used is asked again."""
    assert {*said.asked} == {0} and len({*said.kept}) == len(said.kept) > 0


def meet(port: int, count: int, index: int) -> list[str]:
    """The flags of process `index` of `count`."""
    return [
        f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={index}"
    ]  # fmt: skip


# Of how a step was run, which a restart within it changes, and not of what came out.
_CLOCKS = ("time/", "perf/", "drafts/", "sampling/evicted")


def newest(workdir: pathlib.Path) -> int:
    whole, _ = checkpoint.steps(workdir / "checkpoints")
    return whole[0]


def saved(workdir: pathlib.Path, step: int) -> dict:
    """Everything in a checkpoint, on the host: arrays, carried groups, and the JSON as text."""
    out = restored(workdir, step)
    arrays = jax.tree.map(lambda x: np.asarray(x).tobytes(), (out["arrays"], out["carried"]))
    return {"arrays": arrays, "state": json.dumps(out["state"], sort_keys=True)}


def restored(workdir: pathlib.Path, step: int, *items: str):
    """These items of a checkpoint, as they are; none = all. Arrays on other devices cannot be."""
    args = checkpoint.ocp.args
    kinds = {"arrays": args.StandardRestore(), "carried": args.StandardRestore()}
    kinds |= {"state": args.JsonRestore()}
    with checkpoint.reader(workdir / "checkpoints") as m:
        return m.restore(step, args=args.Composite(**{x: kinds[x] for x in items or kinds}))


def records(workdir: pathlib.Path) -> list[str]:
    """The lines of metrics.jsonl without the clocks."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.dumps(_without(_CLOCKS, json.loads(line))) for line in lines]


def _without(names: tuple[str, ...], row: dict) -> dict:
    """The row without the fields whose names begin so."""
    return {k: v for k, v in row.items() if not k.startswith(names)}


def files(workdir: pathlib.Path, *folders: str) -> dict[str, bytes]:
    return {
        f"{folder}/{p.name}": p.read_bytes()
        for folder in folders
        for p in (workdir / folder).iterdir()
        if not p.name.startswith(".")
    }


def assert_same_run(a: pathlib.Path, b: pathlib.Path, arrays: bool = True) -> None:
    """Bit for bit, but for the clocks. arrays: False = by their checksums alone, where this process
    cannot restore them, as they are of several."""
    step = newest(a)
    assert newest(b) == step
    of = saved if arrays else lambda workdir, step: restored(workdir, step, "state")
    assert of(a, step) == of(b, step)
    assert records(a) == records(b)
    steps = [r["step"] for r in metrics.read(a / "metrics.jsonl")]
    assert steps == list(range(step + 1))
    assert files(a, "rollouts", "eval", "data") == files(b, "rollouts", "eval", "data")


# Of a sample, what another mesh rounds in another way.
_ROUNDED = ("mean_entropy", "entropies", "logps")


def assert_same_run_elsewhere(a: pathlib.Path, b: pathlib.Path, atol: float = 1e-4) -> None:
    """On other devices an update adds up in another order: what is drawn, parked, graded, trained
    on and counted is the same, and weights and log-probs are but for their last bits. These decide
    a draw whose uniform lies between two tokens, so that of evaluations, which draw most, one
    problem in sixteen may have other samples. atol: of the weights."""
    step = newest(a)
    assert newest(b) == step
    known = ("content", "config", "versions")  # the first has the checksums of weights
    one, other = (restored(x, step, "carried", "state") for x in (a, b))
    assert _without(known, one["state"]) == _without(known, other["state"])
    parked = other["carried"]
    assert one["carried"].keys() == parked.keys()
    for name, x in one["carried"].items():
        near = np.issubdtype(x.dtype, np.floating)
        np.testing.assert_allclose(parked[name], x, atol=1e-4 * near, rtol=0, err_msg=name)
    one, other = (files(x, "rollouts", "eval") for x in (a, b))
    assert one.keys() == other.keys()
    rows = lambda text: [_without(_ROUNDED, json.loads(row)) for row in text.splitlines()]
    for name in one:
        pairs = list(zip(rows(one[name]), rows(other[name]), strict=True))
        ties = len(pairs) // 16 if name.startswith("eval/") else 0
        assert sum(x != y for x, y in pairs) <= ties, name
    near = functools.partial(np.testing.assert_allclose, atol=atol)
    jax.tree.map(near, weights(a, step), weights(b, step))


def weights(workdir: pathlib.Path, step: int):
    """The parameters, on one device."""
    like = qwen2.abstract(qwen2.shape_from_config(get_config()))
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), like)
    return checkpoint.restore_params(workdir / "checkpoints", like, here, step)


def step_resumed_from(said: str) -> int:
    return int(re.search(r"resumed after step (\d+)", said)[1])
