"""avg@k, maj@k and pass@k of a policy on problem files, from k samples of our own drawing.

    python -m dapo_jax.evaluate --workdir=DIR [--config=FILE] [--data=aime24,gsm8k,name=FILE]

Sets known by name (data/published.py) bring the settings of a paper, which flags and overrides of
fields replace; files of one's own take those of the config (docs/evaluation.md).

The policy is the newest checkpoint of WORKDIR, where it has none the model of config.model.path, or
what --checkpoint names; the config, unless --config names one, is the run's own. Every sample is
kept under WORKDIR/eval/<set>/<hash of the settings>/, in batches of problems; the same command goes
on after the last whole batch.

Samples are grouped by problem. A sample's random numbers are named by the problem's id and its
index, under a seed of evaluation's own, so scores do not depend on batch, order or mesh.
"""

import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from etils import epath
from jax.experimental import multihost_utils
from tqdm import tqdm

from dapo_jax import bars, build, parallel
from dapo_jax.checkpoint import checkpoint, workdir as workdir_lib
from dapo_jax.checkpoint.seal import checksums
from dapo_jax.config import cli, presets, schema, validation
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import files, published, tokenizer
from dapo_jax.data.problems import Encoded
from dapo_jax.evaluation import named_sets, scores as scores_lib
from dapo_jax.evaluation.scores import Scores, majority, pass_at_k
from dapo_jax.hosts import processes, start
from dapo_jax.model import hf, qwen2
from dapo_jax.reward import grading
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Watch

__all__ = ["Scores", "checksums", "evaluate", "evaluate_sets", "majority", "pass_at_k"]


def evaluate(
    machine: build.Machine,
    decode_params,
    text: build.Text,
    data: Encoded,
    k: int,
    draw: Draw,
) -> Scores:
    """Draw k samples of every problem of `data` and let the judge of `text` grade them."""
    (scores,) = evaluate_together(machine, decode_params, text, [data], k, [draw])
    return scores


def evaluate_together(
    machine: build.Machine,
    decode_params,
    text: build.Text,
    sets: Sequence[Encoded],
    k: int,
    draws: Sequence[Draw],
) -> list[Scores]:
    """`evaluate` of every set by its own draw, which differ in top_p alone. One call of the
    sampler: the last long responses of all are waited for once."""
    # The 63-bit id is cut to the 31 bits of the draw's counter.
    prompts = [
        (int(p.id[:8], 16) & 0x7FFFFFFF, ids)
        for data in sets
        for p, ids in zip(data.problems, data.ids, strict=True)
    ]
    top_ps = [draw.top_p for data, draw in zip(sets, draws, strict=True) for _ in data.ids]
    cut = grading.cut_at(text.tokenizer, draws[0].stop_strings)
    groups, _ = build.sample_groups(machine, decode_params, prompts, k, draws[0], top_ps, cut)
    rest = iter(groups)
    return [_graded(text, data, list(itertools.islice(rest, len(data.ids)))) for data in sets]


def _graded(text: build.Text, data: Encoded, groups: list[Group]) -> Scores:
    groups = grading.grade_groups(text.tokenizer, text.judge, groups, data.problems)
    grades, responses = [g.grades for g in groups], [g.responses for g in groups]
    only_scores = any(g.right_G is None for g in grades)
    return Scores(
        correct_PxK=None if only_scores else np.stack([g.right_G for g in grades]),
        answers=[g.answers for g in grades],
        golds=[p.answer for p in data.problems],
        truncated_PxK=np.array([[r.truncated for r in row] for row in responses]),
        lengths_PxK=np.array([[len(r.tokens) for r in row] for row in responses]),
        responses=responses,
        score_PxK=np.stack([g.score_G for g in grades]) if only_scores else None,
    )


def evaluate_sets(
    config, machine, decode_params, text: build.Text
) -> tuple[dict[str, float], list[dict]]:
    """The evaluation of a training run: every set at top_p=1 and, where set, at `eval.top_p`.
    (tags as in log/tags.py, a row per problem and setting)."""
    asked = list(itertools.product(text.evals.items(), build.evaluation_draws(config)))
    if not asked:
        return {}, []
    sets, draws = zip(*((data, draw) for (_, data), draw in asked), strict=True)
    results = evaluate_together(machine, decode_params, text, sets, config.eval.k, draws)
    out, rows = {}, []
    for ((name, data), draw), scores in zip(asked, results, strict=True):
        tag = f"eval/{name}" + ("" if draw.top_p == 1.0 else f"_top_p{draw.top_p:g}")
        out |= {f"{tag}/{key}": value for key, value in scores.headline().items()}
        if draw.top_p == 1.0:
            out[f"{tag}/length_mean"] = float(scores.lengths_PxK.mean())
            out[f"{tag}/truncated_frac"] = float(scores.truncated_PxK.mean())
        about = {"set": name, "top_p": draw.top_p}
        rows += (about | row for row in scores_lib.verdicts(data, scores))
    return out, rows


# ------------------------------------------------------------------------------------------------
# What to evaluate
# ------------------------------------------------------------------------------------------------


class Policy(NamedTuple):
    """Where weights are: a step of an Orbax directory, or else the model directory itself."""

    model_dir: pathlib.Path | None  # Hugging Face directory: shape and tokenizer, perhaps weights
    steps: str = ""  # Orbax directory of step directories
    step: int | None = None

    def __str__(self):
        return f"{self.steps} step {self.step}" if self.steps else str(self.model_dir)


def find_policy(
    config, workdir: pathlib.Path, base: pathlib.Path | None, given: str = ""
) -> Policy:
    """`given`, or else the newest checkpoint of the run, or else `base`, the directory of the
    config's model. ValueError: there is no checkpoint."""
    if given:
        return find_given(given, base)
    if directory := config.checkpoint.directory:
        return Policy(base, directory, checkpoint.find_step(directory))
    if (workdir / "checkpoints").is_dir():
        return find_given(str(workdir), base)
    if base:
        return Policy(base)
    raise ValueError(
        f"--workdir={workdir}: no checkpoint in it; train there first, or name one by --checkpoint"
    )


def find_given(
    given: str,
    base: pathlib.Path | None = None,
    resolve: Callable[[str], pathlib.Path] = start.resolve,
) -> Policy:
    """A run's workdir or its checkpoints/, either with @STEP for another than the newest, one step
    in there, what `convert to-orbax` wrote, a Hugging Face directory or a hub name. ValueError:
    there is no checkpoint. base: the model directory of what holds no model itself."""
    named = re.fullmatch(r"(.+)@(\d+)", given)
    step = int(named[2]) if named and not pathlib.Path(given).exists() else None
    path = epath.Path(given if step is None else named[1]).expanduser()
    weights = "://" not in given and (not path.is_dir() or any(path.glob("*.safetensors")))
    if step is None and weights:
        return Policy(resolve(given))
    if path.name.isdigit() and (path / "arrays").is_dir():
        path, step = path.parent, int(path.name) if step is None else step
    elif (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    return Policy(base, str(path), checkpoint.find_step(path, step))


def load_params(config, machine: build.Machine, policy: Policy) -> qwen2.Params:
    """In the training layout; adapters (LoRA) that the policy was trained with are merged in."""
    if not policy.steps:
        return build.initial_params(config, machine)
    return checkpoint.restore_merged(
        policy.steps, machine.shape, machine.mesh, machine.trainer.rules, policy.step
    )


# ------------------------------------------------------------------------------------------------
# Sampling with restarts
# ------------------------------------------------------------------------------------------------


def evaluate_to_files(
    folder: pathlib.Path,
    machine: build.Machine,
    decode_params,
    text: build.Text,
    data: Encoded,
    k: int,
    draw: Draw,
    saved=lambda: None,
) -> Scores | None:
    """`evaluate` a batch of problems at a time, each batch a file of `folder` that appears whole.
    Problems that are there already are not sampled again. Process 0 has the files and the scores;
    the others return None. `saved` is called after each file."""
    first = parallel.is_main_process()
    there = scores_lib.finished(folder) if first else {}
    done = np.array([p.id in there for p in data.problems])
    if jax.process_count() > 1:
        done = np.asarray(multihost_utils.broadcast_one_to_all(done), bool)
    left = np.flatnonzero(~done)
    size = -(-2 * machine.engine.slots // k)  # two fills of the slots: less would leave many idle
    bar = bars.bar(
        total=len(done) * k,
        initial=int(done.sum()) * k,
        desc=folder.parent.name,
        unit="sample",
        dynamic_ncols=True,
        show=first,
    )
    machine = machine._replace(watch=Watch(progress=bar.update))
    with bar:
        for at in range(0, len(left), size):
            part = left[at : at + size]
            batch = Encoded([data.ids[i] for i in part], [data.problems[i] for i in part], 0)
            scores = evaluate(machine, decode_params, text, batch, k, draw)
            if first:
                lines = scores_lib.rows(batch, scores, text.tokenizer)
                scores_lib.write_lines(folder / f"batch_{part[0]:06d}.jsonl", lines)
                saved()
    if not first:
        return None
    there = scores_lib.finished(folder)
    return scores_lib.from_rows([there[p.id] for p in data.problems])


def settings_key(settings: dict) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------
# python -m dapo_jax.evaluate
# ------------------------------------------------------------------------------------------------


def evaluate_checkpoint(
    config,
    where: str | pathlib.Path,
    given: str = "",
    score: grading.Score | None = None,
    *,
    fixed: frozenset[str] = frozenset(),
    data_dir: str = "data",
    rows: bool = False,
) -> dict:
    """Evaluate on every set of `c.eval.files` in the workdir `where`, print a report of each (with
    `rows` a line per problem) and a table of all, and return them as plain JSON values: {settings:
    what all sets share, sets: {name: `scores.summary`, its settings, the folder of samples}}.

    fixed: fields of the config that replace the settings of named sets, which are looked for in
    `data_dir` and fetched into it. ValueError: a set is not to be had, or anything else is wrong
    with what was asked.
    """
    processes.agree(processes.identity(config, str(where)))
    validation.validate(config, len(jax.devices()))
    home = workdir_lib.open_workdir(where)
    workdir, saved = home.local, functools.partial(workdir_lib.send, home)
    if home.remote and not given and (home.remote / workdir_lib.CHECKPOINTS).exists():
        given = home.checkpoints
    base = start.model_directory(
        config, home, config.checkpoint.directory or home.checkpoints, given
    )
    policy = find_policy(config, workdir, base, given)
    every = list(
        named_sets.ask(config, workdir, policy.model_dir, score, fixed, pathlib.Path(data_dir))
    )
    first = parallel.is_main_process()
    say = tqdm.write if first else lambda _: None
    for note in (note for asked in every for note in asked.text.notes):
        say(note)
    say(f"policy: {policy}, prompts {'as chats' if config.tokenizer.chat else 'as plain text'}")
    machine = every[0].machine
    params = load_params(config, machine, policy)
    weights = [int(x) for x in parallel.to_host(checksums(params))]
    decode_params = machine.engine.decode_params(params, keep=False)
    del params
    abouts, sets = [], {}
    for asked in every:
        told, decides = settings(asked, weights)
        about = {"policy": str(policy), "files": asked.config.eval.files or "embedded"} | decides
        about |= {"paper": asked.source} if asked.source else {}
        abouts.append(about)
        for name, data in asked.text.evals.items():
            ids = [[p.id, p.answer, ids] for p, ids in zip(data.problems, data.ids, strict=True)]
            folder = workdir / "eval" / name / settings_key(decides | {"prompts": ids})
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                files.write_json(folder / "settings.json", about)
            k, draw = asked.config.eval.k, build.evaluation_draw(asked.config)
            scores = evaluate_to_files(
                folder, asked.machine, decode_params, asked.text, data, k, draw, saved
            )
            if scores is not None:
                r = scores_lib.summary(scores, [p.id for p in data.problems], config.seed)
                r |= {"settings": told, "samples": f"{home.name}/{folder.relative_to(workdir)}"}
                sets[name] = r
                say("\n".join(scores_lib.lines(name, r, rows)))
                say(f"  samples: {r['samples']}")
        asked.machine.engine.release()
    saved()
    sets = {name: sets[name] for name in build.named_files(config.eval.files) or sets if sets}
    if sets:
        say("\n".join(["", *scores_lib.table(sets)]))
    shared = {k: v for k, v in abouts[0].items() if all(a.get(k) == v for a in abouts)}
    return {"settings": shared | {"files": config.eval.files or "embedded"}, "sets": sets}


def settings(asked: named_sets.Asked, weights: list[int]) -> tuple[dict, dict]:
    """(how the sets are sampled and judged, all that a sample and its verdict depend on beside the
    prompts: whoever changes one of these gets new files)."""
    config, draw = asked.config, build.evaluation_draw(asked.config)
    judged = (config.reward.function or config.reward.verifier, config.reward.by_source)
    told = {
        "k": config.eval.k,
        "seed": config.seed,
        "temperature": draw.temperature,
        "top_p": draw.top_p,
        "mode": ";".join(filter(None, judged)),
        "stop_strings": draw.stop_strings,
        "max_response_tokens": draw.max_tokens,
    } | ({"judge": asked.text.judge.source} if asked.text.judge.source else {})
    network = asked.machine.shape._asdict() | {"dtype": config.model.dtype}
    network.pop("init_std")  # told by the weights
    return told, told | {
        "model": network,
        "weights": weights,
        "stop_ids": sorted(asked.text.tokenizer.stop_ids),
        "platform": jax.default_backend(),
    }


_FIELDS = {
    "data": "eval.files",
    "k": "eval.k",
    "top_p": "eval.top_p",
    "temperature": "eval.temperature",
    "max_response_tokens": "eval.max_response_tokens",
}


def define_flags() -> None:
    """Not at import: `train` imports this module and has no such flags."""
    flags.DEFINE_string(
        "data",
        None,
        f"Sets by name ({published.KNOWN}) and problem files, [name=]path,...; default:"
        " config.eval.files.",
    )
    flags.DEFINE_string("data_dir", "data", "Folder of the sets by name, fetched where missing.")
    flags.DEFINE_integer("k", None, "Samples a problem; default: the set's, config.eval.k.")
    flags.DEFINE_float("top_p", None, "Nucleus mass; default: the set's, config.eval.top_p.")
    flags.DEFINE_float(
        "temperature", None, "0 is greedy; default: the set's, config.eval.temperature."
    )
    flags.DEFINE_integer(
        "max_response_tokens", None, "Default: the set's, config.eval.max_response_tokens."
    )
    flags.DEFINE_string(
        "checkpoint",
        "",
        "Workdir[@STEP], Orbax or Hugging Face directory; default: the newest there is.",
    )
    flags.DEFINE_bool("rows", False, "A line per problem.")
    flags.DEFINE_string("json", "", "File for settings, scores and the table of problems.")


def config_of_run(workdir: str) -> schema.Config | None:
    """What the run in `workdir` was trained with; None where there is none."""
    if not workdir or not (file := epath.Path(workdir) / "config.json").exists():
        return None
    try:
        return schema.of_run(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}; name a config file: --config=FILE") from error


def config_of_policy() -> schema.Config | None:
    """The config of the run that --checkpoint, or else --workdir, names. Where --checkpoint is a
    Hugging Face directory or hub name: the paper's, with prompts in the model's chat template if it
    has one, on a sampler for a single accelerator."""
    small = functools.partial(hf.resolve, weights=False)  # each for itself: nobody has met yet
    if not (given := flags.FLAGS.checkpoint):
        return config_of_run(cli.WORKDIR.value)
    if (policy := find_given(given, None, small)).steps:
        return config_of_run(str(epath.Path(policy.steps).parent))
    if not flags.FLAGS.data and not cli.CONFIG.overrides.get("eval.files"):
        raise ValueError(f"--data: say what to evaluate on: {published.KNOWN}, or files")
    c = presets.paper()
    c.tokenizer.chat = bool(tokenizer.load(policy.model_dir).template)
    c.rollout.slots = c.optim.micro_batch_rows = 64
    c.rollout.cache_fraction = 0.25  # few responses get as long as they may
    return c


def main(score: grading.Score | None = None) -> None:
    flag = flags.FLAGS
    if not cli.WORKDIR.value:
        raise ValueError("--workdir: say where the samples are to be kept (the run's directory)")
    if flag.data is not None and not build.named_files(flag.data):
        raise ValueError("--data: names no file; write --data=FILE,FILE or leave it out")
    out = pathlib.Path(flag.json) if flag.json else None
    if out and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ValueError(f"--json={out}: not a file in an existing directory")
    said = {field: v for n, field in _FIELDS.items() if (v := flag[n].value) is not None}
    cli.apply(cli.CONFIG.value, said)
    with processes.joined():
        result = evaluate_checkpoint(
            cli.CONFIG.value,
            cli.WORKDIR.value,
            flag.checkpoint,
            score,
            fixed=frozenset(said | cli.CONFIG.overrides),
            data_dir=flag.data_dir,
            rows=flag.rows,
        )
        if out and parallel.is_main_process():
            files.write_json(out, result)


if __name__ == "__main__":
    define_flags()
    cli.run(main, without_config=config_of_policy)
