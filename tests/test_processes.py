"""How the processes of a run find each other, agree and notice who is gone; real ones are those of
tests/faults/test_several.py."""

import io
import json
import socket
import threading
import time
import unittest.mock
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import flags
from ports import free_port, wait_until

from dapo_jax import config, parallel
from dapo_jax.hosts import exit_report, processes


@pytest.fixture
def set_flags(monkeypatch):
    """`set_flags(coordinator, num_processes, process_id)`"""

    def change(*values):
        flags.FLAGS.mark_as_parsed()
        names = ("coordinator", "num_processes", "process_id")
        for name, value in zip(names, values, strict=True):
            monkeypatch.setattr(flags.FLAGS[name], "value", value)

    return change


@pytest.fixture
def initialize(monkeypatch):
    mock = unittest.mock.Mock()
    monkeypatch.setattr(jax.distributed, "initialize", mock)
    return mock


def test_one_process_needs_no_coordinator(set_flags, initialize, monkeypatch):
    set_flags("", 1, -1)
    with processes.joined():
        assert parallel.gather_json({"a": [1]}) == [{"a": [1]}]
        assert parallel.any_process(True) and not parallel.any_process(False)
    set_flags("", 0, -1)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_NTASKS", "1")  # `srun --gpus=8 --pty bash`: all GPUs are this one's
        assert processes.start() is False
    assert not initialize.called
    initialize.side_effect = ValueError("coordinator_address should be defined.")
    assert processes.start() is False
    set_flags("", 64, -1)  # of launchers: a slice that does not know the others waits for them
    with pytest.raises(ValueError, match="^--num_processes=64: JAX finds no cluster here$"):
        processes.start()
    assert initialize.call_args.args == (None, 64, None)
    initialize.side_effect = ValueError("bad SLURM_NTASKS")  # of a cluster that is there
    with pytest.raises(ValueError, match="environment .*COORDINATOR_ADDRESS.*: bad SLURM_NTASKS"):
        processes.start()


ALL_THREE, PORT = "give all three .a process_id from 0", "wants host:port"


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "said"),
    [
        ("h:1", 0, -1, ALL_THREE), ("h:1", 2, -1, ALL_THREE), ("h:1", 2, 2, ALL_THREE),
        ("", 2, 0, ALL_THREE), ("host", 2, 0, PORT), ("h:0", 2, 1, PORT), ("h:65536", 2, 1, PORT),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_together(coordinator, count, index, said, set_flags):
    set_flags(coordinator, count, index)
    with pytest.raises(ValueError, match=said):
        processes.start()


def test_a_coordinator_on_loopback_listens_there_alone():
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "10.0.0.1", "host-0", "0.0.0.0"):
        bound = host if host[:3] in ("127", "loc") else "[::]"
        port = free_port()
        assert processes._bind_address(f"{host}:{port}") == f"{bound}:{port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
@pytest.mark.parametrize("taken", ["127.0.0.1", ""])
def test_a_port_that_is_taken(host, taken, set_flags, initialize):
    """Also by somebody who would share it, as the server of JAX does."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind((taken, 0))
        s.listen()
        port = s.getsockname()[1]
        set_flags(f"{host}:{port}", 2, 0)
        with pytest.raises(ValueError, match=rf"port {port} is in use"):
            processes.start()
    assert not initialize.called


def test_the_coordinator_is_told_where_to_listen_and_how_long_to_wait(set_flags, initialize):
    """JAX's heartbeat comes every half of its timeout, and fails after half to all of it."""
    address = f"127.0.0.1:{free_port()}"
    set_flags(address, 2, 0)
    initialize.side_effect = jax.errors.JaxRuntimeError("INTERNAL: no\nstack")
    with pytest.raises(ValueError, match="^the processes could not meet: INTERNAL: no;"):
        processes.start()
    given = initialize.call_args.kwargs
    assert given["coordinator_bind_address"] == address
    assert given["heartbeat_timeout_seconds"] / 2 > 2.2 * processes.HEARTBEAT_TIMEOUT.value


def test_agree_names_what_differs(monkeypatch):
    mine = processes.identity(config.base(), "runs/a")
    assert {f"config.{name}" for name in config.SCHEMA} < set(mine)
    others = {"--workdir", "python", "the version of jax", "the source of dapo_jax (its hash)"}
    assert others < set(mine)
    processes.agree(mine)
    other = mine | {"config.optim.lr": 0.5}
    gather = lambda value: [value, other if value == mine else "another hash"]
    monkeypatch.setattr(parallel, "meet", gather)
    with pytest.raises(ValueError, match=r"^config\.optim\.lr is 0\.5 in process 1 and 0\.0003 in"):
        processes.agree(mine)


def test_flags_and_settings_are_compared_but_those_of_one_machine(set_flags, monkeypatch):
    set_flags("a:1", 2, 0)
    mine = processes.identity(config.base(), "runs/a")
    set_flags("b:1", 3, 1)
    monkeypatch.setenv("XLA_FLAGS", f"{mine['XLA_FLAGS']} --xla_x=1 --xla_dump_to=/d")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind="TPU v5")])
    with jax.debug_infs(True):
        theirs = processes.identity(config.base(), "runs/a")
    assert mine.keys() == theirs.keys()
    assert {name for name in mine if mine[name] != theirs[name]} == {
        "--num_processes", "XLA_FLAGS", "jax_debug_infs", "the devices of each process"
    }  # fmt: skip
    assert "dump" not in theirs["XLA_FLAGS"]


class Service:
    """A stand-in for the coordination service; process 1 of 2 beats until it is told not to."""

    def __init__(self):
        self.entries, self.beats, self.alive, self.last = {}, 0, True, 0.0

    def key_value_set(self, key, value, overwrite):
        self.entries[key] = value

    def key_value_dir_get(self, folder):
        if self.alive:
            self.beats, self.last = self.beats + 1, time.monotonic()
        self.entries[f"{folder}/1"] = f"{self.beats} host b, pid 7"
        return list(self.entries.items())


def watching(service, timeout: float) -> processes.Watch:
    return processes.Watch(service, timeout, SimpleNamespace(stdin=io.StringIO()))


@pytest.fixture
def ended(monkeypatch):
    """The exit statuses of this process, which does not end; it is one of two."""
    statuses = []
    monkeypatch.setattr(processes.os, "_exit", statuses.append)
    monkeypatch.setattr(processes.distributed.global_state, "num_processes", 2)
    return statuses


def test_watch_names_the_process_that_is_silent_and_leaves(capsys, ended):
    """With the status that is started again."""
    service = Service()
    watch = watching(service, timeout=1)
    wait_until(lambda: service.beats > 30)
    assert not watch.gone.is_set() and not ended
    service.alive = False
    assert watch.gone.wait(120)
    assert time.monotonic() - service.last > 1  # the limit, not less
    wait_until(lambda: ended)
    watch.stop()
    assert time.monotonic() - service.last > 2 and ended[0] == 75 and watch.gone.is_set()
    assert "process 1 of 2 (host b, pid 7) has been silent" in capsys.readouterr().err


def test_watch_is_gone_before_python_ends():
    """Also one that sleeps for long, or whose question is under way."""
    asleep, asking, answer = Service(), Service(), threading.Event()
    asking.key_value_dir_get = lambda folder: answer.wait(60) and [] if asking.entries else []
    for service in (asleep, asking):
        watch = watching(service, timeout=10_000)
        wait_until(lambda s=service: s.entries)
        watch.stop()
        threading.Timer(0.1, answer.set).start()
        watch.end()
        assert not watch._thread.is_alive()


def test_watch_follows_a_process_that_has_left(capsys, ended):
    """Soon, with its status and its words."""
    service = Service()
    watch = watching(service, timeout=2)
    announced = json.dumps(["host b", "the disk is full", 3])
    service.key_value_set("dapo_jax/alive/left/1", announced, True)
    wait_until(lambda: ended)
    watch.stop()
    assert ended == [3] and watch.status == 3 and watch.gone.is_set()
    said = "error: process 1 (host b) has left with status 3: the disk is full\n"
    assert capsys.readouterr().err == said


def test_a_process_that_leaves_says_so(ended):
    """To all that are left, without waiting for a coordinator that does not answer."""
    service = Service()
    watch = watching(service, timeout=1)
    watch.leave("the first line\nthe second", 75)
    wait_until(lambda: "dapo_jax/alive/left/0" in service.entries)
    announced = json.loads(service.entries["dapo_jax/alive/left/0"])
    assert announced == [socket.gethostname(), "the first line", 75]
    assert "bye\n" in watch._reporter.stdin.getvalue()

    service.key_value_set = lambda *_: time.sleep(600)  # stops the watch's own beats, too
    began = time.monotonic()
    watch.leave("", 75)
    assert time.monotonic() - began < 60


def test_hosts_that_differ_are_named(monkeypatch):
    """Eight bytes of each are compared; of one process nothing is looked at."""
    parallel.same_everywhere("it", iter(lambda: pytest.fail("looked"), None))
    sent, added = [], [0, 0, 0, 0]
    gather = lambda mine: sent.append(mine) or np.stack([mine + a for a in added])
    monkeypatch.setattr(parallel.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(parallel, "gather_json", lambda _: [f"host{i}" for i in range(4)])
    parallel.same_everywhere("it", [b"a", b"b"])
    added[2] = 1
    with pytest.raises(ValueError, match=r"^it: process 2 \(host2\) of 4 came to another result"):
        parallel.same_everywhere("it", [b"a", b"c"])
    assert sent[0].nbytes == 8 and not np.array_equal(sent[0], sent[1])


def test_one_failure_is_everybodys(monkeypatch):
    """Nobody goes on to wait for who has failed; of two kinds the graver one counts."""

    class Worse(ValueError):
        pass

    kinds = (Worse, OSError, ValueError)
    others, mine = [None, None], unittest.mock.Mock(return_value=5)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(parallel, "gather_json", lambda mine: [mine, *others])
    assert parallel.agreed(mine, kinds) == 5
    assert parallel.of_main_process(lambda: [1, {"a": 2}]) == [1, {"a": 2}]
    disk = "^process 2: the disk$"
    for theirs, error, raised, said in (
        (None, Worse("mine"), Worse, "^mine$"),
        ([1, "the disk"], None, OSError, disk),
        ([1, "the disk"], Worse("mine"), Worse, "^mine$"),
        ([1, "the disk"], ValueError("mine"), OSError, disk),
        (None, KeyError("x"), KeyError, "x"),  # a bug keeps its traceback
    ):
        others[1], mine.side_effect = theirs, error
        with pytest.raises(raised, match=said):
            parallel.agreed(mine, kinds)


def test_the_report_of_an_exit():
    """Nothing after an orderly end; else it depends on whether process 0 still listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        report = lambda lines, me: exit_report.report(lines, there, me, 2)
        assert report(["host a, pid 7", "bye"], 1) == ""
        assert report(["host a, pid 7"], 1).startswith("error: process 1 of 2 broke off")
    gone = f"error: process 0 of 2 (host a, pid 7), the coordinator {there}, does not answer"
    assert report(["host a, pid 7"], 1).startswith(gone)
    assert report([], 0).startswith("error: process 0 of 2 broke off")
