"""Why a sample is what it is: any sample of a kept step, drawn again and taken apart.

    python -m dapo_jax.lab explain RUN                                steps that can be explained
    python -m dapo_jax.lab explain RUN@STEP                           what the step's record holds
    python -m dapo_jax.lab explain RUN@STEP PROBLEM [SAMPLE] [TOKEN]  the group, a sample, a token

STEP is a rollout step as in rollouts/; a checkpoint of the step before has to be kept. PROBLEM is
an id of rollouts/ (its first characters are enough) or, of digits alone, a position of the stream;
SAMPLE and TOKEN count from 0. Only the problem asked for is drawn. --whole does the whole step
again, which gives each token's weight, ratio and clip. Exit status 1: what is drawn is not what the
run has recorded.
"""

import argparse
import functools
import math
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config import cli
from dapo_jax.dapo import reward
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.minibatches import make_minibatches
from dapo_jax.data import files, prompts
from dapo_jax.lab import explanation, redraw
from dapo_jax.lab.redraw import Opened, Whole
from dapo_jax.model import ops, qwen2
from dapo_jax.rollout import draw
from dapo_jax.rollout.engine import Response

_CHUNK = 64  # tokens whose logits are made at a time
TOP = 5  # likeliest tokens shown at each place, beside the one drawn
ROUNDED = 1e-4  # of log-probs in rollouts/, which have four digits


def explain(
    o: Opened,
    problem: str,
    sample: int | None = None,
    *,
    whole: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    objective: str = "",
) -> dict[str, Any]:
    """All that is known of a problem's group in step `o`, as plain values (docs/explain.md), and of
    each token of `sample`. whole: do the step again; it ends the use of `o`. changes: what to ask
    for otherwise, name -> config fields. objective: another `config.loss.objective`, asked about
    the same tokens (implies whole). ValueError: there is no such problem or sample."""
    position = redraw.position(o, problem)
    if not position < 2**31:
        raise ValueError(f"PROBLEM {problem}: positions are below 2**31")
    (group,) = redraw.draw(o, [position])
    asked, G = o.text.train.problems[o.stream[position]], len(group.responses)
    if sample is not None and not 0 <= sample < G:
        raise ValueError(f"SAMPLE {sample}: this run draws samples 0 to {G - 1} of a problem")
    record, notes = compared(o, group), [*o.notes]
    if o.config.rollout.staleness and not record["of_this_problem"]:
        notes.append(
            "rollout.staleness: the run may have gone on with it by the next step's weights"
        )
    out = {
        "run": o.path, "step": o.step, "weights_after_step": o.step - 1, "seed": o.config.seed,
        "notes": notes, "position": position, "epoch": position // len(o.text.train.ids),
        "problem": asked.id, "source": asked.source, "answer": asked.answer,
        "prompt": o.text.tokenizer.decode(group.prompt, skip_special=False),
        "teaches": bool(o.method.teaches(group)), "record": record,
        "samples": judged(o, group), "what_if": {},
    }  # fmt: skip
    for name, fields in (changes or {}).items():
        other = redraw.changed(o, fields)
        (again,) = redraw.draw(other, [position])
        teaches = bool(other.method.teaches(again))
        out["what_if"][name] = {"teaches": teaches, "samples": judged(other, again)}
    if sample is not None:
        out |= {"sample": sample, "tokens": tokens(o, group, sample)}
    if whole or objective:
        add_whole(out, redraw.whole(o, [objective] * bool(objective)), objective)
    notes += o.heard.note() if o.heard else []
    return out


def judged(o: Opened, group: Group) -> list[dict[str, Any]]:
    """What each response of a graded group is worth. `advantage` is None where it depends on more
    than the group: on the batch, or on a value model."""
    grades, c = group.grades, o.config
    alone = c.advantage.scale != "batch" and not c.advantage.whiten and not c.critic.enabled
    (items,) = make_minibatches(o.method, [group], o.step - 1)
    longest, rows = c.rollout.max_response_tokens, []
    for i, (r, item) in enumerate(zip(group.responses, items, strict=True)):
        score, n, own = float(grades.score_G[i]), r.length, r.drawn
        whole = float(reward.shaped(grades.score_G[i], n, longest, c.reward))
        made = np.array(made_by(o, group, r))[own].tolist()
        made = [str(v) if v >= 0 else "an earlier step" for v in made]
        rows.append({
            "sample": i, "tokens": len(own), "reply_tokens": len(own) - n,
            "truncated": bool(r.truncated),
            "response": o.text.tokenizer.decode(r.tokens.tolist()),
            "extracted": grades.answers[i],
            "right": None if grades.right_G is None else bool(grades.right_G[i]),
            "score": score, "parts": {k: float(x[i]) for k, x in grades.parts_G.items()},
            "overlong_penalty": whole - score, "reward": whole,
            "advantage": item.advantage if alone else None, "trained": bool(item.weight),
            "logp": float(r.logps[own].sum(dtype=float)),
            "entropy": float(r.entropies[own].mean()),
            "made_by_weights_after": dict(Counter(made)),
        })  # fmt: skip
    return rows


def made_by(o: Opened, group: Group, response: Response) -> list[int]:
    """The step behind which the weights stand that drew each token; -1: those of an earlier step,
    which carried the whole group over and does not say which."""
    if response.versions is not None:
        return response.versions.tolist()
    waits = group.position in {g.position for g in o.state.carried}
    return [-1 if waits else o.step - 1] * len(response.tokens)


def compared(o: Opened, group: Group) -> dict[str, Any]:
    """The record of the step against what is drawn again: of this problem its rows in rollouts/ and
    its responses in the journal; where rollouts/ has none of it, those of its first problem, so
    that wrong weights do not stay unnoticed."""
    rows, differ = redraw.recorded(o.path, o.step), []
    mine = [r for r in rows if r["position"] == group.position]
    others = [r for r in rows if r["position"] == rows[0]["position"]] if not mine else []
    if others:
        (group_of,) = redraw.draw(o, [others[0]["position"]])
    for row in mine or others:
        differ += [w for w in [_difference(o, group if mine else group_of, row)] if w]
    kept = redraw.journal(o, group.position)
    for i, old in kept.items():
        new = group.responses[i].tokens[: len(old.tokens)]
        if not np.array_equal(new, old.tokens):
            differ.append(f"sample {i}: the journal has other tokens")
    found = {"of_this_problem": len(mine), "of_another": len(others), "journal": len(kept)}
    return found | {"differences": differ}


def _difference(o: Opened, group: Group, row: Mapping[str, Any]) -> str:
    """How a row of rollouts/ differs from the response of the group that is nearest to it; '' where
    one is equal in tokens, log-probs as far as they are written, and grade."""
    ids, where = [r.tokens.tolist() for r in group.responses], f"position {group.position}"
    wanted, most = row.get("pieces") or [], -1
    said = f"{where}: no response was drawn"
    for i, r in enumerate(group.responses):
        texts = [_piece(o, t) for t in ids[i]]
        same = next((n for n, (a, b) in enumerate(zip(texts, wanted, strict=False)) if a != b), -1)
        if same >= 0 or len(texts) != len(wanted):
            n = same if same >= 0 else min(len(texts), len(wanted))
            if n > most:
                a, b = ("".join(x[n : n + 1]) or "its end" for x in (texts, wanted))
                most, said = n, f"{where}: at token {n} {a!r} is drawn and {b!r} recorded"
                if not r.drawn[n : n + 1].all():
                    said = f"{where}: at token {n} {b!r} was replied, and {a!r} when asked again"
            continue
        gap = np.abs(r.logps - np.array(row["logps"], float))[r.drawn].max()
        longest, score = o.config.rollout.max_response_tokens, group.grades.score_G[i]
        grade = float(reward.shaped(score, r.length, longest, o.config.reward))
        if gap > ROUNDED:
            return f"{where}: equal tokens, but log-probs differ by {gap:.2g}"
        if abs(grade - row["reward"]) > 1e-9:
            told = "was the run started from Python with a score of its own?"
            return f"{where}: equal tokens, but reward {grade:g} is {row['reward']:g} there; {told}"
        return ""
    return said


def _piece(o: Opened, token: int) -> str:
    return o.text.tokenizer.decode([int(token)], skip_special=False)


# --- Tokens ---


def tokens(o: Opened, group: Group, sample: int) -> list[dict[str, Any]]:
    """Each token of a response: its id and text, log-prob and entropy as the sampler has them, the
    uniform number that drew it, the weights that made it, and the candidates there in the order of
    the inverse CDF: (text, from, to). A token of earlier weights has no candidates: those weights
    are another checkpoint's. A token of a reply was not drawn: it has None of all these."""
    r, how = group.responses[sample], o.draw
    ids, first = np.array([*group.prompt, *r.tokens]), len(group.prompt) - 1
    n = len(r.tokens)
    key = draw.row_keys(jax.random.key(how.seed), np.int32([group.position]), np.int32([sample]))
    uniform_n = np.asarray(draw.uniform(jnp.repeat(key, n), np.arange(n)))
    padded = np.zeros((2, -(-len(ids) // _CHUNK) * _CHUNK))
    padded[0, : len(ids)], padded[1, first : first + n] = ids, uniform_n
    shape = o.machine.shape._replace(attention="chunked")  # one row, on any devices
    params = o.machine.trainer.merged(o.state.params)
    params = qwen2.cast(params, o.config.model.dtype, shape)
    numbers = np.float32(how.temperature), np.float32(how.top_p)
    given = padded[0].astype(np.int32), np.int32(len(ids)), padded[1].astype(np.float32), *numbers
    top = min(TOP, shape.vocab_size)
    seen = jax.device_get(_places(shape, params, *given, how.mode, top))
    out, made = [], made_by(o, group, r)
    for i, by in enumerate(made):
        again, *near = (x[first + i] for x in seen)
        there = {int(t): (float(p), float(to)) for t, p, to in zip(*near, strict=True)}
        candidates = [[_piece(o, t), max(to - p, 0.0), to] for t, (p, to) in there.items()]
        own = bool(r.drawn[i])
        known = lambda x, own=own: float(x) if own else None
        now, place = own and by == o.step - 1, list(there).index(int(r.tokens[i]))
        out.append({
            "token": i, "id": int(r.tokens[i]), "piece": _piece(o, r.tokens[i]), "reply": not own,
            "logp": known(r.logps[i]), "entropy": known(r.entropies[i]),
            "uniform": known(uniform_n[i]), "weights_after_step": by if own else None,
            "candidates": candidates if now else [], "drawn": place if now else None,
            "forward_draws_it": bool(again == r.tokens[i]) if now else None,
        })  # fmt: skip
    return out


@functools.partial(jax.jit, static_argnums=(0, 7, 8))
def _places(shape, params, ids_T, length, uniform_T, temperature, top_p, mode: str, top: int):
    """At each place, by one forward pass over a prompt and its response: the token that the uniform
    draws; ids [T, top + 1], ascending, of the likeliest and of the one that follows, their share of
    what is drawn from, and the running sum with it. Logits are made for `_CHUNK` places a time."""
    model, places = qwen2.bind(shape, params), jnp.arange(len(ids_T))
    segments = (places < length).astype(jnp.int32)
    x_TxD = model.hidden(ids_T[None], places[None], segments[None])[0]
    head_DxV = model.head()

    def one(place):
        x_D, following, uniform = place
        logits_1xV = ops.logits(x_D[None], head_DxV)
        token = draw.draw(logits_1xV, uniform[None], temperature, top_p, mode).token_S[0]
        weight_1xV = jax.nn.softmax(logits_1xV / temperature)
        if mode == "top_p":
            weight_1xV = jnp.where(draw.nucleus(weight_1xV, top_p), weight_1xV, 0.0)
        share_V = (weight_1xV / weight_1xV.sum())[0]
        near = jnp.sort(jnp.append(jax.lax.top_k(share_V, top)[1], following))
        return token, near, share_V[near], jnp.cumsum(share_V)[near]

    places = x_TxD, jnp.roll(ids_T, -1), uniform_T
    return jax.lax.map(one, places, batch_size=_CHUNK)


# --- The whole step ---


def unlike(found: Whole) -> list[str]:
    """The numbers of metrics.jsonl that the step done again has otherwise, a line each."""
    near = functools.partial(math.isclose, rel_tol=1e-6, abs_tol=1e-6)
    same = lambda a, b: a == b or (isinstance(a, float) and b is not None and near(a, b))
    pairs = {t: (found.recorded[t], x) for t, x in found.found.items() if t in found.recorded}
    differ = {t: pair for t, pair in pairs.items() if not same(*pair)}
    return [f"metrics.jsonl: {t} is {a!r:.60}, and {b!r:.60} now" for t, (a, b) in differ.items()]


def add_whole(out: dict[str, Any], found: Whole, objective: str) -> None:
    """Put what the whole step tells into an explanation: the sums, and of each response and token
    its part."""
    loss = float(np.mean([u.loss for u in found.updates])) if found.updates else None
    among = lambda groups: out["position"] in {g.position for g in groups}
    out["whole_step"] = {
        "metrics_compared": len(found.found.keys() & found.recorded.keys()),
        "drew_it": among(found.record.batch.drawn), "in_batch": among(found.record.batch.groups),
        "updates": len(found.updates), "loss_by_tokens": loss,
        "policy/loss": found.recorded.get("policy/loss"),
    }  # fmt: skip
    out["record"]["differences"] += unlike(found)
    kinds, others = ("clipped_low", "clipped_high", "dual_clipped"), []
    numbered = enumerate(found.updates)
    parts = [(n, u, row) for n, u in numbered for row in out["samples"]]
    for number, u, row in parts:
        if (at := u.places.get((out["position"], row["sample"]))) is None:
            continue
        cells = lambda terms, at=at: {k: np.asarray(x)[at] for k, x in terms._asdict().items()}
        own, weight_n, advantage_n = cells(u.terms), u.weight_AxRxT[at], u.rows.advantage_AxRxT[at]
        ratio_n, advantages = (x[u.rows.trained_AxRxT[at]] for x in (own["ratio"], advantage_n))
        counts = lambda terms: {k: int(terms[k].sum()) for k in kinds}
        total = lambda loss_n, by=weight_n: float(np.sum(by * loss_n, dtype=float))
        row |= {"update": number, "weight": total(1.0), "loss": total(own["loss"])}
        row |= {"advantage": float(advantages.mean(dtype=float)), **counts(own)}
        row |= {"ratio_min": float(ratio_n.min()), "ratio_max": float(ratio_n.max())}
        if objective:
            other = cells(u.others[objective])
            others.append({"sample": row["sample"], "loss": total(other["loss"]), **counts(other)})
        for i, token in enumerate(out["tokens"] if row["sample"] == out.get("sample") else ()):
            token |= {"weight": float(weight_n[i]), "advantage": float(advantage_n[i])}
            token |= {"importance": float(u.importance_AxRxT[at][i])}
            token |= {k: float(own[k][i]) for k in ("ratio", "loss")}
            token["clipped"] = next((k for k in kinds if own[k][i]), "")
            if objective:
                token[f"loss by {objective}"] = float(other["loss"][i])
    if objective:
        out["what_if"][f"objective={objective}"] = {"samples": others}


# --- The command ---


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser("python -m dapo_jax.lab explain", description=__doc__)
    parser.add_argument("run", metavar="RUN[@STEP]", help="workdir, local or gs://, and a step")
    parser.add_argument("problem", nargs="?", help="id of rollouts/, or position of the stream")
    parser.add_argument("sample", nargs="?", type=int, help="0, 1, ... in the group")
    parser.add_argument("token", nargs="?", type=int, help="0, 1, ... in the response")
    parser.add_argument("--whole", action="store_true", help="do the step again, with its updates")
    parser.add_argument("--reward", default="", help="grade by this too, as config.reward.function")
    parser.add_argument("--cap", type=int, default=0, help="another longest response, in TOKENS")
    parser.add_argument("--objective", default="", help="another loss, as config.loss.objective")
    parser.add_argument("--json", default="", help="write everything here")
    parser.add_argument("--page", default="", help="write it here, as HTML for a browser")
    a = parser.parse_args(argv)
    try:
        return _run(a)
    except (ValueError, OSError) as error:
        return cli.fail(str(error) or type(error).__name__)


def _run(a: argparse.Namespace) -> int:
    named = re.fullmatch(r"(.+)@(\d{1,15})", a.run)
    if not named:
        if a.problem is not None:
            raise ValueError(f"{a.run}: name a step: {a.run}@STEP")
        there = redraw.steps(a.run)
        print(f"{a.run} can explain the steps {', '.join(map(str, there)) or '(none)'}")
        return 0
    if a.cap < 0:
        raise ValueError(f"--cap={a.cap}: wants 1 or more tokens")
    o = redraw.open_step(named[1], int(named[2]))
    if a.problem is None:
        print(prompts.visible(explanation.listed(a.run, redraw.recorded(o.path, o.step))))
        return 0
    changes = {}
    if a.reward:
        changes[f"reward={a.reward}"] = {"reward.function": a.reward, "reward.by_source": ""}
    if a.cap:
        buffer = min(o.config.reward.overlong_buffer_tokens, a.cap)
        fields = {"rollout.max_response_tokens": a.cap, "reward.overlong_buffer_tokens": buffer}
        changes[f"cap={a.cap}"] = fields
    how = dict(whole=a.whole, changes=changes, objective=a.objective)
    found = explain(o, a.problem, a.sample, **how)
    if a.token is not None and not 0 <= a.token < len(found["tokens"]):
        raise ValueError(
            f"TOKEN {a.token}: the response has tokens 0 to {len(found['tokens']) - 1}"
        )
    print(prompts.visible(explanation.text(found, a.token)), flush=True)  # minutes' work: first
    if a.json:
        files.write_json(pathlib.Path(a.json), found)
    if a.page:
        files.write(pathlib.Path(a.page), explanation.file(found))
    return int(bool(found["record"]["differences"]))


if __name__ == "__main__":
    sys.exit(main())
