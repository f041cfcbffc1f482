"""python -m dapo_jax.evaluate --data=aime24,gsm8k: settings of the papers, what replaces them, the
same digits alone and in company, the table; and the page's (test_pages.py runs its commands)."""

import hashlib
import io
import json
import pathlib
import re
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_jax import evaluate
from dapo_jax.data import answers, problems, prompts, published
from dapo_jax.evaluation import named_sets, scores

sys.path.insert(0, str(pathlib.Path(__file__).parent / "data"))
from tiny_config import __file__ as CONFIG, get_config as tiny

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()
FIXED = frozenset({"eval.max_response_tokens", "reward.verifier"})


@pytest.fixture(scope="module")
def problems_of_the_run(run) -> list[tuple[str, str]]:
    """(prompt, answer) of problems that the run's model has words for."""
    rows = map(json.loads, (run / "data" / "heldout.jsonl").read_text().splitlines())
    return [(r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in rows]


@pytest.fixture(scope="module")
def bodies(problems_of_the_run) -> dict[str, bytes]:
    """Files in the forms that are published."""
    asked = problems_of_the_run
    lines = lambda made: "".join(json.dumps(r) + "\n" for r in made).encode()
    chat = lambda q: [{"role": "user", "content": prompts.in_template(q)[0][1]}]
    verl = [{"prompt": chat(q), "reward_model": {"ground_truth": a}} for q, a in asked[:2]]
    verl = [row | {"data_source": "math_dapo"} for row in verl]
    pq.write_table(pa.Table.from_pylist(verl * 32), aime := io.BytesIO())
    return {
        "aime24": aime.getvalue(),
        "aime25": lines({"problem": q, "answer": int(a)} for q, a in asked[2:4]),
        "gsm8k-train": lines({"question": q, "answer": f"so\n#### {a}"} for q, a in asked[:1]),
        "gsm8k-test": lines({"question": q, "answer": f"so\n#### {a}"} for q, a in asked[:50]),
        "math500": lines({"problem": q, "solution": "s", "answer": a} for q, a in asked[4:8]),
        "amc23": lines({"question": q, "answer": f"{a}.0"} for q, a in asked[8:10]),
    }


@pytest.fixture
def pins(bodies, server, monkeypatch) -> None:
    """The files are served, and their hashes are those that are pinned."""
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
    """The evaluation of sets in a new folder `where`."""

    def evaluated(files, where="work", fixed=FIXED):
        return evaluate.evaluate_checkpoint(
            asked(files), tmp_path / where, str(run), fixed=fixed, data_dir=f"{tmp_path}/sets"
        )

    return evaluated


def test_the_settings_are_those_of_the_papers(pins, run, tmp_path, monkeypatch):
    """Each file is read once; all problems count, whatever eval.max_problems is."""
    seen, read = [], problems.read
    noted = lambda files, *how: (seen.extend(map(str, files)), read(files, *how))[1]
    monkeypatch.setattr(problems, "read", noted)
    mine, sets, told, notes = f"{run}/data/heldout.jsonl", tmp_path / "sets", {}, []
    c = asked(f"aime24,mine={mine},gsm8k,amc=amc23")
    c.tokenizer.path = f"{run}/data/tokenizer.model"
    for found in named_sets.ask(c, run, None, None, FIXED - {"reward.verifier"}, sets):
        notes += [note.split(":")[0] for note in found.text.notes]
        how, paper = evaluate.settings(found, [])[0], found.source.partition(",")[0]
        assert how["max_response_tokens"] == 12
        for name, data in found.text.evals.items():
            told[name] = (len(data.ids), how["k"], how["temperature"], how["top_p"], how["mode"])
            told[name] += (paper,)
    assert told == {
        "mine": (48, 8, 1.0, 0.7, "integer", ""),  # the config's
        "aime24": (2, 32, 1.0, 0.7, "dapo", "DAPO"),
        "gsm8k": (50, 1, 0.0, 1.0, "boxed", "Qwen2.5-Math"),
        "amc": (2, 32, 0.7, 0.9, "boxed", "JustRL"),
    }
    fetched = ["aime24.parquet", "gsm8k-test.jsonl", "amc23.jsonl"]
    assert seen == [mine, *(f"{sets}/{name}" for name in fetched)]
    assert notes == ["mine", *(name for name in told if name != "mine" for _ in range(2))]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("eval.k", 2, "k"), ("eval.temperature", 0.5, "temperature"), ("eval.top_p", 0.25, "top_p"),
        ("reward.verifier", "exact", "mode"), ("reward.by_source", "x=boxed", "mode"),
        ("eval.stop_strings", "7", "stop_strings"), ("eval.max_problems", 1, None),
        ("rollout.max_response_tokens", 9, "max_response_tokens"), ("data.template", "plain", None),
        ("data.max_prompt_tokens", 16, None),
    ],
)  # fmt: skip
def test_what_is_said_replaces_a_papers_setting(field, value, told, pins, run, tmp_path):
    """Also where it is the config's own value by chance: who says it, means it."""
    c = tiny()
    c.eval.files = "aime24"
    c.update({field: value})
    sets = tmp_path / "sets"
    ask = lambda fixed: next(named_sets.ask(c, run, None, None, frozenset(fixed), sets))
    said, usual = ask({field}), ask(())
    if told:
        here, there = (evaluate.settings(x, [])[0][told] for x in (said, usual))
        expected = ("7",) if field == "eval.stop_strings" else value
        assert here == ("integer;x=boxed" if field == "reward.by_source" else expected) != there
    elif field == "eval.max_problems":
        assert len(said.text.evals["aime24"].ids) == 1 < len(usual.text.evals["aime24"].ids)
    else:
        here, there = (x.text.evals["aime24"] for x in (said, usual))
        assert here.ids != there.ids or here.n_long != there.n_long
    assert usual.config.eval.max_response_tokens == published.DAPO.max_response_tokens


def test_math500_is_judged_by_equivalence(
    problems_of_the_run, evaluated, server, tmp_path, monkeypatch
):
    """Rows as they are published, by math-verify in a worker, every sample."""
    pytest.importorskip("math_verify", reason="needs math-verify (requirements-peers.txt)")
    about = {"subject": "Prealgebra", "level": 1, "unique_id": "test/prealgebra/1.json"}
    rows = [
        {"problem": problem, "solution": "s", "answer": f"\\frac{{{2 * int(gold)}}}{{2}}"} | about
        for problem, gold in problems_of_the_run[:40]
    ]
    body = "".join(json.dumps(r) + "\n" for r in rows).encode()
    pinned = published.SETS["math500"]._replace(sha256=hashlib.sha256(body).hexdigest())
    monkeypatch.setitem(published.SETS, "math500", pinned)
    server[1][f"/{pinned.source}"] = body
    scored = evaluated("math500", fixed=FIXED - {"reward.verifier"})["sets"]["math500"]
    how = scored["settings"]
    assert (scored["problems"], how["k"], how["mode"]) == (40, 4, "math")
    kept = [json.loads(x) for f in (tmp_path / "work").rglob("batch_*") for x in f.open()]
    assert len(kept) == 160 and {r["gold"] for r in kept} == {r["answer"] for r in rows}
    right = [r for r in kept if r["correct"]]
    assert 0 < scored["avg@k"] == len(right) / 160 < 1
    for r in kept:
        assert answers.verify(r["response"], r["gold"], "math").correct == r["correct"]
    assert not any(answers.verify(r["response"], r["gold"], "boxed").correct for r in right)


def table(text: str) -> list[str]:
    """The lines of the last table that was printed."""
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


@pytest.mark.parametrize(("problems", "k", "slots"), [(3, 2, 8), (9, 1, 16), (50, 4, 128)])
def test_no_slot_is_idle_from_the_start(problems, k, slots):
    """Eight shards; 128 slots as configured."""
    c = tiny()
    c.rollout.slots, c.eval.k, c.mesh.data, c.mesh.fsdp = 128, k, 2, 4
    sets = {name: SimpleNamespace(ids=[[1]] * n) for name, n in (("a", problems), ("b", 1))}
    named_sets.fill(c, SimpleNamespace(evals=sets))
    assert c.rollout.slots == slots


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


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ("gsm8k-train", "gsm8k-train: a set for training; those of evaluation are gsm8k, aim"),
        ("dapo-math-17k", "dapo-math-17k: a set for training"),
        ("aime23", "aime23: no such file, and no set of that name (gsm8k, aime24, aime25, "),
        ("gsm8k,gsm8k=a.jsonl", "the name 'gsm8k' is used twice; write name=path"),
        ("math500", "math500: config.reward: verifier 'math' needs a library: pip install "),
    ],
)
def test_refused(files, wrong, evaluated, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(wrong)) as error:
        evaluated(files, fixed=frozenset())
    assert "\n" not in str(error.value) and not (tmp_path / "work" / "eval").exists()


def test_a_set_that_is_not_to_be_had_says_how(evaluated, server, tmp_path):
    server[1].clear()
    with pytest.raises(ValueError, match=r"^aime24: http.*: not to be had: .*404") as error:
        evaluated("aime24")
    command = f"python -m dapo_jax.data prepare aime24 --out={tmp_path}/sets"
    assert str(error.value).endswith(f"; on a machine with a network: {command}")


@pytest.mark.parametrize(
    ("context", "fixed", "limit"),
    [
        (None, (), 20480),
        (4096, (), 4096),
        (32768, (), 20480),
        (16, (), 0),  # no room behind a prompt
        (16, ("eval.max_response_tokens",), 20480),
    ],
)
def test_responses_end_where_the_models_context_does(context, fixed, limit, pins, run, tmp_path):
    """Qwen2.5-Math has 4,096 tokens; a paper's 20,480 would be noise beyond them."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    c = tiny()
    c.eval.files = "aime24"
    (asked,) = named_sets.ask(c, run, None, None, frozenset(), tmp_path / "sets")
    longest = max(map(len, asked.text.evals["aime24"].ids))
    c.eval.max_response_tokens = 20480
    if not limit:
        with pytest.raises(ValueError, match=r"the model's context 16 .*--max_response_tokens=N$"):
            named_sets.fit("aime24", c, asked.text, tmp_path, frozenset(fixed))
        return
    note = named_sets.fit("aime24", c, asked.text, tmp_path, frozenset(fixed))
    got = c.eval.max_response_tokens
    assert got == c.rollout.max_response_tokens == (limit if limit == 20480 else limit - longest)
    assert bool(note) == (got < 20480) and (not note or f" {got} tokens" in note)
    assert c.data.max_prompt_tokens % 128 == 0 and c.data.max_prompt_tokens >= longest


def test_the_page_has_the_settings_of_each_set():
    told = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M)
    assert dict(told) == {
        name.removesuffix("-test"): f"{p.k} | {p.temperature:g} | {p.top_p:g} |"
        f" {p.max_response_tokens:,} | `{p.template}` | `{p.verifier}` | {p.source}"
        for name, s in published.SETS.items()
        if (p := s.protocol)
    }
    assert all(f"`{name}`" in PAGE for name, _ in told) and "pip install 'dapo_jax[math]'" in PAGE
    shown = table(PAGE.replace("```\nset ", "\nset "))[0]
    assert shown.split() == next(scores.table({})).split()


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ("", "--data: say what to evaluate on: gsm8k, aime24, aime25, gsm8k-test, math500, amc23,"),
        ("--data=aime24 --checkpoint=nowhere", "nowhere: no such directory, and the Hugging Face"),
        (f"--config={CONFIG} --k=0", "config.eval.k: 0 is too small, at least 1"),
    ],
)
def test_the_command_says_what_is_missing_or_wrong(flags, wrong, shell, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").touch()
    command = ("-m", "dapo_jax.evaluate", "--checkpoint=model", "--workdir=w", *flags.split())
    done = shell.python(*command, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {wrong}") and done.stderr.count("\n") == 1
