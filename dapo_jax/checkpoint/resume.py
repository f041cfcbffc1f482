"""Going on where a run was cut off: which checkpoint, and whether this config may go on from it."""

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

from dapo_jax import parallel
from dapo_jax.build import Text
from dapo_jax.checkpoint import checkpoint
from dapo_jax.checkpoint.checkpoint import Damaged
from dapo_jax.config import schema
from dapo_jax.dapo.state import State
from dapo_jax.data.problems import Encoded

# Fields that decide how long, how fast, where and how closely watched a run is, but not what it
# learns. All others are refused when they change. Names that end in a dot are sections.
HARMLESS = (
    "steps",
    "init_from",  # used only where the workdir has no checkpoint
    "init_state",
    "eval.",
    "checkpoint.",
    "log.",
    "guard.",
    "mesh.",
    "sharding.",
    "critic.init_from",
    "model.path",  # may have moved: the weights are here, the fingerprint covers the tokens
    "model.scan_layers",
    "model.attention",
    "model.remat",
    "model.attention_chunk",
    "model.head_chunk",
    "reward.workers",
    "rollout.slots",
    "rollout.chunk",
    "rollout.prefill_prompts",
    "rollout.prefill_tokens",
    "rollout.page_tokens",
    "rollout.cache_fraction",
    "optim.micro_batch_rows",
    "optim.row_tokens",
    "optim.offload",
    "optim.max_skipped",
)
LANES = ("rollout.slots", "rollout.chunk")  # decide with rollout.staleness which step a token is of


def newest(
    directory: str | pathlib.Path,
    like: State,
    shardings: State,
    accept: Callable[[dict[str, Any]], bool],
    say: Callable[[str], None],
) -> State | None:
    """The state of the newest whole checkpoint under `directory`; None where there is no checkpoint
    at all. Damaged ones are reported and set aside, and the one before is used. What is there and
    what is whole is for process 0 to say; all of them restore the same step, or none does.

    accept: is given the saved JSON before any array is read; raises to refuse, and says whether the
    problems are the same: what is known of others is left behind.
    Damaged: there are checkpoints, and none of them is whole. OSError: one cannot be read now.
    """
    opinion = parallel.of_main_process(lambda: checkpoint.steps(directory))
    whole, damaged = opinion[0], {int(step): wrong for step, wrong in opinion[1].items()}
    for step in whole:
        with checkpoint.reader(directory) as m:
            try:
                same = accept(checkpoint.read_state(m, step))
                state = checkpoint.restore(m, step, like, shardings)
                state = state if same else state._replace(rates=None)
                break
            except Damaged as error:
                damaged[step] = str(error)
    else:
        if not damaged:
            return None
        listed = "; ".join(f"step {s}: {w}" for s, w in sorted(damaged.items(), reverse=True))
        raise Damaged(
            f"{directory}: no checkpoint is whole, and no run starts anew over damaged ones;"
            f" restore a copy of one, or remove the directory to begin again ({listed})"
        )
    for other, wrong in sorted(damaged.items(), reverse=True):
        say(f"warning: checkpoint of step {other} is damaged: {wrong}")
    if damaged and parallel.is_main_process():
        for other in damaged:
            kept_in = checkpoint.set_aside(directory, other).parent
        say(f"warning: going on from step {step}; what is damaged is kept in {kept_in}")
    parallel.all_processes(True)  # nobody writes before they are out of the way
    return state


# ------------------------------------------------------------------------------------------------
# Changes since the checkpoint
# ------------------------------------------------------------------------------------------------


def check(
    saved: dict[str, Any],
    config,
    inputs: dict[str, str],
    allow: bool,
    say: Callable[[str], None],
) -> bool:
    """Show what has changed since `saved` was written; whether the training problems have not.
    ConfigError: it changes what is learned, and that is not allowed."""
    harmless, meaningful = differences(saved["config"], schema.leaves(config))
    named = any(saved["config"].get(f"reward.{f}") for f in ("function", "by_source"))
    if saved.get("reward", "") != inputs["reward"] and named:
        meaningful.append("the file of config.reward.function: it has other contents")
    if saved["data"] != inputs["data"] and not any("config.data." in line for line in meaningful):
        meaningful.append(
            "the training problems: other prompts, tokens or answers under the same names"
        )
    for line in harmless:
        say(f"changed: {line}")
    packages = checkpoint.versions()
    for name, old in saved["versions"].items():
        if packages.get(name, old) != old:
            say(f"changed: {name} {old} -> {packages[name]}; the last bits may differ")
    if meaningful and not allow:
        raise schema.ConfigError(
            "\n".join(
                [f"changed since the checkpoint: {line}" for line in meaningful]
                + [
                    "this would be another experiment: change it back, choose another --workdir"
                    " (config.init_from starts from these weights, with config.init_state=all"
                    " from this step), or add --allow_config_change"
                ]
            )
        )
    for line in meaningful:
        say(f"changed (allowed): {line}")
    return saved["data"] == inputs["data"]


def differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(harmless, meaningful) changes of flat configs, 'config.name: old -> new'. A field that one
    lacks, being of another version, counts with its default."""
    harmless, meaningful = [], []
    for name in [*new, *(k for k in old if k not in new)]:
        default = schema.SCHEMA[name].default if name in schema.SCHEMA else None
        was, now = old.get(name, default), new.get(name, default)
        if was != now:
            line = f"config.{name}: {was!r} -> {now!r}"
            free = any(name == h or (h[-1] == "." and name.startswith(h)) for h in HARMLESS)
            free = free and not (name in LANES and new.get("rollout.staleness"))
            (harmless if free else meaningful).append(line)
    return harmless, meaningful


def inputs(text: Text) -> dict[str, str]:
    """What a run depends on beside its config, as saved: hashes of the problems and of the file of
    a reward function."""
    return {"data": fingerprint(text.train), "reward": text.judge.source}


def fingerprint(train: Encoded) -> str:
    """SHA-256 of the prompts' token ids and the answers, in order, and of the rows where a reward
    sees them: what a stream position means."""
    rows = [
        [p.id, p.answer, ids, *([p.row] if p.row else [])]
        for p, ids in zip(train.problems, train.ids, strict=True)
    ]
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()
