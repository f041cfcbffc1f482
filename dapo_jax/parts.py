"""What a config describes, put together: text, mesh, sampler and trainer programs.

Training, evaluation and the experiments all start here, so that they cannot differ.
"""

import bisect
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dapo_jax import config as config_lib, parallel
from dapo_jax.dapo import update
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import arithmetic, problems, tokenizer, verifier
from dapo_jax.model import hf, qwen2
from dapo_jax.rollout import engine


class Text(NamedTuple):
    """Everything made of words."""

    tokenizer: tokenizer.Tokenizer
    train: problems.Encoded  # prompts and problems of the training set
    evals: dict[str, problems.Encoded]  # set name -> prompts and problems
    notes: list[str]  # what the readers dropped, for the log


class Machine(NamedTuple):
    """Everything that runs on devices."""

    mesh: Mesh
    shape: qwen2.Shape
    model_dir: pathlib.Path | None  # where the weights come from; None = random
    tx: optax.GradientTransformation
    trainer: update.Programs
    engine: engine.Engine


class Grades(NamedTuple):
    """Verdicts on the G responses of one problem."""

    correct: np.ndarray  # bool [G], by reward.mode
    shadow: np.ndarray  # bool [G], by the other mode; logged, never trained on
    answers: list[str | None]  # what reward.mode extracted; None = no answer line
    source: str = ""  # the problem's data_source, where the caller wants it


# ------------------------------------------------------------------------------------------------
# Text
# ------------------------------------------------------------------------------------------------


def named_files(files: str) -> dict[str, str]:
    """'aime24=a.parquet,b.jsonl' -> {'aime24': 'a.parquet', 'b': 'b.jsonl'}."""
    named = {}
    for entry in filter(None, (f.strip() for f in files.split(","))):
        name, _, path = entry.rpartition("=")
        name = name or pathlib.Path(path).name.split(".")[0]
        if name in named:
            raise ValueError(f"config.eval.files: the name {name!r} is used twice; write name=path")
        named[name] = path
    return named


def load_text(c, workdir: pathlib.Path, model_dir: pathlib.Path | None) -> Text:
    """Read problems and tokenizer. The embedded task writes its files under workdir/data first and
    then takes the same way as any other."""
    train_files = [f.strip() for f in c.data.train.split(",") if f.strip()]
    eval_files = named_files(c.eval.files)
    tokenizer_path = c.tokenizer.path or model_dir
    if not train_files:
        made = arithmetic.write(
            workdir / "data", train=c.data.embedded_problems, heldout=max(c.eval.problems, 128)
        )
        train_files = [made.train]
        eval_files = eval_files or {"heldout": made.heldout, "harder": made.harder}
        tokenizer_path = tokenizer_path or made.tokenizer
    if not tokenizer_path:
        raise ValueError(
            "config.tokenizer.path: problem files of one's own need a tokenizer; give a directory"
            " with tokenizer.json or a SentencePiece .model"
        )
    tok = tokenizer.load(tokenizer_path, c.tokenizer.chat_template)
    notes = []

    def read(name, files, limit=0):
        rows, report = problems.read(files, c.data.on_bad)
        rows = rows[: limit or None]
        out = problems.encode(rows, tok, c.data.max_prompt_tokens, c.tokenizer.chat, c.data.on_long)
        note = f"{name}: {len(out.problems)} problems of {report.rows} rows"
        for count, what in (
            (report.duplicates, "repeated prompts"),
            (len(report.conflicts), "prompts with conflicting answers dropped"),
            (len(report.refused), "rows without an integer answer skipped"),
            (out.n_long, f"prompts over {c.data.max_prompt_tokens} tokens ({c.data.on_long})"),
        ):
            note += f", {count} {what}" if count else ""
        notes.append(note)
        return out

    train = read("train", train_files)
    evals = {name: read(name, [path], c.eval.problems) for name, path in eval_files.items()}
    return Text(tok, train, evals, notes)


def digest(text: Text) -> str:
    """Of all prompts and answers, in their order: hosts may hold different copies of a file."""
    sha = hashlib.sha256()
    for data in (text.train, *text.evals.values()):
        for ids, problem in zip(data.ids, data.problems, strict=True):
            sha.update(f"{ids} {problem.answer}\n".encode())
    return sha.hexdigest()[:12]


def grade(
    tok: tokenizer.Tokenizer,
    responses: Sequence[engine.Response],
    answer: str,
    mode: str,
) -> Grades:
    """Decode and verify the responses to one problem."""
    texts = [tok.decode(r.tokens.tolist()) for r in responses]
    other = "integer" if mode == "dapo" else "dapo"
    verdicts = [verifier.verify(t, answer, mode) for t in texts]
    return Grades(
        np.array([v.correct for v in verdicts], bool),
        np.array([verifier.verify(t, answer, other).correct for t in texts], bool),
        [v.extracted for v in verdicts],
    )


def grade_groups(
    tok: tokenizer.Tokenizer, groups: Sequence[Group], answers: Sequence[str], mode: str
) -> list[Grades]:
    """`grade` of each group. Every process decodes and verifies its own share of the groups, and
    only verdicts and extracted answers are gathered (the token ids come out of the sampler whole on
    every process: any of them may have to pack any row)."""
    if not groups:
        return []
    mine = problems.host_slice(0, len(groups), jax.process_index(), jax.process_count())
    graded = [grade(tok, groups[i].responses, answers[i], mode) for i in mine]
    if jax.process_count() == 1:
        return graded
    plain = [(g.correct.tolist(), g.shadow.tolist(), g.answers) for g in graded]
    return [
        Grades(np.array(correct, bool), np.array(shadow, bool), extracted)
        for share in parallel.gather_json(plain)
        for correct, shadow, extracted in share
    ]


def cut_at(tok: tokenizer.Tokenizer, texts: Sequence[str]) -> Callable[[np.ndarray], int] | None:
    """The `cut` of `Engine.generate` that ends a response with the token that completes one of
    `texts`; None for none."""
    if not texts:
        return None

    def holds(ids: np.ndarray) -> bool:
        text = tok.decode(ids.tolist())
        return any(t in text for t in texts)

    def cut(ids: np.ndarray) -> int:
        if not holds(ids):
            return 0
        return bisect.bisect_left(range(len(ids)), True, key=lambda n: holds(ids[: n + 1])) + 1

    return cut


# ------------------------------------------------------------------------------------------------
# Devices
# ------------------------------------------------------------------------------------------------


def build_machine(c, vocab_tokens: int, stop_ids, model_dir: pathlib.Path | None) -> Machine:
    """Mesh, model shape and programs; nothing compiles yet. Raises ConfigError for shapes that the
    mesh or the tokenizer refuse."""
    sizes = config_lib.resolve_mesh(c, len(jax.devices()))
    mesh = parallel.make_mesh(sizes)
    if model_dir:
        shape = hf.read_shape(model_dir, **qwen2.compute_choices(c))
        if bad := config_lib.check_shape(shape, sizes["tensor"], sizes["fsdp"]):
            raise config_lib.ConfigError("\n".join(bad))
    else:
        shape = qwen2.shape_from_config(c)
    if shape.vocab_size < vocab_tokens:
        raise config_lib.ConfigError(
            f"the tokenizer has {vocab_tokens} ids and the model {shape.vocab_size} embedding rows;"
            " they do not belong together (config.model.vocab_size, config.tokenizer.path)"
        )
    machine = assemble(c, mesh, shape, stop_ids, model_dir)
    try:
        machine.engine.require_memory(qwen2.abstract(shape), parallel.device_memory(mesh))
    except ValueError as error:
        raise config_lib.ConfigError(f"config.rollout: {error}") from None
    return machine


def assemble(c, mesh: Mesh, shape: qwen2.Shape, stop_ids, model_dir=None) -> Machine:
    """The programs of a run on any mesh, also of devices that are only described."""
    rules = c.sharding.to_dict()
    tx = update.optimizer(
        c.optim.b1, c.optim.b2, c.optim.eps, c.optim.weight_decay, c.optim.clip_norm
    )
    trainer = update.programs(shape, mesh, rules["train"], tx, c.model.dtype, c.optim.offload)
    longest = max(c.rollout.max_response_tokens, c.eval.max_response_tokens)
    sampler = engine.Engine(
        shape,
        mesh,
        rules["decode"],
        slots=c.rollout.slots,
        prompt_tokens=c.data.max_prompt_tokens,
        response_tokens=longest,
        chunk=c.rollout.chunk,
        prefill_prompts=c.rollout.prefill_prompts,
        prefill_tokens=c.rollout.prefill_tokens,
        page_tokens=c.rollout.page_tokens,
        cache_fraction=c.rollout.cache_fraction,
        stop_ids=stop_ids,
        dtype=c.model.dtype,
    )
    return Machine(mesh, shape, model_dir, tx, trainer, sampler)


def minibatch_responses(c) -> int:
    return c.rollout.groups // c.optim.minibatches * c.rollout.group_size


def calls(c, m: Machine) -> dict[str, tuple]:
    """Name -> (jitted program, its abstract arguments) of what a step runs, quick to compile first:
    'decode weights' (their cast into the sampler's layout), 'prefill', 'decode_*' (one a way to
    draw that training or evaluation uses), 'old log-probs' and 'update' at a whole mini-batch."""
    abstract = qwen2.abstract(m.shape)
    micro_batches = -(-minibatch_responses(c) // c.optim.micro_rows)
    wanted = m.trainer.arguments(micro_batches, c.optim.micro_rows, config_lib.row_tokens(c))
    params, _, rows, _, _, used, _, temperature, _ = wanted
    sampler = m.engine.calls(abstract)
    evals = [(c.eval.temperature, p) for p in (1.0, c.eval.top_p)]
    draws = dict.fromkeys(
        engine.draw_mode(*x) for x in [(c.rollout.temperature, c.rollout.top_p), *evals]
    )
    out = {"decode weights": (m.engine.programs.to_decode_layout, (params,))}
    out |= {name: sampler[name] for name in ("prefill", *(f"decode_{mode}" for mode in draws))}
    if c.loss.old_logprobs == "recompute" or c.loss.kl_coef:
        out["old log-probs"] = (m.trainer.log_probs, (params, rows, used, temperature))
    return out | {"update": (m.trainer.update, wanted)}


def initial_params(c, m: Machine) -> qwen2.Params:
    """Weights of the model directory, or random ones from the seed; in the training layout."""
    if m.model_dir:
        return hf.load_params(m.model_dir, m.shape, m.mesh, c.sharding.train.to_dict())
    key = np.asarray(jax.random.key_data(jax.random.key(c.seed)))
    return m.trainer.init_params(key)


def sample_groups(
    m: Machine,
    decode_params,
    prompts: Sequence[tuple[int, Sequence[int]]],
    group_size: int,
    **settings,
) -> tuple[list[Group], engine.Stats]:
    """G responses to each (stream position, prompt); ungraded groups in the given order."""
    requests = [
        engine.Request(prompt, position, g)
        for position, prompt in prompts
        for g in range(group_size)
    ]
    responses, stats = m.engine.generate(decode_params, requests, **settings)
    groups = [
        Group(position, prompt, responses[i * group_size : (i + 1) * group_size], None)
        for i, (position, prompt) in enumerate(prompts)
    ]
    return groups, stats
