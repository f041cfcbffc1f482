"""The notebooks run from top to bottom in an empty directory and are kept without outputs; what
their first cell installs, and that an install is whole."""

import base64
import glob
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import types

import nbformat
import numpy as np
import pytest
import setuptools
from IPython.core.interactiveshell import InteractiveShell
from scripts import ROOT

from dapo_jax import config, sample
from dapo_jax.lab.dynamics import tokens
from dapo_jax.log import metrics
from dapo_jax.model import hf
from dapo_jax.run import policy

NAMES = sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb"))


def read(name):
    return nbformat.read(ROOT / "notebooks" / name, as_version=4)


SET_UP = read("train_on_colab.ipynb").cells[1].source  # the same in all of them


def test_an_install_has_the_files_that_are_read(monkeypatch):
    """setup.py names every folder of the package, and every file that is no Python."""
    monkeypatch.setattr(setuptools, "setup", lambda **found: asked.update(found))
    asked, package = {}, ROOT / "dapo_jax"
    runpy.run_path(str(ROOT / "setup.py"))
    others = {p for p in package.rglob("*.*") if p.suffix not in (".py", ".pyc")}
    named = asked["package_data"].items()
    code = {".".join(p.parent.relative_to(ROOT).parts) for p in package.rglob("*.py")}
    assert {*asked["packages"]} == code
    assert others == {ROOT.joinpath(*where.split("."), f) for where, files in named for f in files}


@pytest.mark.parametrize("name", NAMES)
def test_no_outputs_are_kept_and_cells_are_thin(name):
    notebook = read(name)
    nbformat.validate(notebook)
    first, *cells = [c for c in notebook.cells if c.cell_type == "code"]
    assert first.source == SET_UP
    assert all(c.outputs == [] and c.execution_count is None for c in (first, *cells))
    assert not any("def " in c.source for c in cells)  # the code lives in dapo_jax


ZIP, WHEEL = "notebooks/dapo_jax.zip", "notebooks/dapo_jax-1-any.whl"
CHECKOUT = "dapo_jax/__init__.py"


def set_up(monkeypatch, folder, pip, address=""):
    """What IPython says of the set-up cell in a folder, where dapo_jax cannot be imported."""
    shell = InteractiveShell()
    shell.register_magic_function(pip, "line", "pip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    monkeypatch.chdir(folder)
    return shell.run_cell(SET_UP.replace('ADDRESS = ""', f'ADDRESS = "{address}"'))


@pytest.mark.parametrize(
    ("address", "files", "chip", "asked"),
    [
        ("", [], "", "set ADDRESS, or upload dapo_jax.zip"),
        ("", ["uploaded"], "", "dapo_jax[gcs] @ HOME/notebooks/mine.zip"),
        ("", [CHECKOUT], "/dev/vfio/0", "dapo_jax[tpu,gcs] @ HOME"),
        ("", [CHECKOUT, ZIP, "uploaded"], "nvidia-smi", f"dapo_jax[cuda,gcs] @ HOME/{ZIP}"),
        ("", [CHECKOUT, WHEEL], "", f"dapo_jax[gcs] @ HOME/{WHEEL}"),
        ("../mine.tar.gz", [ZIP], "", "dapo_jax[gcs] @ HOME/mine.tar.gz"),
        *(
            (address, [], "", f"dapo_jax[gcs] @ {prefix}{address}")
            for address, prefix in (
                ("https://example.org/me/dapo_jax", "git+"),
                ("git+ssh://git@example.org/me/dapo_jax", ""),
                ("https://example.org/dapo_jax.zip", ""),
                ("file:///home/me/dapo_jax", ""),
            )
        ),
    ],
)
def test_set_up_takes_an_address_or_what_is_there(
    address, files, chip, asked, tmp_path, monkeypatch
):
    """What the set-up cell asks pip for, or ends with."""
    said = []
    monkeypatch.setattr(glob, "glob", lambda pattern: [chip] if chip[:8] == pattern[:8] else [])
    monkeypatch.setattr(shutil, "which", lambda program: program == chip)
    if "uploaded" in files:
        upload = types.SimpleNamespace(upload=lambda: {"mine.zip": b""})
        monkeypatch.setitem(sys.modules, "google.colab", types.SimpleNamespace(files=upload))
    for folder in ("notebooks", "dapo_jax"):
        (tmp_path / folder).mkdir()
    for file in set(files) - {"uploaded"}:
        (tmp_path / file).touch()
    result = set_up(monkeypatch, tmp_path / "notebooks", said.append, address)
    said.append(str(result.error_in_exec))
    assert asked.replace("HOME", tmp_path.as_uri()) in said[0]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A quickstart of a few steps and a short warm-up."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    settings = {
        "steps": 3, "supervised_warmup.skill_steps": 150, "supervised_warmup.habit_steps": 0,
        "eval.max_problems": 16, "eval.every": 2, "rollout.groups": 8, "checkpoint.every": 2,
        "curriculum.pass_rate_cap": 0.9,
    }  # fmt: skip
    command = [sys.executable, "-m", "dapo_jax.train", "--config=configs/quickstart.py"]
    command += [f"--workdir={folder}", *(f"--config.{k}={v}" for k, v in settings.items())]
    env = os.environ | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
# In place of what the notebook trains: the embedded task.
TINY = config.leaves(config.base()) | {"steps": 2, "supervised_warmup.skill_steps": 150}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, figures",
    [
        ("training_dynamics.ipynb", 15),
        ("inspect_model.ipynb", 0),
        ("train_on_colab.ipynb", 1),
        pytest.param("train_on_kaggle.ipynb", 1, marks=pytest.mark.nightly),
    ],  # as Colab's
)
def test_runs_top_to_bottom_in_an_empty_folder(name, figures, tmp_path, monkeypatch, request):
    from nbclient import NotebookClient

    train = name.startswith("train_")
    workdir = tmp_path / "run" if train else request.getfixturevalue("fresh")
    (here := tmp_path / "empty").mkdir()
    overlay = tmp_path / "verl.log"
    overlay.write_text("".join(f"(T pid=1) step:{i} - actor/entropy:0.{i}\n" for i in range(1, 9)))
    env = ENVIRONMENT | {
        "DAPO_JAX_WORKDIRS": str(workdir),
        "DAPO_JAX_OVERLAY": str(overlay),
        "DAPO_JAX_OVERRIDES": json.dumps(TINY),
    }
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    notebook, place = read(name), {"metadata": {"path": str(here)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=place).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or "Traceback" in o.get("text", "")]
    shown = lambda kind: [o.data[kind] for o in outputs if kind in o.get("data", {})]
    images, pages = shown("image/png"), shown("text/html")
    assert len(images) >= figures and all(len(base64.b64decode(i)) > 5000 for i in images)
    assert any("nats per token" in page for page in pages)
    assert not any("<script" in page for page in pages)
    if train:
        assert [r["step"] for r in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
        assert hf.load(tmp_path / "run-hf").shape.num_layers == 2


@pytest.mark.slow
def test_tokens_are_what_the_sampler_drew(fresh):
    """Log-probs and entropies of one forward pass are the sampler's own records."""
    loaded = tokens.open_run(str(fresh), n=4, temperature=0.8)
    prompt, answer = tokens.problems(str(fresh))[0]
    responses, answers = sample.draw(loaded, prompt), tokens.answers(loaded, prompt, answer, top=48)
    assert len(responses) == len(answers) == 4
    for response, seen in zip(responses, answers, strict=True):
        np.testing.assert_allclose(response.logps, [t.logp for t in seen.tokens], atol=1e-4)
        np.testing.assert_allclose(response.entropies, [t.entropy for t in seen.tokens], atol=1e-4)
        assert seen.text == loaded.tokenizer.decode(response.tokens.tolist())
        for token in seen.tokens:
            pieces, shares = zip(*token.others, strict=True)
            assert list(shares) == sorted(shares, reverse=True) and abs(sum(shares) - 1) < 1e-4
            near = np.abs(shares - np.exp(token.logp)) < 1e-5
            assert token.piece in np.array(pieces)[near]
    assert loaded.policy.step == 3
    assert tokens.open_run(str(fresh), n=1, step=2).policy.step == 2
    with pytest.raises(ValueError, match="no step 77"):
        tokens.open_run(str(fresh), step=77)


def test_what_is_no_run_of_ours(tmp_path):
    (tmp_path / "config.json").write_text('{"rollout.group_size": "many"}')
    with pytest.raises(ValueError, match=r"^.*config\.json: .*group_size.*$"):
        tokens.open_run(str(tmp_path))
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(ValueError, match="give prompts and answers of your own"):
        tokens.problems(str(tmp_path))
    with pytest.raises(ValueError, match=r"no config\.json in it"):
        tokens.open_run(str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_a_run_in_a_bucket(fresh, bucket, monkeypatch):
    """Its tokenizer is fetched, its checkpoints stay there, and nothing is written beside them."""
    shutil.copytree(fresh, bucket, dirs_exist_ok=True)
    before = sorted(bucket.rglob("*"))
    load = policy.load_params

    def local(c, machine, found):  # Orbax opens buckets by itself
        assert (found.steps, found.step) == ("gs://b/checkpoints", 3)
        return load(c, machine, found._replace(steps=str(fresh / "checkpoints")))

    monkeypatch.setattr(policy, "load_params", local)
    loaded = tokens.open_run("gs://b/", n=1)
    prompt, answer = tokens.problems("gs://b/")[0]
    assert tokens.answers(loaded, prompt, answer)[0].tokens
    assert sorted(bucket.rglob("*")) == before
