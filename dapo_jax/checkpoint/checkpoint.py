"""One atomic checkpoint: everything that decides what happens next, under one step number.

    arrays      params, opt_state, ref_params and each entry of `State.memory` under its name; saved
                by shard, restored into any mesh
    carried     groups waiting for the next step, or in flight (ragged, flat), and the arrays of
                `State.by_problem`
    state       JSON: counters, cursor, acceptance estimate, resolved config, package versions,
                fingerprint of the data, checksums of the rest
    seal.json   the files of all this (`checkpoint/seal.py`)

Orbax writes to a temporary directory and renames it, so a step directory is there whole or not at
all. Nothing is pickled. What is read back is untrusted: `Damaged` says what is wrong with it.
"""

import contextlib
import importlib.metadata
import math
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as keeping

from dapo_jax import gate, parallel
from dapo_jax.checkpoint import groups as groups_lib, retry, seal, workdir
from dapo_jax.checkpoint.seal import Damaged
from dapo_jax.config import schema
from dapo_jax.dapo.state import Counters, State
from dapo_jax.data import files
from dapo_jax.model import adapters, qwen2

ERRORS = (Damaged, OSError, ValueError)  # of reading, the graver ones first (parallel.agreed)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

Directory = str | pathlib.Path


def versions() -> dict[str, str]:
    return {p: importlib.metadata.version(p) for p in _PACKAGES}


def manager(
    directory: Directory, keep: int, keep_every: int = 0, keep_best: int = 0, cleanup: bool = False
) -> ocp.CheckpointManager:
    """Asynchronous; keeps the newest `keep` steps, those divisible by `keep_every` and the
    `keep_best` with the highest score. `cleanup`: remove what killed saves have left, which only
    the one process that writes there may do."""
    path = absolute(directory)
    score = lambda saved: -math.inf if saved["score"] is None else saved["score"]
    policies = [keeping.LatestN(keep)]
    if keep_every:
        policies.append(keeping.EveryNSteps(keep_every))
    if keep_best:
        best = dict(get_metric_fn=score, n=keep_best, keep_checkpoints_without_metrics=False)
        policies.append(keeping.BestN(**best))

    def write_seal():
        """Called before the commit."""
        if parallel.is_main_process():
            for entry in path.iterdir():
                if entry.name[0].isdigit() and not (entry / seal.SEAL).exists():
                    seal.write(entry)

    options = ocp.CheckpointManagerOptions(
        preservation_policy=keeping.AnyPreservationPolicy(policies),
        best_fn=score if keep_best else None,  # without it Orbax does not write the score
        cleanup_tmp_directories=cleanup,
        async_options=ocp.AsyncOptions(post_finalization_callback=write_seal),
    )
    return ocp.CheckpointManager(path, options=options)


def absolute(directory: Directory) -> epath.Path:
    """Local paths absolute, as Orbax wants them, and without links."""
    remote = workdir.is_remote(directory)
    return workdir.place(directory if remote else pathlib.Path(directory).resolve(), directory)


def is_there(state: State) -> bool:
    """Whether its arrays can be saved; an update deletes those that it starts from."""
    return not any(x.is_deleted() for x in jax.tree.leaves(_arrays(state)))


class NotFinite(ValueError):
    """A state with NaN or infinity, from which no run can go on."""


def save(
    m: ocp.CheckpointManager,
    state: State,
    config: dict[str, Any],
    inputs: Mapping[str, str] = MappingProxyType({}),
    score: float | None = None,
) -> None:
    """Start writing `state` under its step; returns once its arrays may be overwritten. inputs:
    `resume.inputs`. score: what `keep_best` compares (None: never among the best). NotFinite: an
    array holds NaN or infinity, on every process; nothing is written."""
    arrays, carried = _arrays(state), groups_lib.flatten(state.carried)
    carried |= state.by_problem
    survey = seal.survey(arrays)
    if broken := [path for path, (_, finite) in survey.items() if not finite]:
        why = f"{len(broken)} of {len(survey)} arrays hold NaN or infinity, {broken[0]} the first"
        raise NotFinite(f"step {state.counters.step} is not saved in {m.directory}: {why}")
    checksums = {path: number for path, (number, _) in survey.items()}
    content = {"arrays": checksums, "carried": seal.digest(carried)}
    described = state.counters._asdict() | {"config": config, "versions": versions()}
    items = ocp.args.Composite(
        arrays=ocp.args.StandardSave(arrays),
        carried=ocp.args.StandardSave(carried),
        state=ocp.args.JsonSave(described | {**inputs, "content": content}),
    )
    m.save(state.counters.step, args=items, metrics={"score": score})


def restore(m: ocp.CheckpointManager, step: int, like: State, shardings: State) -> State:
    """The saved state, its arrays laid out by `shardings`; works on any mesh, whatever mesh wrote
    it. `like` has the structure, shapes and dtypes of params, opt_state and ref_params.

    A collective. ValueError: other names or shapes than `like`. Damaged: it is not what was saved.
    OSError: it cannot be read now."""
    saved = read_state(m, step)
    target = parallel.sharded(_arrays(like), _arrays(shardings))
    there = parallel.agreed(lambda: _saved_shapes(m, step), ERRORS)
    _check_same(f"{m.directory} step {step}", there, target)
    args = {"arrays": ocp.args.StandardRestore(target), "carried": ocp.args.StandardRestore()}
    read = lambda: [_read(m, step, item, how) for item, how in args.items()]
    arrays, carried = parallel.agreed(read, ERRORS)
    content = saved["content"]
    _check_content(arrays, content["arrays"])
    if seal.digest(carried) != content.get("carried"):
        raise Damaged("carried is not what was saved")
    try:
        by_problem = {k: np.asarray(v) for k, v in carried.items() if k not in groups_lib.FIELDS}
        groups = groups_lib.unflatten(carried)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Damaged(f"carried holds no groups: {gate.describe(error)}") from error
    trained = arrays["params"], arrays["opt_state"], arrays.get("ref_params")
    counters = Counters(**{k: saved[k] for k in Counters._fields if k in saved})
    memory = {name: tree for name, tree in arrays.items() if name in like.memory}
    return State(*trained, groups, counters, memory, by_problem)


def _check_content(arrays: dict, saved: dict[str, int]) -> None:
    """Damaged: an array has another checksum than was saved."""
    for name, number in sorted(seal.content(arrays).items()):
        if number != saved.get(name):
            raise Damaged(f"{name} is not what was saved")


def read_state(m: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """The JSON of a step, as process 0 reads it. Damaged: it has not what `save` writes."""
    saved = parallel.of_main_process(lambda: read_json(m, step), ERRORS)
    for name, default in Counters._field_defaults.items():
        # A counter that an older version did not have starts at its default.
        value = saved.get(name, default)
        if type(value) is not type(default) or not 0 <= value < 2**63:
            raise Damaged(f"state: {name} is {value!r:.40}")
    known = [saved.get(k) for k in ("config", "versions", "content")]
    good = all(isinstance(x, dict) for x in known) and isinstance(known[2].get("arrays"), dict)
    if not good or not isinstance(saved.get("data", ""), str) or saved.get("step") != step:
        raise Damaged("state has other fields than were saved")
    return saved


def read_json(m: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """The JSON of a step, as this process reads it, with any fields."""
    saved = _read(m, step, "state", ocp.args.JsonRestore())
    if not isinstance(saved, dict):
        raise Damaged("state is no JSON object")
    return saved


def _read(m: ocp.CheckpointManager, step: int, item: str, args):
    restored = lambda: m.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    return _retried(m, step, item, restored)


def _retried(m: ocp.CheckpointManager, step: int, item: str, action):
    """What cannot be read is tried again. Damaged: it was read, twice, and makes no sense.
    ValueError: the step is not there any more."""
    place = m.directory / str(step)
    for last in (False, True):
        try:
            return retry.read(f"{m.directory} step {step}: {item}", action)
        except Exception as error:  # whatever the readers make of changed bytes
            if retry.temporary(error):
                raise
            if not place.exists():
                why = "was removed while it was read, by the run that writes there"
                remedy = "without a step the newest is read; checkpoint.keep says how many stay"
                raise ValueError(f"{m.directory} step {step}: {why}; {remedy}") from error
            if last:
                raise Damaged(f"{item} cannot be read: {gate.describe(error)}") from error


def _arrays(state: State) -> dict:
    reference = {} if state.ref_params is None else {"ref_params": state.ref_params}
    return {"params": state.params, "opt_state": state.opt_state} | reference | state.memory


def restore_params(directory: Directory, params_like, shardings, step: int | None = None):
    """The parameters alone, of the newest (or the given) step under `directory`, in the dtypes of
    `params_like` and laid out by `shardings`; nothing is written. ValueError: no such step; its
    parameters have other names or shapes than `params_like`; it is damaged."""
    with _reading_step(directory, step) as (m, step):
        # Orbax would leave a parameter that is not there as it stands in the target.
        saved = parallel.agreed(lambda: _saved_shapes(m, step), ERRORS)["params"]
        _check_same(f"{directory} step {step}", saved, params_like)
        target = {"params": parallel.sharded(params_like, shardings)}
        types = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=types, partial_restore=True)
        read = lambda: (_read(m, step, "arrays", args)["params"], read_json(m, step))
        params, state = parallel.agreed(read, ERRORS)
        content = state["content"].get("arrays") if isinstance(state.get("content"), dict) else None
        kept = jax.tree.map(lambda a, b: a.dtype == b.dtype, saved, params_like)
        # `convert` saves no checksums; rounded arrays have others.
        if content and jax.tree.all(kept):
            _check_content({"params": params}, content)
    return params


def restore_merged(
    directory: Directory, shape: qwen2.Shape, mesh, rules, step: int | None = None
) -> qwen2.Params:
    """As `restore_params`, for a network of this shape, in float32: adapters (LoRA) that the run
    has trained are merged into the weights they belong to."""
    with _reading_step(directory, step) as (m, step):
        saved = parallel.agreed(lambda: read_json(m, step), ERRORS).get("config")
    c, named = schema.base(), ("model.lora.", "model.dtype", "model.float32_head")
    of_run = saved if isinstance(saved, dict) else {}  # `convert` saves none
    c.update({k: v for k, v in of_run.items() if k.startswith(named)})
    shape = shape._replace(lora=qwen2.lora_choice(c), float32_head=c.model.float32_head)
    shardings = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)
    params = restore_params(directory, qwen2.abstract(shape), shardings, step)
    if not shape.lora:
        return params
    merged = lambda params: qwen2.cast(adapters.merge(shape.lora, params, "float32"), "float32")
    return jax.jit(merged, out_shardings=adapters.base(shardings))(params)


@contextlib.contextmanager
def _reading_step(directory: Directory, step: int | None):
    """(a reader, the step that `find_step` finds). `Damaged` inside gets the step's name."""
    step = find_step(directory, step)
    with reader(directory) as m:
        try:
            yield m, step
        except Damaged as error:
            raise Damaged(f"{directory} step {step}: damaged: {error}") from error


def _saved_shapes(m: ocp.CheckpointManager, step: int) -> dict:
    path = m.directory / str(step) / "arrays"
    shapes = lambda: ocp.PyTreeCheckpointHandler().metadata(path).tree
    return _retried(m, step, "arrays", shapes)


def steps(
    directory: Directory, among: Sequence[int] | None = None
) -> tuple[list[int], dict[int, str]]:
    """(whole steps, newest first; damaged ones and what is wrong with each), by their seals. among:
    those to look at, of `numbers`."""
    path, whole, damaged = absolute(directory), [], {}
    for step in numbers(directory) if among is None else among:
        try:
            seal.check(path / str(step))
            whole.append(step)
        except (Damaged, FileNotFoundError) as error:
            if (path / str(step)).exists():  # else the run that writes here has removed it
                damaged[step] = str(error)
    return whole, damaged


def numbers(directory: Directory) -> list[int]:
    """The steps that are there, whole or not, newest first."""
    path = absolute(directory)

    def there() -> list[int]:
        entries = path.iterdir() if path.is_dir() else ()
        return [int(p.name) for p in entries if p.name.isdigit() and p.is_dir()]

    return sorted(retry.read(f"{path}", there), reverse=True)


def set_aside(directory: Directory, step: int) -> epath.Path:
    """Move a damaged step out of the way of the run that redoes it; a second one becomes STEP.2."""
    path = absolute(directory)
    kept = path.parent / f"{path.name}.damaged"
    kept.mkdir(parents=True, exist_ok=True)
    return (path / str(step)).rename(files.unused(kept / str(step)))


def find_step(directory: Directory, step: int | None = None) -> int:
    """`step`, or else the newest whole one under `directory`, as process 0 finds it. ValueError:
    there is none; the given one is not there or is damaged."""

    def find() -> int:
        if not workdir.is_remote(directory) and not pathlib.Path(directory).is_dir():
            raise ValueError(f"{directory}: no such directory")
        known, damaged = numbers(directory), {}
        if step is not None and step not in known:
            there = ", ".join(map(str, sorted(known))) or "none"
            raise ValueError(f"{directory}: no step {step}; it has {there}")
        for wanted in known if step is None else [step]:  # a seal takes long in a bucket
            whole, wrong = steps(directory, [wanted])
            if whole:
                return wanted
            damaged |= wrong
        if not damaged and step is None and numbers(directory) != known:
            return find()  # the run that writes there has removed these, and has newer ones
        if not damaged:
            raise ValueError(f"{directory}: no checkpoint in it")
        wanted = max(damaged)
        raise Damaged(f"{directory} step {wanted}: damaged: {damaged[wanted]}")

    return parallel.of_main_process(find, ERRORS)


def reader(directory: Directory) -> ocp.CheckpointManager:
    """Creates and removes nothing, so that a run may be writing there at the same time. Processes
    read each by itself: one that has to try again must not leave the others waiting in Orbax."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    how = dict(create=False, lightweight_initialize=True, multiprocessing_options=alone)
    options = ocp.CheckpointManagerOptions(**how)
    return ocp.CheckpointManager(absolute(directory), options=options)


def _check_same(where: str, saved, wanted) -> None:
    """ValueError: the trees have other names or shapes."""
    named = lambda tree: {seal.name(k): list(x.shape) for k, x in jax.tree.leaves_with_path(tree)}
    saved, wanted = named(saved), named(wanted)
    for name in sorted(saved.keys() | wanted.keys()):
        there, here = saved.get(name, "absent"), wanted.get(name, "absent")
        if there != here:
            remedy = "use the config of the run that wrote it (model.* and what else is trained)"
            differs = f"{name} is {there} there and {here} by this config"
            raise ValueError(f"{where}: {differs}; {remedy}")
