"""Killed at random moments and started again, a run ends with the same bits.

launch/test.sh -m slow tests/faults --kills=300 --kill_seed=7
"""

import collections
import random
import time
from pathlib import Path

import harness
import pytest
from server import PHASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # as many kills as --kills says

# (processes, devices of each); the mesh takes them all.
HERE = ((1, 1),)
PLACES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
PARTS = {  # what a run may have beside the plain algorithm: each is drawn with probability 1/2
    # Two models, the second alone in the first steps.
    "values": ("critic.enabled=True", "critic.pretrain_steps=4", "critic.lr=1e-3"),
    # Responses of up to eight ticks, which outlive steps.
    "staleness": (
        "loss.importance_cap=5", "rollout.chunk=4", "rollout.max_response_tokens=32",
        "rollout.staleness=2",
    ),
    "adapters": ("model.lora.rank=2", "optim.lr=1e-2"),
    "curriculum": (
        "curriculum.pass_rate_cap=0.5", "curriculum.revisit_epochs=1", "data.embedded_problems=16",
        "dynamic_sampling.surplus=drop",
    ),
    "positives": ("loss.positive_coef=0.1",),
    "pages": ("rollout.page_tokens=8",),  # several a row, where else it has one
    "drafts": ("rollout.draft_tokens=4",),  # by idle slots, whose bits are those without
    "journal": (),  # finished responses are kept at once: the fault "eager"
}  # fmt: skip
REFUSED = "error: config."  # a combination that cannot be, in lines

# Seconds from the beginning of each phase to about its end: the kill comes within them.
LENGTH = dict(zip(PHASES, (1.0, 0.03, 0.02, 0.03, 0.05, 0.01), strict=True))
TALKING = LENGTH | {"rollout": 0.8, "evaluation": 0.8}  # with turns: replies are waited for


class Chains:
    """Runs that are killed and started again until they end, one chain after the other."""

    def __init__(self, server, folder, request):
        option = request.config.getoption
        self.kills, seed = option("--kills"), option("--kill_seed")
        self._said = f"--kill_seed={seed}"
        print(f"\n{self._said}")
        self.rng, self._server, self._folder = random.Random(seed), server, folder
        self.killed, self.resumed = collections.Counter(), collections.Counter()
        self._moments, self._turns, self.chains = [], [], 0
        self.awaited = self.unused = 0

    def until_the_end(
        self, kills: int, places: tuple, *flags: str, length=LENGTH, faults=(), **how
    ) -> Path:
        """The workdir of a chain; at most so many kills in all. length: as LENGTH."""
        self.chains += 1
        workdir, code = self._folder / f"chain_{self.chains}", None
        how["faults"] = [*faults, *[f"talks={_log(workdir)}"] * (length is TALKING)]
        while code != 0:
            # Each of them equally often.
            self._moments = self._moments or self.rng.sample(PHASES, len(PHASES))
            self._turns = self._turns or self.rng.sample(places, len(places))
            phase, (processes, devices) = self._moments.pop(), self._turns.pop()
            run = self._server.start_all(workdir, processes, *flags, devices=devices, **how)
            times = 1 if phase == "start-up" else self.rng.randint(1, 3)
            if run[0].wait_for(phase, times) and self.killed.total() < kills:
                time.sleep(self.rng.uniform(0, length[phase]))
                for process in run:
                    process.kill()
            codes = [process.wait() for process in run]
            code = codes[0] if any(codes) else 0
            assert code in (0, -9), f"{self._said} {flags} {how}\n{run[0].said()}"
            if code:
                self.killed[phase, processes, devices] += 1
                self.resumed["resumed" in run[0].said()] += 1
            # Else it ended before the signal came: no moment.
        return workdir

    def told(self, workdir: Path, *flags: str, faults=(), **how) -> Path:
        """A run that is left alone and given the replies that this chain has used."""
        said = harness.replies(_log(workdir))
        harness.assert_asked_once(said)
        self.awaited += said.awaited
        self.unused += len(said.asked) - len(said.kept)
        other, faults = Path(f"{workdir}_told"), [*faults, f"told={_log(workdir)}"]
        self._server.run(other, *flags, faults=faults, **how)
        return other

    def tell(self) -> None:
        print(f"{self.killed.total()} kills in {self.chains} chains: {dict(self.killed)}")
        print(f"{self.awaited} while a reply was awaited; {self.unused} replies were not used")


def _log(workdir: Path) -> Path:
    return Path(f"{workdir}_replies")


@pytest.mark.parametrize("length", [LENGTH, pytest.param(TALKING, marks=pytest.mark.nightly)])
def test_killed_at_random_moments_ends_with_the_same_bits(length, server, tmp_path, request):
    """Each chain has other parts. At XLA's own level: what is compiled is what users run. With
    turns the run that is left alone is given the same replies, none of them asked for twice."""
    chains, whole, refused = Chains(server, tmp_path, request), {}, set()
    talking = length is TALKING
    while chains.killed.total() < chains.kills:
        parts = tuple(name for name in PARTS if chains.rng.random() < 0.5)
        fields = [*harness.TURNS * talking, *(f for name in parts for f in PARTS[name])]
        flags = [f"--config.{field}" for field in fields]
        how = dict(soon=False, faults=["eager"] if "journal" in parts else [])
        if parts in refused:
            continue
        if parts not in whole:
            whole[parts] = tmp_path / "-".join(("whole", *parts))
            # With turns it shows no more than whether it is refused.
            short = (["--config.steps=0"], ["talks=/dev/null"]) if talking else ([], how["faults"])
            run = server.start(whole[parts], *flags, *short[0], soon=False, faults=short[1])
            if run.wait():
                lines = run.said().strip().splitlines()
                assert all(line.startswith(REFUSED) for line in lines), (parts, run.said())
                refused.add(parts)
                continue
        workdir = chains.until_the_end(chains.kills, HERE, *flags, length=length, **how)
        left_alone = chains.told(workdir, *flags, **how) if talking else whole[parts]
        harness.assert_same_run(left_alone, workdir)
    chains.tell()
    print(f"parts: {sorted(whole.keys() - refused)}; refused: {sorted(refused)}")
    if chains.kills >= 30:
        assert {phase for phase, *_ in chains.killed} == {*PHASES}
        assert chains.resumed[True] > chains.kills // 4


@pytest.mark.nightly  # test_several has two and four processes
@pytest.mark.parametrize("part", [(), PARTS["staleness"]], ids=["whole", "carried"])
def test_with_replies_it_goes_on_on_other_device_counts(part, server, tmp_path):
    """From eight to one, two, four and back, killed while it samples each time. What was said
    before is not asked for again."""
    log, workdir, there = tmp_path / "replies", tmp_path / "run", 0
    fields = (*harness.TURNS, *part, "checkpoint.every=1", "steps=10")
    flags, faults = [f"--config.{field}" for field in fields], [f"talks={log}"]
    for devices in (8, 1, 2, 4, 8):
        run = server.start(workdir, *flags, devices=devices, faults=faults)
        assert run.wait_for("commit", 2) and run.wait_for("chunk", 3), run.said()
        run.kill()
        assert run.wait() == -9
        there += " responses or grades are there already" in run.said()
    said = server.run(workdir, *flags, devices=1, faults=faults)
    assert there > 1 and 4 < harness.step_resumed_from(said) < 10
    harness.assert_asked_once(harness.replies(log))
    server.run(tmp_path / "told", *flags, faults=[f"told={log}"])
    harness.assert_same_run_elsewhere(tmp_path / "told", workdir)


@pytest.mark.nightly  # by --kills=6 it is one kill; test_several has two, then four processes
def test_killed_and_gone_on_elsewhere(server, tmp_path, request):
    """What two processes have parked goes on in four."""
    chains = Chains(server, tmp_path, request)
    flags = [f"--config.{field}" for field in PARTS["staleness"]]
    server.run(tmp_path / "whole", *flags)
    kills = max(1, chains.kills // 5)
    while chains.killed.total() < kills:
        workdir = chains.until_the_end(kills, PLACES, *flags)
        harness.assert_same_run_elsewhere(tmp_path / "whole", workdir)
    chains.tell()
    assert len({place[1:] for place in chains.killed}) == min(len(PLACES), kills)
