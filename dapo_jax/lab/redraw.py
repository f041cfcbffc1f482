"""A step of a run, drawn again from one of its checkpoints by the run's own functions.

Rollout step s, as metrics.jsonl and rollouts/ count, is drawn by the weights after step s - 1. So
the steps that can be drawn again are those behind the checkpoints that are kept. Nothing is written
in the run's directory.

    o = redraw.open_step("runs/quickstart", 21)
    group, = redraw.draw(o, [redraw.position(o, "3b5c")])      # one problem, nothing else
    found = redraw.whole(o)                                    # the step: its batch and its updates
"""

import copy
import functools
import json
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import algorithm, build, parallel
from dapo_jax.algorithm import Algorithm, StepRecord
from dapo_jax.checkpoint import checkpoint
from dapo_jax.checkpoint.journal import Journal
from dapo_jax.checkpoint.remembered import Responses
from dapo_jax.checkpoint.resume import inputs
from dapo_jax.checkpoint.workdir import CHECKPOINTS, JOURNAL, Workdir
from dapo_jax.config import schema, validation
from dapo_jax.dapo import objective, packing, update
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.minibatches import make_minibatches
from dapo_jax.dapo.state import State
from dapo_jax.data import problems
from dapo_jax.lab import replies
from dapo_jax.lab.dynamics import logs
from dapo_jax.log import metrics
from dapo_jax.model import hf
from dapo_jax.reward import grading
from dapo_jax.rollout.engine import Draw, Request, Response, Store
from dapo_jax.run import begin
from dapo_jax.variants import choose, over_batch


class Opened(NamedTuple):
    """A rollout step as it begins."""

    path: str  # of the run
    step: int  # as metrics.jsonl and rollouts/ count: the first is 1
    config: schema.Config
    method: Algorithm
    text: build.Text
    machine: build.Machine
    stream: Sequence[int]  # position -> row of the training set
    state: State  # after step - 1
    notes: list[str]  # what has changed since it was saved, a line each
    heard: replies.Heard | None = None  # of a run with turns: what is known of the replies

    @property
    def draw(self) -> Draw:
        return algorithm.training_draw(self.method, self.state.counters.step)


def steps(path: str, config: schema.Config | None = None) -> list[int]:
    """The rollout steps of a run that can be drawn again, ascending."""
    config = config or _config(path)
    return sorted(n + 1 for n in checkpoint.steps(_directory(path, config))[0])


def open_step(path: str, step: int, score: grading.Score | None = None) -> Opened:
    """Rollout step `step` of the run in `path`, a workdir on a disk or in a bucket, on whatever
    devices this process has. score: the judge, where the run was started from Python with one.
    ValueError: no checkpoint holds its weights; the run's files or model are not there."""
    config = _config(path)
    directory, there = _directory(path, config), steps(path, config)
    if step not in there:
        listed = f"it can show step {', '.join(map(str, there))}" if there else "it has none"
        raise ValueError(
            f"{path}@{step}: step {step} was drawn by the weights after step {step - 1}, of which"
            f" {directory} holds no whole checkpoint; {listed} (config.checkpoint.every and"
            " .keep_every say what a run keeps)"
        )
    if later := [n - 1 for n in there if n > step]:  # saved by the process that ran this step
        with checkpoint.reader(directory) as m:
            config = schema.of_run(json.dumps(checkpoint.read_state(m, min(later))["config"]))
    config.init_from, config.init_state = f"{directory}@{step - 1}", "all"
    notes = lay_out(config)
    validation.validate(config, len(jax.devices()), files=True)
    model_dir = _model_directory(path, config)
    text = _text(config, model_dir, score)
    tok = text.tokenizer
    machine = build.build_machine(config, tok.vocab_size, tok.stop_ids, model_dir)
    with tempfile.TemporaryDirectory() as none:  # has no checkpoint
        state, _ = begin.start_state(config, text, machine, none, lambda _: True, notes.append)
    stream = problems.stream(range(len(text.train.ids)), config.seed)
    state = choose.resumed(config, text, stream, state)
    ours = ("a branch of ", "changed: config.init_")
    notes = [note for note in notes if not note.startswith(ours)]
    o = Opened(path, step, config, choose.of(config), text, machine, stream, state, notes)
    if not config.rollout.turns:
        return o
    heard = replies.Heard(recorded(path, step), _kept(o) or Store(), o.draw)
    return o._replace(method=replies.method(config, heard), heard=heard)


def recorded(path: str, step: int) -> list[dict[str, Any]]:
    """The rows of rollouts/ of a step; none where the run has not made it."""
    file = logs.place(path) / "rollouts" / f"step_{step:06d}.jsonl"
    if not logs.attempt(path, file.exists):
        return []
    rows = map(logs.json_object, logs.text_of(file, str(file)).splitlines())
    return [row for row in rows if row and isinstance(row.get("position"), int)]


def _config(path: str) -> schema.Config:
    if (config := logs.config_of(path)) is None:
        raise ValueError(f"{path}: no config.json in it; give a run's directory")
    return config


def _directory(path: str, config: schema.Config) -> str:
    return config.checkpoint.directory or str(logs.place(path) / CHECKPOINTS)


def _model_directory(path: str, config: schema.Config) -> pathlib.Path | None:
    """Shape and tokenizer of `model.path`: those that the run keeps of a model of the hub."""
    kept = logs.place(path) / "base"
    name = str(kept) if (kept / "config.json").exists() else config.model.path
    return hf.resolve(name, weights=False) if config.model.path else None


def _text(config: schema.Config, model_dir: pathlib.Path | None, score=None) -> build.Text:
    with tempfile.TemporaryDirectory() as folder:  # for the embedded task's files
        return build.load_text(config, pathlib.Path(folder), model_dir, score)


def lay_out(config: schema.Config) -> list[str]:
    """Put the config on the devices that are here. Returns notes."""
    n = len(jax.devices())
    try:
        validation.resolve_mesh(config, n)
        return []
    except schema.ConfigError:
        config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, -1, 1
        up = lambda x: -(-x // n) * n
        config.rollout.slots = up(config.rollout.slots)
        config.rollout.prefill_prompts = up(config.rollout.prefill_prompts)
        return [f"config.mesh: laid over the {n} devices here; the last bits may differ"]


def changed(o: Opened, fields: dict[str, Any]) -> Opened:
    """The same step by a config with other values: to judge or draw its groups otherwise.
    ConfigError: the config cannot be so."""
    config = copy.deepcopy(o.config)
    config.update(fields)
    validation.validate(config, len(jax.devices()), files=True)
    text, machine, tok = o.text, o.machine, o.text.tokenizer
    if any(name.startswith("reward.") for name in fields):
        text = text._replace(judge=grading.judge(config.reward))
        if text.judge.own and not o.text.judge.own:  # it sees the rows, which were not kept
            found = {p.id: p.row for p in _text(config, machine.model_dir).train.problems}
            rows = [p._replace(row=found.get(p.id, p.row)) for p in text.train.problems]
            text = text._replace(train=text.train._replace(problems=rows))
    if config.rollout.max_response_tokens > machine.engine.response_tokens:
        machine = build.build_machine(config, tok.vocab_size, tok.stop_ids, machine.model_dir)
    method = replies.method(config, o.heard)
    return o._replace(config=config, method=method, text=text, machine=machine)


def position(o: Opened, problem: str) -> int:
    """The stream position that `problem` names: a number, or the id (or its first digits) of a
    problem, whose next position from the step's beginning on it then is; of one that was begun or
    accepted earlier, that one. ValueError: no problem, or several."""
    if re.fullmatch(r"\d{1,15}", problem):
        return int(problem)
    ids = [p.id for p in o.text.train.problems]
    rows = [row for row, name in enumerate(ids) if name.startswith(problem) and problem]
    if len(rows) != 1:
        found = f"{len(rows)} problems' ids begin so" if rows else "no problem of data.train has it"
        raise ValueError(
            f"PROBLEM {problem!r}: {found}; give the id in rollouts/, or a position of the stream"
        )
    waiting = [g.position for g in o.state.carried if o.stream[g.position] == rows[0]]
    first = o.state.counters.position
    ahead = range(first, first + 2 * len(ids))
    return next(p for p in (*waiting, *ahead) if o.stream[p] == rows[0])


def begun(o: Opened, position: int) -> tuple[Group, list[Request]]:
    """(the group at a position as the step finds it, None for each response that nobody has begun;
    what is left to draw of it). Under a shorter limit than the run's a response ends there."""
    waiting = {g.position: g for g in o.state.carried}
    ids, G = o.text.train.ids[o.stream[position]], o.config.rollout.group_size
    most = o.config.rollout.max_response_tokens
    group = waiting.get(position, Group(position, ids, [None] * G))
    group = group._replace(responses=[r and _within(r, most) for r in group.responses])
    asked = [
        Request(group.prompt, position, i)
        if r is None
        else Request(group.prompt, position, i, prefix=r.tokens.tolist(), note=r.note)
        for i, r in enumerate(group.responses)
        if r is None or not r.ended
    ]
    return group, asked


def _within(r: Response, most: int) -> Response:
    if len(r.tokens) < most + r.ended:
        return r
    short = {k: x[:most] for k, x in r._asdict().items() if isinstance(x, np.ndarray)}
    return r._replace(**short, truncated=True, ended=True, grade=None, note=b"")


def draw(o: Opened, positions: Sequence[int]) -> list[Group]:
    """The groups at these positions, graded, as the weights at the beginning of the step draw them.
    What earlier steps have drawn of one is in the checkpoint, and is not drawn again. ValueError:
    the judge or a tool fails."""
    groups, asked = zip(*(begun(o, p) for p in positions), strict=True)
    requests = [request for of in asked for request in of]
    engine, drawn = o.machine.engine, []
    if requests:
        weights = engine.decode_params(o.state.params)
        drawn = replies.generate(o, weights, requests)
        engine.release()
    rest, version = iter(drawn), o.state.counters.step if o.config.rollout.staleness else None
    ended = lambda r: replies.graded(r) if r and r.ended else _joined(r, next(rest), version)
    whole = [g._replace(responses=[ended(r) for r in g.responses]) for g in groups]
    problems = [o.text.train.problems[o.stream[p]] for p in positions]
    return grading.grade_groups(o.text.tokenizer, o.text.judge, whole, problems)


def _joined(before: Response | None, new: Response, version: int | None) -> Response:
    """A response, part of which earlier weights may have drawn. version: of the weights that drew
    the rest; None: the run keeps no versions."""
    if version is None:
        return new
    made = np.full(len(new.tokens), version, np.int32)
    if before is None:
        return new._replace(versions=made)
    arrays = (np.concatenate(pair) for pair in zip(before[:3], new[:3], strict=True))
    versions = np.concatenate([before.versions, made])
    return Response(*arrays, new.truncated, versions, grade=new.grade)


def journal(o: Opened, position: int) -> dict[int, Response]:
    """Sample -> what the run's journal holds of what this step has to draw of it, behind the tokens
    that earlier steps drew; of a response with replies, its first turn of this step."""
    _, asked = begun(o, position)
    found = kept.get(asked, o.draw) if (kept := _kept(o)) else [None] * len(asked)
    whole = lambda q, r: r._replace(tokens=np.append(np.array(q.prefix, np.int32), r.tokens))
    return {q.sample: whole(q, r) for q, r in zip(asked, found, strict=True) if r}


def _kept(o: Opened) -> Responses | None:
    """The run's journal, of a step that no checkpoint covers yet, under this very config and on
    such devices; None: there is none."""
    place = logs.place(o.path) / JOURNAL
    if not (o.config.checkpoint.journal_gb and place.is_dir() and any(place.iterdir())):
        return None
    home = Workdir(o.path, pathlib.Path(o.path), logs.place(o.path), {})
    book = Journal(home, o.config, inputs(o.text, o.config), o.state.counters.step, lambda _: None)
    book.open(o.state.params)
    return Responses(book)


# --- The whole step ---


class Update(NamedTuple):
    """What one gradient update trained on, by cells [A, R, T] of its rows."""

    rows: packing.PackedBatch
    terms: objective.TokenLoss
    weight_AxRxT: np.ndarray  # of a token in the loss, importance weight included
    importance_AxRxT: np.ndarray
    others: dict[str, objective.TokenLoss]  # what other objectives say of the same tokens
    places: dict[tuple[int, int], packing.Place]  # (position, sample) -> its cells

    @property
    def loss(self) -> float:
        """The sum over its tokens of weight times loss."""
        return float(np.sum(self.weight_AxRxT * self.terms.loss, dtype=np.float64))


class Whole(NamedTuple):
    record: StepRecord
    updates: list[Update]
    found: dict[str, Any]  # tag -> value of metrics.jsonl, as far as it is no clock's
    recorded: dict[str, Any]  # the run's own record of the step; {} where it has none


def by_token(config):
    """The objective, to be asked about single tokens. ValueError: it chooses by the mini-batch."""
    if (name := config.loss.objective) in over_batch.METHODS:
        why = "chooses by its whole mini-batch and cannot be compared token by token"
        raise ValueError(f"loss.objective: {name!r} {why}")
    return choose.objective(config)


def whole(o: Opened, objectives: Sequence[str] = ()) -> Whole:
    """Do the step again: its batch, its updates, and each token's part in them. objectives: names
    of `config.loss.objective` to be asked about the same tokens beside the run's own. Ends the use
    of `o`, whose weights are updated in place."""
    configs = [o.config, *(changed(o, {"loss.objective": name}).config for name in objectives)]
    seen, trainer = [], o.machine.trainer
    of = by_token if objectives else choose.objective
    programs = [token_terms(trainer, of(c)) for c in configs]

    def noted(params, opt_state, batch, knobs):
        logp = trainer.log_probs(params, batch.rows, batch.micro_batches, knobs.temperature)
        terms = [of(batch, logp, knobs.loss) for of in programs]
        seen.append(jax.device_get((batch.rows, terms)))
        return trainer.update(params, opt_state, batch, knobs)

    watched = copy.copy(trainer)
    watched.update = noted
    machine = o.machine._replace(trainer=watched)
    state, record = algorithm.step(o.method, o.text, machine, o.stream, o.state)
    groups, updates = record.batch.groups, []
    name = {id(r.tokens): (g.position, i) for g in groups for i, r in enumerate(g.responses)}
    open_ends = bool(o.machine.others) and o.config.critic.bootstrap_truncated
    minibatches = make_minibatches(o.method, groups, o.step - 1)
    trained = [items for items in minibatches if any(item.weight for item in items)]
    for items, (rows, terms) in zip(trained, seen, strict=bool(seen)):
        places = packing.pack(items, o.machine.layout, open_ends=open_ends)[2]
        at = {name[id(i.response)]: p for i, p in zip(items, places, strict=True) if p}
        (term, weight, importance), *rest = terms
        others = {n: t[0] for n, t in zip(objectives, rest, strict=True)}
        updates.append(Update(rows, term, weight, importance, others, at))
    tokens = sum(r.length for g in record.batch.drawn for r in g.responses)
    found = metrics.rollout_metrics(o.config, record.batch, tokens)
    found |= metrics.update_metrics(record.updates, bool(o.config.loss.kl_coef)) | record.metrics
    found |= {"optim/updates": state.counters.updates, "optim/lr": record.knobs.lr}
    timeless = {k: x for k, x in found.items() if not k.startswith("time/")}
    found = {k: x if isinstance(x, list) else metrics.number(x) for k, x in timeless.items()}
    recorded = {s: r for s, r in logs.records(o.path)}.get(o.step, {})
    return Whole(record, updates, found, recorded)


@functools.lru_cache(maxsize=8)
def token_terms(trainer: update.Trainer, choice: objective.Choice):
    """A program (batch, the trainer's log-probs before the update, Coefficients) -> (terms, weight,
    importance weight) of each cell, [A, R, T], as `update.dapo_loss` sums them up."""

    def micro(c, rows, logp, old):
        over = update.per_response(rows, trainer.shape.shared_prompts)
        logp, old = (jnp.where(rows.trained_AxRxT, x, 0.0) for x in (logp, old))
        term = choice.token_loss(logp, old, rows.advantage_AxRxT, c, over)
        importance = jnp.ones_like(logp)
        if choice.importance:
            importance = choice.importance(old, rows.sampled_logp_AxRxT, c, over)
        return term, rows.weight_AxRxT * importance, importance

    @jax.jit
    def of(batch: update.Batch, logp_AxRxT, c: objective.Coefficients):
        with parallel.mesh_scope(trainer.mesh, trainer.rules):
            each = jax.vmap(functools.partial(micro, c))
            return each(batch.rows, logp_AxRxT, batch.old_logp_AxRxT)

    return of
