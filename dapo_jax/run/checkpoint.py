"""One atomic checkpoint: everything that decides what happens next, under one step number.

    params, opt_state, ref_params   arrays, saved by shard, restored into any mesh
    carried                         accepted groups waiting for the next step (ragged arrays, flat)
    state                           JSON: counters, cursor, acceptance estimate, resolved config,
                                    package versions

Orbax writes to a temporary directory and renames it, so a step directory is there whole or not at
all. Nothing is pickled.
"""

import importlib.metadata
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict

from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.rollout.engine import Response

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    return {p: importlib.metadata.version(p) for p in _PACKAGES}


def manager(directory: str | pathlib.Path, keep: int) -> ocp.CheckpointManager:
    """Asynchronous; keeps the newest `keep` steps. A local path is made absolute for Orbax."""
    path = str(directory)
    if "://" not in path:
        path = str(pathlib.Path(path).resolve())
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
    return ocp.CheckpointManager(path, options=options)


class State(NamedTuple):
    """Everything that decides what happens next, and nothing else."""

    params: dict
    opt_state: Any
    ref_params: dict | None  # the start of the run, where loss.kl_coef wants it
    carried: list[Group]  # accepted groups of earlier steps
    step: int = 0  # rollout steps done
    rounds: int = 0  # generation rounds done
    updates: int = 0  # gradient updates done
    position: int = 0  # next problem of the stream
    accept_rate: float = 1.0  # estimate; decides only how many problems are drawn ahead
    empty_steps: int = 0  # steps in a row without a learnable group
    skipped_in_row: int = 0  # non-finite gradients in a row
    tokens: int = 0  # response tokens drawn so far
    samples: int = 0  # responses drawn so far


_COUNTERS = State._fields[4:]


def save(m: ocp.CheckpointManager, state: State, config: dict[str, Any]) -> None:
    """Start writing `state` under its step; returns once its arrays may be overwritten."""
    counters = {k: getattr(state, k) for k in _COUNTERS}
    m.save(
        state.step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardSave(_arrays(state)),
            carried=ocp.args.StandardSave(flatten_groups(state.carried)),
            state=ocp.args.JsonSave(counters | {"config": config, "versions": versions()}),
        ),
    )


def restore(m: ocp.CheckpointManager, step: int, like: State, shardings: State) -> State:
    """The saved state, its arrays laid out by `shardings`; works on any mesh, whatever mesh wrote
    it. `like` has the structure, shapes and dtypes of params, opt_state and ref_params."""
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        _arrays(like),
        _arrays(shardings),
    )
    out = m.restore(
        step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardRestore(target),
            carried=ocp.args.StandardRestore(),
            state=ocp.args.JsonRestore(),
        ),
    )
    arrays, saved = out["arrays"], out["state"]
    return State(
        arrays["params"],
        arrays["opt_state"],
        arrays.get("ref_params"),
        unflatten_groups(out["carried"]),
        **{k: saved[k] for k in _COUNTERS},
    )


def _arrays(state: State) -> dict:
    arrays = {"params": state.params, "opt_state": state.opt_state}
    return arrays | ({} if state.ref_params is None else {"ref_params": state.ref_params})


def restore_params(directory: str | pathlib.Path, params_like, shardings, step: int | None = None):
    """The parameters alone, of the newest (or the given) step under `directory`, in the dtypes of
    `params_like` and laid out by `shardings`. Nothing else is read, nothing is written.

    ValueError: no such step; its parameters have other names or shapes than `params_like`.
    """
    with _reader(directory) as m:
        step = _existing_step(m, directory, step)
        # Orbax would leave a parameter that is not there as it stands in the target.
        saved = ocp.PyTreeCheckpointHandler().metadata(m.directory / str(step) / "arrays")
        _check_same(f"{directory} step {step}", saved.tree["params"], params_like)
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params_like, shardings
        )
        args = ocp.args.PyTreeRestore(
            item={"params": target},
            restore_args=ocp.checkpoint_utils.construct_restore_args({"params": target}),
            partial_restore=True,
        )
        return m.restore(step, args=ocp.args.Composite(arrays=args))["arrays"]["params"]


def newest_step(directory: str | pathlib.Path) -> int:
    """ValueError: `directory` holds no checkpoint."""
    with _reader(directory) as m:
        return _existing_step(m, directory, None)


def _reader(directory: str | pathlib.Path) -> ocp.CheckpointManager:
    """Creates and removes nothing, so that a run may be writing there at the same time."""
    path = str(directory)
    if "://" not in path:
        path = str(pathlib.Path(path).resolve())
        if not pathlib.Path(path).is_dir():
            raise ValueError(f"{directory}: no such directory")
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(create=False))


def _existing_step(m: ocp.CheckpointManager, directory, step: int | None) -> int:
    steps = sorted(m.all_steps())
    if not steps:
        raise ValueError(f"{directory}: no checkpoint in it")
    if step is not None and step not in steps:
        raise ValueError(f"{directory}: no step {step}; it has {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def _check_same(where: str, saved, wanted) -> None:
    saved, wanted = (
        {".".join(k): list(x.shape) for k, x in flatten_dict(tree).items()}
        for tree in (saved, wanted)
    )
    for name in sorted(saved.keys() | wanted.keys()):
        there, here = saved.get(name, "absent"), wanted.get(name, "absent")
        if there != here:
            raise ValueError(
                f"{where}: {name} is {there} there and {here} by this config; use config.model.* of"
                " the run that wrote it"
            )


# ------------------------------------------------------------------------------------------------
# Groups as flat arrays
# ------------------------------------------------------------------------------------------------


def flatten_groups(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Ragged groups -> concatenated arrays and their lengths. Orbax refuses arrays of size 0, so
    each array ends with one dummy entry."""
    responses = [r for g in groups for r in g.responses]

    def join(parts, dtype):
        return np.concatenate(
            [np.asarray(p, dtype).reshape(-1) for p in parts] + [np.zeros(1, dtype)]
        )

    return dict(
        position=join([g.position for g in groups], np.int64),
        prompt_length=join([len(g.prompt) for g in groups], np.int32),
        prompt=join([g.prompt for g in groups], np.int32),
        correct=join([g.correct for g in groups], np.int32),
        response_length=join([len(r.tokens) for r in responses], np.int32),
        tokens=join([r.tokens for r in responses], np.int32),
        logps=join([r.logps for r in responses], np.float32),
        entropies=join([r.entropies for r in responses], np.float32),
        truncated=join([r.truncated for r in responses], np.int32),
    )


def unflatten_groups(flat: dict[str, np.ndarray]) -> list[Group]:
    flat = {k: np.asarray(v)[:-1] for k, v in flat.items()}
    n = len(flat["position"])
    if not n:
        return []
    split = lambda name, lengths: np.split(flat[name], np.cumsum(flat[lengths])[:-1])  # noqa: E731
    tokens, logps, entropies = (
        split(k, "response_length") for k in ("tokens", "logps", "entropies")
    )
    responses = [
        Response(t, lp, e, bool(c))
        for t, lp, e, c in zip(tokens, logps, entropies, flat["truncated"], strict=True)
    ]
    G = len(responses) // n
    return [
        Group(int(p), prompt.tolist(), responses[i * G : (i + 1) * G], correct.astype(bool))
        for i, (p, prompt, correct) in enumerate(
            zip(
                flat["position"],
                split("prompt", "prompt_length"),
                flat["correct"].reshape(n, G),
                strict=True,
            )
        )
    ]


def dump_json(path: pathlib.Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)
