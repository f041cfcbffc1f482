"""Shapes of the models that a config names: no weights are read or fetched."""

import functools
import pathlib
import re

import huggingface_hub

from dapo_jax.model import hf, qwen2

# Vocabulary, D, F, layers, heads, key/value heads, tied embeddings: the config.json of each size.
QWEN2_5 = {
    "0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "3B": (151936, 2048, 11008, 36, 16, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "14B": (152064, 5120, 13824, 48, 40, 8, False),
    "32B": (152064, 5120, 27648, 64, 40, 8, False),
    "72B": (152064, 8192, 29568, 80, 64, 8, False),
}
QWEN3 = {
    "0.6B": (151936, 1024, 3072, 28, 16, 8, True),
    "1.7B": (151936, 2048, 6144, 28, 16, 8, True),
    "4B": (151936, 2560, 9728, 36, 32, 8, True),
    "8B": (151936, 4096, 12288, 36, 32, 8, False),
    "14B": (151936, 5120, 17408, 40, 40, 8, False),
    "32B": (151936, 5120, 25600, 64, 64, 8, False),
}
_DISTILLED = "deepseek-ai/DeepSeek-R1-Distill-Qwen"


def qwen2_5(size: str, **choices) -> qwen2.Shape:
    """Shape of the published Qwen2.5 of that size, e.g. '32B'."""
    V, D, F, L, H, K, tied = QWEN2_5[size]
    eps = 1e-5 if D >= 5120 else 1e-6
    return qwen2.Shape(V, D, F, L, H, K, D // H, 1e6, eps, tied, **choices)


def published(name: str, **choices) -> qwen2.Shape | None:
    """Shape of a model by its name on the hub; None where the name is not known here. Qwen2.5 and
    its Instruct variant have one shape, and so have Qwen3 and its Base variant."""
    plain = re.sub(r"(Qwen2\.5.*)-Instruct$|(Qwen3.*)-Base$", r"\1\2", name)
    family, _, size = plain.rpartition("-")
    if family == "Qwen/Qwen3" and size in QWEN3:
        *counts, tied = QWEN3[size]
        return qwen2.Shape(*counts, 128, 1e6, 1e-6, tied, qkv_bias=False, qk_norm=True, **choices)
    of_math = {"rope_theta": 1e4} if size in ("1.5B", "7B") else {}
    sizes, fields = {
        "Qwen/Qwen2.5": (QWEN2_5, {}),
        "Qwen/Qwen2.5-Math": (("1.5B", "7B"), of_math),
        _DISTILLED: (("1.5B", "7B", "14B", "32B"), of_math | {"tie_embeddings": False}),
    }.get(family, ((), {}))
    return qwen2_5(size, **choices)._replace(**fields) if size in sizes else None


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
    if "://" in path or pathlib.Path(path).expanduser().is_dir():
        return hf.read_shape(hf.resolve(path, weights=False), **choices)
    if shape := published(path, **choices):
        return shape
    try:
        file = _config_file(path)
    except Exception as e:  # as in hf.resolve
        raise ValueError(f"{path}: its config.json is not to be had ({type(e).__name__})") from e
    return hf.read_shape(pathlib.Path(file).parent, **choices)


# Fetched once: a search reads it for every mesh.
_config_file = functools.cache(lambda path: huggingface_hub.hf_hub_download(path, "config.json"))
