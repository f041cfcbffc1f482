"""Several processes as one run: how they find each other, agree, and notice that one is gone.

Every process runs the same command and issues the same device programs in the same order. JAX finds
the others by itself on TPU (Compute Engine or GKE), Slurm and Open MPI; elsewhere name them:

    python -m dapo_jax.train ... --coordinator=10.0.0.1:8476 --num_processes=2 --process_id=0

If a process ends with an error, the others end with its status; if it falls silent, with 75.
The coordinator (process 0) trusts whoever reaches its port: no password, no encryption.
"""

import atexit
import contextlib
import errno
import faulthandler
import hashlib
import itertools
import json
import os
import pathlib
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn

import jax
from absl import flags
from jax._src import distributed  # the coordination service's client has no public name yet

from dapo_jax import parallel
from dapo_jax.checkpoint import checkpoint, workdir
from dapo_jax.config import cli, schema
from dapo_jax.hosts import exit_report

COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "host:port of process 0; default: found by JAX, else this is the only one."
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 0, "Processes of the run; 1: only this. Alone: how many JAX has to find."
)
PROCESS_ID = flags.DEFINE_integer("process_id", -1, "Which of them this is, from 0.")
START_TIMEOUT = flags.DEFINE_integer("start_timeout", 50, "Seconds in which all must have met.", 1)
HEARTBEAT_TIMEOUT = flags.DEFINE_integer(
    "heartbeat_timeout",
    100,
    "Seconds of silence after which a process is named as gone. The run ends then if a program of"
    " the devices fails by it, after twice as long if all wait; the silent one after three times.",
    lower_bound=5,
)

HINT = (
    "is the same command running on every host (and no older one left over), is the address right,"
    " does the firewall let its port through, and do slices know each other (MEGASCALE_NUM_SLICES)?"
)
_ALIVE = "dapo_jax/alive"  # folder of the coordination service with the heartbeats
_watch: "Watch | None" = None  # within `joined`
# Errors of a device program or of the network start with a status; mistakes of the user do not.
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_)")


@contextlib.contextmanager
def joined():
    """Within this scope the processes of the run are one JAX system. An error inside ends this
    process at once, so that the others do not wait for it."""
    if not start():
        yield
        return
    global _watch
    me = distributed.global_state
    reporter = _reporter(me.coordinator_address, me.process_id, me.num_processes)
    _watch = Watch(me.client, HEARTBEAT_TIMEOUT.value, reporter)
    try:
        yield
    except BaseException as error:
        leave(*_exit_status(_watch, error))
    _watch.stop()
    jax.distributed.shutdown()  # waits for the others
    _watch.end()
    _watch = None


def leave(message: str, status: int) -> NoReturn:
    """Tell the others and end this process now, from any thread; a clean-up would wait for them."""
    _print(message)
    if _watch:
        _watch.leave(message, status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start() -> bool:
    """Meet the other processes; False where this is the only one. Exits with 1 and a hint when they
    have not met in time. ValueError: the three flags do not fit together, process 0 cannot listen,
    or this machine has a process of that number already."""
    address, count, index = COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
    if count == 1:
        return False
    given = _given(address, count, index)
    # For a single task of Slurm's jax would make a cluster, and leave it one of its GPUs.
    if not (given or count) and os.environ.get("SLURM_NTASKS") == "1":
        return False
    if given:
        _claim(address, index)
    bind = _bind_address(address) if given and index == 0 else None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX itself would abort with a stack trace.
    timer = _in_background(threading.Timer(START_TIMEOUT.value, _give_up))
    try:
        jax.distributed.initialize(
            address or None,
            count or None,  # that alone: as many as JAX has to find
            index if given else None,
            initialization_timeout=START_TIMEOUT.value + 60,
            # JAX aborts after half to all of this; `Watch` ends one that hangs at 2.2 timeouts.
            heartbeat_timeout_seconds=6 * HEARTBEAT_TIMEOUT.value,
            coordinator_bind_address=bind,
            # Flags describe one process a host, which has all of the host's devices.
            cluster_detection_method="deactivate" if given else None,
        )
    except ValueError as error:
        if given:
            raise
        if "coordinator_address" not in str(error):
            hint = "what the environment says of a cluster is not enough (JAX_COORDINATOR_ADDRESS?)"
            raise ValueError(f"{hint}: {error}") from error
        if count:
            raise ValueError(f"--num_processes={count}: JAX finds no cluster here") from error
        return False
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"the processes could not meet: {first_line}; {HINT}") from error
    finally:
        timer.cancel()
    # JAX's preemption service handles SIGTERM and waits until the program looks. Here it ends the
    # process, until the training loop handles it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    me = distributed.global_state
    where = f"on {socket.gethostname()}, coordinator {me.coordinator_address}"
    print(f"process {me.process_id} of {me.num_processes} {where}", file=sys.stderr, flush=True)
    return True


def _given(address: str, count: int, index: int) -> bool:
    """Whether flags name the run's processes; ValueError: they do so wrongly."""
    if not address and index < 0:
        return False
    if not (address and 0 <= index < count):
        said = f"--coordinator={address} --num_processes={count} --process_id={index}"
        how = "give all three (a process_id from 0 to num_processes - 1) or none"
        raise ValueError(f"{said}: {how}")
    match = re.fullmatch(r".+:(\d{1,5})", address)
    if not (match and 0 < int(match[1]) < 1 << 16):
        raise ValueError(f"--coordinator={address}: wants host:port, as 10.0.0.1:8476")
    return True


def _bind_address(address: str) -> str:
    """Where the coordinator listens: at its host alone if that is loopback, else on all interfaces.
    ValueError: it cannot listen there (JAX would end with a stack trace, or crash)."""
    host, port = re.fullmatch(r"\[?(.+?)\]?:(\d+)", address).groups()
    loopback = host in ("localhost", "::1") or host.startswith("127.")
    v6 = ":" in host if loopback else socket.has_dualstack_ipv6()
    family, both = socket.AF_INET6 if v6 else socket.AF_INET, v6 and not loopback
    place = (host if loopback else "", int(port))
    try:
        socket.create_server(place, family=family, dualstack_ipv6=both).close()
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            what = "is in use; end what listens there (an older run?) or say another, everywhere"
        raise ValueError(f"--coordinator={address}: port {port} {what}") from error
    return address if loopback else f"[::]:{port}"


def _claim(address: str, index: int) -> None:
    """Lock this number on this machine until this process ends. ValueError: another process has
    it; JAX would end the whole run if a second client had the same number."""
    name = re.sub(r"\W", "_", f"dapo_jax-{os.getuid()}-{address}-{index}")
    path = pathlib.Path(tempfile.gettempdir(), name)
    try:
        _, owner = workdir.lock(path, 0o600)  # the file stays open
    except OSError:  # no place to write: go on without the check
        return
    if owner:
        there = f"this machine has that process of {address} already ({owner})"
        raise ValueError(f"--process_id={index}: {there}")
    atexit.register(path.unlink, missing_ok=True)


def _give_up():
    me, where = distributed.global_state, distributed.global_state.coordinator_address
    what = f"process {me.process_id}: no answer from the coordinator {where}"
    if where is None:
        what = "the cluster's metadata names no coordinator that can be resolved"
    elif me.process_id == 0:
        what = f"not all {me.num_processes} processes came to {where}"
    leave(f"{what} within {START_TIMEOUT.value} s; {HINT}", 1)


def agree(values: dict[str, Any]) -> None:
    """Raise ValueError on every process, naming the first field that differs, unless all processes
    bring the same JSON values. Only a hash travels when they do."""
    text = json.dumps(values, sort_keys=True)
    if len(set(parallel.meet(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    mine, *others = parallel.meet(values)
    for number, theirs in enumerate(others, 1):
        for name in mine | theirs:
            a, b = mine.get(name, "nothing"), theirs.get(name, "nothing")
            if a != b:
                differs = f"{name} is {b!r} in process {number} and {a!r} in process 0"
                same = "start every process with the same command, environment, code and packages"
                raise ValueError(f"{differs}; {same}")


def identity(config, where: str) -> dict[str, Any]:
    """What must be the same in all processes: config, flags, workdir, versions, this package's
    source, the devices of each, and how jax and XLA are set."""
    package = pathlib.Path(__file__).parent.parent
    source = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        source.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    out = {f"config.{name}": value for name, value in schema.leaves(config).items()}
    out |= {f"the version of {p}": v for p, v in checkpoint.versions().items()}
    if flags.FLAGS.is_parsed():
        for module, defined in flags.FLAGS.flags_by_module_dict().items():
            if not module.startswith("absl."):
                out |= {f"--{f.name}": f.value for f in defined if f.name not in _OF_A_PROCESS}
    for name, value in jax.config.values.items():
        if not any(word in name for word in _OF_A_MACHINE):
            out[name] = value if isinstance(value, bool | int | float | str) else str(value)
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        given = os.environ.get(name, "").split()
        out[name] = " ".join(sorted(x for x in given if not x.startswith("--xla_dump")))
    devices = jax.local_devices()
    out["the devices of each process"] = f"{len(devices)} {devices[0].device_kind}"
    out |= {"--workdir": where, "python": platform.python_version()}
    return out | {"the source of dapo_jax (its hash)": source.hexdigest()[:12]}


# Flags and settings of jax that may differ: who a process is, what it logs, and where.
_OF_A_PROCESS = ("config", "coordinator", "process_id")
_OF_A_MACHINE = (
    "address", "cache", "dump", "file", "jax_log", "log_modules", "num_cpu", "platform", "timeout",
    "traceback", "visible_devices",
)  # fmt: skip


class Watch:
    """A thread that sends heartbeats, and names a process that has left or has been silent for
    `timeout` seconds. It ends this process `timeout` / 10 seconds after another has announced that
    it leaves, and after a silence of twice the timeout. reporter: gets process 0's host and pid."""

    def __init__(self, client, timeout: float, reporter: subprocess.Popen):
        self._client, self._timeout, self._reporter = client, timeout, reporter
        self._me = distributed.global_state.process_id
        self._total = distributed.global_state.num_processes
        self._stopped, self._ended = threading.Event(), threading.Event()
        self.gone = threading.Event()  # a process is known to be silent or to have left
        self._heard: dict[str, tuple[str, float]] = {}  # process -> (its last beat, when it came)
        self.status = os.EX_TEMPFAIL  # exit status to follow with
        self._thread = _in_background(threading.Thread(target=self._run))

    def _run(self):
        name = f"host {socket.gethostname()}, pid {os.getpid()}"
        for beat in itertools.count():
            try:
                self._client.key_value_set(f"{_ALIVE}/{self._me}", f"{beat} {name}", True)
                entries = self._client.key_value_dir_get(_ALIVE)
            except Exception:  # shutting down; or the coordinator is gone, and JAX aborts
                return
            now = time.monotonic()
            for key, value in entries:
                number = key.rsplit("/", 1)[-1]
                if "/left/" in key:
                    self._follow(number, *json.loads(value))
                    continue
                if number == "0":
                    _send(self._reporter, value.partition(" ")[2])
                if self._heard.get(number, ("", 0))[0] != value:
                    self._heard[number] = (value, now)
            for number, (value, when) in self._heard.items():
                self._judge(number, value.partition(" ")[2], now - when)
            if self._ended.wait(self._timeout / 20):
                return

    def _judge(self, number: str, who: str, silent_s: float) -> None:
        """Name a process whose last beat came `silent_s` ago, or end this one, if it is time."""
        if self._stopped.is_set():
            return
        # One period more: the last beat came up to that long before the silence began.
        if silent_s > 1.05 * self._timeout and not self.gone.is_set():
            silent = f"has been silent for {silent_s:.0f} s"
            _print(f"process {number} of {self._total} ({who}) {silent}: {exit_report.GONE}")
            self.gone.set()
        if silent_s > 2 * self._timeout:
            leave("", self.status)

    def _follow(self, number: str, who: str, message: str, status: int) -> None:
        """Another process has announced that it leaves: leave soon, with its status."""
        if self.gone.is_set() or self._stopped.is_set() or number == str(self._me):
            return
        self.status = status
        _print(f"process {number} ({who}) has left with status {status}: {message}")
        self.gone.set()

        def follow() -> None:
            if status == os.EX_TEMPFAIL:  # the others may have waited for this one
                faulthandler.dump_traceback(sys.__stderr__)
            leave("", status)

        _in_background(threading.Timer(self._timeout / 10, follow))

    def leave(self, message: str, status: int) -> None:
        """Tell the others that this process leaves. JAX aborts them when the coordinator ends, so
        that one waits until they have left, or could have."""
        self._stopped.set()
        announced = json.dumps([socket.gethostname(), message.partition("\n")[0], status])

        def announce() -> None:
            with contextlib.suppress(Exception):  # the coordinator is gone
                self._client.key_value_set(f"{_ALIVE}/left/{self._me}", announced, True)
                everybody = lambda: self._client.key_value_dir_get(f"{_ALIVE}/left")
                while self._me == 0 and len(everybody()) < self._total:
                    time.sleep(0.1)

        # In a thread, since a coordinator may hang, too.
        wait_s = self._timeout / 5 if self._me == 0 else 3
        _in_background(threading.Thread(target=announce)).join(wait_s)
        _send(self._reporter, "bye")

    def stop(self):
        """Name nobody any more, but send heartbeats: others may still be at work."""
        self._stopped.set()

    def end(self):
        """End the thread: one that calls the coordinator at Python's end aborts the process."""
        self._ended.set()
        self._thread.join(30)
        _send(self._reporter, "bye")


def _in_background(thread: threading.Thread) -> threading.Thread:
    thread.daemon = True
    thread.start()
    return thread


def _reporter(address: str, me: int, total: int) -> subprocess.Popen:
    """A process that reports this one's end where JAX aborts it (exit_report.py)."""
    numbers = (me, total, 3 * HEARTBEAT_TIMEOUT.value)  # the others have left by then
    command = [sys.executable, "-I", "-S", exit_report.__file__, address, *map(str, numbers)]
    # Signals to the run's process group are not for it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def _send(reporter: subprocess.Popen, line: str) -> None:
    with contextlib.suppress(OSError):  # it was ended, and reports nothing
        print(line, file=reporter.stdin, flush=True)


def _exit_status(watch: Watch, error: BaseException) -> tuple[str, int]:
    """(message, exit status) with which this process, one of several, ends after an error."""
    if isinstance(error, SystemExit):
        return "", error.code if isinstance(error.code, int) else int(error.code is not None)
    text = str(error) or type(error).__name__
    if _STATUS.match(text):  # a device program failed: most likely because a peer is gone
        said = f"process {distributed.global_state.process_id}: {text.splitlines()[0]}"
        print(f"{said}\nasking who is gone ...", file=sys.stderr, flush=True)
        gone = watch.gone.wait(1.2 * HEARTBEAT_TIMEOUT.value)  # it is named after two beats more
        return ("", watch.status) if gone else (said, 1)  # the watch has told the first
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, Exception) and (told := cli.mistake(error)):
        return told, 1
    sys.excepthook(type(error), error, error.__traceback__)
    return "", 1


def _print(message: str):
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
