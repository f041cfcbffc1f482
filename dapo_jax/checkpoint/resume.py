"""Resume: which checkpoint to restore, and whether this config may continue from it."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax import parallel
from dapo_jax.build import Text
from dapo_jax.checkpoint import checkpoint
from dapo_jax.checkpoint.checkpoint import Damaged
from dapo_jax.checkpoint.workdir import Workdir
from dapo_jax.config import schema
from dapo_jax.dapo.state import State
from dapo_jax.data.problems import Encoded
from dapo_jax.variants import choose

# Fields that decide how long, how fast and where a run trains, and what it logs, but not what it
# learns. A change of any other field is refused. Names that end in a dot are sections.
HARMLESS = (
    "steps", "eval.", "checkpoint.", "log.", "guard.", "mesh.", "sharding.", *choose.FREE_FIELDS,
    "init_from", "init_state",  # used only if the workdir has no checkpoint
    "model.path",  # may have moved: weights are in the checkpoint, tokens in the fingerprint
    "model.scan_layers", "model.attention", "model.remat", "model.attention_chunk",
    "model.head_chunk", "reward.workers", "reward.concurrency", "rollout.slots", "rollout.chunk",
    "rollout.draft_cost", "rollout.draft_tokens", "rollout.draft_places",
    "rollout.prefill_prompts", "rollout.prefill_tokens", "rollout.page_tokens",
    "rollout.cache_fraction", "optim.micro_batch_rows", "optim.row_tokens", "optim.offload",
    "optim.last_row_tokens", "optim.share_prompts", "optim.max_skipped",
    "dynamic_sampling.max_empty_steps", "dynamic_sampling.on_exhausted",
)  # fmt: skip


Say = Callable[[str], None]
Accept = Callable[[dict[str, Any]], bool]


def newest(
    directory: str | pathlib.Path, like: State, shardings: State, accept: Accept, say: Say
) -> State | None:
    """The state of the newest whole checkpoint under `directory`; None if there is no checkpoint at
    all. Damaged ones are reported and set aside, and the one before is used. Process 0 decides
    which checkpoints are whole; all processes restore the same step, or none does.

    accept: called with the saved JSON before any array is read. It raises to refuse, and returns
      whether the problems are the same; if not, what is recorded about problems is dropped.
    Damaged: there are checkpoints, but none is whole. OSError: one cannot be read now."""
    opinion = parallel.of_main_process(lambda: checkpoint.steps(directory))
    whole, damaged = opinion[0], {int(step): wrong for step, wrong in opinion[1].items()}
    for step in whole:
        with checkpoint.reader(directory) as m:
            try:
                same = accept(checkpoint.read_state(m, step))
                state = checkpoint.restore(m, step, like, shardings)
                state = state if same else state._replace(by_problem={})
                break
            except Damaged as error:
                damaged[step] = str(error)
    else:
        if not damaged:
            return None
        listed = "; ".join(f"step {s}: {w}" for s, w in sorted(damaged.items(), reverse=True))
        why = "no checkpoint is whole, and no run starts anew over damaged ones"
        remedy = "restore a copy of one, or remove the directory to begin again"
        raise Damaged(f"{directory}: {why}; {remedy} ({listed})")
    for other, wrong in sorted(damaged.items(), reverse=True):
        say(f"warning: checkpoint of step {other} is damaged: {wrong}")
    if damaged and parallel.is_main_process():
        for other in damaged:
            kept_in = checkpoint.set_aside(directory, other).parent
        say(f"warning: going on from step {step}; what is damaged is kept in {kept_in}")
    parallel.any_process(False)  # a barrier: no process writes before they are moved
    return state


def require_own(home: Workdir, directory: str) -> None:
    """ValueError: `directory` has no checkpoint, and where this workdir's run kept its own there
    are some: it would begin again, over its records. A collective."""

    def elsewhere() -> str:
        file = home.local / "config.json"
        if checkpoint.numbers(directory) or not file.exists():
            return ""
        with contextlib.suppress(ValueError):  # a damaged one says nothing
            before = schema.of_run(file.read_text()).checkpoint.directory or home.checkpoints
            return before if checkpoint.numbers(before) else ""
        return ""

    if before := parallel.of_main_process(elsewhere):
        what = f"no checkpoint in {directory}; this workdir's run has its own in {before}"
        raise ValueError(f"config.checkpoint.directory: {what}; name that, or another workdir")


def check(saved: dict[str, Any], config, inputs: dict[str, str], allow: bool, say: Say) -> bool:
    """Print what has changed since `saved` was written. Returns whether the training problems are
    the same. ConfigError: a change affects what is learned, and `allow` is False."""
    harmless, meaningful = differences(saved["config"], schema.leaves(config))
    named = ("reward.function", "reward.by_source", "reward.reply")
    own = [f"config.{x}" for x in named if saved["config"].get(x)]
    if own and saved.get("reward", "") != inputs["reward"]:
        meaningful.append(f"the file of {' or '.join(own)}: it has other contents")
    if saved.get("objective", "") != inputs.get("objective", ""):
        meaningful.append("the file of config.loss.objective: it has other contents")
    same = saved.get("data") == inputs["data"]
    if not same and not any("config.data." in line for line in meaningful):
        meaningful.append("the training problems: other prompts, tokens or answers, same names")
    for line in harmless:
        say(f"changed: {line}")
    packages = checkpoint.versions()
    for name, old in saved["versions"].items():
        if packages.get(name, old) != old:
            say(f"changed: {name} {old} -> {packages[name]}; the last bits may differ")
    if meaningful and not allow:
        branch = "config.init_from starts from these weights, with init_state=all from this step"
        ways = f"change it back, choose another --workdir ({branch}), or add --allow_config_change"
        lines = [f"changed since the checkpoint: {line}" for line in meaningful]
        raise schema.ConfigError("\n".join([*lines, f"this would be another experiment: {ways}"]))
    for line in meaningful:
        say(f"changed (allowed): {line}")
    return same


def differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(harmless, meaningful) changes between flat configs, as 'config.name: old -> new'. A field
    that one of them lacks, being of another version, counts with its default."""
    harmless, meaningful = [], []
    for name in new | old:
        default = schema.SCHEMA[name].default if name in schema.SCHEMA else None
        was, now = old.get(name, default), new.get(name, default)
        if was != now:
            line = f"config.{name}: {was!r} -> {now!r}"
            free = among(name, HARMLESS) and name not in choose.fixed_fields(new)
            (harmless if free else meaningful).append(line)
    return harmless, meaningful


def among(field: str, names: Sequence[str]) -> bool:
    """Whether `names` holds this field of the config, or its section (with a dot at the end)."""
    return any(field == name or (name[-1] == "." and field.startswith(name)) for name in names)


def inputs(text: Text, config) -> dict[str, str]:
    """What a run depends on besides its config, as saved: hashes of the problems and of the files
    of reward functions and of an objective of the user's."""
    return {"data": fingerprint(text.train), "reward": text.judge.source} | choose.files(config)


def identity(text: Text) -> dict[str, str]:
    """What must be the same in all processes of the files that they have read."""
    sets = {"data.train": text.train} | {f"eval.files {k}": v for k, v in text.evals.items()}
    out = {f"the hash of config.{name}": fingerprint(data) for name, data in sets.items()}
    return out | {"the hash of config.reward's own files": text.judge.source}


def fingerprint(train: Encoded) -> str:
    """SHA-256 of everything that defines a stream position: the prompts' token ids and the answers,
    in order, and the rows if a reward sees them."""
    rows = [
        [p.id, p.answer, ids, *([p.row] if p.row else [])]
        for p, ids in zip(train.problems, train.ids, strict=True)
    ]
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()
