"""Shapes of the models that a config names: no weights are read or fetched."""

import os
import pathlib
import re

from dapo_jax.model import hf, qwen2


def _read(text: str) -> dict[str, qwen2.Shape]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, *counts, theta, eps, tied = line.split()
            numbers = *map(int, counts), float(theta), float(eps)
            third = "Qwen3" in name
            found[name] = qwen2.Shape(*numbers, tied == "yes", qkv_bias=not third, qk_norm=third)
    return found


PUBLISHED = _read(pathlib.Path(__file__).with_name("shapes.txt").read_text())


def published(name: str, **choices) -> qwen2.Shape | None:
    """Shape of a model by its name on the hub; None where the name is not known here. Qwen2.5 and
    its Instruct variant have one shape, and so have Qwen3 and its Base variant."""
    plain = re.sub(r"(Qwen2\.5.*)-Instruct$|(Qwen3.*)-Base$", r"\1\2", name)
    return PUBLISHED[plain]._replace(**choices) if plain in PUBLISHED else None


def network(config) -> qwen2.Shape:
    """Shape of the policy. ValueError: its config.json cannot be read."""
    if not config.model.path:
        return qwen2.shape_from_config(config)
    return read_network(config, config.model.path)


def value_model(config, policy: qwen2.Shape) -> qwen2.Shape | None:
    """Shape of the value model beside the policy; None where the run has none."""
    if not config.critic.enabled or policy.value_head:
        return None
    start = config.critic.init_from
    body = read_network(config, start)._replace(remat=policy.remat) if start else policy
    return body.merged._replace(value_head=True)


def read_network(config, path: str) -> qwen2.Shape:
    """Shape of the model at `path`, a directory or a name on the hub, as the config computes it."""
    choices = qwen2.compute_choices(config)
    if "://" in path or os.path.isdir(os.path.expanduser(path)):
        return hf.read_shape(hf.resolve(path, weights=False), **choices)
    if shape := published(path, **choices):
        return shape
    try:
        file = hf.config_file(path)
    except Exception as e:  # as in hf.resolve
        nowhere = f"no such directory here, and no config.json on the hub ({type(e).__name__})"
        raise ValueError(f"{path}: {nowhere}") from e
    return hf.read_shape(file.parent, **choices)
