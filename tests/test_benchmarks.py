"""What benchmarks share, the tables they make of what they measured, and the pages of the results;
of the measuring itself only that it works, at the smallest setting."""

import json
import os
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from benchmarks import (
    __main__ as command,
    arms,
    cache_dtype,
    credit,
    half_billion,
    harness,
    ladder,
    mechanisms,
    pod_step,
    rungs,
    rungs_recipes,
    tables,
)
from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.model import hf, qwen2

RESULTS = sorted(path.stem for path in harness.RESULTS.glob("*.json"))
FIELDS = {"title", "command", "date", "commit", "machine", "versions", "about", "notes", "figures"}


def test_pages_are_those_of_the_results():
    """After a change of a result: python -m benchmarks tables."""
    files = tables.rendered()
    assert [path for path, text in files.items() if path.read_text() != text] == []
    assert set(files) - {harness.ROOT / "README.md"} == set(tables.PAGES.glob("*"))
    assert sorted(name for topic in tables.TOPICS.values() for name in topic.results) == RESULTS


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_whole(name):
    found = tables.read(name)
    assert found.keys() == FIELDS | {"columns", "rows"} and found["title"] and found["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [0-9a-f]{40}", f"{found['date']} {found['commit']}")
    assert found["rows"] and {len(row) for row in found["rows"]} == {len(found["columns"])}
    folder = harness.ROOT / "benchmarks" / "figures"
    assert all((folder / file).exists() for file, _ in found["figures"])
    run = re.match(r"python -m benchmarks (\w+)(.*)", found["command"])
    assert not run or run[1] in command.BENCHMARKS
    assert harness.as_json(found) == (harness.RESULTS / f"{name}.json").read_text()
    if study := run and re.search(r"--study=(\w+)", run[2]):
        assert study[1] == name and name in arms.STUDIES


def test_measured_again_a_result_keeps_what_was_written_about_it():
    table = harness.Table("a", "b")
    table.row(1, 2.5)
    table.note("said")
    with pytest.raises(AssertionError):
        table.row(1)
    old = {"title": "T", "about": "why", "notes": ["old"], "figures": [["a.png", "A"]]}
    found = harness.result(table, old, "python -m benchmarks x", ["numpy"])
    kept = {"notes": ["said"], "rows": [["1", "2.5"]], "versions": {"numpy": np.__version__}}
    assert old | kept == {key: found[key] for key in {**old, **kept}}
    assert found["machine"].count("core") == 1
    assert json.loads(harness.as_json(found)) == found
    fresh = harness.result(table, {}, "command", [])
    assert fresh.keys() == found.keys() and fresh["title"] == "command"


def test_all_benchmarks_are_listed(capsys):
    folder = harness.ROOT / "benchmarks"
    with pytest.raises(SystemExit) as end:
        command.main([])
    said = capsys.readouterr().out
    modules = {p.stem for p in folder.glob("*.py") if "\ndef measure(" in p.read_text()}
    assert not end.value.code and modules == command.BENCHMARKS.keys()
    assert all(re.search(rf"^  {name} +\S", said, re.M) for name in modules)
    with pytest.raises(SystemExit, match="no benchmark 'nosuch'"):
        command.main(["nosuch"])
    cores = lambda *argv: harness.parse("half_billion", half_billion, argv).cores
    assert cores() == (1,) and cores("--full") == (1, 2) and cores("--full", "--cores", "2") == [2]


def test_an_instruction_set_stands_before_anything_is_imported(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1")
    assert harness.limited("") == {}
    found = harness.limited("AVX2")
    assert found == harness.AVX2 | {"XLA_FLAGS": "--xla_foo=1 --xla_cpu_max_isa=AVX2"}
    prepared = []
    monkeypatch.setattr(harness, "prepare", lambda cores, environment: prepared.append(environment))
    monkeypatch.setattr(harness, "run", lambda *_: None)
    for isa in (["--isa=AVX2"], ["--isa", "AVX2"]):
        command.main(["ladder", *isa])
    assert prepared == [found, found]
    code = "import sys, benchmarks.__main__; print({'jax', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=harness.ROOT, capture_output=True)
    assert done.stdout.strip() == b"set()", done.stderr


def test_a_process_of_its_own_has_its_own_environment():
    assert harness.apart(os.getenv, "SET_FOR_IT", SET_FOR_IT="yes") == "yes"
    assert harness.apart(os.getenv, "OMP_NUM_THREADS", cores=1) == "1"


def test_functions_take_turns_and_a_median_is_taken():
    told = []
    found = harness.in_turns({"a": lambda: told.append("a"), "b": lambda: told.append("b") or 7}, 3)
    assert told == ["a", "b"] * 4 and found["b"][1] == 7 and found["a"][0] >= 0
    ticks = iter([0, 4, 10, 11, 20, 22])
    assert harness.median_seconds(lambda: None, 3, lambda: next(ticks)) == 2


def run(values, updates=10, tokens=1e6, **last):
    """Records of a run: accuracy -> one every step, `last` in the last."""
    records = [
        {"step": s, arms.TAG: v, arms.UPDATES: s * updates, arms.TOKENS: s * tokens}
        for s, v in enumerate(values)
        if v is not None
    ]
    return [*records[:-1], records[-1] | last]


LINE = [x / 10 for x in range(7)]  # .6 at step 6
NOW = {"critic/explained_variance": 0.53}
AGED = {"staleness/age_mean": 0.5, "policy/importance_ess": 0.99, "perf/slot_occupancy": 0.9}
aged = lambda a, b, **tags: [run([0, *[None] * 5, x], **tags) for x in (a, b)]
pretrained = [r | NOW | {arms.UPDATES: 10 * max(r["step"] - 3, 0)} for r in run([0, 0, 0, *LINE])]
RUNS = {
    "recipes": {"dapo": [run(LINE, 10, 3e6)] * 2, "gspo": [run(LINE, 20, 1e6)] * 2},
    "vapo": {"dapo": [run(LINE)] * 2, "vapo": [pretrained] * 2},
    "curricula": {
        "none": [run([0.1, 0.8, 1.0], tokens=1e4)] * 2,
        "no_positive": [run(x, tokens=1e4) for x in ([0.0, 0.9, 0.95], [0.1, 0.2, 0.3])],
        "band": [run([0.1, 0.9, 1.0], tokens=1e4)] * 2,
    },
    "staleness_quickstart": {
        "S=0": aged(0.6, 0.9), "S=1": aged(0.6, 0.84, **AGED), "S=2": aged(0.3, 0.59, **AGED)
    },
    "quickstart": {
        "naive GRPO": [run(LINE)] * 2, "DAPO": [run([x + 0.2 for x in LINE], 20, 2e6)] * 2
    },
}  # fmt: skip
TABLES = (harness.ROOT / "tests/data/arms.txt").read_text().split("\n\n")


@pytest.mark.parametrize("wanted", TABLES, ids=RUNS)
def test_arms_are_compared(wanted):
    """Some columns of each study's table."""
    about, *lines = wanted.strip().split("\n")
    study = about.split(":")[0]
    table = arms.compared(arms.STUDIES[study], RUNS[study])
    heads, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    places = [0]
    for head in heads[1:]:  # one that stands there twice: the next of them
        places.append(table.columns.index(head, places[-1] + 1))
    assert [[row[i] for i in places] for row in table.rows] == rows


# What an arm may change of the plain one's config.
OF_STALENESS = r"rollout\.staleness|rollout\.slots|loss\.importance_cap"
OF_VAPO = r"critic\.|loss\.|dynamic_sampling\.|reward\.overlong|steps"
CHANGED = {
    "recipes": r"(?!supervised_warmup\.|data\.|optim\.)",
    "curricula": r"curriculum\.|rollout\.temperature",
    **dict.fromkeys(("staleness_quickstart", "staleness_ladder"), OF_STALENESS),
    **dict.fromkeys(("vapo", "vapo_chains"), OF_VAPO),
    "turns": r"rollout\.turns|reward\.reply",
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_arm_changes_what_it_is_about_and_nothing_else(name, tmp_path):
    study = arms.STUDIES[name]
    plain, *others = (study.fields(arm, out=tmp_path) for arm in study.arms)
    for other in others:
        changed = {key for key in plain if plain[key] != other[key]}
        assert changed and all(re.match(CHANGED[name], key) for key in changed), changed
    if CHANGED[name] == OF_STALENESS:
        batch = plain["rollout.groups"] * plain["rollout.group_size"]
        assert [o["rollout.slots"] for o in others] == [2 * batch, 3 * batch]
    if CHANGED[name] == OF_VAPO:
        vapo = study.fields("vapo", out=tmp_path)
        assert vapo["steps"] - plain["steps"] == vapo["critic.pretrain_steps"] > 0
        assert ("train_k5678.jsonl" in vapo["data.train"]) == (name == "vapo_chains")


RECIPES = {name: flag.quick for name, flag in rungs_recipes.FLAGS.items()} | {"write": False}
KEPT = [  # a benchmark, and what it is asked, so that it reads what is kept
    *((arms, dict(study=study, kept=True)) for study in arms.STUDIES),
    *((ladder, dict(method=method, runs="")) for method in presets.LADDERS),
    (mechanisms, dict(only=mechanisms.EVERY, seeds=6, kept=True, write=False)),
    (rungs, dict(kept=True)),
    *((credit, dict(kept=True, ladder=of_ladder)) for of_ladder in (False, True)),
    *((rungs_recipes, RECIPES | of) for of in ({}, {"parts": True}, {"without": True})),
]


@pytest.mark.parametrize(("benchmark", "asked"), KEPT, ids=str)
def test_tables_follow_from_what_is_kept(benchmark, asked):
    by_hand = benchmark in (arms, ladder, mechanisms)  # notes behind those that are made
    for table in benchmark.measure(types.SimpleNamespace(**asked)):
        result = tables.read(table.name)
        assert (list(table.columns), table.rows) == (result["columns"], result["rows"])
        assert table.notes == result["notes"][: len(table.notes) if by_hand else None]


def test_steps_with_a_value_model_and_with_staleness_add_up(monkeypatch):
    parts = dict(prefill=6.0, decode=100.0, tail=50.0, host=4.0, update=200.0, evaluation=40.0)
    aged = [dict(staleness=s, slots=2048, seconds=(4 - s) * 100, occupancy=0.5 + s / 4, mean=0.25,
                 oldest=1, parked=2e6, phases=parts) for s in (0, 1)]  # fmt: skip
    found = {"step": {"expected_s": 400.0, "parts": parts, "staleness": aged}}
    monkeypatch.setattr(pod_step.planner, "expected", lambda *_: found)
    rows = pod_step.with_values(["v5p-256", "v6e-256"]).rows
    assert " ".join(rows[0]) == "v5p-256 DAPO 400 160 0 200 0 0 40" and len(rows) == 2
    first, second = map(" ".join, pod_step.with_staleness(["v6e-256"]).rows)
    assert first == "v6e-256 0 2,048 6.7 1.00 50% 160 6 - - -"
    assert second == "v6e-256 1 2,048 5.0 0.75 75% 160 6 0.25 1 2.0"


def test_a_stretched_model_is_the_same_function():
    shape = qwen2.shape_from_config(config.base())._replace(vocab_size=64)
    model = hf.Model(shape, qwen2.init(shape, jax.random.key(0)))
    other = cache_dtype.stretched(model, 64.0)  # a power of two: not even rounding differs
    ratio = other.params["blocks"]["k"] / model.params["blocks"]["k"]
    assert set(np.unique(ratio)) == {1.0, 64.0}
    tokens_1xT = np.arange(12)[None]
    np.testing.assert_array_equal(other(tokens_1xT), model(tokens_1xT))


SMALLEST = "start --processes=1; run_costs; sampler --parts readers; update --parts rate"


@pytest.mark.slow
@pytest.mark.parametrize("words", SMALLEST.split("; "))
def test_the_smallest_setting_works(words):
    command = [sys.executable, "-m", "benchmarks", *words.split()]
    done = subprocess.run(command, cwd=harness.ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
