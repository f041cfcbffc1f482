"""What README's list of commands and the pages on comparing, diagnosing and going back show, typed
in their order on runs of two steps; and the runs, plan and comparison of the pages on variants."""

import functools
import json
import re
import shutil

import pages
import pytest
from scripts import ROOT

from benchmarks import harness, mechanisms, rungs
from dapo_jax.lab.experiments import bandit, bases, pool, study
from dapo_jax.log import metrics

README = (ROOT / "README.md").read_text()
((USE, *_),) = [re.findall(r"```\n(.*?)```", README.partition("\n## Use\n")[2], re.S)]


def shown(page: str, start: str) -> list[str]:
    """The lines of a page's blocks that begin so."""
    text = "\n".join(block for _, block in pages.blocks(page))
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.slow
@pytest.mark.nightly
def test_each_line_works_as_it_is_printed(tmp_path, shell):
    (desk := tmp_path / "desk").mkdir()
    pages.stand_ins(desk, tmp_path / "made")

    typed = functools.partial(pages.typed, shell, desk)
    train, evaluate, sample, convert, plan = USE.splitlines()
    assert "done: 2 steps" in typed(train)
    assert re.search(r"^test +4 +32 ", typed(evaluate), re.M)
    assert json.loads((desk / "scores.json").read_text())["sets"]["test"]["k"] == 32
    assert re.search(r"^ *\d\.\d+  '.+'$", typed(sample), re.M)  # a line for each token drawn
    typed(convert)
    assert (desk / "runs/a_hf/model.safetensors").exists()
    shutil.copy(ROOT / "configs/dapo_qwen2_5_32b.py", desk / "configs")
    assert " on v5p-256 = " in typed(plan) and json.loads((desk / "plan.json").read_text())
    typed(train.replace("runs/a", "runs/b") + " --config.seed=1")
    compare, *_ = shown("compare_and_sweep.md", "python -m dapo_jax.lab compare")
    assert "at 2 steps" in typed(compare) and "updates done" in typed(compare)
    assert (desk / "compare.png").exists() and (desk / "compare.json").exists()
    (code,) = [text for kind, text in pages.blocks("compare_and_sweep.md") if kind == "python"]
    (desk / "figures.py").write_text(code)
    typed("python -m figures")
    assert (desk / "headline.png").exists() and (desk / "generalization.png").exists()
    for line in shown("diagnose.md", "python"):  # of two steps nothing can be told
        done = shell.python(*pages.words(line), cwd=desk)
        assert done.returncode in (0, 2, 3) and "not judged (2 steps)" in done.stdout
    assert json.loads((desk / "why.json").read_text())["steps"] == 2
    branch, rewind = shown("reading_a_run.md", "python -m dapo_jax.train")
    file = "configs/quickstart.py"
    branch = branch.replace("FILE", file).replace("NEW", "runs/c").replace("OLD@120", "runs/a@1")
    assert "a branch of runs/a/checkpoints step 1" in typed(branch)
    rewind = rewind.replace("FILE", file).replace("DIR", "runs/a").replace("120", "1")
    saved = lambda: sorted(p.name for p in (desk / "runs/a/checkpoints").glob("[0-9]*"))
    assert "back at step 1; 1 later checkpoints" in typed(rewind) and saved() == ["1"]
    assert "done: 2 steps" in typed(train) and saved() == ["1", "2"]
    assert [r["step"] for r in metrics.read(desk / "runs/a/metrics.jsonl")] == [0, 1, 2]


# Of a run on the embedded task, beside one step.
WARM = ("supervised_warmup.skill_steps=9", "supervised_warmup.habit_steps=1")


@pytest.mark.slow
@pytest.mark.nightly
def test_the_pages_of_variants_by_fewer_steps(tmp_path, shell):
    """docs/vapo.md, turns.md and rungs.md, but what makes runs for hours; of VAPO's ladder a rung.
    The base of the rungs is one that has learned nothing."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")

    def typed(line: str, *fields: str) -> str:
        return pages.typed(shell, tmp_path, line, *(f"--config.{field}" for field in fields))

    rungs.write_problems(tmp_path / "runs/rungs/data")
    (rung,) = shown("rungs.md", "python -m dapo_jax.train")
    typed(rung.replace("runs/rung", "runs/rungs/base_100"), "steps=0", "init_from=", "eval.every=0")
    vapo, *turns = (x for p in ("vapo", "turns") for x in shown(f"{p}.md", "python -m dapo_jax.tr"))
    assert len(turns) == 2
    small = {vapo: ("steps=2", "critic.pretrain_steps=1", *WARM), rung: ("steps=1",)}
    for line in (vapo, *turns, rung):
        typed(line, "eval.every=0", *small.get(line, ("steps=1", *WARM)))
        workdir = tmp_path / re.search(r"--workdir=(\S+)", line)[1]
        assert metrics.read(workdir / "metrics.jsonl")[-1]["step"] == 1 + (line == vapo)
    (plan,) = shown("vapo.md", "python -m dapo_jax.plan")
    assert " on v5p-256 = " in typed(plan)
    (ladder,) = shown("vapo.md", "python -m dapo_jax.lab ladder")
    typed(ladder.replace("--seeds=5", "--seeds=1 --jobs=1 --only=ppo"), *small[vapo])
    assert "| ppo | 5 |" in (tmp_path / "runs/ladder_vapo/table.md").read_text()
    (kept,) = shown("rungs.md", "python -m benchmarks rungs --kept")
    assert "+dynamic_sampling" in typed(kept)


def test_vapo_s_experiments_are_those_that_its_page_names(tmp_path, monkeypatch):
    """All but their runs, which take minutes: test_mechanisms.py has what becomes of these."""
    monkeypatch.chdir(tmp_path)
    begun = {}
    run_all = lambda tasks, out, *_: begun.update({str(out): tasks}) or {}
    monkeypatch.setattr(pool, "run_all", run_all)
    monkeypatch.setattr(study.Study, "compare", lambda *_: [])
    for line in shown("vapo.md", "python -m benchmarks mechanisms"):
        args = harness.parse("mechanisms", mechanisms, pages.words(line)[3:])
        assert args.seeds == 6 and mechanisms.measure(args)
    assert [*begun] == ["runs/positive_lm", "runs/value_pretraining"]
    play, pretrain = ({t.work for t in tasks} for tasks in begun.values())
    assert play == {bandit.make, bandit.play} and pretrain == {bases.make, study.run}
    assert (tmp_path / "runs/value_pretraining/data").is_dir()
