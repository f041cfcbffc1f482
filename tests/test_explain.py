"""Samples of kept steps, drawn again: what the run has drawn, of every kind of run; what a token, a
sample and a group are made of; and what is not the run's is noticed."""

import functools
import json
import pathlib
import shutil
from dataclasses import replace
from types import SimpleNamespace

import golden
import numpy as np
import pages
import pytest
from scripts import ROOT

from dapo_jax import build, config, train
from dapo_jax.checkpoint import checkpoint
from dapo_jax.config import cli, schema
from dapo_jax.dapo import advantage
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import tokenizer
from dapo_jax.lab import before, explain, explanation, redraw, replies
from dapo_jax.reward.tools import Reply
from dapo_jax.rollout.engine import Draw, Response, Store
from dapo_jax.variants import turns

FIELDS = {
    "steps": 3, "eval.every": 0, "eval.k": 1, "eval.max_problems": 4, "checkpoint.every": 1,
    "checkpoint.keep": 99, "data.embedded_problems": 64, "rollout.groups": 4,
    "rollout.group_size": 4, "optim.minibatches": 2, "rollout.slots": 16, "log.tensorboard": False,
    "rollout.prefill_prompts": 8, "rollout.max_response_tokens": 16, "optim.lr": 1e-2,
    "reward.overlong_buffer_tokens": 4, "reward.function": "judge.py:half",
}  # fmt: skip
JUDGE = """import zlib
from dapo_jax.reward.grading import Grade
def half(problem, response):
    right = zlib.crc32(response.encode()) % 2 == 0
    return Grade(float(right), right, response[-4:], {"length": len(response)})
def long(problem, response): return len(response) / 10
def moody(problem, transcript):  # other answers from the moment on that a file is there
    import pathlib
    from dapo_jax.reward.tools import Reply
    which = zlib.crc32(repr(transcript).encode()) + pathlib.Path("again").exists()
    said = ["3", "+ 4", "- 7 +", "none"][which % 4]
    return None if said == "none" else Reply(said)
"""


def trained(c, workdir, stops=()):
    """Run it, with other starts behind the steps `stops`. Returns step -> the groups that it judged
    or trained on."""
    drawn, of = {}, lambda batch: [*batch.drawn, *batch.groups]
    note = lambda state, record: drawn.update(
        {state.counters.step: [*{id(g): g for g in of(record.batch)}.values()]}
    )
    for steps in (*stops, c.steps):
        c.steps = steps
        train.train(c, workdir, hooks=train.Hooks(step=note))
    return drawn


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(workdir, what it drew) of a run on a random model, started twice; its folder is the working
    directory."""
    folder = tmp_path_factory.mktemp("explained")
    (folder / "judge.py").write_text(JUDGE)
    c = config.base()
    c.update(FIELDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield "run", trained(c, "run", stops=(2,))


def agree(path: str, drawn, samples: int, seed: int = 0) -> int:
    """Draw random samples of its steps again: tokens, log-probs and uniforms. Returns how many."""
    rng, done = np.random.default_rng(seed), 0
    all_of = [(s, g, i) for s, gs in drawn.items() for g in gs for i in range(len(g.responses))]
    chosen = [all_of[n] for n in rng.permutation(len(all_of))[:samples]]
    for step in sorted({s for s, *_ in chosen}):
        o = redraw.open_step(path, step)
        mine = [(g, i) for s, g, i in chosen if s == step]
        groups = redraw.draw(o, [g.position for g, _ in mine])
        for (was, i), now in zip(mine, groups, strict=True):
            a, b = was.responses[i], now.responses[i]
            np.testing.assert_array_equal(a.tokens, b.tokens)
            assert np.abs((a.logps - b.logps)[a.drawn]).max() < 1e-4
            assert a.truncated == b.truncated and not (a.drawn ^ b.drawn).any()
            assert was.grades.score_G[i] == now.grades.score_G[i]
            if a.versions is not None:
                np.testing.assert_array_equal(a.versions, b.versions)
            done += 1
        look = explain.tokens(o, groups[0], mine[0][1])
        for token in look:
            if token["candidates"]:
                _, low, high = token["candidates"][token["drawn"]]
                assert low - 1e-5 <= token["uniform"] <= high + 1e-5
        whole = redraw.whole(o)
        for u, log in zip(whole.updates, whole.record.updates, strict=False):
            assert u.loss == pytest.approx(log["loss"], abs=1e-6)
        if whole.updates:
            loss = np.mean([u.loss for u in whole.updates])
            assert loss == pytest.approx(whole.recorded["policy/loss"], abs=1e-6)
        assert whole.recorded and not explain.unlike(whole)
    return done


def test_samples_of_a_run_are_what_it_drew(made):
    path, drawn = made
    assert redraw.steps(path) == [1, 2, 3, 4] and agree(path, drawn, 24) == 24


def test_what_a_sample_is_made_of(made, tmp_path, capsys):
    """Numbers of the group, of its tokens in the loss, and of what might have been."""
    path, drawn = made
    group = next(g for g in drawn[2] if g.mixed())
    said = [f"{path}@2", str(group.position), "1"]
    flags = ["--whole", "--reward=judge.py:long", "--cap=6", "--objective=cispo"]
    assert explain.main([*said, *flags, f"--json={tmp_path / 'a.json'}"]) == 0
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert "as recorded: " in shown and "numbers of metrics.jsonl" in shown
    rows, at = found["samples"], found["whole_step"]
    assert at["drew_it"] and at["loss_by_tokens"] == pytest.approx(at["policy/loss"], abs=1e-6)
    c = schema.of_run(pathlib.Path("run/config.json").read_bytes())
    of = lambda r: r["score"] + min(0.0, (c.rollout.max_response_tokens - 4 - r["tokens"]) / 4)
    assert [r["reward"] for r in rows] == [of(r) for r in rows]
    assert [r["parts"] for r in rows] == [{"length": len(r["response"])} for r in rows]
    everything = np.ones((1, len(rows)), bool)
    normal = advantage.group_normalize(np.array([[of(r) for r in rows]]), c.advantage, everything)
    assert [r["advantage"] for r in rows] == normal[0].tolist()
    mine = found["tokens"]
    assert [t["id"] for t in mine] == group.responses[1].tokens.tolist()
    assert [t["logp"] for t in mine] == group.responses[1].logps.tolist()
    if at["in_batch"]:  # else nothing trains on it
        assert sum(t["weight"] * t["loss"] for t in mine) == pytest.approx(rows[1]["loss"])
    by_length, short = (found["what_if"][k] for k in ("reward=judge.py:long", "cap=6"))
    assert [r["score"] for r in by_length["samples"]] == [len(r["response"]) / 10 for r in rows]
    assert by_length["samples"][0]["right"] is None
    for r, s in zip(rows, short["samples"], strict=True):  # the same tokens, ended earlier
        assert s["tokens"] == min(r["tokens"], 6) and r["response"].startswith(s["response"])
    assert explain.main([*said, "0"]) == 0
    assert "falls into" in (one := capsys.readouterr().out) and "  >  " in one
    page = explanation.page(found)
    assert page.count("<table") == 2 and "<script" not in page


def test_a_longer_limit_goes_on_with_the_same_tokens(made):
    path, drawn = made
    group = next(g for gs in drawn.values() for g in gs if any(r.truncated for r in g.responses))
    step = next(s for s, gs in drawn.items() if group in gs)
    o = redraw.open_step(path, step)
    found = explain.explain(
        o, str(group.position), changes={"longer": {"rollout.max_response_tokens": 24}}
    )
    was, now = found["samples"], found["what_if"]["longer"]["samples"]
    assert any(a["tokens"] < b["tokens"] for a, b in zip(was, now, strict=True))
    assert all(b["response"].startswith(a["response"]) for a, b in zip(was, now, strict=True))


def test_what_earlier_steps_drew_ends_at_a_shorter_limit():
    def row(n, ended):
        return Response(np.arange(n), np.zeros(n), np.zeros(n), False, np.zeros(n, int), ended)

    group = Group(7, [1, 2], [row(6, False), row(6, True), row(4, True), row(3, False)])
    text = SimpleNamespace(train=SimpleNamespace(ids=[[1, 2]]))
    rollout = SimpleNamespace(group_size=4, max_response_tokens=4)
    o = SimpleNamespace(state=SimpleNamespace(carried=[group]), text=text, stream=[0] * 8)
    o.config = SimpleNamespace(rollout=rollout)
    found, asked = redraw.begun(o, 7)
    assert [len(r.versions) for r in found.responses] == [4, 4, 4, 3] and len(asked) == 1
    assert [r.truncated for r in found.responses] == [True, True, False, False]


def test_other_weights_than_the_run_s_are_noticed(made, tmp_path, capsys):
    path, drawn = made
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    o = redraw.open_step(path, 2)
    o.state.params["embed"] *= 1.5
    with checkpoint.manager(tmp_path / "other", keep=1) as m:  # a whole one, of other weights
        checkpoint.save(m, o.state, schema.leaves(o.config), redraw.inputs(o.text, o.config))
    shutil.rmtree(copy / "checkpoints" / "1")
    (tmp_path / "other" / "1").rename(copy / "checkpoints" / "1")
    problem = str(drawn[2][0].position)
    assert explain.main([f"{path}@2", problem]) == 0
    assert explain.main([f"{copy}@2", problem]) == 1
    assert "NOT AS RECORDED: position" in capsys.readouterr().out
    # One with another step's name is no checkpoint of it.
    shutil.rmtree(copy / "checkpoints" / "2")
    shutil.copytree(copy / "checkpoints" / "3", copy / "checkpoints" / "2")
    with pytest.raises(SystemExit):
        explain.main([f"{copy}@3", problem])
    assert "holds no whole checkpoint; it can show step 1, 2, 4" in capsys.readouterr().err
    # A record that says otherwise
    file = copy / "rollouts" / "step_000004.jsonl"
    assert not file.exists()  # of a step that the run has not made
    assert explain.main([f"{copy}@4", problem, "--whole"]) == 0
    assert "nothing: the run has no record" in capsys.readouterr().out
    row = {"position": int(problem), "pieces": ["x"], "logps": [0.0], "reward": 0.0}
    file.write_text(json.dumps(row) + "\n")
    assert explain.main([f"{copy}@4", problem]) == 1
    with pytest.raises(SystemExit):  # what was found is told before it is written
        explain.main([f"{copy}@4", problem, f"--json={tmp_path}/none/a.json"])
    assert capsys.readouterr().out.count("NOT AS RECORDED") == 2


@pytest.mark.slow
def test_a_reward_of_one_s_own_sees_the_rows_of_a_run_by_a_verifier(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text("def score(problem, response): return len(problem.row)")
    assert explain.main([f"{run}@1", "0", "--reward=rows.py:score", "--json=a.json"]) == 0
    found = json.loads((tmp_path / "a.json").read_text())["what_if"]["reward=rows.py:score"]
    assert all(r["score"] > 0 for r in found["samples"])


def test_what_a_step_that_was_cut_off_has_kept(made, tmp_path, capsys):
    """The journal: of a step that has no record yet."""
    path, _ = made
    cut = tmp_path / "cut"
    shutil.copytree(path, cut)
    c = config.base()
    c.update(FIELDS | {"steps": 4})

    def stop(phase):
        if phase == "update":
            raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        train.train(c, cut, hooks=train.Hooks(phase=stop))
    o = redraw.open_step(str(cut), 4)
    first = o.state.counters.position
    assert explain.main([f"{cut}@4", str(first)]) == 0
    assert "as recorded: 4 responses of the journal" in capsys.readouterr().out
    (group,) = redraw.draw(o, [first])
    for i, kept in redraw.journal(o, first).items():
        np.testing.assert_array_equal(kept.tokens, group.responses[i].tokens)
    assert not redraw.journal(o, first + 1000)


def test_a_probe_draws_what_the_first_step_draws(made):
    """Before the run: the same groups by the same weights."""
    path, drawn = made
    c = config.base()
    c.update(FIELDS)
    o = redraw.open_step(path, 1)
    first = sorted(drawn[1], key=lambda g: g.position)[:4]
    found = before.probed(c, o.text, None, 4, lambda _: None)
    assert found["teach"] == sum(g.mixed() for g in first)
    lengths = [len(r.tokens) for g in first for r in g.responses]
    assert found["response/length_mean"] == np.mean(lengths)


def test_a_reply_is_read_back_from_the_texts_of_its_tokens(assets):
    """With the released template, which frames it, and by words; cut to its budget; who knows no
    reply, or two, asks."""
    folder = assets / "tokenizer"
    qwen = tokenizer.load(folder, folder / "chat_template_qwen2.5_instruct.jinja")
    piece = lambda ids: [qwen.decode([t], skip_special=False) for t in ids]
    turn, asked = [*qwen.encode("look up 漢字"), *qwen.encode("<|im_end|>")], []
    row = SimpleNamespace(request=SimpleNamespace(stream=7), tokens=turn)
    other = Reply("asked")

    def answers(*ends, chat=True, tokens=9, given=other):
        budget = turns.Budget(4, tokens, chat)
        rows = []
        for end in ends:
            new = turns.rendered(qwen, budget, end) if end else []
            drawn = [1] * len(turn) + [0] * len(new) + [1] * bool(end)
            pieces = piece([*turn, *new, *turn[:1] * bool(end)])
            rows.append({"position": 7, "pieces": pieces, **({"drawn": drawn} if end else {})})
        ask = lambda draw, rows, texts: asked.append(len(rows)) or [given] * len(rows)
        heard = replies.Heard([*rows, {"position": 7, "pieces": [1]}], Store())
        asker = replies._Asker(SimpleNamespace(ask=ask), heard, qwen, budget)
        return asker.ask(Draw(0), [row], [()])[0]

    for said in (Reply("4"), Reply(" x^2 = 4, so", "user"), Reply("a <b>\n\nc")):
        assert answers(said) == answers(said, said) == said
        assert answers(Reply(said.text), chat=False) == Reply(said.text)
    assert answers(Reply("one two three four"), tokens=2) == Reply("one two")
    assert {*asked} == {0}
    # A part of a character has no text; two samples that begin alike; none of the record.
    assert answers(Reply("漢字🫨")) == answers(Reply("1"), Reply("2")) == answers() == other
    assert answers(None) is None  # it ends there in the record, whatever is said now
    assert answers(None, given=None) is None and asked[-1] == 1
    assert answers(Reply("1"), None) == other


@pytest.mark.slow
def test_replies_are_those_of_the_record(made, capsys, monkeypatch):
    """By a tool that answers otherwise the next time: rows of rollouts/ come back as they are, with
    their replies, where no two begin alike; what the record lacks is asked for again, and the
    explanation says so."""
    stops = frozenset((12, 33, 35, 36, 44, 46))
    often = lambda *where: replace(tokenizer.load(*where), stop_ids=stops)
    monkeypatch.setattr(build, "tokenizer", SimpleNamespace(load=often))  # turns end soon
    c = config.base()
    c.update(FIELDS | {"steps": 1, "rollout.turns": 3, "rollout.max_response_tokens": 32})
    c.update({"reward.reply": "judge.py:moody", "rollout.reply_tokens": 4, "log.samples": 99})
    drawn = trained(c, "talk")
    pathlib.Path("again").touch()
    o, piece = redraw.open_step("talk", 1), lambda r: [explain._piece(o, t) for t in r.tokens]
    rows = [r for r in redraw.recorded("talk", 1) if 0 in r.get("drawn", ())]
    first = [(r["position"], r["pieces"][: r["drawn"].index(0)]) for r in rows]
    recorded = [
        (r["position"], r["pieces"])
        for r in rows
        if sum(at == r["position"] and r["pieces"][: len(x)] == x for at, x in first) == 1
    ]
    again = {g.position: g for g in redraw.draw(o, sorted({position for position, _ in recorded}))}
    both = [
        (group.position, i, was, again[group.position].responses[i])
        for group in drawn[1]
        for i, was in enumerate(group.responses)
        if (group.position, piece(was)) in recorded
    ]
    assert len(both) > 3
    for _, _, was, now in both:
        np.testing.assert_array_equal(was.tokens, now.tokens)
        np.testing.assert_array_equal(was.drawn, now.drawn)
    position, i, was, _ = both[0]
    said = ["talk@1", str(position), str(i)]
    # What other samples are told now may make a difference of the whole step.
    assert explain.main([*said, "--whole", "--json=talk.json"]) in (0, 1)
    shown, found = capsys.readouterr().out, json.loads(pathlib.Path("talk.json").read_text())
    assert "turns are put to reward.reply again" in shown and "  reply  " in shown
    replies = [t for t in found["tokens"] if t["reply"]]
    assert [t["id"] for t in replies] == was.tokens[~was.drawn].tolist()
    assert all(t["logp"] is None and t["uniform"] is None and not t["candidates"] for t in replies)
    assert {t["weight"] for t in replies if "weight" in t} <= {0.0}
    own = [t["logp"] for t in found["tokens"] if not t["reply"]]
    assert own == was.logps[was.drawn].tolist()
    assert explanation.page(found).count("<table") == 2
    assert explain.main([*said, str(replies[0]["token"])]) == 0
    assert "of a reply; the policy did not draw it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (["run@7", "0"], "it can show step 1, 2, 3, 4"),
        (["run", "0"], "run: name a step: run@STEP"),
        (["none@1", "0"], "none: no config.json in it"),
        (["run@2", "zz"], "PROBLEM 'zz': no problem of data.train has it"),
        (["run@2", ""], "PROBLEM ''"),
        (["run@2", "0", "4"], "SAMPLE 4: this run draws samples 0 to 3"),
        (["run@2", "0", "0", "99"], "TOKEN 99: the response has tokens 0 to"),
        (["run@2", "0", "--cap=-1"], "--cap=-1"),
        (["run@2", "0", "--objective=xx"], "config.loss.objective"),
        (["run@2", "0", "--reward=no.py:x"], "no.py"),
    ],
)
def test_mistakes_are_one_line(made, said, wrong, capsys):
    with pytest.raises(SystemExit) as end:
        explain.main(said)
    err = capsys.readouterr().err
    assert end.value.code == 1 and err.startswith("error: ") and wrong in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path, shell):
    (tmp_path / "desk").mkdir()
    pages.stand_ins(tmp_path / "desk", tmp_path / "made")
    typed = functools.partial(pages.typed, shell)
    _, steps, listed, sample, token, page = pages.follow("explain.md", tmp_path / "desk", typed)
    assert "can explain the steps 1, 2, 3, 4" in steps and "rollouts/ holds" in listed
    assert "\nas recorded: " in sample and "whole step: " in sample and "with cap=" in sample
    assert "falls into" in token and (tmp_path / "desk" / "why.json").exists()
    assert "a.html" in page and "<svg" in (tmp_path / "desk" / "a.html").read_text()


TALK = """reward.reply=guess rollout.turns=3 rollout.reply_tokens=4 rollout.max_response_tokens=16
    rollout.chunk=2"""
KINDS = {
    **golden.RUNS,
    "resumed": "loss.old_logprobs=recompute",
    "turns": TALK,
    "turns_stale": f"{TALK} rollout.staleness=1 rollout.slots=12 loss.importance_cap=5"
    " loss.old_logprobs=recompute",
}


@pytest.mark.slow
@pytest.mark.nightly  # by day one small run, `made`
@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_all_kinds_of_runs(kind, tmp_path):
    """648 random ones, of the golden runs and of one that was started three times."""
    c, bad = cli.load(str(ROOT / "configs" / "quickstart.py")), []
    given = f"{golden.EVERY} {KINDS[kind]} checkpoint.every=1 checkpoint.keep=99".split()
    c.update(cli.overrides([tuple(flag.split("=")) for flag in given], bad))
    c.rollout.slots = max(c.rollout.slots, 16)  # a multiple of the devices
    stops = (2, 4) if kind == "resumed" else ()
    assert not bad and agree(str(tmp_path), trained(c, tmp_path, stops), 72) == 72
