"""Asked to leave at any moment, a run is gone in time, and ends with the same bits."""

import collections
import random
import signal
import time

import harness
import pytest
from server import PHASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # as many moments as --kills says

LIMIT_S = 15.0  # that a pod on GKE has; on an idle machine 8.5 are enough
AT_WORK = PHASES[1:]  # before, a run has nothing to keep and SIGTERM ends it at once


def test_asked_to_leave_at_random_moments(whole, server, tmp_path, request):
    """Every third time it is killed instead. What was finished is not drawn again. Whoever cannot
    listen: tests/test_leaving.py."""
    moments, seed = request.config.getoption("--kills"), request.config.getoption("--kill_seed")
    print(f"\n--kill_seed={seed}")
    rng, left, longest, kept, chains = random.Random(seed), collections.Counter(), 0.0, 0, 0
    while left.total() < moments:
        chains += 1
        workdir, ended = tmp_path / f"chain_{chains}", False
        while not ended:
            run = server.start(workdir, "--terminated_status=75", faults=["eager"])
            phase = rng.choice(AT_WORK)
            if run.wait_for(phase, rng.randint(1, 3)) and left.total() < moments:
                time.sleep(rng.uniform(0, 0.05))
                number = signal.SIGKILL if rng.random() < 1 / 3 else signal.SIGTERM
                asked = time.monotonic()
                run.send_signal(number)
                code = run.wait()
                # At its end before the signal came: between its last event and its exit.
                events = (workdir / "events.jsonl").read_text()
                ended = code == 0 or '"leave", "finished": true' in events
                if not ended:
                    assert code == (75 if number == signal.SIGTERM else -9), run.said()
                    left[phase, number.name] += 1
                    longest = max(longest, time.monotonic() - asked)
            else:
                assert run.wait() == 0, f"--kill_seed={seed}\n{run.said()}"
                ended = True
            kept += run.said().count(" are there already")
        harness.assert_same_run(whole, workdir)
    print(f"{left.total()} moments in {chains} chains: {dict(left)}; {kept} policies read back")
    print(f"SIGTERM to exit: at most {longest:.1f} s")
    assert longest < LIMIT_S
    if moments >= 30:
        assert {p for p, _ in left} == set(AT_WORK) and kept > moments // 4
