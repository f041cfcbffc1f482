"""Runs with guessed tokens, alone, with responses that outlive steps, over 8 devices, and killed at
any moment: the bits of a run that is left alone and guesses nothing."""

import json

import harness
import pytest
from test_kill import PARTS, Chains

from dapo_jax.log import metrics

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(0)]

STALE = (
    "loss.importance_cap=5", "rollout.staleness=1", "rollout.chunk=4",
    "rollout.max_response_tokens=32",
)  # fmt: skip
RUNS = {"now": (), "staleness": STALE, "devices": ("mesh.tensor=2",)}  # 4 shards of 4 slots
DEVICES = {"devices": 8}  # else 1


def flags(*fields: str) -> list[str]:
    return [f"--config.{field}" for field in fields]


def assert_same_but_for_guesses(plain, guessed) -> None:
    """Samples, batches, updates and what is carried, bit for bit; the config alone differs."""
    step = harness.newest(plain)
    assert harness.newest(guessed) == step
    one, other = (harness.saved(workdir, step) for workdir in (plain, guessed))
    assert one["arrays"] == other["arrays"]
    known = lambda saved: {k: v for k, v in json.loads(saved["state"]).items() if k != "config"}
    assert known(one) == known(other)
    assert harness.records(plain) == harness.records(guessed)
    folders = ("rollouts", "eval", "data")
    assert harness.files(plain, *folders) == harness.files(guessed, *folders)


@pytest.fixture(scope="module", params=RUNS)
def plain(request, server, tmp_path_factory):
    """(fields, devices, the workdir of a run without guesses)."""
    workdir = tmp_path_factory.mktemp(request.param) / "plain"
    fields, devices = RUNS[request.param], DEVICES.get(request.param, 1)
    server.run(workdir, *flags(*fields), devices=devices)
    return fields, devices, workdir


def test_a_run_with_guesses_is_that_without(plain, server, tmp_path):
    fields, devices, whole = plain
    server.run(tmp_path / "run", *flags(*fields, *PARTS["drafts"]), devices=devices)
    assert_same_but_for_guesses(whole, tmp_path / "run")
    records = metrics.read(tmp_path / "run" / "metrics.jsonl")
    of = lambda tag: sum(r.get(tag) or 0 for r in records)
    assert of("drafts/passes") > 3 and of("drafts/drafted/siblings") > 0
    if fields == STALE:
        assert of("staleness/parked_tokens") > 0


def test_killed_with_guesses_it_ends_with_the_bits_of_none(plain, server, tmp_path, request):
    """What was guessed from is forgotten at each kill. Half of the chains find finished responses
    in the journal."""
    fields, devices, whole = plain
    chains = Chains(server, tmp_path, request)
    kills = max(1, chains.kills // len(RUNS))
    while chains.killed.total() < kills:
        faults = ["eager"] * chains.rng.randint(0, 1)
        run = flags(*fields, *PARTS["drafts"])
        workdir = chains.until_the_end(kills, ((1, devices),), *run, faults=faults)
        assert_same_but_for_guesses(whole, workdir)
    chains.tell()
    assert chains.resumed[True] > kills // 4 or kills < 10
