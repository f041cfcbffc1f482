"""avg@k, maj@k and pass@k of a policy on problem files, from k samples per problem.

    python -m dapo_jax.evaluate --workdir=DIR [--config=FILE] [--data=aime24,gsm8k,name=FILE]

The policy is what --checkpoint names, else the newest checkpoint of WORKDIR, else the model of
config.model.path. All samples are kept under WORKDIR/eval/<set>/<hash of the settings>/, in batches
of problems; the same command continues after the last whole batch. More: docs/evaluation.md.
"""

import functools
import hashlib
import json
import pathlib

import jax
from absl import flags
from etils import epath
from tqdm import tqdm

from dapo_jax import bars, build, parallel
from dapo_jax.checkpoint import resume, seal, workdir as workdir_lib
from dapo_jax.config import cli, presets, schema, validation
from dapo_jax.data import files, published, tokenizer
from dapo_jax.data.problems import Encoded
from dapo_jax.evaluation import named_sets, scores as scores_lib
from dapo_jax.evaluation.sampling import Evaluator, evaluate
from dapo_jax.evaluation.scores import Scores
from dapo_jax.hosts import processes, start
from dapo_jax.model import hf
from dapo_jax.reward import grading
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Watch
from dapo_jax.run import policy as policy_lib


def evaluate_to_files(
    folder: pathlib.Path, evaluator: Evaluator, data: Encoded, draw: Draw, saved=lambda: None
) -> Scores | None:
    """`evaluate` one batch of problems after the other, and write each to a file of `folder`, but
    for problems that have samples there. Only process 0 writes files and returns the scores; the
    others return None. saved: called after each file."""
    first, k = parallel.is_main_process(), evaluator.k
    done = set(parallel.gather_json(list(scores_lib.finished(folder, k)) if first else [])[0])
    left = [i for i, p in enumerate(data.problems) if p.id not in done]
    # Fills the slots twice: fewer leave many idle.
    size = -(-2 * evaluator.machine.engine.slots // k)
    total, initial = len(data.problems) * k, (len(data.problems) - len(left)) * k
    look = dict(unit="sample", desc=folder.parent.name, show=first)
    bar = bars.bar(total=total, initial=initial, **look)
    machine = evaluator.machine._replace(watch=Watch(progress=bar.update))
    with bar:
        for at in range(0, len(left), size):
            part = left[at : at + size]
            batch = Encoded([data.ids[i] for i in part], [data.problems[i] for i in part], 0)
            (scores,) = evaluate(evaluator._replace(machine=machine), [(batch, draw)])
            if first:
                rows = scores_lib.rows(batch, scores, evaluator.text.tokenizer)
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                files.write(folder / f"batch_{part[0]:06d}.jsonl", lines)
                saved()
    if not first:
        return None
    there = scores_lib.finished(folder, k)
    return scores_lib.from_rows([there[p.id] for p in data.problems])


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
    """Evaluate the policy on every set of `config.eval.files`, keep the samples in `where`, print
    (with `rows` a line per problem and) a table of the sets. Returns JSON values: {settings: those
    of all sets, sets: {name: `scores.summary`, its settings, the folder of its samples}}.

    given: as in `find_policy`. fixed, data_dir: as in `named_sets.ask`. ValueError: a set cannot
    be fetched, or the config does not fit the policy."""
    processes.agree(processes.identity(config, str(where)))
    validation.validate(config, len(jax.devices()))
    home = workdir_lib.open_workdir(where)
    if home.remote and not given and (home.remote / workdir_lib.CHECKPOINTS).exists():
        given = home.checkpoints
    checkpoints = config.checkpoint.directory or home.checkpoints
    base = start.model_directory(config, home, checkpoints, given)
    policy = policy_lib.find_policy(config, home.local, base, given)
    fetched = pathlib.Path(data_dir)
    every = list(named_sets.ask(config, home.local, policy.model_dir, score, fixed, fetched))
    say = tqdm.write if parallel.is_main_process() else lambda _: None
    for asked in every:
        processes.agree(resume.identity(asked.text))
        for note in asked.text.notes:
            say(note)
    say(f"policy: {policy}, prompts as {'chats' if config.tokenizer.chat else 'plain text'}")
    machine = every[0].machine
    params = policy_lib.load_params(config, machine, policy)
    weights = list(seal.content(params).values())
    decode_params = machine.engine.decode_params(params, keep=False)
    del params
    saved = functools.partial(workdir_lib.send, home)
    sets, abouts = {}, []
    for asked in every:
        shown, decides = settings(asked, weights)
        about = {"policy": str(policy), "files": asked.config.eval.files or "embedded"} | decides
        abouts.append(about | ({"paper": asked.source} if asked.source else {}))
        talking = build.talking(asked.config, asked.machine, asked.text)
        evaluator = Evaluator(talking, decode_params, asked.text, asked.config.eval.k)
        for name, data in asked.text.evals.items():
            # Kept under WORKDIR/eval/NAME/HASH of what decides and the prompts.
            ids = [[p.id, p.answer, ids] for p, ids in zip(data.problems, data.ids, strict=True)]
            hashed = json.dumps(decides | {"prompts": ids}, sort_keys=True).encode()
            folder = home.local / "eval" / name / hashlib.sha256(hashed).hexdigest()[:12]
            if parallel.is_main_process():
                folder.mkdir(parents=True, exist_ok=True)
                files.write_json(folder / "settings.json", abouts[-1])
            draw = build.evaluation_draw(asked.config)
            scores = evaluate_to_files(folder, evaluator, data, draw, saved)
            if scores is None:
                continue
            samples = f"{home.name}/{folder.relative_to(home.local)}"
            sets[name] = scores_lib.summary(scores, [p.id for p in data.problems], config.seed)
            sets[name] |= {"settings": shown, "samples": samples}
            say("\n".join(scores_lib.lines(name, sets[name], rows)))
        asked.machine.engine.release()
    workdir_lib.send(home)
    sets = {name: sets[name] for name in build.named_files(config.eval.files) or sets if sets}
    if sets:
        say("\n".join(["", *scores_lib.table(sets)]))
    shared = {k: v for k, v in abouts[0].items() if all(a.get(k) == v for a in abouts)}
    return {"settings": shared | {"files": config.eval.files or "embedded"}, "sets": sets}


# Told only where they are set, so that samples from before they were told stay valid.
_SELDOM_SET = ("rollout.turns", "rollout.reply_tokens", "reward.reply", "reward.format_tags")


def settings(asked: named_sets.Asked, weights: list[int]) -> tuple[dict, dict]:
    """(how the sets are sampled and judged; these and everything else, except the prompts, that
    samples and verdicts depend on). A change of the latter means new files of samples."""
    config, draw = asked.config, build.evaluation_draw(asked.config)
    judged = (config.reward.function or config.reward.verifier, config.reward.by_source)
    shown = {
        "k": config.eval.k,
        "seed": config.seed,
        "temperature": draw.temperature,
        "top_p": draw.top_p,
        "mode": ";".join(filter(None, judged)),
        "stop_strings": draw.stop_strings,
        "max_response_tokens": draw.max_tokens,
    } | ({"judge": asked.text.judge.source} if asked.text.judge.source else {})
    fields = schema.leaves(config)
    seldom = {n: fields[n] for n in _SELDOM_SET if fields[n] != schema.SCHEMA[n].default}
    network = asked.machine.shape._asdict() | {"dtype": config.model.dtype}
    network.pop("init_std")  # the weights say it
    return shown, shown | seldom | {
        "model": network,
        "weights": weights,
        "stop_ids": sorted(asked.text.tokenizer.stop_ids),
        "platform": jax.default_backend(),
    }


_FIELDS = {n: f"eval.{n}" for n in ("k", "top_p", "temperature", "max_response_tokens")}
_FIELDS |= {"data": "eval.files"}


def define_flags() -> None:
    """Not at import: `train` imports this module and has no such flags."""
    data = f"Sets by name ({published.KNOWN}) and problem files, [name=]path,..."
    flags.DEFINE_string("data", None, f"{data}; default: config.eval.files.")
    flags.DEFINE_string("data_dir", "data", "Folder of the sets by name, fetched where missing.")
    usual = "default: the set's, else that of config.eval."
    flags.DEFINE_integer("k", None, f"Samples per problem; {usual}")
    flags.DEFINE_float("top_p", None, f"Nucleus mass; {usual}")
    flags.DEFINE_float("temperature", None, f"0 is greedy; {usual}")
    flags.DEFINE_integer("max_response_tokens", None, f"Limit of a response; {usual}")
    policy = "Workdir[@STEP], Orbax or Hugging Face directory; default: the newest there is."
    flags.DEFINE_string("checkpoint", "", policy)
    flags.DEFINE_bool("rows", False, "A line per problem.")
    flags.DEFINE_string("json", "", "File for settings, scores and the table of problems.")


def config_of_policy() -> schema.Config | None:
    """The config of the run that --checkpoint, else --workdir, names. For a Hugging Face model: the
    paper's config with its chat template, if it has one, and a sampler for one accelerator."""
    # Each process looks for itself: they have not met yet, and JAX cannot start before they do.
    small = functools.partial(hf.resolve, weights=False)
    if not (given := flags.FLAGS.checkpoint):
        return policy_lib.config_of_run(cli.WORKDIR.value)
    if (policy := policy_lib.named(given, None, small)).steps:
        return policy_lib.config_of_run(str(epath.Path(policy.steps).parent))
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
        what = cli.CONFIG.value, cli.WORKDIR.value, flag.checkpoint, score
        how = dict(fixed=frozenset(said | cli.CONFIG.overrides), data_dir=flag.data_dir)
        result = evaluate_checkpoint(*what, rows=flag.rows, **how)
        if out and parallel.is_main_process():
            files.write_json(out, result)


if __name__ == "__main__":
    define_flags()
    cli.run(main, without_config=config_of_policy)
