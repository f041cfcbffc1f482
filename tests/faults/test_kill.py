"""Killed at random moments and started again, a run ends with the same bits.

launch/test.sh -m slow tests/faults --kills=300 --kill_seed=7
"""

import collections
import random
import time

import harness
import pytest
from ports import free_port
from server import PHASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # as many kills as --kills says

# Responses of up to eight ticks, which outlive steps.
STALE = ["--config.loss.importance_cap=5", "--config.rollout.chunk=4"]
STALE += ["--config.rollout.max_response_tokens=32"]
# Two models, the second alone in the first steps.
VALUES = ["--config.critic.enabled=True", "--config.critic.pretrain_steps=4"]
VALUES += ["--config.critic.lr=1e-3", "--config.loss.positive_coef=0.1"]
FLAGS = {
    "plain": [],
    "staleness 1": [*STALE, "--config.rollout.staleness=1"],
    "staleness 2": [*STALE, "--config.rollout.staleness=2"],
    "values": VALUES,
}

# Seconds from the beginning of a phase to about its end: the kill comes within them.
LENGTH = {
    "start-up": 1.0,
    "rollout": 0.03,
    "update": 0.02,
    "evaluation": 0.03,
    "save": 0.05,
    "commit": 0.01,
}


@pytest.mark.parametrize("name", FLAGS)
def test_killed_at_random_moments_ends_with_the_same_bits(name, whole, server, tmp_path, request):
    """One chain after the other: kill, start again, kill ... until the run reaches its end."""
    flags = FLAGS[name]
    if flags:
        whole = tmp_path / "whole"
        server.run(whole, *flags)
    kills = request.config.getoption("--kills") // (3 if flags else 1)
    seed = request.config.getoption("--kill_seed")
    print(f"\n--kill_seed={seed}")
    rng, killed, resumed = random.Random(seed), collections.Counter(), collections.Counter()
    plan, chains = [], 0
    while killed.total() < kills:
        chains += 1
        workdir = tmp_path / f"chain_{chains}"
        while True:
            plan = plan or rng.sample(PHASES, len(PHASES))  # each of them equally often
            phase = plan.pop()
            run = server.start(workdir, *flags)
            reached = run.wait_for(phase, 1 if phase == "start-up" else rng.randint(1, 3))
            if reached and killed.total() < kills:
                time.sleep(rng.uniform(0, LENGTH[phase]))
                run.kill()
                if run.wait() == -9:
                    killed[phase] += 1
                    resumed["resumed" in run.said()] += 1
                    continue
                # It ended before the signal came: no moment.
            code = run.wait()
            assert code == 0, f"--kill_seed={seed}\n{run.said()}"
            break
        harness.assert_same_run(whole, workdir)
    print(f"{killed.total()} kills in {chains} chains: {dict(killed)}")
    assert killed.total() >= kills
    if kills >= 30:
        assert set(killed) == set(PHASES) and resumed[True] > kills // 4


# (processes, devices of each); the mesh takes them all.
PLACES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))


def begin(server, workdir, place, *flags) -> list:
    """The processes of a run, process 0 first."""
    processes, devices = place
    if processes == 1:
        return [server.start(workdir, *flags, devices=devices)]
    at = f"--coordinator=127.0.0.1:{free_port()}"
    each = (f"--process_id={i}" for i in range(processes))
    many = (at, f"--num_processes={processes}")
    return [server.start(workdir, *flags, *many, i, devices=devices) for i in each]


def test_killed_it_goes_on_on_other_devices_and_processes(server, tmp_path, request):
    """Elsewhere at each start: what was parked by two processes goes on in four, or in one."""
    flags = [*STALE, "--config.rollout.staleness=2", "--config.mesh.fsdp=-1"]
    server.run(tmp_path / "whole", *flags)
    kills, seed = request.config.getoption("--kills") // 5, request.config.getoption("--kill_seed")
    print(f"\n--kill_seed={seed}")
    rng, killed, chains = random.Random(seed), collections.Counter(), 0
    phases, places = [], []
    while killed.total() < kills:
        chains += 1
        workdir, code = tmp_path / f"chain_{chains}", None
        while code != 0:
            phases = phases or rng.sample(PHASES, len(PHASES))  # each of them equally often
            places = places or rng.sample(PLACES, len(PLACES))
            phase, place = phases.pop(), places.pop()
            run = begin(server, workdir, place, *flags)
            reached = run[0].wait_for(phase, 1 if phase == "start-up" else rng.randint(1, 3))
            if reached and killed.total() < kills:
                time.sleep(rng.uniform(0, LENGTH[phase]))
                for process in run:
                    process.kill()
            codes = [process.wait() for process in run]
            code = 0 if not any(codes) else codes[0]
            killed += collections.Counter({place: code == -9})  # keeps no zeros
            assert code in (0, -9), f"--kill_seed={seed} {place}\n{run[0].said()}"
        harness.assert_same_run_elsewhere(tmp_path / "whole", workdir)
    print(f"{killed.total()} kills in {chains} chains, by processes x devices: {dict(killed)}")
    assert len(killed) == min(len(PLACES), kills)
