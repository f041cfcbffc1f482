"""Killed at random moments and started again, a run ends with the same bits.

launch/test.sh -m slow tests/faults --kills=300 --kill_seed=7
"""

import collections
import random
import time
from typing import NamedTuple

import harness
import pytest
from server import PHASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # as many kills as --kills says

# (processes, devices of each); the mesh takes them all.
HERE = ((1, 1),)
PLACES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))


class Case(NamedTuple):
    fields: tuple[str, ...]  # of the config
    share: int = 3  # of --kills, one in so many
    places: tuple = HERE  # another at each start: what two processes have parked goes on in four


# Responses of up to eight ticks, which outlive steps.
STALE = ("loss.importance_cap=5", "rollout.chunk=4", "rollout.max_response_tokens=32")
TWO = (*STALE, "rollout.staleness=2")
# Two models, the second alone in the first steps.
VALUES = ("critic.enabled=True", "critic.pretrain_steps=4", "critic.lr=1e-3")
CASES = {
    "plain": Case((), 1),
    "staleness 1": Case((*STALE, "rollout.staleness=1")),
    "staleness 2": Case(TWO),
    "values": Case((*VALUES, "loss.positive_coef=0.1")),
    "staleness 2 elsewhere": Case((*TWO, "mesh.fsdp=-1"), 5, PLACES),
}

# Seconds from the beginning of each phase to about its end: the kill comes within them.
LENGTH = dict(zip(PHASES, (1.0, 0.03, 0.02, 0.03, 0.05, 0.01), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_killed_at_random_moments_ends_with_the_same_bits(name, whole, server, tmp_path, request):
    """One chain after the other: kill, start again, kill ... until the run reaches its end."""
    fields, share, places = CASES[name]
    flags = [f"--config.{field}" for field in fields]
    if flags:
        whole = tmp_path / "whole"
        server.run(whole, *flags)
    kills = request.config.getoption("--kills") // share
    seed = request.config.getoption("--kill_seed")
    print(f"\n--kill_seed={seed}")
    rng, killed, resumed = random.Random(seed), collections.Counter(), collections.Counter()
    moments, turns, chains = [], [], 0
    while killed.total() < kills:
        chains += 1
        workdir, code = tmp_path / f"chain_{chains}", None
        while code != 0:
            moments = moments or rng.sample(PHASES, len(PHASES))  # each of them equally often
            turns = turns or rng.sample(places, len(places))
            phase, place = moments.pop(), turns.pop()
            processes, devices = place
            run = server.start_all(workdir, processes, *flags, devices=devices)
            reached = run[0].wait_for(phase, 1 if phase == "start-up" else rng.randint(1, 3))
            if reached and killed.total() < kills:
                time.sleep(rng.uniform(0, LENGTH[phase]))
                for process in run:
                    process.kill()
            codes = [process.wait() for process in run]
            code = codes[0] if any(codes) else 0
            assert code in (0, -9), f"--kill_seed={seed} {place}\n{run[0].said()}"
            if code:
                killed[phase, place] += 1
                resumed["resumed" in run[0].said()] += 1
            # Else it ended before the signal came: no moment.
        if places == HERE:
            harness.assert_same_run(whole, workdir)
        else:
            harness.assert_same_run_elsewhere(whole, workdir)
    print(f"{killed.total()} kills in {chains} chains: {dict(killed)}")
    assert killed.total() >= kills
    assert len({place for _, place in killed}) == min(len(places), kills)
    if kills >= 30:
        assert {phase for phase, _ in killed} == {*PHASES} and resumed[True] > kills // 4
