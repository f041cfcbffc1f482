"""The parts that training and evaluation share."""

import zlib

import numpy as np
import pytest
from data import tiny_config
from test_config import changed

from dapo_jax import algorithm, build, config
from dapo_jax.config import validation
from dapo_jax.dapo.dynamic_sampling import Collected, Group, fingerprint
from dapo_jax.dapo.reward import Grade, Grades
from dapo_jax.dapo.state import Counters, State
from dapo_jax.data import arithmetic, problems, tokenizer as tokenizer_lib
from dapo_jax.reward import grading
from dapo_jax.rollout import engine


def made(**fields):
    return build.build_machine(changed(**fields), 48, (0, 1), None)


def test_cut_keeps_the_token_that_completes_a_text(tmp_path):
    tok = tokenizer_lib.load(arithmetic.write(tmp_path, train=4, heldout=4).tokenizer)
    ids = np.array(tok.encode("f 4 g 6 h 3 Answer: 3 f 4 Answer: 3"))
    for texts in (["h 3"], ["Answer: 3", "h 3"], ["never", "g"], ["3"]):
        n = grading.cut_at(tok, texts)(ids)
        assert any(t in tok.decode(ids[:n].tolist()) for t in texts)
        assert not any(t in tok.decode(ids[: n - 1].tolist()) for t in texts)
    assert grading.cut_at(tok, ["h 4"])(ids) == 0
    assert grading.cut_at(tok, []) is None
    assert config.stop_strings(r"\n\n|Problem: ") == ["\n\n", "Problem: "]
    assert config.stop_strings("") == []


def test_a_prompt_is_packed_once_where_prompts_are_shared():
    """The cells of a mini-batch, by the config: 4 responses of 2 tokens to a prompt of 5."""
    drawn = engine.Response(np.full(2, 3), np.zeros(2, "f"), np.zeros(2, "f"), False)
    right_G = np.array([True, False] * 2)
    groups = [Group(0, [1, 2, 3, 4, 5], [drawn] * 4, Grades(right_G.astype(float), right_G))]

    def cells(share_prompts):
        c = changed(rollout__groups=1, rollout__group_size=4, loss__old_logprobs="reuse")
        c.optim.minibatches, c.optim.share_prompts = 1, share_prompts
        machine = build.build_machine(c, 48, (0, 1), None)
        given = algorithm.make_minibatches(algorithm.dapo(c), groups, 0)
        (batch,) = algorithm.pack_minibatches(machine, given)
        return int((batch.rows.segments_AxRxT > 0).sum())

    assert (cells(False), cells(True)) == (4 * (4 + 2), 4 + 4 * 2)


def test_an_update_finds_the_cache_released():
    machine, found = made(), []
    none = Collected([], [], [], 0, 1, 1.0), engine.total([])
    sample = lambda *_: setattr(machine.engine, "_pool", "keys") or none
    learn = lambda method, m, state, *_: found.append(m.engine._pool) or (state, [], {})
    method = algorithm.dapo(config.base())._replace(sample=sample, learn=learn)
    algorithm.step(method, None, machine, [], State(None, None))
    assert found == [None]


def test_a_reward_of_a_source_that_no_problem_has_is_told(tmp_path):
    c = config.base()
    c.data.embedded_problems, c.reward.by_source = 8, "variable_*=boxed; mine = dapo"
    *_, note = build.load_text(c, tmp_path, None).notes
    assert note == "reward.by_source: no problem is of mine; there are variable_chain"


@pytest.mark.slow
def test_a_step_that_ends_what_no_batch_can_use_has_the_batch_of_one_that_does_not(tmp_path):
    """To the bit; and what counts of it does not depend on when the others ended."""
    c, got = tiny_config.get_config(), []
    heads = lambda problem, response: Grade(0.0, zlib.crc32(response.encode()) % 2 == 0)
    text = build.load_text(c, tmp_path, None, heads)
    stream = problems.stream(range(len(text.train.ids)), c.seed)
    for surplus, chunk in (("drop", 1), ("end", 1), ("end", 4)):
        c.dynamic_sampling.surplus, c.rollout.chunk = surplus, chunk
        m = build.build_machine(c, text.tokenizer.vocab_size, text.tokenizer.stop_ids, None)
        state = State(build.initial_params(c, m), None, counters=Counters(accept_rate=0.3))
        got.append(algorithm.sample_batch(algorithm.dapo(c), text, m, stream, state))
    (drop, full), (end, early), (other, late) = got
    for batch in (end, other):
        assert [*fingerprint(batch.groups)] == [*fingerprint(drop.groups)]
        assert (batch.next_position, batch.carried) == (drop.next_position, [])
    assert [*fingerprint(end.drawn)] == [*fingerprint(drop.drawn[: end.next_position])]
    tokens = sum(len(r.tokens) for g in end.drawn for r in g.responses)
    assert early.tokens == late.tokens == tokens and early.slot_steps < full.slot_steps


def test_splash_and_triton_attention_cannot_share_prompts():
    made(optim__share_prompts=True)
    for kernel in ("splash", "triton"):
        with pytest.raises(config.ConfigError, match=rf"share_prompts: {kernel} .*=chunked"):
            made(optim__share_prompts=True, model__attention=kernel)


def test_triton_attention_has_heads_of_powers_of_two():
    made(model__attention="triton", model__head_dim=16)
    with pytest.raises(config.ConfigError, match=r"attention: triton .*these have 24; set 'auto'"):
        made(model__attention="triton", model__head_dim=24)


@pytest.mark.parametrize("fields", [{}, {"model__dtype": "bfloat16", "model__head_dim": 16}])
def test_cudnn_is_refused_where_it_cannot_run(fields):
    with pytest.raises(config.ConfigError, match="attention: cudnn takes GPUs from .*set 'auto'"):
        made(model__attention="cudnn", **fields)


def test_passes_have_as_many_rows_for_each_device():
    c = changed(optim__micro_batch_rows=6)
    config.validate(c, 8)
    for data, fsdp, rows in ((1, 8, 8), (2, 4, 8), (1, 2, 6), (1, 1, 6), (4, 1, 8)):
        assert validation.micro_rows(c, dict(data=data, fsdp=fsdp, tensor=8)) == rows
    assert made(mesh={"data": 2, "fsdp": 4}, optim__micro_batch_rows=6).layout.micro_rows == 8


@pytest.mark.parametrize(
    ("change", "trainer", "sampler"),
    [
        ({"seed": 1, "optim.lr": 1e-3, "loss.clip_high": 0.3, "steps": 7}, True, True),
        ({"optim.b2": 0.9}, False, True),
        ({"loss.objective": "cispo"}, False, True),
        ({"sharding.train.mlp": ""}, False, True),
        ({"rollout.chunk": 4}, True, False),
        ({"rollout.staleness": 1}, False, False),
        ({"model.dtype": "bfloat16"}, False, False),
        ({"model.lora.rank": 2}, False, False),
        ({"mesh.fsdp": 1, "mesh.tensor": 2, "mesh.data": -1}, False, False),
    ],
    ids=str,
)
def test_runs_of_a_process_share_the_programs_that_are_the_same(change, trainer, sampler):
    a, b = made(), made(**change)
    assert a.engine is not b.engine
    shared = a.trainer is b.trainer, a.engine.programs is b.engine.programs
    assert shared == (trainer, sampler)
