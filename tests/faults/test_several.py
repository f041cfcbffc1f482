"""Several processes as one run: they meet over loopback, come to one result, and end together."""

import json
import re
import shutil
import signal
import socket
import time

import harness
import jax
import numpy as np
import pytest
from harness import meet
from ports import free_port
from test_start import hub  # noqa: F401  # the fixture

from dapo_jax.log import metrics

pytestmark = pytest.mark.slow

FIELDS = "eval.every=0 eval.top_p=1.0 checkpoint.every=1 checkpoint.keep=10 log.tensorboard=False"
SHORT = [f"--config.{field}" for field in FIELDS.split()]


def said(running: list[harness.Run], status: int = 0, seconds: float = 900) -> list[str]:
    """The output of each, which all end with this exit status."""
    done = finish(running, seconds)
    assert [s for s, _ in done] == [status] * len(running), shown(done)
    return [text for _, text in done]


def finish(running: list[harness.Run], seconds: float = 900) -> list[tuple[int, str]]:
    """(exit status, output) of each; none outlives the test."""
    try:
        texts = [p.communicate(timeout=seconds)[0] for p in running]
    finally:
        for p in running:
            p.kill()
    return [(p.returncode, text) for p, text in zip(running, texts, strict=True)]


def shown(done: list[tuple[int, str]]) -> str:
    return "".join(f"\n=== exit status {status}\n{text[-3000:]}" for status, text in done)


@pytest.fixture
def run(server, tmp_path):
    """`run(name, count, *flags, ...)`: what each process has said, of a run to its end."""
    return lambda name, count, *flags, **how: said(
        server.start_all(tmp_path / name, count, *SHORT, *flags, **how)
    )


@pytest.fixture
def at_work(server, tmp_path):
    """`at_work(*flags)`: (port, two processes in the middle of an endless run in tmp_path/run)."""

    def start(*flags):
        port, endless = free_port(), ("--config.steps=1000000", "--config.checkpoint.every=0")
        running = server.start_all(tmp_path / "run", 2, *SHORT, *endless, *flags, port=port)
        for process in running:
            assert process.wait_for("rollout", 2), shown(finish(running))
        return port, running

    return start


BESIDE = "data.embedded_problems=8 curriculum.pass_rate_cap=0.5 curriculum.revisit_epochs=1"
BESIDE += " critic.enabled=True critic.pretrain_steps=1 critic.lr=1e-3"
BESIDE += " supervised_warmup.skill_steps=1 dynamic_sampling.surplus=end rollout.chunk=2"
BESIDE = [f"--config.{field}" for field in BESIDE.split()]  # its last round ends four rows early


def test_two_then_four_processes_do_what_one_does(run, tmp_path):
    """The whole loop: warm-up, rollouts by a curriculum, updates, evaluation, save; and a resume of
    what two processes of two devices each left by four processes of one."""
    one, many = tmp_path / "one", tmp_path / "many"
    run("one", 1, "--config.steps=3", *BESIDE)
    run("many", 2, "--config.steps=2", "--config.mesh.tensor=2", *BESIDE, devices=2)
    first, *others = run("many", 4, "--config.steps=3", "--config.mesh.fsdp=4", *BESIDE)
    assert "resumed after step 2" in first and "done: 3 steps" in first
    assert not any("done" in text or "start" in text for text in others)
    (many / "eval" / "step_000002.jsonl").unlink()  # it was a last step there alone
    # That the hosts of a run agree in each round, the run checks itself.
    harness.assert_same_run_elsewhere(one, many, atol=1e-5)
    for a, b in zip(*(metrics.read(w / "metrics.jsonl") for w in (one, many)), strict=True):
        same = ("step", "reward", "sampling", "curriculum")
        exact = {k: v for k, v in a.items() if k.split("/")[0] in same}
        assert exact.items() <= b.items()
        scores = {k: v for k, v in a.items() if k.startswith("eval/") and a["step"] in (0, 3)}
        assert a["step"] not in (0, 3) or len(scores) == 10
        assert scores.items() <= b.items()
        of = lambda r: [v for k, v in r.items() if k.startswith("critic/")]
        assert (a["step"] == 0) == (of(a) == []) and of(a) == pytest.approx(of(b), abs=1e-3)


def test_sigterm_to_one_process_ends_both_and_the_same_bits_come_out(run, server, tmp_path):
    """Then both are killed. What was drawn since the last checkpoint is read back, on both. To
    process 0: below, behind a pause."""
    length = ("--config.steps=12", "--config.checkpoint.every=0")
    run("whole", 2, *length)
    workdir = tmp_path / "run"
    for asked in (1, None):
        running = server.start_all(workdir, 2, *SHORT, *length, faults=["eager"])
        assert running[0].wait_for("update", 3)
        if asked is None:
            for process in running:
                process.kill()
            finish(running)
            continue
        running[asked].send_signal(signal.SIGTERM)
        began = time.monotonic()
        first, _ = said(running, seconds=120)
        assert time.monotonic() - began < 60  # 10, on a machine with a core for each
        assert "; the same command " in first and "terminated " in first
    first, _ = run("run", 2, *length)
    assert re.search(r"step \d+: \d+ responses or grades are there already", first)
    assert harness.records(workdir) == harness.records(tmp_path / "whole")
    a, b = harness.weights(workdir, 12), harness.weights(tmp_path / "whole", 12)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_replies_in_several_processes(run, server, tmp_path):
    """Who is asked answers otherwise at each call. Two processes are killed while they sample, four
    go on to the end. Given the same replies, two that are left alone come to the same bits."""
    log, flags = tmp_path / "replies", [f"--config.{field}" for field in harness.TURNS]
    flags += ["--config.steps=5", "--config.checkpoint.every=5", "--config.mesh.fsdp=4"]
    how = dict(devices=2, faults=[f"talks={log}"])
    running = server.start_all(tmp_path / "many", 2, *SHORT, *flags, **how)
    assert running[0].wait_for("rollout", 3) and running[0].wait_for("chunk", 2)
    for process in running:
        process.kill()
    finish(running)
    before = harness.replies(log)
    first, *_ = run("many", 4, *flags, faults=[f"talks={log}"])
    assert re.search(r"step \d+: \d+ responses or grades are there already", first)
    said = harness.replies(log)
    harness.assert_asked_once(said)
    assert len(said.kept) > len(before.kept) + 20 > 40
    assert said.awaited <= 1 and len(said.asked) - len(said.kept) <= 16  # rows of a chunk
    run("two", 2, *flags, devices=2, faults=[f"told={log}"])
    harness.assert_same_run(tmp_path / "two", tmp_path / "many", arrays=False)


KILLED = -signal.SIGKILL
NAMED = "error: process {} of 2 (host "
COORDINATOR = "the coordinator 127.0.0.1:"


@pytest.mark.parametrize("to", [0, 1])
def test_a_process_that_is_killed_is_named_by_the_other_that_ends(to, at_work):
    """JAX ends those who have lost the coordinator, process 0, at once and with a stack trace; the
    last line is ours."""
    _, running = at_work("--heartbeat_timeout=10")
    running[to].kill()
    began = time.monotonic()
    done = finish(running, 120)
    assert time.monotonic() - began < 80  # without the flag it takes 100 s
    (mine, _), (other, told) = done[to], done[1 - to]
    assert mine == KILLED and (other == 75 if to == 1 else other not in (0, KILLED)), shown(done)
    last = told.strip().splitlines()[-1]
    assert last.startswith(NAMED.format(to)) and "goes on from the last checkpoint" in last
    assert (COORDINATOR in last) == (to == 0)


@pytest.mark.parametrize("to", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_process_that_is_stopped_is_ended_and_named(to, at_work):
    """Nobody hears that process 0 is silent: all wait for its answer, and their own signs of life
    with them; both have been silent for as long, so which one is ended first is chance."""
    _, running = at_work("--heartbeat_timeout=5")
    running[to].send_signal(signal.SIGSTOP)
    done = finish(running, 80)  # without the flag it takes 100 s
    (mine, said), (other, told) = done[to], done[1 - to]
    silent = "error: process {} of 2 gave no sign of life for 15 s"
    assert mine == KILLED and silent.format(to) in said, shown(done)
    if to == 1:
        assert other == 75 and NAMED.format(1) in told, shown(done)
    elif other == KILLED:
        assert silent.format(1) in told, shown(done)
    else:
        assert other != 0 and COORDINATOR in told, shown(done)


def test_a_pause_within_the_limit_and_a_second_process_of_a_number_do_no_harm(
    at_work, server, tmp_path
):
    """The second one ends itself alone."""
    port, running = at_work("--heartbeat_timeout=20")
    socket.create_server(("127.0.0.2", port)).close()  # on all interfaces it would be in use
    running[1].send_signal(signal.SIGSTOP)
    time.sleep(12)
    running[1].send_signal(signal.SIGCONT)
    for index in (1, 0):
        (text,) = said([server.start(tmp_path / "run", *SHORT, *meet(port, 2, index))], 1)
        assert f"error: --process_id={index}: this machine has that process" in text
        assert f"(process {running[index].pid} on " in text and "Traceback" not in text
    assert all(process.wait_for("rollout", 3) for process in running)
    running[0].send_signal(signal.SIGTERM)
    assert not any("silent" in text for text in said(running, seconds=120))


def test_a_coordinator_that_is_not_there(server, tmp_path):
    flags = (*meet(free_port(), 2, 1), "--start_timeout=5")
    (text,) = said([server.start(tmp_path / "run", *flags)], 1, 200)
    last = text.strip().splitlines()[-1]
    assert last.startswith("error: process 1: no answer from the coordinator 127.0.0.1:")
    assert "firewall" in last


def test_another_config_is_refused_by_name(server, tmp_path):
    port, other = free_port(), "--config.optim.lr=0.5"
    flags = ([*meet(port, 2, i), *[other] * i] for i in range(2))
    for text in said([server.start(tmp_path / "run", *f) for f in flags], 1):
        assert "error: config.optim.lr is 0.5 in process 1 and 0.0003 in process 0" in text
    assert not (tmp_path / "run").exists()


HANGS = ("--config.guard.hang_floor_s=2", "--config.guard.hang_end_s=6")
# What goes wrong on process 1 (server.py): flags, the status of both, what each says. With a hang
# all stacks are shown, long before anybody is silent: a thread of each goes on beating. Of two
# hosts that differ, the first one counts as the rest.
FLIPPED = r"error: the round from problem .*on: process 1 \("
WRONG = {
    "hang": (HANGS, 75, "a hang: '|has left with status 75", "in stands_still"),
    "break": ((), 1, "has left with status 1: no more of this", r"error: no more of this\s*\Z"),
    "flip": ((), 1, FLIPPED, FLIPPED),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_goes_wrong_on_one_ends_both_with_its_words(fault, server, tmp_path):
    flags, status, *words = WRONG[fault]
    endless = ("--config.steps=1000000", "--heartbeat_timeout=20", *flags)
    running = server.start_all(tmp_path / "run", 2, *SHORT, *endless, faults=[fault])
    texts = said(running, status)
    for word, text in zip(words, texts, strict=True):
        assert re.search(word, text, re.S), text
    assert any("a hang: '" in t and "all stacks" in t for t in texts) == (fault == "hang")


def test_all_restore_the_step_that_all_can_read(run, tmp_path):
    """What one process cannot read at first it reads later; what is bad for one is for all."""
    run("2", 2, "--config.steps=2")
    shutil.copytree(tmp_path / "2", tmp_path / "1")
    for fault, step in ("unreadable", 2), ("unreadable=2", 1):
        first, second = run(str(step), 2, "--config.steps=3", faults=[fault])
        assert f"resumed after step {step}" in first and "done: 3 steps" in first
        assert ("warning: process 1: " in second and "again in 2 s" in second) == (step == 2)
        assert (tmp_path / str(step) / "checkpoints.damaged" / "2").exists() == (step == 1)
        wrong = "checkpoint of step 2 is damaged: process 1: arrays cannot be read: DATA_LOSS"
        assert (f"warning: {wrong}" in first) == (step == 1)


# --- What a start costs ---


@pytest.fixture
def counted(run, hub, tmp_path):  # noqa: F811
    """`counted(count, *flags, ...)`: (what a start has cost each process, what they said)."""
    fields = "model.path=org/tiny mesh.fsdp=-1 optim.minibatches=2"

    def start(count, *flags, **how) -> tuple[list[dict], list[str]]:
        flags = (*(f"--config.{field}" for field in fields.split()), *flags)
        told = run("run", count, *flags, faults=[f"counted={hub}"], **how)
        files = [tmp_path / "run" / f"counts_{i}.json" for i in range(count)]
        return [json.loads(f.read_text()) for f in files], told

    return start


@pytest.fixture
def sizes(hub) -> tuple[int, int]:  # noqa: F811
    """Bytes of the model's weights, and of the other files."""
    bytes_of = {p.name: p.stat().st_size for p in (hub / "org/tiny").iterdir()}
    return bytes_of.pop("model.safetensors"), sum(bytes_of.values())


def test_four_processes_read_the_weights_once_and_compile_each_program_once(
    counted, sizes, tmp_path
):
    none = dict(hub_calls=0, hub_bytes=0, weight_bytes=0, programs_compiled=0)
    (first, *others), _ = counted(4, "--config.steps=1")
    assert (first["hub_calls"], first["hub_bytes"]) == (1, sum(sizes))
    assert sizes[0] - 10_000 < first["weight_bytes"] < sizes[0]  # the file's header aside
    assert first["programs_compiled"] > 20 and others == [none] * 3

    (first, *others), said = counted(4, "--config.steps=2")
    assert "resumed after step 1" in said[0]
    assert first | {"programs_compiled": 0} == none and others == [none] * 3
    records = metrics.read(tmp_path / "run" / "metrics.jsonl")
    told = [r.get("time/first_token_s", 0.0) > 0 for r in records]
    assert told == [True, False, True]  # step 0's evaluation, and the step after the restart


@pytest.mark.parametrize("given", [(), ("--checkpoint=org/tiny",)], ids=["of config", "given"])
def test_an_evaluation_reads_the_weights_once_for_all_processes(counted, sizes, given):
    (first, second), said = counted(2, *given, module="evaluate")
    # Of a given one, the small files for the config's own model are fetched apart.
    assert first["hub_calls"] == 1 + len(given)
    assert first["hub_bytes"] == sum(sizes) + sizes[1] * len(given)
    costs = ("hub_calls", "hub_bytes", "weight_bytes")
    assert first["weight_bytes"] > 0 and [second[cost] for cost in costs] == [0, 0, 0]
    assert "heldout: 8 problems x 2 samples" in said[0]
