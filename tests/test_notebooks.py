"""The notebooks run from top to bottom on a fresh run, and are kept without outputs."""

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import nbformat
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from dapo_jax import sample
from dapo_jax.dynamics import tokens

ROOT = Path(__file__).parent.parent
NAMES = sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb"))


def read(name):
    return nbformat.read(ROOT / "notebooks" / name, as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_no_outputs_are_kept_and_cells_are_thin(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    assert cells and all(c.outputs == [] and c.execution_count is None for c in cells)
    assert all(len(c.source.splitlines()) <= 16 for c in cells)
    assert not any("def " in c.source for c in cells)  # the code lives in dapo_jax


@pytest.mark.parametrize("name", NAMES)
def test_set_up_installs_from_an_address_an_archive_or_the_checkout(name, tmp_path, monkeypatch):
    """The cell is run by IPython where dapo_jax cannot be imported; pip's line is caught."""
    shell = InteractiveShell()
    asked = []
    shell.register_magic_function(asked.append, "line", "pip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    cell = read(name).cells[1].source
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")

    def pip(source):
        asked.clear()
        result = shell.run_cell(source)
        return asked[0].strip() if asked else str(result.error_in_exec)

    wanted = 'install -q "dapo_jax[notebook,gcs] @ {}"'.format
    assert "set ADDRESS, or upload dapo_jax.zip" in pip(cell)
    (tmp_path / "dapo_jax").mkdir()
    (tmp_path / "dapo_jax" / "__init__.py").touch()
    assert pip(cell) == wanted(tmp_path.as_uri())
    archive = tmp_path / "notebooks" / "dapo_jax-main.zip"
    archive.touch()
    assert pip(cell) == wanted(archive.as_uri())
    for given, found in (
        ("git+https://example.org/me/dapo_jax", "git+https://example.org/me/dapo_jax"),
        ("../mine.tar.gz", (tmp_path / "mine.tar.gz").as_uri()),
    ):
        assert pip(cell.replace('ADDRESS = ""', f'ADDRESS = "{given}"')) == wanted(found)
    assert "OWNER" not in (ROOT / "notebooks" / name).read_text()


def test_both_are_there():
    assert NAMES == ["inspect_model.ipynb", "training_dynamics.ipynb"]


# --- on a fresh run -----------------------------------------------------------------------------


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A quickstart of a few steps and a short warm-up."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    settings = {
        "steps": 3,
        "supervised_warmup.skill_steps": 150,
        "supervised_warmup.habit_steps": 0,
        "eval.max_problems": 16,
        "eval.every": 2,
        "rollout.groups": 8,
        "checkpoint.every": 2,
    }
    command = [sys.executable, "-m", "dapo_jax.train", "--config=configs/quickstart.py"]
    command += [f"--workdir={folder}", *(f"--config.{k}={v}" for k, v in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def overlay(tmp_path_factory):
    lines = [f"(T pid=1) step:{i} - actor/entropy:0.{i} - actor/grad_norm:1.0" for i in range(1, 9)]
    path = tmp_path_factory.mktemp("verl") / "verl.log"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, figures", [("training_dynamics.ipynb", 12), ("inspect_model.ipynb", 1)]
)
def test_runs_top_to_bottom(name, figures, fresh, overlay, monkeypatch):
    from nbclient import NotebookClient

    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("DAPO_JAX_WORKDIRS", str(fresh))
    monkeypatch.setenv("DAPO_JAX_OVERLAY", str(overlay))
    notebook = read(name)
    NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}
    ).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o.text for o in outputs if o.output_type == "stream" and "Traceback" in o.text]
    images = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert len(images) >= figures
    assert all(len(base64.b64decode(i)) > 5000 for i in images)
    pages = [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert any("nats per token" in page for page in pages)
    assert not any("<script" in page for page in pages)


@pytest.mark.slow
def test_tokens_are_what_the_sampler_drew(fresh):
    """Log-probs and entropies of one forward pass are the sampler's own records."""
    loaded = tokens.open_run(str(fresh), n=4, temperature=0.8)
    prompt, answer = tokens.problems(str(fresh))[0]
    ids = sample.encode(loaded.config, loaded.tokenizer, prompt)
    responses, answers = sample.draw(loaded, ids), tokens.answers(loaded, prompt, answer, top=48)
    assert len(responses) == len(answers) == 4
    for response, seen in zip(responses, answers, strict=True):
        np.testing.assert_allclose(response.logps, [t.logp for t in seen.tokens], atol=1e-4)
        np.testing.assert_allclose(response.entropies, [t.entropy for t in seen.tokens], atol=1e-4)
        assert seen.text == loaded.tokenizer.decode(response.tokens.tolist())
        for token in seen.tokens:
            shares = [p for _, p in token.others]
            assert shares == sorted(shares, reverse=True) and abs(sum(shares) - 1) < 1e-4
            assert any(
                piece == token.piece and abs(p - np.exp(token.logp)) < 1e-5
                for piece, p in token.others
            )
    first = tokens.open_run(str(fresh), n=1, step=2)
    assert first.policy.step == 2 and loaded.policy.step == 3
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), first.params, loaded.params)
    assert any(jax.tree.leaves(changed))
    with pytest.raises(ValueError, match="no step 77"):
        tokens.open_run(str(fresh), step=77)


def test_configs_of_other_versions(tmp_path):
    saved = {"rollout.group_size": 4, "gone.field": 1, "seed": 7}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    c = tokens.read_config(str(tmp_path))
    assert (c.rollout.group_size, c.seed, c.optim.lr) == (4, 7, 3e-4)
    for text, message in (
        ("{", "config.json: no JSON"),
        ('{"model_type": "qwen2"}', "config.json: not a run's"),
        ('{"rollout.group_size": "many"}', "config.json: "),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            tokens.read_config(str(tmp_path))
        assert "\n" not in str(error.value)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("")
    with pytest.raises(ValueError, match="give prompts and answers of your own"):
        tokens.problems(str(tmp_path))
    with pytest.raises(ValueError, match=r"no config\.json in it"):
        tokens.open_run(str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_a_run_in_a_bucket(fresh, bucket, monkeypatch):
    """Its tokenizer is fetched, its checkpoints stay there, and nothing is written beside them."""
    for part in ("config.json", "data", "rollouts"):
        copy = shutil.copytree if (fresh / part).is_dir() else shutil.copy
        copy(fresh / part, bucket / part)
    before = sorted(bucket.rglob("*"))
    load = sample.load

    def local(c, where, **settings):  # Orbax opens buckets by itself
        assert c.checkpoint.directory == "gs://b/checkpoints"
        c.checkpoint.directory = str(fresh / "checkpoints")
        return load(c, where, **settings)

    monkeypatch.setattr(sample, "load", local)
    loaded = tokens.open_run("gs://b/", n=1)
    prompt, answer = tokens.problems("gs://b/")[0]
    assert tokens.answers(loaded, prompt, answer)[0].tokens
    assert sorted(bucket.rglob("*")) == before
