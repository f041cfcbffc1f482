"""Hugging Face directories while the run goes on: whole or not at all, no more than are wanted, and
no bit of the run is another."""

import errno

import jax
import numpy as np
import pytest
from test_train import arrays, assert_same_bits, run, small, without_clocks

from dapo_jax import build, config, convert
from dapo_jax.checkpoint import export, workdir
from dapo_jax.dapo.state import State
from dapo_jax.data import arithmetic, tokenizer
from dapo_jax.model import hf, qwen2, rope


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(config, machine, random state) of the embedded task."""
    c = small(1, checkpoint__export_keep=2)
    tok = build.load_text(c, tmp_path_factory.mktemp("text"), None).tokenizer
    machine = build.build_machine(c, tok.vocab_size, tok.stop_ids, None)
    return c, machine, State(build.initial_params(c, machine), {})


def written(made, home, *steps) -> list[str]:
    """What is said meanwhile."""
    c, machine, state = made
    build.load_text(c, home.local, None)  # the embedded tokenizer
    said = []
    for step in steps:
        export.export(c, home, machine, state.count(step=step - state.counters.step), said.append)
    return said


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def assert_is_the_policy(made, directory):
    """Opened by our loader, its logits are those of the state in bfloat16, bit for bit."""
    _, machine, state = made
    here = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), state.params)
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), here)
    tokens = np.arange(20)[None]
    want = hf.Model(hf.read_shape(directory), rounded)(tokens)
    np.testing.assert_array_equal(hf.load(directory)(tokens), want)
    assert tokenizer.load(directory).stop_ids == {*machine.engine.stop_ids}


def test_the_newest_are_kept_and_open_as_the_policy(made, tmp_path):
    home = workdir.open_workdir(tmp_path / "run")
    assert written(made, home, 2, 9, 11) == []
    folder = tmp_path / "run" / "export"
    assert names(folder) == ["step_11", "step_9"]
    assert_is_the_policy(made, folder / "step_11")
    # After a rewind: what is older counts alone, and a step is exported again.
    (folder / "step_9" / "config.json").write_text("old")
    assert written(made, home, 9) == [] and names(folder) == ["step_11", "step_9"]
    assert_is_the_policy(made, folder / "step_9")


def test_no_half_directory_looks_whole_and_a_full_disk_ends_no_run(made, tmp_path, monkeypatch):
    home, folder = workdir.open_workdir(tmp_path / "run"), tmp_path / "run" / "export"

    def broken_off(file, *rest):
        file.write_bytes(b"half")
        raise error

    assert written(made, home, 1) == []
    with monkeypatch.context() as m:
        m.setattr(hf, "_write_file", broken_off)
        error = KeyboardInterrupt()  # as a kill
        with pytest.raises(KeyboardInterrupt):
            written(made, home, 3)
        assert names(folder) == ["step_1", "step_3.partial"]
        error = OSError(errno.ENOSPC, "No space left on device")
        (said,) = written(made, home, 3)
        assert said.startswith("warning: step 3 is not exported to ") and "No space left" in said
        assert {"step_1"} <= {*names(folder)} <= {"step_1", "step_3.partial"}
    assert written(made, home, 4) == [] and names(folder) == ["step_1", "step_4"]


def test_in_a_bucket_config_json_comes_last_and_nothing_is_fetched(made, bucket, monkeypatch):
    home = workdir.open_workdir("gs://b/run")
    sent = []
    real = export.shutil.copyfileobj
    monkeypatch.setattr(
        export.shutil, "copyfileobj", lambda a, b, n: (sent.append(a.name), real(a, b, n))
    )
    assert written(made, home, 1, 2, 3) == []
    assert sent[-1].endswith("config.json") and any(n.endswith(".safetensors") for n in sent)
    folder = bucket / "run" / "export"
    assert names(folder) == ["step_2", "step_3"]
    assert_is_the_policy(made, folder / "step_3")
    workdir.send(home)
    again = workdir.open_workdir("gs://b/run")
    assert not (again.local / "export").exists() and names(folder) == ["step_2", "step_3"]


def write_qwen3(folder):
    """Random weights of a Qwen3 whose heads are twice D / H wide, with YaRN of a context shorter
    than prompt and response."""
    shape, yarn = qwen2.shape_from_config(config.base()), rope.Yarn(4.0, 16, 1.1386)
    shape = shape._replace(qkv_bias=False, qk_norm=True, head_dim=32, yarn=yarn)
    words = arithmetic.write(folder / "words", train=16, heldout=16).tokenizer
    hf.save(folder / "model", shape, qwen2.init(shape, jax.random.key(0)), "float32", words.parent)


@pytest.mark.slow
def test_a_run_of_qwen3_exports_what_convert_would_and_changes_no_bit(tmp_path):
    """Every second step and the last, of a run that is cut after the second."""
    write_qwen3(tmp_path)

    def asked(steps: int, export_every: int = 0):
        model = dict(model__path=str(tmp_path / "model"), tokenizer__chat=False)
        return small(steps, **model, checkpoint__export_every=export_every)

    assert run(asked(3), tmp_path / "plain")
    assert not (tmp_path / "plain" / "export").exists()
    for steps in (2, 3):
        assert run(asked(steps, 2), tmp_path / "exports")
    assert names(tmp_path / "exports" / "export") == ["step_2", "step_3"]
    step = lambda r: {k: v for k, v in r.items() if not k.startswith(("perf/", "eval/"))}
    plain, exports = (without_clocks(tmp_path / name) for name in ("plain", "exports"))
    assert [*map(step, plain)] == [*map(step, exports)]
    assert_same_bits(arrays(tmp_path / "plain", 3), arrays(tmp_path / "exports", 3))
    convert.main(["to-hf", str(tmp_path / "exports"), str(tmp_path / "hf")])
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        mine = tmp_path / "exports" / "export" / "step_3" / name
        assert mine.read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert hf.read_shape(tmp_path / "hf") == hf.read_shape(tmp_path / "model")
    assert max(r["policy/sampler_trainer_logprob_gap"] for r in plain[1:]) < 1e-4
    assert not any(r["optim/skipped"] for r in plain[1:])
    start, end = hf.load(tmp_path / "model").params, arrays(tmp_path / "plain", 3)["params"]
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), start, end)
    assert all(jax.tree.leaves(moved))  # q_norm and k_norm are trained too
