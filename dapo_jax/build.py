"""What a config describes, put together: text, mesh, sampler and trainer programs.

Training, evaluation and the experiments all start here, so that they cannot differ.
"""

import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dapo_jax import parallel
from dapo_jax.config import schema, validation
from dapo_jax.dapo import update
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import arithmetic, problems, prompts, tokenizer
from dapo_jax.model import attention_kernels, hf, qwen2
from dapo_jax.parallel import Call
from dapo_jax.reward import grading
from dapo_jax.rollout import engine
from dapo_jax.rollout.draw import Draw
from dapo_jax.variants import curriculum, objectives, positive_lm
from dapo_jax.variants.vapo.critic import Critic, critic_shape


class Text(NamedTuple):
    """Everything made of words."""

    tokenizer: tokenizer.Tokenizer
    train: problems.Encoded  # prompts and problems of the training set
    evals: dict[str, problems.Encoded]  # set name -> prompts and problems
    notes: list[str]  # what the readers dropped, for the log
    judge: grading.Judge  # what a response is worth


class Machine(NamedTuple):
    """Everything that runs on devices."""

    mesh: Mesh
    shape: qwen2.Shape  # of what is sampled: adapters are the trainer's own
    model_dir: pathlib.Path | None  # where the weights come from; None = random
    tx: optax.GradientTransformation
    trainer: update.Trainer
    engine: engine.Engine
    critic: Critic | None = None  # the value model's trainer, where there is one
    watch: engine.Watch = engine.UNWATCHED  # who observes sampling and updates

    def decode_params(self, params):
        """`Engine.decode_params`, with the store of responses opened for these weights."""
        self.watch.store.open(params)
        return self.engine.decode_params(params)


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


def load_text(
    config,
    workdir: pathlib.Path,
    model_dir: pathlib.Path | None,
    score: grading.Score | None = None,
    train: bool = True,
) -> Text:
    """Read problems and tokenizer. The embedded task writes its files under workdir/data first and
    then takes the same way as any other. score: judges responses; None = what the config names.
    train: False = the training set is not wanted, and the first of `eval.files` stands for it."""
    judge = grading.judge(config, score)
    train_files = [f.strip() for f in config.data.train.split(",") if f.strip()]
    eval_files = named_files(config.eval.files)
    tokenizer_path = config.tokenizer.path or model_dir
    alone = not train and eval_files and (train_files or tokenizer_path)
    first = next(iter(eval_files)) if alone else "train"
    if not train_files and not alone:
        made = arithmetic.write(
            workdir / "data",
            train=config.data.embedded_problems,
            heldout=max(config.eval.max_problems, 128),
        )
        train_files = [made.train]
        eval_files = eval_files or {"heldout": made.heldout, "harder": made.harder}
        tokenizer_path = tokenizer_path or made.tokenizer
    if not tokenizer_path:
        raise ValueError(
            "config.tokenizer.path: problem files of one's own need a tokenizer; give a directory"
            " with tokenizer.json or a SentencePiece .model"
        )
    tok = tokenizer.load(tokenizer_path, config.tokenizer.chat_template)
    notes = []
    how = problems.Reading(
        judge.takes,
        problems.columns(config.data.columns),
        prompts.template(config.data.template),
        config.data.system,
        judge.own,
    )

    def read(name, files, limit=0):
        rows, report = problems.read(files, config.data.on_bad, how)
        if how.columns and not report.mapped and name == first:
            raise ValueError(f"config.data.columns: no row of {files[0]} has all of these columns")
        rows = rows[: limit or None]
        out = problems.encode(
            rows,
            tok,
            config.data.max_prompt_tokens,
            config.tokenizer.chat,
            config.data.on_long,
            name,
        )
        note = f"{name}: {len(out.problems)} problems of {report.rows} rows"
        for count, what in (
            (report.duplicates, "repeated prompts"),
            (len(report.conflicts), "prompts with conflicting answers dropped"),
            (len(report.refused), f"rows without {judge.answers} skipped"),
            (
                out.n_long,
                f"prompts over {config.data.max_prompt_tokens} tokens ({config.data.on_long})",
            ),
        ):
            note += f", {count} {what}" if count else ""
        notes.append(note)
        return out

    trained = None if alone else read("train", train_files)
    if not train:
        notes.clear()
    evals = {
        name: read(name, [path], config.eval.max_problems) for name, path in eval_files.items()
    }
    return Text(tok, trained or evals[first], evals, notes, judge)


def digest(text: Text) -> str:
    """Of all prompts and answers, in their order: hosts may hold different copies of a file."""
    sha = hashlib.sha256()
    for data in (text.train, *text.evals.values()):
        for ids, problem in zip(data.ids, data.problems, strict=True):
            sha.update(f"{ids} {problem.answer} {problem.row or ''}\n".encode())
    return sha.hexdigest()[:12]


# ------------------------------------------------------------------------------------------------
# Devices
# ------------------------------------------------------------------------------------------------


def build_machine(
    config, vocab_tokens: int, stop_ids, model_dir: pathlib.Path | None, critic: bool = True
) -> Machine:
    """Mesh, model shape and programs; nothing compiles yet. critic: False = to sample and evaluate
    alone, which no value model is needed for. Raises ConfigError for shapes that the mesh or the
    tokenizer refuse."""
    sizes = validation.resolve_mesh(config, len(jax.devices()))
    mesh = parallel.make_mesh(sizes)
    if model_dir:
        shape = hf.read_shape(model_dir, **qwen2.compute_choices(config))
        if bad := validation.check_shape(shape, sizes, config.sharding):
            raise schema.ConfigError("\n".join(bad))
    else:
        shape = qwen2.shape_from_config(config)
    if shape.vocab_size < vocab_tokens:
        raise schema.ConfigError(
            f"the tokenizer has {vocab_tokens} ids and the model {shape.vocab_size} embedding rows;"
            " they do not belong together (config.model.vocab_size, config.tokenizer.path)"
        )
    kernel = attention_kernels.choose(shape.attention, config.model.dtype, shape.head_dim)
    if config.optim.share_prompts and kernel == "splash":
        raise schema.ConfigError(
            "config.optim.share_prompts: splash attention, which model.attention names or has on a"
            " TPU, cannot see a prompt beside its own segment; set model.attention=chunked"
        )
    machine = assemble(config, mesh, shape, stop_ids, model_dir, critic)
    values = machine.critic.shape if config.critic.init_from and machine.critic else None
    if values and (bad := validation.check_shape(values, sizes, config.sharding)):
        raise schema.ConfigError("\n".join(f"the value model: {line}" for line in bad))
    try:
        machine.engine.require_memory(qwen2.abstract(machine.shape), parallel.device_memory(mesh))
    except ValueError as error:
        raise schema.ConfigError(f"config.rollout: {error}") from None
    return machine


def assemble(
    config, mesh: Mesh, shape: qwen2.Shape, stop_ids, model_dir=None, critic: bool = True
) -> Machine:
    """The programs of a run on any mesh, also of devices that are only described."""
    rules = config.sharding.to_dict()
    adam = (config.optim.b1, config.optim.b2, config.optim.eps)
    programs = (
        mesh,
        tuple(rules["train"].items()),
        (*adam, config.optim.weight_decay, config.optim.clip_norm),
        config.model.dtype,
        config.optim.offload,
    )
    choice = objectives.choice(config.loss)._replace(aged=config.rollout.staleness > 0)
    terms = positive_lm.terms(config.loss.positive_coef)
    trainer, values = _trainer(update.Trainer, shape, *programs, choice, terms), None
    if critic and config.critic.enabled:
        values = _trainer(Critic, critic_shape(config, shape), *programs)
    longest = max(config.rollout.max_response_tokens, config.eval.max_response_tokens)
    sampler = engine.Engine(
        shape,
        mesh,
        rules["decode"],
        slots=config.rollout.slots,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=longest,
        chunk=config.rollout.chunk,
        prefill_prompts=config.rollout.prefill_prompts,
        prefill_tokens=config.rollout.prefill_tokens,
        page_tokens=config.rollout.page_tokens,
        cache_fraction=config.rollout.cache_fraction,
        cache_dtype=config.rollout.cache_dtype,
        stop_ids=stop_ids,
        dtype=config.model.dtype,
        resumes=config.rollout.staleness > 0,
    )
    return Machine(mesh, shape.merged, model_dir, trainer.tx, trainer, sampler, values)


@functools.lru_cache(maxsize=8)
def _trainer(kind: type, shape, mesh: Mesh, rules, optimizer, *options):
    """The same for like arguments: what one run of a process has compiled serves the next."""
    return kind(shape, mesh, dict(rules), update.optimizer(*optimizer), *options)


def minibatch_responses(config) -> int:
    return config.rollout.groups // config.optim.minibatches * config.rollout.group_size


def row_layout(config, mesh: Mesh) -> dict:
    """How `packing.pack` lays out a mini-batch."""
    return dict(
        row_tokens=validation.row_tokens(config),
        micro_rows=validation.micro_rows(config, mesh.shape),
        max_items=minibatch_responses(config),
        open_ends=config.critic.enabled and config.critic.bootstrap_truncated,
        share_prompts=config.optim.share_prompts,
    )


def calls(config, m: Machine) -> dict[str, Call]:
    """What a step runs, by name and quick to compile first: 'decode weights' (their cast into the
    sampler's layout), 'prefill', 'decode_MODE' (for each way to draw that training or evaluation
    uses, of the last rows 'decode_MODE, few'), 'old log-probs' and 'update' at a whole mini-batch.
    """
    abstract = qwen2.abstract(m.shape)
    rows = validation.micro_rows(config, m.mesh.shape)
    wanted = m.trainer.abstract(
        -(-minibatch_responses(config) // rows), rows, validation.row_tokens(config)
    )
    params, _, batch, knobs = wanted
    sampler = m.engine.calls(abstract)
    draws = [training_draw(config), *evaluation_draws(config)]
    out = {
        "decode weights": Call(m.engine.programs.to_decode_layout, (params,)),
        "prefill": sampler.prefill,
    }
    modes = {draw.mode for draw in draws}
    used = {name: call for name, call in sampler.decode.items() if name.split(",")[0] in modes}
    out |= {f"decode_{name}": call for name, call in used.items()}
    if config.loss.old_logprobs == "recompute" or config.loss.kl_coef:
        arguments = (params, batch.rows, batch.micro_batches, knobs.temperature)
        out["old log-probs"] = Call(m.trainer.log_probs, arguments, "micro-batch")
    out |= {"update": Call(m.trainer.update, wanted, "micro-batch")}
    if m.critic:
        wanted = m.critic.abstract(*batch.rows.tokens_AxRxT.shape)
        params, _, batch, _ = wanted
        reading = (params, batch.rows, batch.micro_batches)
        out["values"] = Call(m.critic.values, reading, "micro-batch")
        out["update of values"] = Call(m.critic.update, wanted, "micro-batch")
    return out


@contextlib.contextmanager
def compiling(config, m: Machine) -> Iterator[None]:
    """Meanwhile a thread compiles what a step runs, which then lies ready. In one process alone:
    where several share what they compile, each would do so at a place of its own."""
    if jax.process_count() > 1 or not config.steps:
        yield
        return
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.map(
            lambda call: call.program.lower(*call.arguments).compile(), calls(config, m).values()
        )
        try:
            yield
            list(compiled)  # raises what a compilation did
        finally:
            thread.shutdown(cancel_futures=True)


ADAPTERS_SEED = 1 << 20  # folded in: no weight of the network has it


def initial_params(config, m: Machine) -> qwen2.Params:
    """Weights of the model directory, or random ones from the seed; in the training layout, without
    adapters."""
    if m.model_dir:
        return hf.load_params(m.model_dir, m.shape, m.mesh, config.sharding.train.to_dict())
    return m.trainer.init_params(_key_data(jax.random.key(config.seed)))


def with_adapters(config, m: Machine, params: qwen2.Params) -> qwen2.Params:
    """What a run trains: `params`, and adapters (LoRA) from the seed where the config has them."""
    if not config.model.lora.rank:
        return params
    key = jax.random.fold_in(jax.random.key(config.seed), ADAPTERS_SEED)
    return m.trainer.adapted(params, _key_data(key))


def _key_data(key) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))


# ------------------------------------------------------------------------------------------------
# Drawing
# ------------------------------------------------------------------------------------------------

EVALUATION_SEED = 1 << 20  # added: evaluation never shares uniforms with training


def training_draw(config, step: int = 0) -> Draw:
    """How rollouts of rollout step `step` are drawn."""
    return Draw(
        config.seed,
        curriculum.temperature(config, step),
        config.rollout.top_p,
        config.rollout.max_response_tokens,
    )


def evaluation_draw(config, top_p: float | None = None) -> Draw:
    """How evaluation draws, at `eval.top_p` where no other is given."""
    return Draw(
        config.seed + EVALUATION_SEED,
        config.eval.temperature,
        config.eval.top_p if top_p is None else top_p,
        config.eval.max_response_tokens or config.rollout.max_response_tokens,
        tuple(validation.stop_strings(config.eval.stop_strings)),
    )


def evaluation_draws(config) -> list[Draw]:
    """The settings that a run evaluates: top_p 1, and `eval.top_p` where that is another."""
    return [evaluation_draw(config, p) for p in sorted({1.0, config.eval.top_p}, reverse=True)]


def sample_groups(
    m: Machine,
    decode_params,
    prompts: Sequence[tuple[int, Sequence[int]]],
    group_size: int,
    draw: Draw,
    top_ps: Sequence[float] = (),
    cut: Callable[[np.ndarray], int] | None = None,
) -> tuple[list[Group], engine.Stats]:
    """G responses to each (stream position, prompt); ungraded groups in the given order. top_ps: of
    each prompt, where they are not all the draw's. cut: see `Engine.generate`."""
    requests = [
        engine.Request(prompt, position, g, top_p=top_p)
        for (position, prompt), top_p in zip(prompts, top_ps or [0.0] * len(prompts), strict=True)
        for g in range(group_size)
    ]
    responses, stats = m.engine.generate(decode_params, requests, draw, m.watch, cut=cut)
    groups = [
        Group(position, prompt, responses[i * group_size : (i + 1) * group_size])
        for i, (position, prompt) in enumerate(prompts)
    ]
    return groups, stats
