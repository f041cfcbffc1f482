"""What benchmarks share, and the reports they write; the measuring itself is theirs."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))
import curricula
import half_billion
import lengths
import pod_plan
import quickstart
import recipes
import results
import staleness
import timing
import vapo

# Their figures are in README.md or RESULTS.md.
KEPT = (
    "chaos", "checkpoint_cost", "kv_traffic", "logging_cost", "pod_plan", "pod_update",
    "quickstart", "start",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *KEPT, "curricula", "gpu", "half_billion", "race", "recipes", "sampler", "staleness",
        "update", "vapo",
    ],
)  # fmt: skip
def test_every_benchmark_can_keep_its_figures(name):
    source = pathlib.Path(results.__file__).with_name(f"{name}.py").read_text()
    assert '"--write"' in source and "results.write(" in source


def test_a_section_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "RESULTS.md")
    for heading, text in (("## A", "1"), ("## B", "2"), ("## A", "3"), ("## C", "4")):
        results.write(heading, f"{heading}\n\n{text}")
    assert (tmp_path / "RESULTS.md").read_text() == (
        "# Measured\n\n## A\n\n3\n\n## B\n\n2\n\n## C\n\n4\n"
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="of Linux")
def test_an_instruction_set_is_named_to_all_sides_before_they_are_imported():
    code = (
        "import os, sys, timing; timing.one_core(); import json;"
        "assert not {'jax', 'torch', 'numpy'} & set(sys.modules);"
        f"print(json.dumps([{{k: os.environ.get(k) for k in {list(timing.ISA['AVX2'])}}},"
        " len(os.sched_getaffinity(0))]))"
    )
    env = os.environ | {"XLA_FLAGS": "--xla_foo=1"}

    def told(*flags):
        where = pathlib.Path(timing.__file__).parent
        command = [sys.executable, "-c", code, *flags]
        return json.loads(subprocess.check_output(command, cwd=where, env=env))

    plain, cores = told("--repeats=1")
    assert plain["XLA_FLAGS"] == "--xla_foo=1" and cores == 1
    found, _ = told("--isa=AVX2", "--repeats=1")
    assert found == timing.ISA["AVX2"] | {"XLA_FLAGS": "--xla_foo=1 --xla_cpu_max_isa=AVX2"}


def test_the_machine_is_said_by_its_processors_name():
    assert re.fullmatch(r".*\d{4}-\d\d-\d\d, .+, \d+ cores; numpy [\d.]+", results.made_by("numpy"))
    assert results.cpu() and "\n" not in results.cpu()


def test_the_quickstarts_summary():
    def run(scale):
        curve = [(0, 0.1, 0), (20, 0.5 * scale, 1e6), (40, 0.6 * scale, 2e6)]
        return [{"step": s, quickstart.TAG: v, "spent/tokens": t} for s, v, t in curve]

    records = {"DAPO": [run(1.5), run(1.6)], "naive GRPO": [run(1.0), run(1.1)]}
    text = quickstart.summary(records)
    assert "| seed 0 | 0.100 | 0.750 | 0.900 | 0.825 | 2.00 |" in text
    assert "| naive GRPO | step 0 | step 20 | step 40 | mean after the start | M tokens |" in text
    assert re.search(r"mean after the start: \+?0\.275 ", text), text
    assert "At naive GRPO's tokens (2.00 M): DAPO 0.93" in text


def test_recipes_are_compared_at_the_smallest_budget():
    def run(updates, tokens):
        return [
            {"step": s, recipes.TAG: v, "optim/updates": s * updates, "spent/tokens": s * tokens}
            for s, v in ((0, 0.0), (6, 0.6))
        ]

    records = {"dapo": [run(10, 3e6), run(10, 3e6)], "gspo": [run(20, 1e6), run(20, 1e6)]}
    text = recipes.summary(records)
    # 60 updates: all of dapo's 6 steps, 3 of gspo's; 6 M tokens: 2 of dapo's, all of gspo's.
    assert "| dapo | 0.500 +- 0.000 | 0.167 +- 0.000 | 60 | 18.00 |" in text
    assert "| gspo | 0.250 +- 0.000 | 0.500 +- 0.000 | 120 | 6.00 |" in text


def test_every_recipe_is_a_config_of_the_quickstart():
    dapo = recipes.fields("dapo")
    for arm in recipes.ARMS:
        changed = {k for k, v in recipes.fields(arm).items() if v != dapo[k]}
        assert bool(changed) == (arm != "dapo")
        assert not any(k.startswith(("supervised_warmup.", "data.", "optim.")) for k in changed)


def test_vapo_is_compared_behind_its_pretraining(tmp_path):
    """Equal updates are the policy's; at equal tokens pre-training has been paid for."""

    def run(before, told=None):
        return [
            {
                "step": s, vapo.TAG: max(s - before, 0) / 10, "spent/tokens": 1e6 * s,
                "optim/updates": 8 * max(s - before, 0), "response/length_mean": 20.0,
            }
            | ({"critic/explained_variance": told + s / 100} if told else {})
            for s in range(before + 7)
        ]  # fmt: skip

    text = vapo.summary({"vapo": [run(3, 0.5)] * 2, "grpo": [run(0)] * 2})
    assert "| method | at 48 updates | at 6.000 M tokens |" in text
    assert "| vapo | 0.500 +- 0.000 | 0.200 +- 0.000 | 9.000 | 20.0 | 0.530 +- 0.000 |" in text
    assert "| grpo | 0.500 +- 0.000 | 0.500 +- 0.000 | 6.000 | 20.0 | |" in text
    dapo, other = vapo.fields("dapo"), vapo.fields("vapo")
    more = other["steps"] - dapo["steps"]
    assert more == other["critic.pretrain_steps"] == vapo.PRETRAINED["short"]
    chains = vapo.fields("vapo", tmp_path)
    assert chains["critic.pretrain_steps"] == vapo.PRETRAINED["chains"] > more
    assert "train_k5678.jsonl" in chains["data.train"]
    changed = {k for k in dapo if dapo[k] != other[k]} - {"steps"}
    parts = ("critic.", "loss.positive", "dynamic_sampling.", "reward.overlong")
    assert changed and all(k.startswith(parts) for k in changed)


def test_curricula_are_compared_by_tokens_to_an_accuracy():
    def run(*values, **last):
        records = [
            {"step": s, curricula.TAG: v, "spent/tokens": 1e4 * s, "data/epochs": s / 2}
            for s, v in enumerate(values)
        ]
        return [*records[:-1], records[-1] | last]

    assert curricula.tokens_to(run(0.1, 0.8, 1.0, 0.5), 0.9) == (pytest.approx(1.5e4), True)
    assert curricula.tokens_to(run(0.1, 0.8, 0.85), 0.9) == (2e4, False)
    slow, quick = run(0.1, 0.8, 1.0), run(0.0, 0.9, 0.95, **{"curriculum/left_out": 7})
    stopped = [*run(0.1, 0.2, 0.3), {"step": 3, "spent/tokens": 2e4, "data/epochs": 1}]
    text = curricula.summary({"none": [slow, slow], "no_positive": [quick, stopped]})
    assert "| none | 15.0 +- 0.0 | | 2 of 2 | 1.000 +- 0.000 | 1.0 | 0 |" in text
    assert "| no_positive | 15.0 +- 63.5 | 0.0 +- 63.5 | 1 of 2 |" in text


def test_both_sides_of_half_a_billion_take_turns(monkeypatch):
    """A row is of medians over processes, ours before theirs; work a CPU-second."""
    seconds, asked = iter([1.0, 2.0, 8.0, 6.0, 2.0, 3.0]), []

    def run(*side):
        asked.append(side)
        return {"seconds": (s := next(seconds)), "peak": 10 * s}

    monkeypatch.setattr(half_billion, "run", run)
    row = half_billion.compared(2, "decode", 3, 2)
    assert asked == [(2, "decode", "ours", 2), (2, "decode", "theirs", 2)] * 3
    assert row == ("decode, 2 core(s)", "8.0", "5.3", "1.50x", "20.00", "30.00")


def test_every_curriculum_changes_what_is_drawn_and_nothing_else():
    none = curricula.fields("none")
    for arm in curricula.ARMS:
        changed = {k for k, v in curricula.fields(arm).items() if v != none[k]}
        assert bool(changed) == (arm != "none")
        assert all(k.startswith(("curriculum.", "rollout.temperature")) for k in changed)


def test_staleness_is_compared_seed_by_seed_at_equal_updates():
    def run(score, **aged):
        of = lambda s: {"step": s, "optim/updates": 10 * s, "spent/tokens": 1e6 * s}
        return [of(s) | {staleness.TAG: score * s / 6} | aged for s in (0, 6)]

    aged = {"staleness/age_mean": 0.5, "policy/importance_ess": 0.99, "perf/slot_occupancy": 0.9}
    records = {
        "S=0": [run(0.6), run(0.9)],
        "S=1": [run(0.6, **aged), run(0.84, **aged)],
        "S=2": [run(0.3, **aged), run(0.59, **aged)],
    }
    text = staleness.summary(records)
    assert "| S=0 | 0.625 +- 1.588 | - | - | 6.000 +- 0.000 | - | - | - |" in text
    assert "| S=1 | 0.600 +- 1.271 | -0.025 +- 0.318 | not told apart | 6.000" in text
    assert "| 0.50 | 0.990 | 90% |" in text
    assert re.search(r"S=2 .*\| -0.254 \+- 0.053 \| behind \|", text), text


@pytest.mark.parametrize("task", staleness.TASKS)
def test_staleness_changes_what_it_needs_and_nothing_else(task):
    plain = staleness.fields(task, "S=0")
    for arm, S in staleness.ARMS.items():
        changed = {k: v for k, v in staleness.fields(task, arm).items() if v != plain[k]}
        needed = {"rollout.staleness": S, "loss.importance_cap": 5.0}
        batch = plain["rollout.groups"] * plain["rollout.group_size"]
        needed |= {"rollout.slots": (S + 1) * batch}
        assert changed == (needed if S else {})


def test_a_pod_s_staleness_in_a_table():
    phases = dict.fromkeys(("prefill", "decode", "tail", "host", "update"), 60.0)
    of = dict(staleness=0, slots=4096, seconds=300, occupancy=0.5, phases=phases, apart=None)
    aged = dict(of, staleness=1, slots=3072, seconds=240, mean=0.4, oldest=1, parked=1.5e7)
    aged |= dict(apart={"seconds": 200, "share": 0.5})
    text = pod_plan.aged([(pod_plan.ROWS[0], {"step": {"staleness": [of, aged]}})])
    head = "| dapo_qwen2_5_32b | v5p-256 |"
    assert f"{head} 0 | 4,096 | 5.0 | 1.00 | 50% | 240 | 60 | - | - | - | - | - | - |" in text
    assert f"{head} 1 | 3,072 | 4.0 | 0.80 | 50% | 240 | 60 | 0.40 | 1 | 15.0 |" in text
    assert "| 3.3 | 50% | 1.20x |" in text


@pytest.mark.parametrize("n", [64, 512])
def test_lengths_have_the_mean_after_the_cut_for_every_n(n):
    got = lengths.log_normal(n, cap=512, mean=128)
    assert got.max() <= 512 and got.min() >= 1 and abs(got.mean() - 128) < 1
    np.testing.assert_array_equal(np.sort(got), np.sort(lengths.log_normal(n, 512, 128, seed=1)))


def test_functions_take_turns():
    told = []
    found = timing.in_turns({"a": lambda: told.append("a"), "b": lambda: told.append("b") or 7}, 3)
    assert told == ["a", "b"] * 4 and found["b"][1] == 7 and found["a"][0] >= 0


def test_a_clock_counts_calls_while_it_is_on(monkeypatch):
    clock = timing.Clock(time.thread_time)
    work = clock.around(lambda n: sum(range(n)))
    assert work(10) == 45 and len(clock.cpu) == len(clock.wall) == 1
    monkeypatch.setattr(timing.Clock, "on", False)
    assert work(10) == 45 and len(clock.cpu) == 1
