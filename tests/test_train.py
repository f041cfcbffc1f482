"""The loop: every file and tag it promises, resume, exhaustion, fixed shapes, and the invariants
that only a whole run can show. Runs of a few steps on a random tiny model, with a stubbed verifier.
"""

import json
import pathlib
import runpy
import shutil
import signal

import jax
import numpy as np
import pytest
import stubbed_train
from levels import slow
from test_config import changed

from dapo_jax import algorithm, config, train
from dapo_jax.checkpoint import checkpoint
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grade, Grades
from dapo_jax.data import arithmetic
from dapo_jax.log import metrics
from dapo_jax.rollout.engine import Response

ROOT = pathlib.Path(__file__).parent.parent


def small(steps: int, **fields):
    """fields: as of `changed`."""
    c = config.base()
    c.steps, c.eval.every, c.checkpoint.every = steps, 0, 1
    c.eval.k, c.eval.max_problems, c.data.embedded_problems = 2, 8, 64
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 4, 4, 2
    c.rollout.slots, c.rollout.prefill_prompts, c.rollout.max_response_tokens = 16, 8, 16
    c.reward.overlong_buffer_tokens = 4
    c.mesh.fsdp, c.mesh.tensor = 4, 2
    return changed(c, **fields)


def run(c, workdir, **options):
    """Random weights have mixed groups to train on under this judge."""
    return train.train(c, workdir, score=stubbed_train.JUDGE, **options)


def saved(workdir: pathlib.Path, step: int, items=("arrays", "carried")) -> dict:
    """These items of a checkpoint."""
    args = checkpoint.ocp.args
    wanted = args.Composite(**{item: args.StandardRestore() for item in items})
    with checkpoint.reader(workdir / "checkpoints") as m:
        return jax.tree.map(np.asarray, dict(m.restore(step, args=wanted)))


def arrays(workdir: pathlib.Path, step: int):
    return saved(workdir, step, ("arrays",))["arrays"]


def without_clocks(workdir: pathlib.Path) -> list[dict]:
    return [
        {k: v for k, v in r.items() if not k.startswith(("time/", "perf/tokens"))}
        for r in metrics.read(workdir / "metrics.jsonl")
    ]


def rollouts(workdir: pathlib.Path, step: int) -> list[dict]:
    rows = (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_in_a_bucket_a_checkpoint_has_the_records_of_its_steps(tmp_path, bucket, monkeypatch):
    """Also where the run is killed as soon as the checkpoint is there."""
    save, there = checkpoint.save, []

    def noted(*arguments):
        there.append([r["step"] for r in metrics.read(bucket / "run" / "metrics.jsonl")])
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save", noted)
    # Orbax opens buckets by itself.
    run(small(2, checkpoint__directory=str(tmp_path / "checkpoints")), "gs://b/run")
    assert there == [[0], [0, 1], [0, 1, 2]]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Four steps without interruption, and how many programs were compiled after each."""
    workdir = tmp_path_factory.mktemp("whole")
    compiled, per_step = [], []
    count = lambda state, record: per_step.append(len(compiled))

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    stubbed_train.forget_programs()
    run(small(4), workdir, hooks=train.Hooks(step=count))
    return workdir, per_step


def test_every_promised_file_is_there(whole_run):
    workdir, _ = whole_run
    records = metrics.read(workdir / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    assert records[-1]["optim/updates"] == 8
    assert max(r["policy/sampler_trainer_logprob_gap"] for r in records[1:]) <= 1e-4
    assert json.loads((workdir / "config.json").read_text())["rollout.group_size"] == 4
    assert list((workdir / "tensorboard").glob("events*"))
    row = rollouts(workdir, 4)[0]
    assert {"prompt", "response", "answer", "correct", "truncated"} <= set(row)


def test_every_step_goes_on_in_the_stream(whole_run):
    """Each of the first three has used four groups at least."""
    assert min(row["position"] for row in rollouts(whole_run[0], 4)) >= 12


def test_nothing_compiles_after_the_first_step(whole_run):
    _, per_step = whole_run
    assert per_step[0] > 0
    # The second step may still meet a refill or an update of another round; later ones do not.
    assert per_step[1] == per_step[2] == per_step[3]


def test_resume_continues_bit_for_bit(whole_run, tmp_path):
    workdir, _ = whole_run
    run(small(2), tmp_path)
    run(small(4), tmp_path)
    assert_same_bits(arrays(tmp_path, 4), arrays(workdir, 4))
    resumed = {r["step"]: r for r in without_clocks(tmp_path)}
    for record in without_clocks(workdir):
        shared = {k: v for k, v in record.items() if not k.startswith("eval/")}
        assert shared.items() <= resumed[record["step"]].items()


def test_cut_off_in_its_last_evaluation_a_run_is_not_finished(tmp_path):
    ask = lambda: signal.raise_signal(signal.SIGTERM)
    hooks = stubbed_train.at(train.QUIET, "evaluation", 2, ask)
    assert not run(small(1, eval__every=1), tmp_path, hooks=hooks)
    assert '"finished": false' in (tmp_path / "events.jsonl").read_text()


def test_a_changed_config_goes_on_only_where_it_may(whole_run, tmp_path, capsys):
    workdir, _ = whole_run
    shutil.copytree(workdir, tmp_path / "run")
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    c = small(4, optim__lr=1e-5, seed=1)
    with pytest.raises(config.ConfigError) as error:
        run(c, tmp_path / "run")
    seed, lr, advice = str(error.value).splitlines()
    assert seed == "changed since the checkpoint: config.seed: 0 -> 1"
    assert lr == "changed since the checkpoint: config.optim.lr: 0.0003 -> 1e-05"
    assert "--allow_config_change" in advice
    assert files == {p: p.read_bytes() for p in files}  # nothing was touched
    run(c, tmp_path / "run", allow_config_change=True)
    said = capsys.readouterr().out
    assert "changed (allowed): config.seed: 0 -> 1" in said and "resumed after step 4" in said


def test_updates_that_are_not_finite_stop_the_run_with_a_checkpoint(tmp_path, capsys):
    """Scores whose sum no float holds. Parameters and moments stay as they were; started again, the
    run stops at once."""

    def enormous(problem, response):
        right = stubbed_train.accept_half(problem, response).right
        return Grade(1.7e308 if right else 1.6e308, right)

    c = small(9, optim__max_skipped=3)
    for _ in range(2):
        train.train(c, tmp_path, score=enormous)
        said = capsys.readouterr().out
        assert "stopped after step 2, saved: 4 updates in a row were not finite" in said
    records = metrics.read(tmp_path / "metrics.jsonl")
    assert [r.get("optim/skipped") for r in records] == [None, 2, 2]
    before, after = arrays(tmp_path, 1), arrays(tmp_path, 2)
    assert_same_bits(before, after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize(
    ("fields", "steps", "why"),
    [
        slow({"dynamic_sampling.max_empty_steps": 3}, 3, "nothing to learn: 3 steps in a row"),
        ({"dynamic_sampling.on_exhausted": "stop"}, 1, "dynamic sampling used up its 2 rounds"),
        slow({"guard.entropy_max": 0.5, "guard.stop_after": 2}, 2, "2 steps in a row with"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_a_run_that_learns_nothing_stops_with_a_checkpoint(fields, steps, why, tmp_path, capsys):
    c = small(9)
    c.update({"dynamic_sampling.max_rounds": 2} | fields)
    never = train.Hooks(profile=9)
    train.train(c, tmp_path, score=lambda problem, response: False, hooks=never)
    said = capsys.readouterr().out
    assert f"stopped after step {steps}, saved: {why}" in said
    assert f"--profile=9: no trace, the run ends at step {steps}" in said
    assert "0 of 4 groups have right and wrong responses after 2 rounds (100% of the" in said
    last = metrics.read(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == steps and last["optim/updates"] == 0
    assert last["sampling/all_wrong_frac"] == 1.0
    assert ("alarm: step 1 (1 in a row): entropy " in said) == ("guard.entropy_max" in fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"checkpoint.best_metric": "eval/foo/avg@k"}, "foo/avg@k' is of no evaluation set; "),
     ({"data.train": "t.jsonl", "tokenizer.path": "."}, "there are none: name one in")],
)  # fmt: skip
def test_a_metric_that_cannot_rank_is_refused_before_anything_compiles(
    fields, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arithmetic.write_tokenizer(tmp_path / "tokenizer.model")
    pathlib.Path("t.jsonl").write_text('{"problem": "f 4 g", "answer": "4"}\n')
    c = small(1, checkpoint__keep_best=1)
    c.update(fields)
    with pytest.raises(config.ConfigError, match=f"^config.checkpoint.keep_best: .*{says}"):
        train.train(c, tmp_path / "run")
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.parametrize("reading", ["off", "loss", "group"])
def test_the_three_readings_of_overlong_filtering(reading):
    """One group of four: right, wrong, wrong and truncated, right and truncated."""
    c = small(1, loss__overlong_filter=reading, reward__overlong_penalty=0.0)
    zeros = lambda n: np.zeros(n, np.float32)
    responses = [Response(np.arange(n), zeros(n), zeros(n), n == 16) for n in (3, 5, 16, 16)]
    right = np.array([True, False, False, True])
    group = Group(0, [1, 2], responses, Grades(np.where(right, 1.0, -1.0), right))
    ((a, b, x, y),) = algorithm.make_minibatches(algorithm.dapo(c), [group], step=0)
    weights = [1 / 40] * 4 if reading == "off" else [1 / 8, 1 / 8, 0, 0]
    assert [i.weight for i in (a, b, x, y)] == weights
    # Two right of four, or one of two: std with ddof 1 of +-1 is 2/sqrt(3) or sqrt(2).
    expected = 1 / np.sqrt(2) if reading == "group" else np.sqrt(3) / 2
    np.testing.assert_allclose([a.advantage, b.advantage], [expected, -expected], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["eight", pytest.param("gpus", marks=pytest.mark.nightly)])
def test_eight_devices_sample_the_same_tokens_and_learn_the_same(other, tmp_path, shell):
    """In processes of their own, compiled at XLA's own level; also on configs/gpus.py:8's mesh."""
    laid = runpy.run_path(ROOT / "configs" / "gpus.py")["get_config"]("8").mesh.to_dict()
    meshes = {"one": dict(fsdp=1, tensor=1), "eight": dict(fsdp=4, tensor=2), "gpus": laid}
    (tmp_path / "base.py").write_text("from dapo_jax.config import base as get_config")
    for name in (names := ("one", other)):
        fields = config.leaves(small(3)) | {f"mesh.{axis}": n for axis, n in meshes[name].items()}
        flags = [f"--config.{field}={value}" for field, value in fields.items()]
        flags += [f"--config={tmp_path}/base.py", f"--workdir={tmp_path / name}"]
        env = {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": str(1 if name == "one" else 8)}
        done = shell.python(ROOT / "tests" / "stubbed_train.py", *flags, **env)
        assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2, 3):
        for rows in zip(*(rollouts(tmp_path / name, step) for name in names), strict=True):
            assert len({(row["position"], row["response"]) for row in rows}) == 1
    one, many = (arrays(tmp_path / name, 3)["params"] for name in names)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, many)
