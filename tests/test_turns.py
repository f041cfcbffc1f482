"""Replies in a response: no part of the loss, asked once, played back after a kill."""

import numpy as np
import pytest
from levels import compiled_soon
from rounding import assert_near
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

from dapo_jax.dapo import objective
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
