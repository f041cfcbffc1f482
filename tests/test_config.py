"""The config: every field read and in bounds, every mistake one line, presets as published."""

import ast
import copy
import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tables

import dapo_jax
from dapo_jax import config, parallel
from dapo_jax.config import schema, validation
from dapo_jax.model import qwen2

PACKAGE = Path(dapo_jax.__file__).parent

PLACES = {name.rpartition(".")[0] for name in config.SCHEMA}  # "" is the root
SECTIONS = {p: operator.attrgetter(p)(config.base()) if p else config.base() for p in PLACES}


def names_of(place: str, text: str) -> set[str]:
    """What the text of a file calls this section: its own name, a parameter of its type, and
    `x = config.optim`."""
    if not place:
        return {"c", "config"}
    own, kind = place.split(".")[-1], type(SECTIONS[place]).__name__
    found = {own, f"_{own}", *re.findall(rf"\b(\w+): (?:\w+\.)?{kind}\b", text)}
    for left, right in re.findall(r"^ *(\w[\w, ]*) = (.+)$", text, re.MULTILINE):
        for name, of in zip(left.split(", "), right.split(", "), strict=False):
            if re.fullmatch(rf"(c|config|self)\.(\w+\.)*_?{own}", of):
                found.add(name)
    return found


def reads(text: str) -> set[str]:
    """Dotted names of the fields that this code reads; what it only assigns does not count."""
    tree = ast.walk(ast.parse(text))
    loads = [n for n in tree if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    pairs = {tuple(ast.unparse(node).split(".")[-2:]) for node in loads}
    found = set()
    for place in PLACES:
        names = names_of(place, text)
        found |= {f"{place}.{leaf}" for of, leaf in pairs if of in names}
    return {name.removeprefix(".") for name in found}


def test_every_field_is_read_by_the_code():
    """In config/ only these functions use fields; the rest of it checks and sets them."""
    users = (validation.row_tokens, validation.warm_up, validation.micro_rows)
    texts = [inspect.getsource(user) for user in users]
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "config" and file.name != "settings.py":
            texts.append(file.read_text())
    found = set().union(*map(reads, texts))
    found |= {f"model.{name}" for name in qwen2.Shape._fields}  # `shape_from_config` takes all
    found |= {f"mesh.{axis}" for axis in parallel.AXES}  # so does `resolve_mesh`
    by_axis = "".join(text for text in texts if re.search(r"constrain\(|spec\(", text))
    axes = config.base().sharding.train.to_dict()
    found |= {f"sharding.{p}.{a}" for p in ("train", "decode") for a in axes if f'"{a}"' in by_axis}
    assert [name for name in config.SCHEMA if name not in found] == []


def test_the_table_is_what_the_sections_declare():
    flat = config.leaves(config.base())
    assert list(flat) == list(config.SCHEMA)
    assert flat == {name: field.default for name, field in config.SCHEMA.items()}
    for name, field in config.SCHEMA.items():
        assert field.doc and field.mistake(name, field.default) is None, name
    assert not [n for n, f in config.SCHEMA.items() if "director" in f.doc and not f.path]
    assert set(schema.PEERS.values()) <= set(config.SCHEMA)
    assert not {*schema.PEERS} & {*config.SCHEMA}


def test_a_config_is_copied_compared_and_set_by_name():
    c = config.paper()
    other = copy.deepcopy(c)
    other.update({"optim.lr": 1, "model": {"lora": {"rank": 4}}, "seed": 3})
    assert (other.optim.lr, other.model.lora.rank, other.seed) == (1.0, 4, 3)
    assert type(other.optim.lr) is float and c.model.lora.rank == 0 and c != other
    c.update(config.leaves(other))
    assert c == other and c.to_dict() == other.to_dict()
    assert c.to_dict()["model"]["lora"] == dict(rank=4, alpha=16.0, targets="q,k,v,o,gate,up,down")
    assert c.mesh["data"] == 1
    assert not hasattr(c, "nothing") and not hasattr(c, "__nothing__")


def test_a_config_and_what_judges_and_reads_need_no_jax():
    """Workers start quickly, and never take the accelerator."""
    parts = "config.cli config.presets reward.workers data.problems data.tokenizer data.prompts"
    names = ", ".join(f"dapo_jax.{part}" for part in parts.split())
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("c.model.lora.rnk = 1", "config.model.lora.rnk: no such field; did you mean model.lora.r"),
        ("c.nope.x = 1", "config.nope: no such field"),
        ("c.update({'seed.x': 1})", "config.seed.x: no such field; did you mean seed?"),
        ("c.update({'optim': {'lrr': 1}})", "config.optim.lrr: no such field; did you mean optim."),
        ("c.optim.lr = '1e-6'", "config.optim.lr: wants float, got '1e-6' (str)"),
        ("c.rollout.groups = 8.0", "config.rollout.groups: wants int, got 8.0 (float)"),
        ("c.rollout.groups = True", "config.rollout.groups: wants int, got True (bool)"),
        ("c.optim = c.loss", "config.optim: wants a section of fields, got Loss("),
        ("c.loss.clip_hgh", "config.loss.clip_hgh: no such field; did you mean loss.clip_hi"),
    ],
)
def test_a_wrong_name_or_type_is_one_line(statement, says):
    with pytest.raises(config.ConfigError) as error:
        exec(statement, {"c": config.base()})
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


MEANT = {
    "optim.learing_rate": "optim.lr", "lr": "optim.lr", "rollout.group_sise": "rollout.group_size",
    "temperature": "rollout.temperature", "loss.cliphigh": "loss.clip_high", "zzzzzzz": "",
    "optim.clip_low": "loss.clip_low", "curriculum.revisit_epoch": "curriculum.revisit_epochs",
    # other trainers' names
    "beta": "loss.kl_coef", "actor_rollout_ref.rollout.n": "rollout.group_size",
    "algorithm.filter_groups.enable": "dynamic_sampling.enabled",
    "max_completion_lenght": "rollout.max_response_tokens",
}  # fmt: skip


@pytest.mark.parametrize("typed", MEANT)
def test_nearest_names_what_was_meant(typed):
    found = config.nearest(typed).removeprefix("; did you mean ").rstrip("?").split(", ")
    assert MEANT[typed] in found


def changed(c=None, **fields):
    """A config with `section__field=value` set."""
    c = c or config.base()
    c.update({name.replace("__", "."): value for name, value in fields.items()})
    return c


LARGE = "a number of that size is too large, at most 4194304"
MISTAKES = [  # the beginning of the line that is said
    *tables.cases("config_mistakes"),
    {"fields": {"rollout.chunk": 10**5000}, "says": f"rollout.chunk: {LARGE}"},
    {"fields": {"optim.clip_norm": 10**400}, "says": "optim.clip_norm: 1e+300 is too large, at"},
]


def test_what_goes_together_is_what_the_page_says():
    """Each pair of its table; and with each row all others that no pair of them forbids."""
    page = (PACKAGE.parent / "docs/on_a_pod.md").read_text().partition("<!-- TOGETHER -->")[2]
    rows = re.findall(r"^\| \d+ \| (`.*`) \| (.*) \|$", page, re.M)
    typed = lambda x: ast.literal_eval(x) if x[0] in ".0123456789FT" else x
    fields = [re.findall("`(.*?)=(.*?)`", names) for names, _ in rows]
    cell = lambda *pair: rows[max(pair)][1].split("|")[min(pair)].strip()

    def refused(*chosen: int) -> str:
        c = config.base()
        c.update({name: typed(x) for i in chosen for name, x in fields[i]})
        try:
            return config.validate(c, 1) or ""
        except config.ConfigError as error:
            return str(error)

    assert len(rows) == 12
    for i in range(12):
        together = [i]
        for j in {*range(12)} - {i}:
            line = refused(j, i) if cell(i, j) != "-" else ""
            assert bool(line) == (cell(i, j) == "no") and "\n" not in line, (i + 1, j + 1, line)
            if all(cell(j, k) not in ("-", "no") for k in together):
                together.append(j)
        assert not refused(*together), together


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case["says"][:45])
def test_a_mistake_is_one_line_that_names_its_field(case):
    c = config.base()
    c.update(case["fields"])
    with pytest.raises(config.ConfigError) as error:
        config.validate(c, case.get("devices", 1))
    line = str(error.value)
    assert line.removeprefix("config.").startswith(case["says"]) and "\n" not in line


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(
        config.ConfigError, match="lr: -1.0 is .*\\nconfig.optim.b1: 1.0 is too large"
    ):
        config.validate(changed(optim__b1=1.0, optim__lr=-1.0), 1)
    here = tmp_path / "a.jsonl"
    here.write_text("")
    c = changed(data__train=f"{here},/nope.parquet", eval__files=f"x={here},y=/no", mesh__data=3)
    c = changed(c, model__path="/nothere", supervised_warmup__skill_steps=5)
    with pytest.raises(config.ConfigError) as error:
        config.validate(c, 1, files=True)
    lines = [line.split(": ") for line in str(error.value).splitlines()]
    assert [line[:2] for line in lines[:4]] == [
        ["config.data.train", "/nope.parquet"],
        ["config.eval.files", "/no"],
        ["config.model.path", "/nothere"],
        ["config.mesh", "data=3 x fsdp=-1 x tensor=1 cannot be laid over 1 devices; use sizes whose"
         " product is 1, or one -1 beside sizes whose product divides it"],
    ]  # fmt: skip
    assert [line[0] for line in lines[4:]] == ["config.supervised_warmup"]


def test_one_array_is_split_once_over_a_mesh_axis():
    rules = {"vocab": "fsdp", "embed": "fsdp", "batch": "data"}
    with pytest.raises(ValueError, match="config.sharding: vocab='fsdp', embed='fsdp' are of one"):
        parallel.spec(("vocab", "embed", None), rules)


def test_resolve_mesh_fills_what_is_left():
    for mesh, devices, sizes in (
        ((1, -1, 1), 8, (1, 8, 1)), ((2, -1, 2), 8, (2, 2, 2)), ((-1, 2, 1), 8, (4, 2, 1)),
        ((2, 2, 2), 8, (2, 2, 2)), ((1, -1, 1), 1, (1, 1, 1)),
    ):  # fmt: skip
        c = changed(**{f"mesh__{a}": n for a, n in zip(parallel.AXES, mesh, strict=True)})
        assert tuple(config.resolve_mesh(c, devices).values()) == sizes


def test_row_tokens_is_derived_or_given():
    assert config.row_tokens(changed(data__max_prompt_tokens=30)) == 64  # 62, in eights
    assert config.row_tokens(changed(optim__row_tokens=100)) == 100
    c = changed(mesh__fsdp=4, mesh__tensor=2, optim__row_tokens=65, sharding__train__sequence="")
    config.validate(c, 8)  # not split over tensor


def test_warnings():
    ramp = "loss.overlong_filter='group' without the soft ramp (reward.overlong_penalty=0)"
    for fields, words in (
        ({}, []),
        (dict(rollout__top_p=0.9), ["rollout.top_p=0.9"]),
        (dict(loss__overlong_filter="group"), []),
        (dict(loss__overlong_filter="group", reward__overlong_penalty=0.0), [ramp]),
    ):
        lines = validation.warnings(changed(**fields))
        assert [line[: len(word)] for line, word in zip(lines, words, strict=True)] == words
