"""The config of a run: all sections in one dataclass, and the flat table of their fields.

Lengths are in TOKENS. "verl" is the code that the DAPO authors name for their released run.
"""

import difflib
import json
import pathlib
from dataclasses import dataclass, field

from dapo_jax.config import sections
from dapo_jax.dapo.settings import Advantage, DynamicSampling, Loss, Optim
from dapo_jax.data.settings import Data, Tokenizer
from dapo_jax.gate import ConfigError, Field, Section, leaves, setting, walk  # noqa: F401
from dapo_jax.model.settings import Model
from dapo_jax.reward.settings import Reward
from dapo_jax.rollout.settings import Rollout
from dapo_jax.variants.settings import Critic, Curriculum, Tokens


# fmt: off
@dataclass
class Config(Section):
    """Every setting of a run; the defaults are full DAPO on the embedded task."""

    seed: int = setting(0, "seeds the problem order, every sample's uniforms, initialisation and minibatch shuffles", 0, 2**31 - 1)
    steps: int = setting(100, "rollout steps (one = sample a batch, then `optim.minibatches` updates)", 0)
    init_from: str = setting("", "starting point of a run whose workdir has no checkpoint: RUN[@STEP] (a workdir or its checkpoints/), one step, or a Hugging Face model", path=True)
    init_state: str = setting("weights", "what is taken from init_from: the weights, or all (optimizer, counters, cursor: a branch that continues at that step)", choices=("weights", "all"))
    model: Model = field(default_factory=Model)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    supervised_warmup: sections.SupervisedWarmup = field(default_factory=sections.SupervisedWarmup)
    rollout: Rollout = field(default_factory=Rollout)
    dynamic_sampling: DynamicSampling = field(default_factory=DynamicSampling)
    curriculum: Curriculum = field(default_factory=Curriculum)
    reward: Reward = field(default_factory=Reward)
    advantage: Advantage = field(default_factory=Advantage)
    loss: Loss = field(default_factory=Loss)
    tokens: Tokens = field(default_factory=Tokens)
    critic: Critic = field(default_factory=Critic)
    optim: Optim = field(default_factory=Optim)
    eval: sections.Eval = field(default_factory=sections.Eval)
    checkpoint: sections.Checkpoint = field(default_factory=sections.Checkpoint)
    log: sections.Log = field(default_factory=sections.Log)
    guard: sections.Guard = field(default_factory=sections.Guard)
    mesh: sections.Mesh = field(default_factory=sections.Mesh)
    sharding: sections.Sharding = field(default_factory=sections.Sharding)
# fmt: on


base = Config  # the preset from which the others begin
SCHEMA: dict[str, Field] = {name: about for name, about, _ in walk(base())}  # by dotted name
PATHS = tuple(name for name, about in SCHEMA.items() if about.path)


def of_run(text: str | bytes) -> Config:
    """The config saved in a run's config.json. Fields unknown to this version are left out; fields
    unknown to the run have their defaults. ValueError: the file is not a run's."""
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("no JSON") from error
    if not isinstance(saved, dict) or "rollout.group_size" not in saved:
        raise ValueError("not a run's")
    config = base()
    config.update({name: value for name, value in saved.items() if name in SCHEMA})
    return config


def _read(text: str) -> dict[str, str]:
    rows = (row.split(": ") for row in text.splitlines() if row and row[0] != "#")
    return {theirs: ours for ours, names in rows for theirs in names.split()}


PEERS = _read(pathlib.Path(__file__).with_name("peers.txt").read_text())  # their name -> our field


def nearest(name: str) -> str:
    """', did you mean a, b?' for a mistyped field or another trainer's, or what a section has; '' if
    none is close."""
    if inside := [known for known in SCHEMA if known.startswith(f"{name}.")]:
        return f"; it is a section, with {', '.join(inside[:3])}"
    *parents, leaf = name.split(".")
    for theirs in (".".join([*parents[-1:], leaf]), leaf):
        if theirs in PEERS:
            return f"; did you mean {PEERS[theirs]}?"
    close = [PEERS[near] for near in difflib.get_close_matches(leaf, PEERS, n=1, cutoff=0.8)]
    close += difflib.get_close_matches(name, SCHEMA, n=3, cutoff=0.5)
    ends = {known: known.rpartition(".")[2] for known in SCHEMA}
    for near in difflib.get_close_matches(leaf, dict.fromkeys(ends.values()), n=3, cutoff=0.6):
        close += [known for known, end in ends.items() if end == near]
    return f"; did you mean {', '.join(list(dict.fromkeys(close))[:3])}?" if close else ""


Section.nearest = staticmethod(nearest)
