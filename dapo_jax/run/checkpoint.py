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


def restore_params(directory: str, params_like, shardings):
    """Only the parameters of the newest step of another run (`init_from`)."""
    m = manager(directory, keep=1)
    step = m.latest_step()
    if step is None:
        raise ValueError(f"init_from: no checkpoint under {directory}")
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params_like, shardings
    )
    args = ocp.args.PyTreeRestore(
        item={"params": target},
        restore_args=ocp.checkpoint_utils.construct_restore_args({"params": target}),
        partial_restore=True,
    )
    out = m.restore(step, args=ocp.args.Composite(arrays=args))
    m.close()
    return out["arrays"]["params"]


# ------------------------------------------------------------------------------------------------
# Groups as flat arrays
# ------------------------------------------------------------------------------------------------


def flatten_groups(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Ragged groups -> concatenated arrays and their lengths. Orbax refuses arrays of size 0, so
    each array ends with one dummy entry."""
    responses = [r for g in groups for r in g.responses]

    def join(parts, dtype):
        return np.concatenate([np.asarray(p, dtype).reshape(-1) for p in parts] + [np.zeros(1, dtype)])

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
