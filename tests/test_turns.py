"""Replies in a response: no part of the loss, asked once, played back after a kill."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from levels import compiled_soon
from rounding import assert_near
from test_carried import Cut, saved
from test_train import assert_same_bits, small
from test_update import (  # noqa: F401
    ALL_ON,
    PLAIN,
    SHAPE,
    WEIGHTED,
    Batch,
    make_batch,
    make_programs,
    oracle_loss,
    params,
    run as update,
    truth,
)

from dapo_jax import build, train
from dapo_jax.checkpoint import journal
from dapo_jax.checkpoint.remembered import Responses
from dapo_jax.dapo import objective
from dapo_jax.data import tokenizer
from dapo_jax.log import metrics
from dapo_jax.variants import objectives

# --- The loss ------------------------------------------------------------------------------------


def with_replies(batch: Batch) -> Batch:
    """Some tokens of each response but its first are a reply's; groups of three share a prompt."""
    rng, items = np.random.default_rng(3), []
    for n, item in enumerate(batch.items):
        logps = item.sampled_logps.copy()
        logps[1:][rng.random(len(logps) - 1) < 0.5] = np.inf
        prompt = batch.items[n // 3 * 3].prompt
        items.append(item._replace(sampled_logps=logps, prompt=prompt))
    assert sum(np.isinf(i.sampled_logps).sum() for i in items) > 10
    return batch._replace(items=items)


@pytest.mark.parametrize(
    ("case", "coefficients", "layouts"),
    [
        ("ppo", ALL_ON, [{}, dict(row_tokens=40, micro_rows=4)]),
        ("ppo", PLAIN, [dict(share_prompts=True)]),
        ("gspo", PLAIN, [{}, dict(share_prompts=True)]),
    ],
)
@compiled_soon()
def test_gradient_of_rows_with_replies(params, case, coefficients, layouts):  # noqa: F811
    """As the float64 oracle's with a mask, in every layout; metrics too."""
    batch = with_replies(make_batch(params, [-0.6, -0.1, 0.0, 0.1, 0.4, 2.6]))
    token_loss, weighted = objectives.OBJECTIVES[case].token_loss, coefficients is ALL_ON
    choice = (WEIGHTED if weighted else objective.DAPO)._replace(token_loss=token_loss)
    loss = lambda p: oracle_loss(p, batch, coefficients, case, "token" if weighted else None)
    want = truth(loss, params)
    for layout in layouts:
        sharing = layout.get("share_prompts", False)
        programs = make_programs(SHAPE._replace(shared_prompts=sharing), choice=choice)
        assert_near(update(programs, params, batch, coefficients, **layout), want)


# --- A run ---------------------------------------------------------------------------------------

TOOL = """
import os, random
from dapo_jax.reward.grading import Grade
from dapo_jax.reward.tools import Reply

def reply(problem, transcript):
    with open({calls!r}, "a") as file:
        file.write("asked\\n")
    said = random.SystemRandom().choice(["3", "+ 4", "Wait 5", "none", "grade"])
    if said == "none":
        return None
    right = len(transcript[-1][1]) % 2 > 0
    return Grade(float(right), right) if said == "grade" else Reply(said)

def score(problem, response):
    return len(response) % 2 > 0
"""


STOPS = range(1, 11)  # a random model ends a turn soon


def spoken(steps: int, folder):
    """A run with a tool that answers otherwise at each call."""
    c = small(steps)
    c.rollout.turns, c.rollout.max_response_tokens, c.checkpoint.every = 3, 32, 2
    c.reward.reply, c.reward.function = (f"{folder}/tool.py:{f}" for f in ("reply", "score"))
    (folder / "tool.py").write_text(TOOL.format(calls=str(folder / "calls")))
    return c


def asked(folder) -> int:
    return len((folder / "calls").read_text().split())


def test_killed_it_is_given_the_same_replies(tmp_path, monkeypatch):
    """Cut off again and again, then beside a run left alone that is given what the first was: the
    same bits. Each reply was asked for once, and is no token of the policy."""
    said, records, keep = {}, [], Responses.keep
    other = {"rollout.slots": 8, "rollout.chunk": 5}  # another schedule, the same samples
    monkeypatch.setattr(journal, "_FREE", (*journal._FREE, *other))

    def kept(self, name, payload):
        said[self._journal.key(name)] = payload
        keep(self, name, payload)

    monkeypatch.setattr(Responses, "keep", kept)
    often = lambda *where: replace(tokenizer.load(*where), stop_ids=frozenset(STOPS))
    monkeypatch.setattr(build, "tokenizer", SimpleNamespace(load=often))
    c = spoken(3, tmp_path)
    for chunks in (2, 5, 9, 13, 400):
        left = iter(range(chunks))

        def phase(name, left=left):
            if name == "chunk" and next(left, None) is None:
                raise Cut

        try:
            assert train.train(c, tmp_path / "cut", hooks=train.Hooks(phase))
            break
        except Cut:
            continue
    calls = asked(tmp_path)
    assert len(said) == calls > 30 and len({*said.values()}) > 4

    monkeypatch.setattr(Responses, "recall", lambda self, name: said[self._journal.key(name)])
    hooks = train.Hooks(step=lambda state, record: records.append(record))
    c.update(other)
    assert train.train(c, tmp_path / "alone", hooks=hooks) and asked(tmp_path) == calls
    assert_same_bits(saved(tmp_path / "cut", 3), saved(tmp_path / "alone", 3))

    rows = [r for record in records for g in record.batch.drawn for r in g.responses]
    replied = [r for r in rows if not r.drawn.all()]
    assert len(replied) > 20 and any((np.diff(r.drawn.astype(int)) < 0).sum() > 1 for r in replied)
    for r in replied:
        starts = np.flatnonzero(np.diff(r.drawn.astype(int)) < 0) + 1
        assert np.isin(r.tokens[starts - 1], STOPS).all() and r.entropies[~r.drawn].max() == 0
        assert len(r.tokens) <= 32 and r.length < len(r.tokens)
    for record in metrics.read(tmp_path / "alone" / "metrics.jsonl")[1:]:
        assert record["policy/sampler_trainer_logprob_gap"] < 1e-4
        assert record["turns/mean"] > 1 and record["turns/errors"] == 0
