"""Where a run begins: at a checkpoint of its own or of another run, or at weights of a model."""

import functools
import hashlib
import json

import jax
import numpy as np

from dapo_jax import build
from dapo_jax.checkpoint import branch, resume
from dapo_jax.config import validation
from dapo_jax.dapo.state import State
from dapo_jax.hosts import processes
from dapo_jax.model import adapters
from dapo_jax.run import warmup
from dapo_jax.run.policy import find_given, load_params
from dapo_jax.variants import choose

ADAPTERS_SEED = 1 << 20  # folded in: no weight of the network has it


def start_state(
    config, text: build.Text, machine: build.Machine, directory, accept, say, local=None
) -> tuple[State, bool]:
    """(where the run begins, whether it goes on from a checkpoint):
    1. at the newest whole checkpoint of this run, if there is one that `accept` does not refuse;
    2. else at `init_from`, if set: its parameters or, by init_state='all', its whole state;
    3. else with the model directory's weights, or random ones, after the warm-up if there is one.
    Adapters (LoRA) are added to what 2 and 3 say, which stays as it is from then on.
    """
    trainer = machine.trainer
    reference = adapters.trained if config.loss.kl_coef else lambda params: None
    params, opt_state = trainer.abstract_state()
    like = State(params, opt_state, reference(params), memory=choose.memory_like(machine))
    layout = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    shardings = State(*layout(like[:3]), memory=layout(like.memory))
    if (state := resume.newest(directory, like, shardings, accept, say)) is not None:
        return state, True
    source = find_given(config.init_from) if config.init_from else None
    if source and config.init_state == "all":
        return branch.state(config, text, source, like, shardings, local, say), True
    if source:
        params = load_params(config, machine._replace(model_dir=source.model_dir), source)
    else:
        phases, imitated = [], validation.warm_up(config)
        if "task" in imitated:
            phases += warmup.usual(config)
        if "files" in imitated:
            shown, note = warmup.of_files(config, text.tokenizer)
            rows = hashlib.sha256(json.dumps(shown.rows).encode()).hexdigest()
            processes.agree({"the rows of supervised_warmup.files (their hash)": rows})
            say(f"{note}; {shown.steps} steps of {config.supervised_warmup.batch}")
            phases.append(shown)
        params = build.initial_params(config, machine)
        if phases:
            beside = functools.partial(build.compiling, config, machine)
            params = warmup.warm_up(config, machine, text.tokenizer, params, phases, beside)
    memory = choose.new_memory(config, machine, params)
    if config.model.lora.rank:
        key = jax.random.fold_in(jax.random.key(config.seed), ADAPTERS_SEED)
        params = trainer.adapted(params, np.asarray(jax.random.key_data(key)))
    copied = jax.tree.map(lambda w: w.copy(), reference(params))
    return State(params, trainer.init_opt_state(params), copied, memory=memory), False
