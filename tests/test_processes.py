"""Several processes as one run. The slow half starts real ones, which meet over loopback."""

import contextlib
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import jax
import numpy as np
import pytest
import typed
from absl import flags
from ports import free_port

from dapo_jax import config, parallel
from dapo_jax.checkpoint import checkpoint
from dapo_jax.dapo import dynamic_sampling
from dapo_jax.data.problems import Problem
from dapo_jax.hosts import exit_report, processes
from dapo_jax.log import metrics
from dapo_jax.model import qwen2
from dapo_jax.reward import grading
from dapo_jax.rollout.engine import Response

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def set_flags():
    """`set_flags(name=value, ...)`, undone after the test."""
    with contextlib.ExitStack() as stack:

        def change(**values):
            flags.FLAGS.mark_as_parsed()
            for name, value in (
                dict(coordinator="", num_processes=0, process_id=-1) | values
            ).items():
                old = flags.FLAGS[name].value
                flags.FLAGS[name].value = value
                stack.callback(setattr, flags.FLAGS[name], "value", old)

        yield change


@pytest.fixture
def initialized(monkeypatch):
    """(the arguments of each call of jax.distributed.initialize, the errors that they raise)"""
    calls, errors = [], []

    def initialize(*_, **given):
        calls.append(given)
        raise errors.pop(0)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return calls, errors


def test_one_process_needs_no_coordinator(set_flags, initialized):
    calls, errors = initialized
    set_flags(num_processes=1)
    with processes.joined():
        assert parallel.gather_json({"a": [1]}) == [{"a": [1]}]
        assert parallel.any_process(True) and not parallel.any_process(False)
    assert not calls
    set_flags()
    errors += [ValueError("coordinator_address should be defined."), ValueError("bad SLURM_NTASKS")]
    assert processes.start() is False
    with pytest.raises(ValueError, match="SLURM_NTASKS"):  # a cluster that is there, and broken
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
    set_flags(coordinator=coordinator, num_processes=count, process_id=index)
    with pytest.raises(ValueError, match=said):
        processes.start()


def test_a_coordinator_on_loopback_listens_there_alone():
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "10.0.0.1", "host-0", "0.0.0.0"):
        bound = host if host[:3] in ("127", "loc") else "[::]"
        port = free_port()
        assert processes._bind_address(host, port) == f"{bound}:{port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
@pytest.mark.parametrize("taken", ["127.0.0.1", ""])
def test_a_port_that_is_taken(host, taken, set_flags, initialized):
    """Also by somebody who would share it, as the server of JAX does."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind((taken, 0))
        s.listen()
        port = s.getsockname()[1]
        set_flags(coordinator=f"{host}:{port}", num_processes=2, process_id=0)
        with pytest.raises(ValueError, match=rf"port {port} is in use"):
            processes.start()
    assert not initialized[0]


def test_the_coordinator_is_told_where_to_listen_and_how_long_to_wait(set_flags, initialized):
    """JAX's heartbeat comes every half of its timeout, and fails after half to all of it."""
    (calls, errors), port = initialized, free_port()
    errors.append(jax.errors.JaxRuntimeError("INTERNAL: no\nstack"))
    set_flags(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=0, heartbeat_timeout=40)
    with pytest.raises(ValueError, match="^the processes could not meet: INTERNAL: no;"):
        processes.start()
    assert calls[0]["coordinator_bind_address"] == f"127.0.0.1:{port}"
    assert calls[0]["heartbeat_timeout_seconds"] / 2 > 2.2 * 40


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


class Sent(Exception):
    """What a host has to say is known; what the others say is not, yet."""


@pytest.mark.parametrize("hosts", [2, 3, 5])
def test_each_host_grades_its_own_share(hosts, monkeypatch):
    """Of four groups; then everybody has all verdicts, in order."""
    none, read = np.zeros(0, np.float32), []
    answers = lambda n: [Response(np.array([n, g]), none, none, False) for g in range(3)]
    groups = [dynamic_sampling.Group(n, [1], answers(n)) for n in range(4)]
    asked = [Problem(str(n), (), answer, "") for n, answer in enumerate(["1", "1", "3", "9"])]

    class Tokenizer:
        def decode(self, ids):
            read.append(ids[0])
            return f"Answer: {sum(ids)}"

    def grade():
        judge = grading.judge(config.base().reward)
        return [g.grades for g in grading.grade_groups(Tokenizer(), judge, groups, asked)]

    alone, sent, done = grade(), {}, []
    assert [g.right_G.tolist() for g in alone] == [
        [False, True, False], [True, False, False], [False, True, False], [False, False, False],
    ]  # fmt: skip

    def send(x):
        sent[jax.process_index()] = x
        raise Sent

    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    monkeypatch.setattr(parallel, "gather_json", send)
    for host in range(hosts):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        read.clear()
        with pytest.raises(Sent):
            grade()
        done += sorted(set(read))
    assert done == [0, 1, 2, 3]  # each group on one host
    through_json = json.loads(json.dumps([sent[h] for h in range(hosts)]))
    monkeypatch.setattr(parallel, "gather_json", lambda _: through_json)
    for a, b in zip(grade(), alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


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


def wait_until(holds):
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    watch = processes.Watch(service, timeout=1)
    wait_until(lambda: service.beats > 30)
    assert not watch.gone.is_set() and not ended
    service.alive = False
    assert watch.gone.wait(120)
    assert time.monotonic() - service.last > 1  # the limit, not less
    wait_until(lambda: ended)
    watch.stop()
    assert time.monotonic() - service.last > 2 and ended[0] == 75 and watch.wait()
    assert "process 1 of 2 (host b, pid 7) has been silent" in capsys.readouterr().err


def test_watch_is_gone_before_python_ends():
    """Also one that sleeps for long, or whose question is under way."""
    asked, answer = threading.Event(), threading.Event()

    class Slow(Service):
        def key_value_dir_get(self, folder):
            asked.set()
            assert answer.wait(60)
            return []

    for service in (Service(), Slow()):
        watch = processes.Watch(service, timeout=10_000)
        wait_until(lambda s=service: asked.is_set() if isinstance(s, Slow) else s.beats)
        watch.stop()
        threading.Timer(0.1, answer.set).start()
        watch.end()
        assert not watch._thread.is_alive()


def test_watch_follows_a_process_that_has_left(capsys, ended):
    """Soon, with its status and its words."""
    service = Service()
    watch = processes.Watch(service, timeout=2)
    announced = json.dumps(["host b", "the disk is full", 3])
    service.key_value_set("dapo_jax/alive/left/1", announced, True)
    wait_until(lambda: ended)
    watch.stop()
    assert ended == [3] and watch.status == 3 and watch.wait()
    said = "error: process 1 (host b) has left with status 3: the disk is full\n"
    assert capsys.readouterr().err == said


def test_a_process_that_leaves_says_so(ended):
    """To all that are left, without waiting for a coordinator that does not answer."""
    service = Service()
    watch = processes.Watch(service, timeout=1)
    watch.leave("the first line\nthe second", 75)
    wait_until(lambda: "dapo_jax/alive/left/0" in service.entries)
    announced = json.loads(service.entries["dapo_jax/alive/left/0"])
    assert announced == [socket.gethostname(), "the first line", 75]

    service.key_value_set = lambda *_: time.sleep(600)  # stops the watch's own beats, too
    began = time.monotonic()
    watch.leave("", 75)
    assert time.monotonic() - began < 60


def test_hosts_that_differ_are_named(monkeypatch):
    """Eight bytes of each are compared; of one process nothing is looked at."""
    parallel.same_everywhere("it", iter(lambda: pytest.fail("looked"), None))
    sent, same = [], []

    def allgather(mine):
        sent.append(mine)
        return np.stack([mine if s else mine + 1 for s in same])

    monkeypatch.setattr(parallel.multihost_utils, "process_allgather", allgather)
    monkeypatch.setattr(jax, "process_count", lambda: len(same))
    monkeypatch.setattr(parallel, "gather_json", lambda _: [f"host{i}" for i in range(len(same))])
    same[:] = [True, True, True]
    parallel.same_everywhere("it", [b"a", b"b"])
    same[:] = [True, True, False, True]
    with pytest.raises(ValueError, match=r"^it: process 2 \(host2\) of 4 came to another result"):
        parallel.same_everywhere("it", [b"a", b"c"])
    assert sent[0].nbytes == 8 and not np.array_equal(sent[0], sent[1])


def test_one_failure_is_everybodys(monkeypatch):
    """Nobody goes on to wait for who has failed; of two kinds the graver one counts."""

    class Worse(ValueError):
        pass

    kinds = (Worse, OSError, ValueError)
    others = [None, None]
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(parallel, "gather_json", lambda mine: [mine, *others])

    def agreed(error=None):
        def action():
            if error:
                raise error
            return 5

        return parallel.agreed(action, kinds)

    assert agreed() == 5
    assert parallel.of_main_process(lambda: [1, {"a": 2}]) == [1, {"a": 2}]
    disk = "^process 2: the disk$"
    for theirs, mine, raised, said in (
        (None, Worse("mine"), Worse, "^mine$"),
        ([1, "the disk"], None, OSError, disk),
        ([1, "the disk"], Worse("mine"), Worse, "^mine$"),
        ([1, "the disk"], ValueError("mine"), OSError, disk),
        (None, KeyError("x"), KeyError, "x"),  # a bug keeps its traceback
    ):
        others[:] = [None, theirs]
        with pytest.raises(raised, match=said):
            agreed(mine)


def test_the_report_of_an_exit():
    """Nothing after an orderly end; else it depends on whether process 0 still listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        there = f"127.0.0.1:{s.getsockname()[1]}"
        assert exit_report.report(["host a, pid 7", "bye"], there, 1, 2) == ""
        assert exit_report.report(["host a, pid 7"], there, 1, 2).startswith(
            "error: process 1 of 2 b"
        )
    said = exit_report.report(["host a, pid 7"], there, 1, 2)
    assert said.startswith(f"error: process 0 of 2 (host a, pid 7), the coordinator {there}, does")
    assert exit_report.report([], there, 0, 2).startswith("error: process 0 of 2 broke off")


REPORTER = [sys.executable, "-I", "-S", exit_report.__file__, "127.0.0.1:1", "0", "4"]


@pytest.mark.parametrize(("sent", "said"), [("bye\n", ""), ("", "process 0 of 4 broke off")])
def test_the_report_comes_from_a_process_that_outlives_this_one(sent, said):
    done = subprocess.run(
        [*REPORTER, "60"], input=sent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and said in done.stderr and bool(done.stderr) == bool(said)


def test_a_process_that_gives_no_sign_of_life_is_ended():
    """Not before its first one, and not while they come."""
    code = """
import subprocess, sys, time
last = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
time.sleep(1.3)
for _ in range(11):
    last.stdin.write(b"host a, pid 7\\n")
    last.stdin.flush()
    time.sleep(0.12)
print("alive", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code, *REPORTER, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "alive\n")
    ending, report = done.stderr.splitlines()
    assert ending == "error: process 0 of 4 gave no sign of life for 1 s: ending it"
    assert report.startswith("error: process 0 of 4 broke off")


# ------------------------------------------------------------------------------------------------
# Real processes
# ------------------------------------------------------------------------------------------------

CONFIG = """
from dapo_jax import config
def get_config():
    c = config.base()
    c.eval.every, c.eval.k, c.eval.max_problems, c.data.embedded_problems = 0, 2, 8, 64
    c.eval.top_p, c.model.num_layers = 1.0, 1
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 4, 4, 2
    c.rollout.slots, c.rollout.prefill_prompts, c.rollout.max_response_tokens = 16, 4, 16
    c.reward.overlong_buffer_tokens, c.log.tensorboard = 4, False
    c.checkpoint.every, c.checkpoint.keep, c.supervised_warmup.skill_steps = 1, 10, 1
    return c
"""


class Group:
    """Starts the processes of runs in a folder of the test."""

    def __init__(self, shell: typed.Shell, folder: pathlib.Path):
        self.shell, self.folder = shell, folder
        (folder / "config.py").write_text(CONFIG)

    def start(
        self, workdir, count, index, port, *extra, devices=1, program=("stubbed_train.py",), **env
    ) -> typed.Process:
        """Process `index` of `count`."""
        defaults = {
            "XLA_FLAGS": f"{typed.SOON} --xla_force_host_platform_device_count={devices}",
            "NPROC": "16",  # as in conftest.py: a thread pool that does not run dry
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "xla"),  # this session's
        }
        return self.shell.start(
            ROOT / "tests" / program[0], *program[1:],
            f"--config={self.folder}/config.py", f"--workdir={workdir}",
            f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={index}",
            *extra, logs=[self.folder / f"said_{uuid.uuid4().hex}.txt"] * 2, env=defaults | env,
        )  # fmt: skip

    def all(self, workdir, count, *extra, port=0, **how) -> list[typed.Process]:
        port = port or free_port()
        return [self.start(workdir, count, i, port, *extra, **how) for i in range(count)]

    def run(self, workdir, count, *extra, **how) -> list[str]:
        """What each has said, of a run to its end."""
        return said(self.all(workdir, count, *extra, **how))

    def at_work(self, *extra, step=1) -> tuple[pathlib.Path, int, list[typed.Process]]:
        """(workdir, port, two processes in the middle of an endless run)."""
        workdir, port = self.folder / "run", free_port()
        endless = ("--config.steps=100000", "--config.checkpoint.every=0", *extra)
        running = self.all(workdir, 2, *endless, port=port)
        wait_for_step(workdir, step, running)
        return workdir, port, running


@pytest.fixture
def group(shell, tmp_path) -> Group:
    return Group(shell, tmp_path)


def finish(running: list[typed.Process], seconds=900) -> list[tuple[int, str]]:
    """(exit status, output) of each; none outlives the test."""
    try:
        texts = [p.communicate(timeout=seconds)[0] for p in running]
    finally:
        for p in running:
            p.kill()
    return [(p.returncode, text) for p, text in zip(running, texts, strict=True)]


def said(running: list[typed.Process], status=0, seconds=900) -> list[str]:
    """The output of each, which all end with this exit status."""
    done = finish(running, seconds)
    assert [s for s, _ in done] == [status] * len(running), shown(done)
    return [text for _, text in done]


def shown(done: list[tuple[int, str]]) -> str:
    return "".join(f"\n=== exit status {status}\n{text[-3000:]}" for status, text in done)


def steps_done(workdir) -> int:
    return len(metrics.read(workdir / "metrics.jsonl")) - 1


def wait_for_step(workdir, step: int, running):
    while steps_done(workdir) < step:
        assert [p.poll() for p in running] == [None, None], shown(finish(running))
        time.sleep(0.02)


def drawn(workdir, process: int) -> list[dict]:
    """What it drew in each step."""
    rows = (workdir / f"drawn_{process}.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def params(workdir, step):
    c = config.base()
    c.model.num_layers = 1  # as in CONFIG
    like = qwen2.abstract(qwen2.shape_from_config(c))
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), like)
    return checkpoint.restore_params(workdir / "checkpoints", like, here, step)


def numbers(workdir) -> list[dict]:
    """Of metrics.jsonl, what a restart within a step does not change."""
    clocks, rows = ("time/", "perf/", "sampling/evicted"), metrics.read(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]


BESIDE = "data.embedded_problems=8 curriculum.pass_rate_cap=0.5 curriculum.revisit_epochs=1"
BESIDE += " critic.enabled=True critic.pretrain_steps=1 critic.lr=1e-3"
BESIDE = [f"--config.{field}" for field in BESIDE.split()]


@pytest.mark.slow
def test_two_then_four_processes_do_what_one_does(group, tmp_path):
    """The whole loop: warm-up, rollouts by a curriculum, updates, evaluation, save; and a resume of
    what two processes of two devices each left by four processes of one."""
    one, many = tmp_path / "one", tmp_path / "many"
    group.run(one, 1, "--config.steps=3", *BESIDE)
    group.run(many, 2, "--config.steps=2", "--config.mesh.tensor=2", *BESIDE, devices=2)
    first, *others = group.run(many, 4, "--config.steps=3", "--config.mesh.fsdp=4", *BESIDE)
    assert "resumed after step 2" in first and "done: 3 steps" in first
    assert not any("done" in text or "start" in text for text in others)

    reference = drawn(one, 0)
    assert drawn(many, 0) == drawn(many, 1) == reference
    assert drawn(many, 2) == drawn(many, 3) == reference[2:]
    for a, b in zip(*(metrics.read(w / "metrics.jsonl") for w in (one, many)), strict=True):
        same = ("step", "reward", "sampling", "curriculum")
        exact = {k: v for k, v in a.items() if k.split("/")[0] in same}
        assert exact.items() <= b.items()
        scores = {k: v for k, v in a.items() if k.startswith("eval/") and a["step"] in (0, 3)}
        assert a["step"] not in (0, 3) or len(scores) == 10
        assert scores.items() <= b.items()
        of = lambda r: [v for k, v in r.items() if k.startswith("critic/")]
        assert (a["step"] == 0) == (of(a) == []) and of(a) == pytest.approx(of(b), abs=1e-3)
    assert (one / "config.json").is_file() and (many / "config.json").is_file()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params(one, 3), params(many, 3)
    )


@pytest.mark.slow
def test_sigterm_to_one_process_ends_both_and_the_same_bits_come_out(group, tmp_path):
    """Then both are killed. What was drawn since the last checkpoint is read back, on both."""
    length = ("--config.steps=20", "--config.checkpoint.every=0")
    group.run(tmp_path / "whole", 2, *length)
    workdir = tmp_path / "run"
    for asked, step in ((1, 2), (0, 5), (None, 8)):
        endless = ["--config.steps=100000"] * (asked is None)
        running = group.all(workdir, 2, *length, *endless)
        wait_for_step(workdir, step, running)
        if asked is None:
            there = set((workdir / "journal").glob("*"))
            while not set((workdir / "journal").glob("*")) - there:
                assert running[0].poll() is None
            for process in running:
                process.kill()
            finish(running)
            continue
        running[asked].send_signal(signal.SIGTERM)
        began = time.monotonic()
        first, _ = said(running, seconds=120)
        assert time.monotonic() - began < 60  # 10, on a machine with a core for each
        assert "; the same command " in first and "terminated " in first
    first, _ = group.run(workdir, 2, *length)
    assert re.search(r"step \d+: \d+ responses or grades are there already", first)
    assert numbers(workdir) == numbers(tmp_path / "whole")
    a, b = params(workdir, 20), params(tmp_path / "whole", 20)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)


KILLED = -signal.SIGKILL
COORDINATOR = "the coordinator 127.0.0.1:"
SILENT = "error: process {} of 2 gave no sign of life for 15 s"
# What happens to one of two: (signal, to whom; the limit of silence in s; the other's status, None:
# any but 0; what its last line says). JAX ends those who have lost the coordinator, at once and
# with a stack trace; the last line is ours.
GONE = [
    (signal.SIGKILL, 1, 10, 75, "error: process 1 of 2 (host "),
    (signal.SIGKILL, 0, 10, None, COORDINATOR),
    (signal.SIGSTOP, 1, 5, 75, "error: process 1 of 2 (host "),
    (signal.SIGSTOP, 0, 5, None, COORDINATOR),
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to", "limit_s", "status", "word"), GONE)
def test_a_process_that_is_gone_is_named_by_the_other_that_ends(
    number, to, limit_s, status, word, group
):
    """One that is stopped is ended itself. Of process 0 nobody hears that it is silent: all wait
    for its answer, and their own signs of life with them; both have been silent for as long, so
    which one is ended first is chance."""
    _, _, running = group.at_work(f"--heartbeat_timeout={limit_s}")
    running[to].send_signal(number)
    began = time.monotonic()
    done = finish(running, 120)
    assert time.monotonic() - began < 80  # without the flag it takes 100 s
    (mine, said), (other, told) = done[to], done[1 - to]
    assert mine == KILLED, shown(done)
    assert number == signal.SIGKILL or SILENT.format(to) in said
    too = (number, to) == (signal.SIGSTOP, 0) and other == KILLED and SILENT.format(1) in told
    last = told.strip().splitlines()[-1]
    named = word in (last if number == signal.SIGKILL else told)
    right = other == status if status else other not in (0, KILLED)
    assert too or (named and right), shown(done)
    if number == signal.SIGKILL:
        assert last.startswith(f"error: process {to} of 2 (host "), shown(done)
        assert "goes on from the last checkpoint" in last


@pytest.mark.slow
def test_a_pause_within_the_limit_and_a_second_process_of_a_number_do_no_harm(group):
    """The second one ends itself alone."""
    workdir, port, running = group.at_work("--heartbeat_timeout=20")
    socket.create_server(("127.0.0.2", port)).close()  # on all interfaces it would be in use
    running[1].send_signal(signal.SIGSTOP)
    time.sleep(12)
    running[1].send_signal(signal.SIGCONT)
    for index in (1, 0):
        (text,) = said([group.start(workdir, 2, index, port)], 1)
        assert f"error: --process_id={index}: this machine has that process" in text
        assert f"(process {running[index].pid} on " in text and "Traceback" not in text
    wait_for_step(workdir, steps_done(workdir) + 3, running)
    running[0].send_signal(signal.SIGTERM)
    assert not any("silent" in text for text in said(running, seconds=120))


@pytest.mark.slow
def test_a_coordinator_that_is_not_there(group, tmp_path):
    alone = group.start(tmp_path / "run", 2, 1, free_port(), "--start_timeout=5")
    (text,) = said([alone], 1, 200)
    last = text.strip().splitlines()[-1]
    assert last.startswith("error: process 1: no answer from the coordinator 127.0.0.1:")
    assert "firewall" in last


@pytest.mark.slow
def test_another_config_is_refused_by_name(group, tmp_path):
    port, other = free_port(), "--config.optim.lr=0.5"
    running = [group.start(tmp_path / "run", 2, i, port, *[other] * i) for i in range(2)]
    for text in said(running, 1):
        assert "error: config.optim.lr is 0.5 in process 1 and 0.0003 in process 0" in text
    assert not (tmp_path / "run").exists()


HANGS = ("--config.guard.hang_floor_s=2", "--config.guard.hang_end_s=6")
# What goes wrong on process 1 (faulty_train.py): flags, the status of both, what each says. With a
# hang all stacks are shown, long before anybody is silent: a thread of each goes on beating. Of two
# hosts that differ, the first one counts as the rest.
FLIPPED = r"error: the round from problem .*on: process 1 \("
WRONG = {
    "hang": (HANGS, 75, "a hang: '|has left with status 75", "in stands_still"),
    "break": ((), 1, "has left with status 1: no more of this", r"error: no more of this\s*\Z"),
    "flip": ((), 1, FLIPPED, FLIPPED),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
def test_what_goes_wrong_on_one_ends_both_with_its_words(fault, group, tmp_path):
    flags, status, *words = WRONG[fault]
    endless = ("--config.steps=100000", "--heartbeat_timeout=20", *flags)
    program = ("faulty_train.py", fault)
    texts = said(group.all(tmp_path / "run", 2, *endless, program=program), status)
    for word, text in zip(words, texts, strict=True):
        assert re.search(word, text, re.S), text
    assert any("a hang: '" in t and "all stacks" in t for t in texts) == (fault == "hang")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "step"), [("away", 2), ("half", 1)])
def test_all_restore_the_step_that_all_can_read(fault, step, group, tmp_path):
    """What one process cannot read at first it reads later; what is bad for one is for all."""
    group.run(tmp_path / "run", 2, "--config.steps=2")
    program = ("faulty_train.py", fault)
    first, second = group.run(tmp_path / "run", 2, "--config.steps=3", program=program)
    assert f"resumed after step {step}" in first and "done: 3 steps" in first
    away, half = fault == "away", fault == "half"
    assert ("warning: process 1: " in second and "again in 2 s" in second) == away
    assert (tmp_path / "run" / "checkpoints.damaged" / "2").exists() == half
    wrong = "warning: checkpoint of step 2 is damaged: process 1: arrays cannot be read: ValueError"
    assert (wrong in first) == half
