"""A checkpoint looked at token by token: what it draws, how sure it is, what it might have said.

loaded = tokens.open_run("runs/quickstart", n=4)
for response in tokens.answers(loaded, "f 4 g + 2 h - 3 ?", "3"):
    print(response.text, response.verdict)
"""

import collections
import functools
import json
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import sample
from dapo_jax.data import answers as verifiers, verifier
from dapo_jax.lab.dynamics import browse, logs
from dapo_jax.model import ops, qwen2

_CHUNK = 64  # tokens whose logits are made at a time


class Token(NamedTuple):
    """One token; probabilities at the sampling temperature, before any nucleus cut."""

    piece: str  # its text alone
    logp: float
    entropy: float  # nats
    others: list[tuple[str, float]]  # the likeliest tokens (it may be among them), probability
    drawn: bool = True  # False: a reply's


class Answer(NamedTuple):
    text: str
    verdict: verifier.Verdict | None  # None where no right answer is given
    truncated: bool
    tokens: list[Token]

    @property
    def mean_entropy(self) -> float:
        return float(np.mean([t.entropy for t in self.tokens if t.drawn]))


def open_run(
    path: str, *, n: int = 4, max_tokens: int = 0, temperature: float = 1.0, seed: int = 0,
    step: int | None = None,
) -> sample.Loaded:  # fmt: skip
    """The policy of a workdir (local or gs://; nothing is written there), on whatever devices this
    process has, ready to draw n answers per prompt. max_tokens 0: as in training; step: of the
    checkpoint, None = the newest. ValueError: what the run lacks."""
    config = logs.config_of(path)
    if config is None:
        raise ValueError(f"{path}: no config.json in it; give a run's directory")
    config.eval.temperature, config.eval.top_p, config.seed = temperature, 1.0, seed
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, -1, 1  # not the run's own devices
    return sample.load(config, os.path.expanduser(path), n=n, max_tokens=max_tokens, step=step)


def problems(path: str, most: int = 4) -> list[tuple[str, str]]:
    """A few (prompt, answer) of a workdir: those it logged last. ValueError: it logged none."""
    for step in reversed(browse.steps(path)):
        if rows := browse.read(path, {step}):
            return list(dict.fromkeys((r.prompt, r.answer) for r in rows))[:most]
    raise ValueError(f"{path}: no samples in rollouts/; give prompts and answers of your own")


def answers(
    loaded: sample.Loaded, prompt: str, answer: str | None = None, top: int = 5
) -> list[Answer]:
    """Draw answers to a prompt and look at every token. answer: the right one, for the verifier.
    ValueError: the prompt is empty or too long."""
    ids = sample.encode(loaded.config, loaded.tokenizer, prompt)
    mode, decode, out = loaded.config.reward.verifier, loaded.tokenizer.decode, []
    for response in sample.draw(loaded, prompt):
        text, last = map(decode, (response.tokens.tolist(), response.last_turn.tolist()))
        verdict = verifiers.verify(last, answer, mode, prompt) if answer else None
        seen = zip(look(loaded, ids, response.tokens.tolist(), top), response.drawn, strict=True)
        tokens = [token._replace(drawn=bool(drawn)) for token, drawn in seen]
        out.append(Answer(text, verdict, response.truncated, tokens))
    return out


def look(
    loaded: sample.Loaded, prompt: Sequence[int], response: Sequence[int], top: int = 5
) -> list[Token]:
    """Each token of a response to a prompt (ids), by one forward pass over both; the `top`
    likeliest tokens at each place beside it."""
    ids = np.array([*prompt, *response])
    padded = np.zeros(-(-len(ids) // _CHUNK) * _CHUNK, np.int32)
    padded[: len(ids)] = ids
    temperature = np.float32(loaded.config.eval.temperature or 1.0)  # greedy: as the model has it
    shape = loaded.machine.shape._replace(attention="chunked")  # one row, on any devices
    params = qwen2.cast(loaded.params, loaded.config.model.dtype, shape)
    most = min(top, shape.vocab_size)
    seen = jax.device_get(_distributions(shape, params, padded, len(ids), temperature, most))
    piece = lambda i: loaded.tokenizer.decode([int(i)], skip_special=False)
    before = slice(len(prompt) - 1, len(ids) - 1)  # the place before a token predicts it
    others = lambda best: [(piece(j), math.exp(p)) for j, p in zip(*best, strict=True)]
    found = zip(response, *(x[before] for x in seen), strict=True)
    return [Token(piece(i), float(p), float(nats), others(best)) for i, p, nats, *best in found]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _distributions(shape: qwen2.Shape, params, ids_T, length, temperature, top: int):
    """At each place: log-prob of the next token of `ids_T`, entropy, and ids [T, top] with log-
    probs [T, top] of the likeliest. Logits are made for `_CHUNK` places at a time."""
    model = qwen2.bind(shape, params)
    places = jnp.arange(len(ids_T))
    segments = (places < length).astype(jnp.int32)
    x_TxD = model.hidden(ids_T[None], places[None], segments[None])[0]
    head_DxV = model.head()

    def one(place):
        x_D, following = place
        logits_1xV = ops.logits(x_D[None], head_DxV) / temperature
        logp_V = jax.nn.log_softmax(logits_1xV[0])
        best, best_ids = jax.lax.top_k(logp_V, top)
        return logp_V[following], -jnp.sum(jnp.exp(logp_V) * logp_V), best_ids, best

    return jax.lax.map(one, (x_TxD, jnp.roll(ids_T, -1)), batch_size=_CHUNK)


def page(prompt: str, drawn: Sequence[Answer]) -> str:
    """Answers as colored text (background: entropy), each with its verdict; those of equal tokens
    once, with their number."""
    of_pieces = lambda a: tuple(t.piece for t in a.tokens)
    times = collections.Counter(map(of_pieces, drawn))
    rows = []
    for pieces, a in {of_pieces(a): a for a in drawn}.items():
        judged = dict(correct=a.verdict.correct, extracted=a.verdict.extracted) if a.verdict else {}
        shown = browse.Sample(
            step=0, problem="", prompt=prompt, response=a.text, answer="", tokens=len(pieces),
            truncated=a.truncated, mean_entropy=a.mean_entropy, pieces=pieces,
            entropies=[t.entropy for t in a.tokens], logps=[t.logp for t in a.tokens],
            drawn=[int(t.drawn) for t in a.tokens], **judged,
        )  # fmt: skip
        rows.append((shown, times[pieces]))
    return browse.html("answers", prompt, rows)


def table(tokens: Sequence[Token]) -> str:
    """One line per token: its probability, the entropy in nats, and the likeliest tokens there, as
    far as their probability rounds to 0.001 or more."""
    top = max((len(t.others) for t in tokens), default=0)
    names = ["#", "token", "probability", "entropy [nats]", *(f"{i + 1}." for i in range(top))]
    quoted = lambda piece: json.dumps(piece, ensure_ascii=False)  # blanks and ends of lines show
    rows = []
    for i, t in enumerate(tokens, 1):
        others = [f"{quoted(piece)} {p:.3f}" if p >= 0.0005 else "" for piece, p in t.others]
        cells = [str(i), quoted(t.piece), f"{math.exp(t.logp):.4f}", f"{t.entropy:.3f}", *others]
        rows.append((t.entropy if t.drawn else -1.0, cells))
    return browse.html("table", names, rows)
