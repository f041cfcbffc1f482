"""Completions of a prompt, streamed to the terminal.

    python -m dapo_jax.sample --workdir=DIR [--config=FILE] [--n=4] [--temperature=0.7] "prompt"

The policy is the newest checkpoint of WORKDIR, else the model of config.model.path. The config is
that of the run, unless --config names one. With config.tokenizer.chat the prompt goes through the
chat template; what turns are answered is shown as [reply: ...]. --probs shows a line per token: its
probability at the temperature, before any nucleus cut, and the vocabulary's spelling of it.
"""

import copy
import functools
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from dapo_jax import build, parallel
from dapo_jax.checkpoint import checkpoint, workdir as workdir_lib
from dapo_jax.config import cli, schema, validation
from dapo_jax.data import problems, prompts as prompts_lib, tokenizer as tokenizer_lib
from dapo_jax.model import hf, qwen2
from dapo_jax.rollout.engine import Request, Response
from dapo_jax.run import policy as policy_lib

_CHUNK = 8  # tokens between two updates of the terminal


class Screen:
    """Shows the completions in order, each as it grows; the `on_tokens` of `Engine.generate`."""

    def __init__(self, tokenizer, n: int, limit: int, probs: bool, write: Callable[[str], None]):
        self.tokenizer, self.n, self.limit, self.probs = tokenizer, n, limit, probs
        self.write, self.stops = write, [[stop] for stop in tokenizer.stop_ids]
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.logps: list[list[float]] = [[] for _ in range(n)]
        self.current, self.shown = -1, 0  # shown: characters, or with probs tokens
        self._next()

    def __call__(self, index: int, start: int, tokens: np.ndarray, logps: np.ndarray) -> None:
        self.ids[index][start:] = tokens.tolist()
        self.logps[index][start:] = logps.tolist()
        while self.current < self.n:
            i = self.current
            ids = self.ids[i]
            ended = len(ids) == self.limit or ids[-1:] in self.stops
            self._show(i, ended)
            if not ended:
                return
            self._next()

    def _next(self) -> None:
        self.current, self.shown = self.current + 1, 0
        if self.n > 1 and self.current < self.n:
            self.write(f"--- {self.current + 1} of {self.n}\n")

    def _show(self, i: int, ended: bool) -> None:
        ids = self.ids[i]
        if self.probs:
            for id, logp in zip(ids[self.shown :], self.logps[i][self.shown :], strict=True):
                said = "   reply" if logp == np.inf else f"{np.exp(logp):8.5f}"
                self.write(f"{said}  {self.tokenizer.token(id)!r}\n")
            self.shown = max(self.shown, len(ids))
            return
        text = marked(self.tokenizer, ids, self.logps[i])
        if not ended:  # an incomplete character decodes to these, which later tokens may change
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        self.write(prompts_lib.visible(text[self.shown :]) + "\n" * ended)
        self.shown = max(self.shown, len(text))


def marked(tokenizer, ids: Sequence[int], logps: Sequence[float]) -> str:
    """The text of a response, each reply (tokens with a log-prob of inf) in a line of its own."""
    text = ""
    for reply, run in itertools.groupby(zip(ids, logps, strict=True), lambda x: x[1] == np.inf):
        said = tokenizer.decode([token for token, _ in run])
        text += f"\n[reply: {said.strip()}]\n" if reply else said
    return text


class Loaded(NamedTuple):
    """A policy ready for sampling."""

    config: schema.Config
    tokenizer: tokenizer_lib.Tokenizer
    machine: build.Machine
    params: qwen2.Params  # in the training layout
    policy: policy_lib.Policy


def load(
    config, where: str, *, n: int, max_tokens: int, step: int | None = None, prompts=()
) -> Loaded:
    """The policy of the workdir `where` (also gs://...; nothing is written there), ready for n
    completions at a time of at most `max_tokens` (0 = as in training). step: of a checkpoint; None
    = the newest. prompts: checked before the weights are read. ValueError: the config, the files or
    a prompt are not usable."""
    config = copy.deepcopy(config)
    config.eval.k = n
    config.eval.max_response_tokens = max_tokens or config.rollout.max_response_tokens
    validation.validate(config, len(jax.devices()))
    sizes = validation.resolve_mesh(config, len(jax.devices()))
    shards = sizes["data"] * sizes["fsdp"]
    config.rollout.slots = min(config.rollout.slots, -(-n // shards) * shards)
    config.rollout.chunk = min(config.rollout.chunk, _CHUNK)
    base = hf.resolve(config.model.path) if config.model.path else None
    workdir = workdir_lib.place(where, f"--workdir={where}")
    policy = policy_lib.find_policy(config, workdir, base)
    if step is not None:
        policy = policy._replace(step=checkpoint.find_step(policy.steps, step))
    embedded = "" if config.data.train else workdir / "data"
    if not (path := config.tokenizer.path or policy.model_dir or embedded):
        raise ValueError("config.tokenizer.path: problem files of one's own need a tokenizer")
    with tempfile.TemporaryDirectory() as folder:
        if path is embedded and workdir_lib.is_remote(where):
            for file in embedded.iterdir():
                (pathlib.Path(folder) / file.name).write_bytes(file.read_bytes())
            path = folder
        tokenizer = tokenizer_lib.load(path, config.tokenizer.chat_template)
    for prompt in prompts:
        encode(config, tokenizer, prompt)
        if words := tokenizer.unknown_words(prompt):
            print("warning: the tokenizer does not know", f"{words}"[:500], file=sys.stderr)
    machine = build.build_machine(
        config, tokenizer.vocab_size, tokenizer.stop_ids, policy.model_dir, others=False
    )
    params = policy_lib.load_params(config, machine, policy)
    return Loaded(config, tokenizer, machine, params, policy)


def encode(config, tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt, through the chat template if the config says so. ValueError: the
    prompt is empty or too long."""
    chat, most = config.tokenizer.chat, config.data.max_prompt_tokens
    ids = tokenizer.chat([("user", prompt)]) if chat else tokenizer.encode(prompt)
    if not 1 <= len(ids) <= most:
        allowed = f"1 to config.data.max_prompt_tokens = {most} are allowed"
        raise ValueError(f"prompt: {len(ids)} tokens; {allowed}")
    return ids


def draw(loaded: Loaded, prompt: str, on_tokens=None, keep: bool = True) -> list[Response]:
    """`config.eval.k` responses to a prompt at `config.eval.temperature` and `.top_p`, of several
    turns if so set. keep: False = no more draws follow, so the engine may reuse the memory of the
    weights. ValueError: as `encode`, or a reply failed."""
    config, said = loaded.config, (("user", prompt),)
    ids = encode(config, loaded.tokenizer, prompt)
    problem = problems.Problem(problems.ident(said), said, "", "")
    judge = build.grading.judge(config.reward) if config.rollout.turns else None
    text = build.Text(loaded.tokenizer, None, {}, [], judge)
    engine = build.talking(config, loaded.machine, text, lambda position: problem).engine
    responses, _ = engine.generate(
        engine.decode_params(loaded.params, keep),
        [Request(ids, 0, i) for i in range(config.eval.k)],
        build.evaluation_draw(config)._replace(seed=config.seed, stop_strings=()),
        on_tokens=on_tokens,
    )
    return responses


def sample(
    config,
    where: str,
    prompt: str,
    *,
    n: int,
    max_tokens: int,
    probs: bool = False,
    write: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Draw n completions at `config.eval.temperature` and `.top_p`, and show them by `write` as
    they grow. Returns their texts. ValueError: as `load`."""
    loaded = load(config, where, n=n, max_tokens=max_tokens, prompts=[prompt])
    tokenizer = loaded.tokenizer
    screen = Screen(tokenizer, n, loaded.config.eval.max_response_tokens, probs, write)
    responses = draw(loaded, prompt, screen, keep=False)
    return [tokenizer.decode(r.tokens.tolist()) for r in responses]


def define_flags() -> None:
    flags.DEFINE_integer("n", 1, "Completions.", lower_bound=1)
    flags.DEFINE_float("temperature", None, "0 is greedy; default: config.eval.temperature.")
    flags.DEFINE_float("top_p", 1.0, "Nucleus mass.")
    flags.DEFINE_integer("max_tokens", 0, "Most tokens; default: as in training.", lower_bound=0)
    flags.DEFINE_boolean("probs", False, "A line per token, with its probability.")


def main(prompt: str) -> None:
    given, config = flags.FLAGS, cli.CONFIG.value
    if not cli.WORKDIR.value and not config.model.path:
        raise ValueError("--workdir: name the run to sample from (or set --config.model.path)")
    config.eval.top_p = given.top_p
    if given.temperature is not None:
        config.eval.temperature = given.temperature
    sys.stdout.reconfigure(errors="replace")  # '?' for characters that the terminal cannot show
    how = dict(n=given.n, max_tokens=given.max_tokens, probs=given.probs)
    if parallel.is_main_process():
        how["write"] = functools.partial(print, end="", flush=True)
    sample(config, cli.WORKDIR.value or ".", prompt, **how)


if __name__ == "__main__":
    define_flags()
    cli.run(main, "prompt", without_config=lambda: policy_lib.config_of_run(cli.WORKDIR.value))
