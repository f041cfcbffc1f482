"""The notebook for Kaggle: what its first cell installs there, and that its settings are valid on
eight chips."""

import os
from pathlib import Path

import jax
from test_notebooks import read, set_up

from dapo_jax import config


def test_a_wheel_of_a_dataset_is_installed(tmp_path, monkeypatch):
    wheel, said = tmp_path / "dataset" / "dapo_jax-1-py3-none-any.whl", []
    found = lambda self, pattern: [wheel] if (str(self), pattern) == WANTED else []
    monkeypatch.setattr(Path, "rglob", found)
    (empty := tmp_path / "working").mkdir()
    set_up(monkeypatch, empty, said.append)
    assert said[0].endswith(f'gcs] @ {wheel.as_uri()}"')


WANTED = "/kaggle/input", "dapo_jax*.whl"


def test_its_settings_fit_eight_chips(monkeypatch, capsys):
    """What the cell says that the run is; each pass has as many rows on each chip."""
    (cell,) = (c.source for c in read("train_on_kaggle.ipynb").cells if "presets" in c.source)
    scope = {}
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the cell sets what no test after it has
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    exec(cell, scope)
    c = scope["c"]
    config.validate(c, 8)
    assert config.resolve_mesh(c, 8) == {"data": 1, "fsdp": 8, "tensor": 1}
    assert c.rollout.slots == c.rollout.groups * c.rollout.group_size == 512
    assert c.optim.micro_batch_rows % 8 == 0 and "100 steps, kept in /kaggle/working" in (
        capsys.readouterr().out
    )
