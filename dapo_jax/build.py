"""What a config describes, put together: text, mesh, sampler and trainer programs.

Training, evaluation and the experiments all start here, so that they cannot differ.
"""

import contextlib
import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax import algorithm, parallel
from dapo_jax.config import schema, validation
from dapo_jax.dapo import packing, update
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import arithmetic, problems, prompts, rows, tokenizer
from dapo_jax.model import attention_kernels, hf, learner, paged_triton, qwen2
from dapo_jax.parallel import Call
from dapo_jax.reward import functions, grading
from dapo_jax.rollout import drafts, engine
from dapo_jax.rollout.draw import Draw
from dapo_jax.variants import choose

talking = choose.turns.talking  # (config, machine, text): responses of several turns, if so set


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
    trainer: update.Trainer
    engine: engine.Engine
    layout: packing.Layout  # of the rows of a mini-batch
    others: Mapping[str, Any]  # trainers of models beside the policy
    watch: engine.Watch = engine.UNWATCHED  # who observes sampling and updates

    def decode_params(self, params):
        """`Engine.decode_params`, with the store of responses opened for these weights."""
        self.watch.store.open(params)
        return self.engine.decode_params(params)

    def sample_groups(
        self,
        decode_params,
        prompts: Sequence[tuple[int, Sequence[int]]],
        group_size: int,
        draw: Draw,
        top_ps: Sequence[float] = (),
        **calls,
    ) -> tuple[list[Group], engine.Stats]:
        """Groups, not yet graded, of responses to each (stream position, prompt), in the given
        order up to the first that lacks one, and the sampler's statistics. top_ps: of each prompt,
        where they differ from the draw's. calls: `cut` and `wanted` of `Engine.generate`."""
        asked = requests(prompts, group_size, top_ps)
        drawn, stats = self.engine.generate(decode_params, asked, draw, self.watch, **calls)
        return grouped(prompts, group_size, drawn), stats


def requests(prompts, group_size: int, top_ps: Sequence[float] = (), draw: Draw | None = None):
    """`Request`s for a group of responses to each (stream position, prompt)."""
    return [
        engine.Request(prompt, position, g, top_p=top_p, draw=draw)
        for (position, prompt), top_p in zip(prompts, top_ps or [0.0] * len(prompts), strict=True)
        for g in range(group_size)
    ]


def grouped(prompts, group_size: int, drawn: Sequence[engine.Response | None]) -> list[Group]:
    """The responses to `requests` as groups, up to the first that lacks one."""
    rest = iter(drawn)
    take = lambda: list(itertools.islice(rest, group_size))
    groups = (Group(position, prompt, take()) for position, prompt in prompts)
    return [*itertools.takewhile(lambda g: None not in g.responses, groups)]


def named_files(files: str) -> dict[str, str]:
    """'aime24=a.parquet,b.jsonl' -> {'aime24': 'a.parquet', 'b': 'b.jsonl'}."""
    named = {}
    for entry in filter(None, (f.strip() for f in files.split(","))):
        name, path = rows.entry(entry)
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
    """Read problems and tokenizer. The embedded task first writes its files under workdir/data and
    then reads them like any others. score: judges responses; None = what the config names.
    train: False = no training set is needed; the first set of `eval.files` stands in for it."""
    judge = grading.judge(config.reward, score)
    train_files = [f.strip() for f in config.data.train.split(",") if f.strip()]
    eval_files = named_files(config.eval.files)
    tokenizer_path = config.tokenizer.path or model_dir
    alone = not train and eval_files and (train_files or tokenizer_path)
    first = next(iter(eval_files)) if alone else "train"
    if not train_files and not alone:
        count, heldout = config.data.embedded_problems, max(config.eval.max_problems, 128)
        made = arithmetic.write(workdir / "data", train=count, heldout=heldout)
        train_files = [made.train]
        eval_files = eval_files or {"heldout": made.heldout, "harder": made.harder}
        tokenizer_path = tokenizer_path or made.tokenizer
    if not tokenizer_path:
        remedy = "give a directory with tokenizer.json or a SentencePiece .model"
        raise ValueError(f"config.tokenizer.path: problem files need a tokenizer; {remedy}")
    tok = tokenizer.load(tokenizer_path, config.tokenizer.chat_template)
    data, columns = config.data, problems.columns(config.data.columns)
    template = prompts.template(data.template)
    how = problems.Reading(judge.takes, columns, template, data.system, judge.own)
    read = lambda name, files, limit=0: problems.read_set(
        name, files, tok, data, config.tokenizer.chat, how, limit, name == first
    )
    trained, notes, evals = None, [], {}
    if not alone:
        trained, note = read("train", train_files)
        notes += [note] * train
    for name, path in eval_files.items():
        evals[name], note = read(name, [path], config.eval.max_problems)
        notes.append(note)
    sets = [trained or evals[first], *evals.values()]
    if train:  # what is evaluated alone may be of other sources
        notes += functions.unused(config.reward, {p.source for x in sets for p in x.problems})
    return Text(tok, sets[0], evals, notes, judge)


def build_machine(
    config, vocab_tokens: int, stop_ids, model_dir: pathlib.Path | None, others: bool = True
) -> Machine:
    """Mesh, model shape and programs; nothing compiles yet. others: False = to sample and evaluate
    alone, without models beside the policy. ConfigError: mesh or tokenizer refuse a shape."""
    sizes = validation.resolve_mesh(config, len(jax.devices()))
    mesh = parallel.make_mesh(sizes)
    if model_dir:
        shape = hf.read_shape(model_dir, **qwen2.compute_choices(config))
        if bad := validation.check_shape(shape, sizes, config.sharding):
            raise schema.ConfigError("\n".join(bad))
    else:
        shape = qwen2.shape_from_config(config)
    if shape.vocab_size < vocab_tokens:
        have = f"the tokenizer has {vocab_tokens} ids, the model {shape.vocab_size} embedding rows"
        raise schema.ConfigError(f"{have} (config.tokenizer.path, config.model.vocab_size)")
    how = shape.attention, config.model.dtype, shape.head_dim, shape.shared_prompts
    kernel = attention_kernels.choose(*how)
    if config.optim.share_prompts and kernel in ("splash", "triton"):
        why = f"{kernel} attention (TPUs have splash) cannot see a prompt beside its own segment"
        raise schema.ConfigError(f"config.optim.share_prompts: {why}; set model.attention=chunked")
    if kernel == "triton" and not paged_triton.fits(16, shape.head_dim):
        why = f"triton takes heads of 16, 32, 64 or 128 numbers, and these have {shape.head_dim}"
        raise schema.ConfigError(f"config.model.attention: {why}; set 'auto'")
    if shape.attention == "cudnn" and not attention_kernels.runs_cudnn(*how[1:3]):
        why = "cudnn takes GPUs from Ampere on, bfloat16, and heads of 8, 16, ... 128 numbers"
        raise schema.ConfigError(f"config.model.attention: {why}; set 'auto'")
    machine = assemble(config, mesh, shape, stop_ids, model_dir, others)
    if bad := validation.check_cache(config, machine.engine.geometry, sizes):
        raise schema.ConfigError("\n".join(bad))
    for name, other in machine.others.items():
        if bad := validation.check_shape(other.shape, sizes, config.sharding):
            raise schema.ConfigError("\n".join(f"the {name} model: {line}" for line in bad))
    try:
        machine.engine.require_memory(qwen2.abstract(machine.shape), parallel.device_memory(mesh))
    except ValueError as error:
        raise schema.ConfigError(f"config.rollout: {error}") from None
    return machine


def assemble(
    config, mesh: Mesh, shape: qwen2.Shape, stop_ids, model_dir=None, others: bool = True
) -> Machine:
    """The programs of a run on any mesh, also of devices that are only described."""
    rules, optim = config.sharding.to_dict(), config.optim
    adam = (optim.b1, optim.b2, optim.eps, optim.weight_decay, optim.clip_norm)
    more = (optim.offload, optim.last_row_tokens)
    programs = (mesh, tuple(rules["train"].items()), adam, config.model.dtype, more)
    terms = tuple(term for term, _ in choose.of(config).terms)
    trainer = _trainer(update.Trainer, shape, *programs, choose.objective(config), terms)
    make = lambda kind, shape: _trainer(kind, shape, *programs)
    longest = max(config.rollout.max_response_tokens, config.eval.max_response_tokens)
    fixed = dict(stop_ids=stop_ids, dtype=config.model.dtype, response_tokens=longest)
    fixed |= dict(prompt_tokens=config.data.max_prompt_tokens)
    sampler = drafts.kind(config.rollout)(shape, mesh, rules["decode"], config.rollout, **fixed)
    items = config.rollout.groups // optim.minibatches * config.rollout.group_size
    sizes = validation.row_tokens(config), validation.micro_rows(config, mesh.shape), items
    layout = packing.Layout(*sizes, optim.share_prompts, optim.last_row_tokens)
    models = choose.others(config, shape, make) if others else {}
    return Machine(mesh, shape.merged, model_dir, trainer, sampler, layout, models)


@functools.lru_cache(maxsize=8)
def _trainer(kind: type, shape, mesh: Mesh, rules, optimizer, dtype, more, *options):
    """The same for like arguments: what one run of a process has compiled serves the next."""
    setup = learner.Setup(mesh, dict(rules), learner.optimizer(*optimizer), dtype, *more)
    return kind(shape, setup, *options)


def calls(config, m: Machine) -> dict[str, Call]:
    """What a step runs, by name, quick to compile first: 'decode weights' (a cast), 'prefill',
    'pages to other shards', 'decode_MODE' (', N slots': last rows), 'old log-probs', 'update'."""
    abstract = qwen2.abstract(m.shape)
    rows = m.layout.micro_rows
    wanted = m.trainer.abstract(-(-m.layout.max_items // rows), rows, m.layout.row_tokens)
    params, _, batch, knobs = wanted
    sampler = m.engine.calls(abstract)
    draws = [algorithm.training_draw(choose.of(config)), *evaluation_draws(config)]
    out = {
        "decode weights": Call(m.engine.programs.weights.to_decode_layout, (params,)),
        "prefill": sampler.prefill,
    } | sampler.others
    modes, decode = {draw.mode for draw in draws}, sampler.decode.items()
    out |= {f"decode_{name}": call for name, call in decode if name.split(",")[0] in modes}
    if config.loss.old_logprobs == "recompute" or config.loss.kl_coef:
        arguments = (params, batch.rows, batch.micro_batches, knobs.temperature)
        out["old log-probs"] = Call(m.trainer.log_probs, arguments, "micro-batch")
    out |= {"update": Call(m.trainer.update, wanted, "micro-batch")}
    for other in m.others.values():
        out |= other.calls(*batch.rows.tokens_AxRxT.shape)
    return out


@contextlib.contextmanager
def compiling(config, m: Machine) -> Iterator[None]:
    """Meanwhile a thread compiles what a step runs, which then lies ready. In one process alone:
    where several share what they compile, each would do so at a place of its own."""
    if jax.process_count() > 1 or not config.steps:
        yield
        return
    with ThreadPoolExecutor(1) as thread:
        ready = lambda call: call.program.lower(*call.arguments).compile()
        compiled = thread.map(ready, calls(config, m).values())
        try:
            yield
            list(compiled)  # raises what a compilation did
        finally:
            thread.shutdown(cancel_futures=True)


def initial_params(config, m: Machine) -> qwen2.Params:
    """The model directory's weights or random ones, in the training layout, without adapters."""
    if m.model_dir:
        return hf.load_params(m.model_dir, m.shape, m.mesh, config.sharding.train.to_dict())
    return m.trainer.init_params(np.asarray(jax.random.key_data(jax.random.key(config.seed))))


EVALUATION_SEED = 1 << 20  # added: evaluation never shares uniforms with training


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
