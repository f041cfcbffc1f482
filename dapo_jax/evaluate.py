"""avg@k, maj@k and pass@k of a policy on problem files, from k samples of our own drawing.

    python -m dapo_jax.evaluate --config=FILE --workdir=DIR [--data=FILE,name=FILE] [--k=32]

The policy is the newest checkpoint of WORKDIR, where it has none the model of config.model.path, or
what --checkpoint names. Every sample is kept under WORKDIR/eval/<set>/<hash of the settings>/, in
batches of problems; the same command goes on after the last whole batch.

Samples are grouped by problem. A sample's random numbers are named by the problem's id and its
index, under a seed of evaluation's own, so scores do not depend on batch, order or mesh.
"""

import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from etils import epath
from jax.experimental import multihost_utils
from tqdm import tqdm

from dapo_jax import bars, build, cli, grading, parallel, validation
from dapo_jax.checkpoint import checkpoint, workdir as workdir_lib
from dapo_jax.checkpoint.seal import checksums
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import files
from dapo_jax.data.problems import Encoded
from dapo_jax.hosts import processes, start
from dapo_jax.log import scores as scores_lib
from dapo_jax.log.scores import Scores, majority, pass_at_k
from dapo_jax.model import qwen2
from dapo_jax.rollout.draw import Draw

__all__ = ["Scores", "checksums", "evaluate", "evaluate_sets", "majority", "pass_at_k"]


def evaluate(
    machine: build.Machine,
    decode_params,
    text: build.Text,
    data: Encoded,
    k: int,
    draw: Draw,
    progress=lambda finished: None,
) -> Scores:
    """Draw k samples of every problem of `data` and let the judge of `text` grade them."""
    (scores,) = evaluate_together(machine, decode_params, text, [data], k, [draw], progress)
    return scores


def evaluate_together(
    machine: build.Machine,
    decode_params,
    text: build.Text,
    sets: Sequence[Encoded],
    k: int,
    draws: Sequence[Draw],
    progress=lambda finished: None,
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
    groups, _ = build.sample_groups(
        machine, decode_params, prompts, k, draws[0], top_ps, progress=progress, cut=cut
    )
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


def find_given(given: str, base: pathlib.Path | None = None) -> Policy:
    """A run's workdir or its checkpoints/, either with @STEP for another than the newest, one step
    in there, what `convert to-orbax` wrote, a Hugging Face directory or a hub name. ValueError:
    there is no checkpoint. base: the model directory of what holds no model itself."""
    named = re.fullmatch(r"(.+)@(\d+)", given)
    step = int(named[2]) if named and not pathlib.Path(given).exists() else None
    path = epath.Path(given if step is None else named[1]).expanduser()
    weights = "://" not in given and (not path.is_dir() or any(path.glob("*.safetensors")))
    if step is None and weights:
        return Policy(start.resolve(given))
    if path.name.isdigit() and (path / "arrays").is_dir():
        path, step = path.parent, int(path.name) if step is None else step
    elif (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    return Policy(base, str(path), checkpoint.find_step(path, step))


def load_params(config, machine: build.Machine, policy: Policy) -> qwen2.Params:
    if not policy.steps:
        return build.initial_params(config, machine)
    return checkpoint.restore_params(
        policy.steps,
        qwen2.abstract(machine.shape),
        machine.trainer.param_shardings,
        policy.step,
    )


def load_text(
    config,
    workdir: pathlib.Path,
    model_dir: pathlib.Path | None,
    score: grading.Score | None = None,
) -> build.Text:
    """As in training, but a training set of one's own is not read: it may have millions of rows."""
    named = build.named_files(config.eval.files)
    for name in named:
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
            raise ValueError(f"{name!r} cannot name a folder of samples; write --data=name=path")
    if config.data.train and not named:
        raise ValueError("no problems to evaluate on; give --data=FILE (or config.eval.files)")
    if named and (config.data.train or config.tokenizer.path or model_dir):
        config = config.copy_and_resolve_references()
        config.data.train = next(iter(named.values()))  # is read anyway
    text = build.load_text(config, workdir, model_dir, score)
    return text._replace(notes=text.notes[1:])  # the first is about the training set


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
    with bar:
        for at in range(0, len(left), size):
            part = left[at : at + size]
            batch = Encoded([data.ids[i] for i in part], [data.problems[i] for i in part], 0)
            scores = evaluate(machine, decode_params, text, batch, k, draw, progress=bar.update)
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
) -> dict:
    """Evaluate on every set of `c.eval.files` in the workdir `where`, print a report of each, and
    return all as plain JSON values: {settings, sets: {name: `scores.summary` and the folder of
    samples}}."""
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
    text = load_text(config, workdir, policy.model_dir, score)
    machine = build.build_machine(
        config, text.tokenizer.vocab_size, text.tokenizer.stop_ids, policy.model_dir
    )
    first = parallel.is_main_process()
    say = tqdm.write if first else lambda _: None
    for note in [*text.notes, f"policy: {policy}"]:
        say(note)
    params = load_params(config, machine, policy)
    weights = [int(x) for x in parallel.to_host(checksums(params))]
    decode_params = machine.engine.decode_params(params)
    del params
    draw = build.evaluation_draw(config)
    told = {
        "k": config.eval.k,
        "seed": config.seed,
        "temperature": draw.temperature,
        "top_p": draw.top_p,
        "mode": ";".join(
            filter(
                None, (config.reward.function or config.reward.verifier, config.reward.by_source)
            )
        ),
        "stop_strings": draw.stop_strings,
        "max_response_tokens": draw.max_tokens,
    } | ({"judge": text.judge.source} if text.judge.source else {})
    # All that a sample and its verdict depend on: whoever changes one of these gets new files.
    network = machine.shape._asdict() | {"dtype": config.model.dtype}
    network.pop("init_std")  # told by the weights
    decides = told | {
        "model": network,
        "weights": weights,
        "stop_ids": sorted(text.tokenizer.stop_ids),
        "platform": jax.default_backend(),
    }
    about = {"policy": str(policy), "files": config.eval.files or "embedded"} | decides
    sets = {}
    for name, data in text.evals.items():
        prompts = [[p.id, p.answer, ids] for p, ids in zip(data.problems, data.ids, strict=True)]
        folder = workdir / "eval" / name / settings_key(decides | {"prompts": prompts})
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(folder / "settings.json", about)
        scores = evaluate_to_files(
            folder, machine, decode_params, text, data, config.eval.k, draw, saved
        )
        if scores is not None:
            sets[name] = scores_lib.summary(scores, [p.id for p in data.problems], config.seed)
            sets[name]["samples"] = f"{home.name}/{folder.relative_to(workdir)}"
            say("\n".join(scores_lib.lines(name, sets[name])))
            say(f"  samples: {sets[name]['samples']}")
    saved()
    return {"settings": about, "sets": sets}


def define_flags() -> None:
    """Not at import: `train` imports this module and has no such flags."""
    flags.DEFINE_string("data", None, "Problem files, [name=]path,...; default: config.eval.files.")
    flags.DEFINE_integer("k", None, "Samples a problem; default: config.eval.k.")
    flags.DEFINE_float("top_p", None, "Nucleus mass; default: config.eval.top_p.")
    flags.DEFINE_float("temperature", None, "0 is greedy; default: config.eval.temperature.")
    flags.DEFINE_string(
        "checkpoint",
        "",
        "Workdir[@STEP], Orbax or Hugging Face directory; default: the newest there is.",
    )
    flags.DEFINE_string("json", "", "File for settings, scores and the table of problems.")


def main(score: grading.Score | None = None) -> None:
    given = flags.FLAGS
    if not cli.WORKDIR.value:
        raise ValueError("--workdir: say where the samples are to be kept (the run's directory)")
    if given.data is not None and not build.named_files(given.data):
        raise ValueError("--data: names no file; write --data=FILE,FILE or leave it out")
    out = pathlib.Path(given.json) if given.json else None
    if out and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ValueError(f"--json={out}: not a file in an existing directory")
    config = cli.CONFIG.value
    for name, value in {
        "files": given.data,
        "k": given.k,
        "top_p": given.top_p,
        "temperature": given.temperature,
    }.items():
        if value is not None:
            config.eval[name] = value
    with processes.joined():
        result = evaluate_checkpoint(config, cli.WORKDIR.value, given.checkpoint, score)
        if out and parallel.is_main_process():
            files.write_json(out, result)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
