"""The race's clock, statistics and table, on made-up readings; the peers themselves are slow tests
that want benchmarks/requirements-peers.txt."""

import importlib
import json
import sys
import types

import jax
import pytest
from scripts import ROOT

from benchmarks import race
from benchmarks.racers import judge, report
from dapo_jax import config as config_lib
from dapo_jax.data import arithmetic, tokenizer
from dapo_jax.model import hf, qwen2


@pytest.fixture
def racer(monkeypatch):
    """A module of benchmarks/racers/, which are scripts: each imports `clock` from beside it."""
    monkeypatch.syspath_prepend(str(race.RACERS))
    return importlib.import_module


def readings(*accuracies, cpu=10.0, start=5.0):
    """Every 5 steps, `cpu` CPU-seconds and 1,000 tokens apart."""
    return [
        dict(step=5 * i, cpu_s=start + cpu * i, wall_s=2 * (start + cpu * i), tokens=1000 * i,
             updates=40 * i, peak_mb=100.0 + i, accuracy=a)
        for i, a in enumerate(accuracies)
    ]  # fmt: skip


def test_the_goal_is_reached_by_one_reading_or_by_a_mean_of_three():
    reached = lambda *accuracies, mean=1: report.reached(readings(*accuracies), 0.8, mean)
    up = 0.1, 0.5, 0.82, 0.7, 0.8, 0.9
    assert reached(*up) == (True, 25.0, 10)
    assert reached(*up, mean=3) == (True, 55.0, 25)  # (.7 + .8 + .9) / 3, after .77
    assert reached(0.8) == (True, 5.0, 0)  # exactly the goal, by the base
    assert reached(0.1, 0.5, 0.79) == (False, 25.0, 10)  # a lower bound
    assert reached(0.9, 0.9, mean=3) == (False, 15.0, 5)  # two readings are no mean of three
    with pytest.raises(ValueError, match="no readings"):
        reached()


def test_the_table():
    """Two seeds a racer; costs are counted from the second reading on, since before it everything
    compiles; `>` marks the bound of a racer that did not get there."""
    seeds = lambda *accuracies: [
        report.summary(readings(*accuracies, cpu=cpu, start=1.0), 0.8) for cpu in (10.0, 20.0)
    ]
    found = {"ours": seeds(0.1, 0.8, 0.8, 0.8), "trl": seeds(0.1, 0.2, 0.3, 0.4)}
    lines = (ROOT / "tests/data/race_table.txt").read_text().splitlines()
    assert [" | ".join(row) for row in report.rows(found, "ours", "We", 0.8)] == lines
    alone = report.rows({"trl": found["trl"]}, "ours", "We", 0.8)
    assert not any("over We" in row[0] for row in alone)
    assert report.times(*([r["thrice"] for r in found[x]] for x in ("ours", "trl"))) == "-"


def test_what_is_paused_is_not_counted(racer, tmp_path, monkeypatch):
    clock, now = racer("clock"), {"cpu": 7.0, "wall": 100.0}
    monkeypatch.setattr(clock.time, "process_time", lambda: now["cpu"])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now["wall"])

    def save(folder):
        folder.mkdir()
        now["cpu"] += 50.0
        now["wall"] += 60.0

    assert race.notes(tmp_path) == []
    watch = clock.Clock(tmp_path)
    assert not watch.reading(0, 0, 0, save)
    now["cpu"] += 2.0
    now["wall"] += 3.0
    (tmp_path / "stop").touch()
    assert watch.reading(5, 123, 40, save)
    with (tmp_path / "readings.jsonl").open("a") as file:
        file.write('{"st')  # a line that is being written does not count
    found = race.notes(tmp_path)
    keys = ("step", "tokens", "updates", "cpu_s", "wall_s")
    # The process is older than the clock.
    assert [[r[k] for k in keys] for r in found] == [[0, 0, 0, 7.0, 0.0], [5, 123, 40, 9.0, 3.0]]
    assert {p.name for p in (tmp_path / "weights").iterdir()} == {"step_000000", "step_000005"}


RACER = """
import clock, sys
args = clock.arguments()
watch = clock.Clock(args.out)
for step in range(0, args.steps + 1, 5):
    if args.arm == "fails" and step == 10:
        sys.exit(3)
    if watch.reading(step, 10 * step, 8 * step, lambda folder: folder.mkdir()):
        break
"""


def test_a_run_is_judged(monkeypatch, tmp_path):
    script = tmp_path / "racer.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(race.RACERS)!r})\n" + RACER)
    monkeypatch.setattr(race, "LIST", {a: (script, a, a) for a in ("works", "fails")})
    asked, accuracies = [], dict(zip(range(0, 25, 5), (0.1, 0.7, 0.8, 0.9, 0.9), strict=True))

    def accuracy(folder):
        asked.append(folder.name)
        assert folder.is_dir()
        return accuracies[int(folder.name[-6:])]

    begun = lambda folder: asked.append(f"the base, {folder.name}")
    referee = types.SimpleNamespace(accuracy=accuracy, require_base=begun)
    args = types.SimpleNamespace(lr=3e-4, steps=20, goal=0.8)
    found = race.run("works", 0, args, tmp_path / "base", tmp_path / "works_0", referee)
    assert asked[:3] == ["the base, step_000000", "step_000000", "step_000005"]
    assert report.reached(found, 0.8)[::2] == (True, 10)
    assert report.reached(found, 0.8, 3)[::2] == (True, 15)
    assert not list((tmp_path / "works_0" / "weights").iterdir())  # judged, and removed
    with pytest.raises(RuntimeError, match=r"fails, seed 0: ended with 3; .*log\.txt"):
        race.run("fails", 0, args, tmp_path, tmp_path / "f", referee)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny random model, problems and vocabulary, as `make_base` leaves them."""
    folder = tmp_path_factory.mktemp("race") / "base"
    shape = qwen2.shape_from_config(config_lib.base())
    hf.save(folder, shape, qwen2.init(shape, jax.random.key(0)), "float32")
    arithmetic.write(folder, train=64)
    judge.write_vocabulary(folder)
    return folder


def test_all_racers_start_without_compiled_programs(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    env = judge.environment(ROOT)
    assert [k for k in env if k.startswith("JAX_")] == ["JAX_PLATFORMS"]
    assert env["OMP_NUM_THREADS"] == "1"


def test_the_tokenizers_of_the_peers_read_and_write_like_ours(base, racer):
    """To tunix a token is one character."""
    tok, text = tokenizer.load(base / "tokenizer.model"), "f 4 g 20 Answer: 20"
    judge.check_tokenizer(base, tok, [text])
    with pytest.raises(ValueError, match="in another way than ours"):
        judge.check_tokenizer(base, tok, ["f4 ?"])
    words, ids = json.loads((base / "vocabulary.json").read_text()), tok.encode(text)
    chars = racer("with_tunix").Characters(words)
    assert chars.encode(text) == ids and len(chars.decode(ids)) == len(ids)
    assert chars.text(chars.decode(ids)) == tok.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_tunix", "with_trl"])
def test_a_peer_computes_our_logits(base, name):
    pytest.importorskip(name[5:], reason="needs benchmarks/requirements-peers.txt")
    commands = {n: [sys.executable, str(race.RACERS / f"{n}.py")] for n in ("ours", name)}
    gaps = judge.logits_gap(base, commands, judge.environment(ROOT))
    assert gaps[name] < 1e-4


@pytest.mark.slow
def test_our_own_run_is_read_where_it_would_evaluate(base, tmp_path):
    referee = types.SimpleNamespace(accuracy=lambda folder: 0.1, require_base=lambda folder: None)
    args = types.SimpleNamespace(lr=3e-4, steps=5, goal=0.8)
    found = race.run("fixed", 0, args, base, tmp_path / "fixed_0", referee)
    assert [r["step"] for r in found] == [0, 5] and found[1]["tokens"] > 0
