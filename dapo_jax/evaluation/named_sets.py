"""Evaluation sets: known by name, each with the settings of a paper, or files of one's own."""

import copy
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from dapo_jax import build
from dapo_jax.config import schema, validation
from dapo_jax.data import answers, published, tokenizer
from dapo_jax.model import hf_format
from dapo_jax.reward import grading


class Asked(NamedTuple):
    """Sets that share their settings: all files of one's own, or one named set."""

    config: schema.Config
    text: build.Text
    machine: build.Machine
    source: str = ""  # the paper that the settings come from


def ask(
    config,
    workdir: pathlib.Path,
    model_dir: pathlib.Path | None,
    score: grading.Score | None,
    fixed: frozenset[str],
    folder: pathlib.Path,
) -> Iterator[Asked]:
    """The sets that `config.eval.files` names. fixed: fields that override the settings of named
    sets. Named sets are fetched into `folder` unless they are there. ValueError: one cannot be.

    A named set has its own sampler, sized by its prompts and its longest response, so that its
    score cannot depend on the other sets."""
    every = build.named_files(config.eval.files)
    for name in every:
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
            raise ValueError(f"{name!r} cannot name a folder of samples; write --data=name=path")
    if config.data.train and not every:
        raise ValueError("no problems to evaluate on; give --data=FILE (or config.eval.files)")
    named, own = {}, {}
    for name, path in every.items():
        there = pathlib.Path(path).exists()
        known = None if there else published.evaluated(path)
        if not known and not there and re.fullmatch(r"[\w-]+", path):
            none = f"{path:.80}: no such file, and no set of that name"
            raise ValueError(f"{none} ({published.KNOWN})")
        (named if known else own)[name] = known or path
    # Without the user's training set, which may have millions of rows.
    read = lambda c: build.load_text(c, workdir, model_dir, score, train=False)
    most = lambda text: max(len(data.ids) for data in text.evals.values())

    def machine_of(c, tok: tokenizer.Tokenizer) -> build.Machine:
        return build.build_machine(c, tok.vocab_size, tok.stop_ids, model_dir, others=False)

    if own or not named:
        config = copy.deepcopy(config)
        if named:
            config.eval.files = ",".join(f"{name}={path}" for name, path in own.items())
        text = read(config)
        fill(config, most(text))
        yield Asked(config, text, machine_of(config, text.tokenizer))
    machines = {}
    for name, (pinned, protocol) in named.items():
        try:
            path, there = published.fetch(pinned, folder)
        except ValueError as error:
            known = pinned.file.partition(".")[0]
            fetch = f"python -m dapo_jax.data prepare {known} --out={folder}"
            raise ValueError(f"{name}: {error}; on a machine with a network: {fetch}") from error
        c = by_protocol(config, protocol, fixed)
        c.eval.files = f"{name}={path}"
        if c.reward.verifier == "math" and not (score or c.reward.function):
            try:
                answers.require_math()
            except ValueError as error:
                auto = "--config.reward.verifier=auto judges by what each prompt asks for"
                raise ValueError(f"{name}: {error}; without it {auto}") from error
        text = read(c)
        (note,) = text.notes
        note += fit(name, c, text, model_dir, fixed)
        fill(c, most(text))
        sizes = (c.data.max_prompt_tokens, c.eval.max_response_tokens, c.rollout.slots)
        machines[sizes] = machines.get(sizes) or machine_of(c, text.tokenizer)
        notes = [f"{name}: fetched into {path}"] * (not there) + [note]
        yield Asked(c, text._replace(notes=notes), machines[sizes], protocol.source)


def by_protocol(config, protocol: published.Protocol, fixed: frozenset[str]):
    """A copy with a paper's settings, but for fields in `fixed`, and prompts of any length."""
    sampling = ("k", "temperature", "top_p", "max_response_tokens")
    wanted = {f"eval.{name}": getattr(protocol, name) for name in sampling}
    wanted |= {"eval.max_problems": 0, "eval.stop_strings": "", "data.template": protocol.template}
    wanted |= {"data.columns": "", "data.max_prompt_tokens": 2**30}
    judges = {"reward.verifier": protocol.verifier, "reward.function": "", "reward.by_source": ""}
    if not fixed & judges.keys():
        workers = max(config.reward.workers, int(protocol.verifier == "math"))
        wanted |= judges | {"reward.workers": workers}
    c = copy.deepcopy(config)
    if "rollout.max_response_tokens" in fixed and not c.eval.max_response_tokens:
        del wanted["eval.max_response_tokens"]
    c.update({k: v for k, v in wanted.items() if k not in fixed})
    return c


def fill(c, problems: int) -> None:
    """No more slots than k samples of each problem: an idle one costs as much as a busy one."""
    sizes = validation.resolve_mesh(c, len(jax.devices()))
    shards, samples = sizes["data"] * sizes["fsdp"], problems * c.eval.k
    c.rollout.slots = min(c.rollout.slots, -(-samples // shards) * shards)


def fit(name: str, c, text: build.Text, model_dir: pathlib.Path | None, fixed) -> str:
    """Size the sampler of `c` by the set's prompts and, unless the user limits responses, by the
    model's context. Returns a note for the log if that shortens responses, else ''. ValueError: the
    context has no room for a response."""
    longest = max(map(len, text.evals[name].ids))
    if "data.max_prompt_tokens" not in fixed:
        c.data.max_prompt_tokens = -(-longest // 128) * 128  # so that sets may share a sampler
    limit = asked = c.eval.max_response_tokens or c.rollout.max_response_tokens
    said = fixed & {"eval.max_response_tokens", "rollout.max_response_tokens"}
    about = hf_format.read_json(model_dir / "config.json") if model_dir and not said else {}
    if context := about.get("max_position_embeddings"):
        limit = min(limit, context - longest)
        if limit < 1:
            sizes = f"its longest prompt has {longest} tokens and the model's context {context}"
            remedy = "say how long a response may be: --max_response_tokens=N"
            raise ValueError(f"{name}: {sizes} (config.json); {remedy}")
    c.eval.max_response_tokens = c.rollout.max_response_tokens = limit
    return f", responses cut at {limit} tokens by the model's context" if limit < asked else ""
