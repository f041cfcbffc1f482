"""python -m dapo_jax.evaluate --data=aime24: settings of the papers, always the same digits."""

import hashlib
import json
import pathlib
import re
from types import SimpleNamespace

import pytest
from pages import DOCS, lines, parquet
from tables import cases
from tiny_config import get_config as tiny

from dapo_jax import config, evaluate
from dapo_jax.data import answers, problems, prompts, published
from dapo_jax.evaluation import named_sets, scores

PAGE = (DOCS / "evaluation.md").read_text()
FIXED = frozenset({"eval.max_response_tokens", "reward.verifier"})


@pytest.fixture(scope="module")
def bodies(run) -> dict[str, bytes]:
    """Files in the forms that are published, of problems that the run's model has words for."""
    rows = map(json.loads, (run / "data" / "heldout.jsonl").read_text().splitlines())
    asked = [(r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in rows]
    chat = lambda q: [{"role": "user", "content": prompts.in_template(q)[0][1]}]
    verl = [{"prompt": chat(q), "reward_model": {"ground_truth": a}} for q, a in asked[:2]]
    verl = [row | {"data_source": "math_dapo"} for row in verl]
    math500 = dict(solution="s", subject="Algebra", level=1, unique_id="test/algebra/1.json")
    half = lambda a: f"\\frac{{{2 * int(a)}}}{{2}}"
    return {
        "aime24": parquet(verl * 32),
        "gsm8k-test": lines([{"question": q, "answer": f"so\n#### {a}"} for q, a in asked[:50]]),
        "math500": lines([math500 | {"problem": q, "answer": half(a)} for q, a in asked[:40]]),
        "amc23": lines([{"question": q, "answer": f"{a}.0"} for q, a in asked[8:10]]),
    }


@pytest.fixture
def pins(bodies, server, monkeypatch) -> None:
    monkeypatch.setenv("DAPO_JAX_DATA_HOST", server[0])
    for name, body in bodies.items():
        pinned = published.SETS[name]._replace(sha256=hashlib.sha256(body).hexdigest())
        monkeypatch.setitem(published.SETS, name, pinned)
        server[1][f"/{pinned.source}"] = body


def asked(files: str):
    """The tiny config, with short responses and a verifier that a random model pleases at times."""
    c = tiny()
    c.eval.files, c.eval.max_response_tokens = files, 12
    return c


@pytest.fixture
def evaluated(pins, run, tmp_path):
    def evaluated(files, where="work", fixed=FIXED):
        return evaluate.evaluate_checkpoint(
            asked(files), tmp_path / where, str(run), fixed=fixed, data_dir=f"{tmp_path}/sets"
        )

    return evaluated


def test_the_settings_are_those_of_the_papers(pins, run, tmp_path, monkeypatch):
    """Each file is read once; all problems count, whatever eval.max_problems is; no slot is idle
    from the start."""
    seen, read = [], problems.read
    noted = lambda files, *how: (seen.extend(map(str, files)), read(files, *how))[1]
    monkeypatch.setattr(problems, "read", noted)
    mine, sets, told, notes = f"{run}/data/heldout.jsonl", tmp_path / "sets", {}, []
    c = asked(f"aime24,mine={mine},gsm8k,amc=amc23")
    c.tokenizer.path, c.rollout.slots = f"{run}/data/tokenizer.model", 128
    for found in named_sets.ask(c, run, None, None, FIXED - {"reward.verifier"}, sets):
        notes += [note.split(":")[0] for note in found.text.notes]
        how, paper = evaluate.settings(found, [])[0], found.source.partition(",")[0]
        assert how["max_response_tokens"] == 12
        for name, data in found.text.evals.items():
            told[name] = (len(data.ids), how["k"], how["temperature"], how["top_p"], how["mode"])
            told[name] += (paper, found.config.rollout.slots)
    assert told == {
        "mine": (48, 8, 1.0, 0.7, "integer", "", 128),  # the config's
        "aime24": (2, 32, 1.0, 0.7, "dapo", "DAPO", 64),
        "gsm8k": (50, 1, 0.0, 1.0, "boxed", "Qwen2.5-Math", 56),
        "amc": (2, 32, 0.7, 0.9, "boxed", "JustRL", 64),
    }
    fetched = ["aime24.parquet", "gsm8k-test.jsonl", "amc23.jsonl"]
    assert seen == [mine, *(f"{sets}/{name}" for name in fetched)]
    assert notes == ["mine", *(name for name in told if name != "mine" for _ in range(2))]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eval.k", 2), ("eval.temperature", 0.5), ("eval.top_p", 0.25), ("eval.max_problems", 1),
        ("eval.stop_strings", "7"), ("reward.verifier", "exact"), ("reward.by_source", "x=boxed"),
        ("rollout.max_response_tokens", 9), ("data.template", "plain"),
        ("data.max_prompt_tokens", 16),
    ],
)  # fmt: skip
def test_what_is_said_replaces_a_papers_setting(field, value, pins, run, tmp_path):
    c = tiny()
    c.eval.files = "aime24"
    c.update({field: value})
    said, usual = (
        next(named_sets.ask(c, run, None, None, fixed, tmp_path / "sets")).config
        for fixed in (frozenset({field}), frozenset())
    )
    assert config.leaves(said)[field] == value != config.leaves(usual)[field]
    assert usual.eval.max_response_tokens == published.DAPO.max_response_tokens


def test_math500_is_judged_by_equivalence(evaluated, tmp_path):
    """Rows as they are published, by math-verify in a worker, every sample."""
    pytest.importorskip("math_verify", reason="needs math-verify (requirements-peers.txt)")
    scored = evaluated("math500", fixed=FIXED - {"reward.verifier"})["sets"]["math500"]
    how = scored["settings"]
    assert (scored["problems"], how["k"], how["mode"]) == (40, 4, "math")
    kept = [json.loads(x) for f in (tmp_path / "work").rglob("batch_*") for x in f.open()]
    right = [r for r in kept if r["correct"]]
    assert 0 < scored["avg@k"] == len(right) / 160 < 1
    for r in kept:
        assert answers.verify(r["response"], r["gold"], "math").correct == r["correct"]
    assert not any(answers.verify(r["response"], r["gold"], "boxed").correct for r in right)


def table(text: str) -> list[str]:
    return text[text.rindex("\nset ") + 1 :].splitlines()


@pytest.mark.slow
def test_the_same_digits_again_alone_and_in_company(evaluated, run, capsys):
    """Nothing is read from a file of samples: each time another workdir."""

    def printed(where, files):
        found = evaluated(files, where)["sets"]
        rows = {
            name: sorted(x for f in pathlib.Path(r["samples"]).glob("batch_*") for x in f.open())
            for name, r in found.items()
        }
        found = {n: r | {"samples": r["samples"].rpartition("/")[2]} for n, r in found.items()}
        return found, rows, table(capsys.readouterr().out)

    files = ["aime24", f"mine={run}/data/harder.jsonl", "gsm8k"]
    found, rows, shown = printed("a", ",".join(files))
    assert sum(r["avg@k"] for r in found.values()) > 0, "only zeros were compared"
    turned = printed("turned", ",".join(reversed(files)))
    assert turned == (found, rows, [shown[0], *reversed(shown[1:])])
    alone = printed("alone", "aime24")
    assert alone[:2] == ({"aime24": found["aime24"]}, {"aime24": rows["aime24"]})
    assert alone[2][1].split() == shown[1].split()


def test_the_table_says_what_the_summaries_say():
    how = {"temperature": 1.0, "top_p": 0.7, "max_response_tokens": 20480}
    r = {"problems": 30, "k": 32, "avg@k": 0.5, "avg@k_interval95": (0.25, 0.75), "maj@k": 0.6}
    r |= {"pass@": {"32": 0.9}, "length_mean": 5012.25, "truncated_frac": 0.125, "settings": how}
    scored = {k: v for k, v in r.items() if k not in ("maj@k", "pass@")}
    head, one, other = scores.table({"aime24": r, "a_longer_name": scored})
    row = "{} 30 32 1 0.7 0.5000 0.2500 to 0.7500 {} 5012.2 20480 12.5%"
    assert " ".join(one.split()) == row.format("aime24", "0.6000 0.9000")
    assert " ".join(other.split()) == row.format("a_longer_name", "- -")
    names = "set problems k T top-p avg@k 95% interval maj@k pass@k length limit truncated"
    assert head.split() == names.split() and len(head) == len(one) == len(other)


@pytest.mark.parametrize("case", cases("evaluation_refused"), ids=lambda case: case["wrong"])
def test_refused(case, pins, run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no math-verify
    (tmp_path / "empty.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    c = tiny()
    c.update(case["fields"])
    with pytest.raises(ValueError, match=re.escape(case["wrong"])) as error:
        evaluate.evaluate_checkpoint(c, tmp_path / "work", str(run), data_dir="sets")
    assert "\n" not in str(error.value) and not (tmp_path / "work" / "eval").exists()


def test_a_set_that_is_not_to_be_had_says_how(evaluated, server, tmp_path):
    server[1].clear()
    with pytest.raises(ValueError, match=r"^aime24: http.*: not to be had: .*404") as error:
        evaluated("aime24")
    command = f"python -m dapo_jax.data prepare aime24 --out={tmp_path}/sets"
    assert str(error.value).endswith(f"; on a machine with a network: {command}")


@pytest.mark.parametrize(
    ("context", "fixed", "limit"),
    [(None, (), 20480), (4096, (), 4096 - 130), (32768, (), 20480), (130, (), 0),  # no room
     (130, ("eval.max_response_tokens",), 20480)],
)  # fmt: skip
def test_responses_end_where_the_models_context_does(context, fixed, limit, tmp_path):
    """Qwen2.5-Math has 4,096 tokens; a paper's 20,480 would be noise beyond them."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    c, prompts = tiny(), SimpleNamespace(ids=[[1] * 20, [1] * 130])
    c.eval.max_response_tokens = 20480
    text = SimpleNamespace(evals={"aime24": prompts})
    fit = lambda: named_sets.fit("aime24", c, text, tmp_path, frozenset(fixed))
    if not limit:
        with pytest.raises(ValueError, match=r"the model's context 130 .*--max_response_tokens=N$"):
            fit()
        return
    cut = f", responses cut at {limit} tokens by the model's context"
    assert fit() == ("" if limit == 20480 else cut)
    assert c.eval.max_response_tokens == c.rollout.max_response_tokens == limit
    assert c.data.max_prompt_tokens == 256


def test_the_page_has_the_settings_of_each_set():
    told = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M)
    assert dict(told) == {
        name.removesuffix("-test"): f"{p.k} | {p.temperature:g} | {p.top_p:g} |"
        f" {p.max_response_tokens:,} | `{p.template}` | `{p.verifier}` | {p.source}"
        for name, s in published.SETS.items()
        if (p := s.protocol)
    }
    assert all(f"`{name}`" in PAGE for name, _ in told) and "pip install 'dapo_jax[math]'" in PAGE


@pytest.mark.slow
def test_of_a_model_without_a_run_the_command_asks_for_sets(shell, tmp_path):
    (tmp_path / "a.safetensors").touch()
    done = shell.python("-m", "dapo_jax.evaluate", f"--checkpoint={tmp_path}", "--workdir=w")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --data: say what to evaluate on: gsm8k, aime24, aime25,")
