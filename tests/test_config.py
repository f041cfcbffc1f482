"""The config: every field read and in bounds, every mistake one line, presets as published."""

import ast
import copy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import dapo_jax
from dapo_jax import config, gate, parallel
from dapo_jax.config import schema, validation
from dapo_jax.model import qwen2

PACKAGE = Path(dapo_jax.__file__).parent

# --- The fields ---

# What a section's fields are read from, besides `c.optim` and `config.optim`: a parameter with its
# type (`settings: Advantage`), its name, or `self` within it.
KINDS = {name: type(getattr(config.base(), name)).__name__ for name in config.base().to_dict()}
SECTIONS = {name: name for name in KINDS if KINDS[name] not in ("int", "str")}
SECTIONS |= {kind: name for name, kind in KINDS.items() if name in SECTIONS}
SECTIONS |= {"lora": "model.lora", "Lora": "model.lora"}


def chain(node) -> list[str]:
    """a.b.c -> ['a', 'b', 'c']; [] where the root is no name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) else []


def aliases(function: ast.FunctionDef) -> dict[str, str]:
    """Local name -> the section it stands for: typed or named parameters, `x = config.optim`."""
    out = {"c": "", "config": ""}
    for a in function.args.args + function.args.kwonlyargs:
        kind = a.annotation and (chain(a.annotation) or [""])[-1]
        if (section := SECTIONS.get(kind) or SECTIONS.get(a.arg)) is not None:
            out[a.arg] = section
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if both else [(target, value)]
            for name, of in pairs:
                root, *rest = chain(of) or [""]
                if isinstance(name, ast.Name) and root in ("c", "config") and rest:
                    out[name.id] = ".".join(rest)
                section = SECTIONS.get(rest[0].lstrip("_")) if root == "self" and rest else None
                if isinstance(name, ast.Name) and section:
                    out[name.id] = section
    return out


def reads(tree: ast.AST) -> set[str]:
    """Dotted names of the fields that the code reads; what it only assigns does not count."""
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            known = aliases(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    root, *rest = chain(node) or [""]
                    if root == "self" and rest:  # self._guard.hang_factor
                        root, *rest = rest[0].lstrip("_"), *rest[1:]
                        known = known | {root: SECTIONS[root]} if root in SECTIONS else known
                    if root in known:
                        found.add(".".join(filter(None, [known[root], *rest])))
    return found


def test_every_field_is_read_by_the_code():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        if file.parent.name == "config":  # checks and presets are no use of a field
            keep = {"row_tokens", "resolve_mesh", "warm_up", "micro_rows"}
            tree.body = [n for n in tree.body if getattr(n, "name", "") in keep]
        found |= reads(tree)
    # `qwen2.shape_from_config` takes all that a Shape has.
    found |= {f"model.{name}" for name in qwen2.Shape._fields}
    # Read as whole tables: `resolve_mesh` takes all of mesh, `parallel.spec` looks up by axis.
    assert {"mesh", "sharding.train", "sharding"} <= found
    tables = ("mesh.", "sharding.")
    assert [n for n in config.SCHEMA if n not in found and not n.startswith(tables)] == []


def test_mesh_and_sharding_tables_hold_what_the_code_looks_up():
    c, used, is_axes = config.base(), set(), lambda x: isinstance(x, tuple)
    assert tuple(c.mesh) == parallel.AXES
    for tied in (False, True):
        c.model.tie_embeddings = tied
        axes = qwen2.metadata(qwen2.shape_from_config(c), "axes")
        used |= {a for leaf in jax.tree.leaves(axes, is_leaf=is_axes) for a in leaf}
    for file in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and chain(call.func)[-1:] in (["constrain"], ["spec"]):
                for arg in ast.walk(ast.Tuple(call.args, ast.Load())):
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                        used.add(arg.value)
    assert set(c.sharding.train) == set(c.sharding.decode) == used
    for value in (*c.sharding.train.values(), *c.sharding.decode.values()):
        assert set(filter(None, value.split(","))) <= set(parallel.AXES)


def test_the_table_is_what_the_sections_declare():
    flat = config.leaves(config.base())
    assert list(flat) == list(config.SCHEMA)
    assert flat == {name: field.default for name, field in config.SCHEMA.items()}
    for name, field in config.SCHEMA.items():
        assert field.doc and field.mistake(name, field.default) is None, name
    assert not [n for n, f in config.SCHEMA.items() if "director" in f.doc and not f.path]
    assert set(schema.peers().values()) <= set(config.SCHEMA)
    assert not {*schema.peers()} & {*config.SCHEMA}


def test_a_config_is_copied_compared_and_set_by_name():
    c = config.paper()
    other = copy.deepcopy(c)
    other.update({"optim.lr": 1, "model": {"lora": {"rank": 4}}, "seed": 3})
    assert (other.optim.lr, other.model.lora.rank, other.seed) == (1.0, 4, 3)
    assert type(other.optim.lr) is float and c.model.lora.rank == 0 and c != other
    c.update(config.leaves(other))
    assert c == other and c.to_dict() == other.to_dict()
    assert c.to_dict()["model"]["lora"] == dict(rank=4, alpha=16.0, targets="q,k,v,o,gate,up,down")
    assert dict(c.mesh) == c.mesh.to_dict() and len(c.mesh) == 3 and "lr" not in c.mesh


def test_a_config_needs_no_jax():
    code = "import sys; from dapo_jax.config import cli, presets; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("c.optim.learning_rate = 1.0", "config.optim.learning_rate: no such field; did you mean"),
        ("c.model.lora.rnk = 1", "config.model.lora.rnk: no such field; did you mean model.lora.r"),
        ("c.nope.x = 1", "config.nope: no such field"),
        ("c.sampling.dynamic = False", "config.sampling: no such field"),
        ("c.update({'seed.x': 1})", "config.seed.x: no such field; did you mean seed?"),
        ("c.update({'optim': {'lrr': 1}})", "config.optim.lrr: no such field; did you mean optim."),
        ("c.optim.lr = '1e-6'", "config.optim.lr: wants float, got '1e-6' (str)"),
        ("c.rollout.groups = 8.0", "config.rollout.groups: wants int, got 8.0 (float)"),
        ("c.rollout.groups = True", "config.rollout.groups: wants int, got True (bool)"),
        ("c.dynamic_sampling.enabled = 1", "config.dynamic_sampling.enabled: wants bool, got 1"),
        ("c.optim.lr = True", "config.optim.lr: wants float, got True (bool)"),
        ("c.model.path = None", "config.model.path: wants str, got None (NoneType)"),
        ("c.optim = c.loss", "config.optim: wants a section of fields, got Loss("),
        ("c.seed = {'a': 1}", "config.seed: wants int, got {'a': 1} (dict)"),
        ("del c.optim.lr", "config.optim.lr: a field cannot be deleted"),
    ],
)
def test_a_wrong_assignment_is_one_line(statement, says):
    with pytest.raises(config.ConfigError) as error:
        exec(statement, {"c": config.base()})
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


MEANT = {
    "optim.learing_rate": "optim.lr", "lr": "optim.lr", "rollout.group_sise": "rollout.group_size",
    "temperature": "rollout.temperature", "loss.cliphigh": "loss.clip_high", "zzzzzzz": "",
    "optim.clip_low": "loss.clip_low", "curriculum.revisit_epoch": "curriculum.revisit_epochs",
    # other trainers' names
    "optim.learning_rate": "optim.lr", "loss.eps_clip": "loss.clip_low", "beta": "loss.kl_coef",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low", "trainer.total_epochs": "steps",
    "n_samples": "rollout.group_size", "actor_rollout_ref.rollout.n": "rollout.group_size",
    "num_generations": "rollout.group_size", "loss.loss_agg_mode": "loss.normalizer",
    "no_resampling_pass_rate": "curriculum.pass_rate_cap",
    "dynamic_filtering_reward_range": "curriculum.band_low",
    "algorithm.filter_groups.enable": "dynamic_sampling.enabled",
    "max_completion_lenght": "rollout.max_response_tokens",
}  # fmt: skip


@pytest.mark.parametrize("typed", MEANT)
def test_nearest_names_what_was_meant(typed):
    found = config.nearest(typed).removeprefix("; did you mean ").rstrip("?").split(", ")
    assert MEANT[typed] in found


# --- Validation ---


def changed(c=None, **fields):
    """A config with `section__field=value` set."""
    c = c or config.base()
    c.update({name.replace("__", "."): value for name, value in fields.items()})
    return c


def test_defaults_and_presets_are_valid():
    for devices in (1, 8):
        config.validate(config.base(), devices)
    for preset in (config.paper, config.verl, config.grpo):
        config.validate(changed(preset(), model__path="some/model", optim__micro_batch_rows=8), 8)


OUTSIDE = {  # a value beyond the bound of a field, or no choice of it, and what the line says then
    "rollout.group_size": (0, "0 is too small, at least 1"), "steps": (-1, "-1 is too small"),
    "rollout.max_response_tokens": (0, "0 is too small"), "loss.clip_low": (-0.1, "-0.1 is too s"),
    "rollout.top_p": (1.5, "1.5 is too large, at most 1"), "optim.lr": (-1e-6, "-1e-06 is too sm"),
    "rollout.temperature": (0.0, "0.0 is too small"), "eval.top_p": (0.0, "0.0 is too small"),
    "seed": (2**64, "18446744073709551616 is too large, at most 2147483647"),
    "rollout.chunk": (10**5000, "a number of that size is too large, at most 4194304"),
    "optim.max_skipped": (2**31, "2147483648 is too large, at most 2147483647"),
    "loss.entropy_enough": (1e13, "10000000000000.0 is too large"),
    "optim.b1": (1.0, "1.0 is too large, at most 0.999999"), "optim.b2": (1.0, "1.0 is too large"),
    "optim.eps": (0.0, "0.0 is too small, at least 1e-20"),
    "supervised_warmup.batch": (99999999999, "99999999999 is too large"),
    "optim.row_tokens": (9999999999999, "9999999999999 is too large"),
    "curriculum.pass_rate_cap": (1.5, "1.5 is too large"),
    "optim.weight_decay": (float("nan"), "wants a finite number, got nan"),
    "optim.clip_norm": (10**400, "1e+300 is too large, at most 1e+09"),
    "loss.normalizer": ("tokens", "'tokens' is not one of"),
    "model.dtype": ("float16", "'float16' is not one of float32"),
    "rollout.cache_dtype": ("fp8", "'fp8' is not one of model,"),
}  # fmt: skip


def test_values_out_of_bounds_are_one_line_each():
    c = config.base()
    c.update({name: value for name, (value, _) in OUTSIDE.items()})
    with pytest.raises(config.ConfigError) as error:
        config.validate(c, 1)
    said = {
        line[7:].split(": ")[0]: line.split(": ", 1)[1] for line in str(error.value).split("\n")
    }
    assert list(said) == [name for name in config.SCHEMA if name in OUTSIDE]
    assert not [n for n, line in said.items() if not line.startswith(OUTSIDE[n][1])]


MISTAKES = [  # fields, devices, how the line begins
    (dict(rollout__top_p=0.0), 1, "rollout.top_p: 0.0 is too small"),
    (dict(optim__lr=11), 1, "optim.lr: 11.0 is too large, at most 10"),
    # sizes
    (dict(rollout__group_size=1), 1, "rollout.group_size: 1 response makes no group"),
    (dict(rollout__group_size=1, dynamic_sampling__enabled=False), 1,
     "rollout.group_size: 1 response makes no group"),
    (dict(rollout__slots=100), 8, "rollout.slots = 100 is not divisible by 8"),
    (dict(rollout__prefill_prompts=4), 8, "rollout.prefill_prompts = 4 is not divisible"),
    (dict(rollout__groups=12), 1, "rollout.groups = 12 is not divisible by 8 (optim"),
    (dict(optim__row_tokens=63), 1, "optim.row_tokens: 63 cannot hold"),
    (dict(reward__overlong_buffer_tokens=33), 1, "reward.overlong_buffer_tokens: 33"),
    (dict(model__num_kv_heads=3), 1, "model.num_heads = 4 is not divisible by 3"),
    (dict(model__head_dim=15), 1, "model.head_dim = 15 must be even"),
    (dict(model__vocab_size=49, mesh__tensor=2), 8, "model.vocab_size = 49 is not"),
    (dict(model__intermediate_size=63, mesh__tensor=2), 8, "model.intermediate_size = 63 is not"),
    (dict(model__hidden_size=60), 8, "model.hidden_size = 60 is not divisible by 8 (mesh.fsdp)"),
    (dict(mesh__tensor=4), 8, "mesh.tensor = 4 does not divide the 2 key/value"),
    (dict(sharding__decode__kv_heads="fsdp,tensor"), 8,
     "model.num_kv_heads = 2 is not divisible by 8 (mesh fsdp,tensor, by sharding.decode"),
    (dict(sharding__train__vocab="data,data"), 1, "sharding.train.vocab: 'data,data': "),
    (dict(sharding__decode__mlp="rows"), 1, "sharding.decode.mlp: 'rows': wants each of"),
    (dict(mesh__fsdp=4, mesh__tensor=2, optim__row_tokens=65), 8,
     "length of a packed row = 65 is not divisible by 2 (the mesh axes of sharding.train.sequence;"
     " set optim.row_tokens to a multiple of 2)"),
    (dict(mesh__data=3), 8, "mesh: data=3 x fsdp=-1 x tensor=1 cannot be laid over 8"),
    (dict(mesh__fsdp=4), 8, "mesh: data=1 x fsdp=4 x tensor=1 wants 4 devices and"),
    (dict(mesh__fsdp=2), 1, "mesh: data=1 x fsdp=2 x tensor=1 wants 2 devices and"),
    (dict(mesh__data=-1), 8, "mesh: data=-1 x fsdp=-1 x tensor=1 cannot be laid"),
    (dict(mesh__data=0), 8, "mesh: data=0 x fsdp=-1"),
    # the algorithm
    (dict(loss__objective="no"), 1, "loss.objective: 'no' is not one of ppo, "),
    (dict(loss__objective="gspo", loss__dual_clip=3.0), 1, "loss.dual_clip: objective 'gsp"),
    (dict(loss__dual_clip=1.0), 1, "loss.dual_clip: 1.0 must exceed 1"),
    (dict(loss__importance_cap=2.0, loss__old_logprobs="reuse"), 1, "loss.importance_cap:"),
    (dict(loss__importance="token_mask"), 1, "loss.importance: 'token_mask' needs"),
    (dict(loss__importance_floor=0.5), 1, "loss.importance_floor: only a mask has one"),
    (dict(rollout__cache_dtype="int8"), 1, "rollout.cache_dtype: 'int8' samples"),
    (dict(rollout__staleness=1), 1, "rollout.staleness: trains on tokens of earlier"),
    (dict(rollout__staleness=1, loss__importance_cap=5.0, dynamic_sampling__refill=False), 1,
     "rollout.staleness: a batch that is short"),
    (dict(rollout__staleness=1, loss__importance_cap=5.0, curriculum__pass_rate_cap=0.9), 1,
     "rollout.staleness: a curriculum chooses by what earlier steps have finished"),
    (dict(dynamic_sampling__refill=False, dynamic_sampling__on_exhausted="stop"), 1,
     "dynamic_sampling.on_exhausted: 'stop' would end the run"),
    (dict(dynamic_sampling__surplus="carry", dynamic_sampling__enabled=False), 1,
     "dynamic_sampling.surplus:"),
    (dict(optim__schedule="cosine"), 1, "optim.decay_steps: schedule 'cosine' needs"),
    (dict(supervised_warmup__skill_steps=5, data__train="a.jsonl"), 1, "supervised_warmup:"),
    (dict(supervised_warmup__steps=5), 1, "supervised_warmup.steps: wants supervised_warm"),
    (dict(eval__stop_strings="a||b"), 1, "eval.stop_strings: 'a||b' has an empty text"),
    # LoRA
    (dict(model__lora__rank=2, model__lora__targets="q,x"), 1, "model.lora.targets: 'q,x'"),
    (dict(model__lora__rank=2, model__lora__targets="q,q"), 1, "model.lora.targets: 'q,q'"),
    (dict(model__lora__rank=2, model__lora__alpha=0.0), 1, "model.lora.alpha: 0 leaves"),
    (dict(model__lora__rank=64), 1, "model.lora.rank = 64 exceeds 32, the narrowest"),
    # curriculum
    (dict(curriculum__revisit_epochs=2), 1, "curriculum.revisit_epochs: wants pass"),
    (dict(curriculum__band_low=0.5, curriculum__band_high=0.5), 1, "curriculum.band_low: 0"),
    (dict(curriculum__band_high=0.8, dynamic_sampling__enabled=False), 1,
     "curriculum.band_low: a band is a rule of Dynamic Sampling"),
    (dict(curriculum__temperature_schedule="linear"), 1,
     "curriculum.temperature_steps: schedule 'linear' needs"),
    (dict(curriculum__temperature_steps=9), 1, "curriculum.temperature_schedule: 'constant' takes"),
    (dict(curriculum__temperature_schedule="cosine", curriculum__temperature_steps=9,
          dynamic_sampling__surplus="carry"), 1,
     "curriculum.temperature_schedule: the log-probs of groups carried over"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "devices", "message"), MISTAKES, ids=[m[2][:45] for m in MISTAKES]
)
def test_a_mistake_is_one_line_that_names_its_field(fields, devices, message):
    with pytest.raises(config.ConfigError) as error:
        config.validate(changed(**fields), devices)
    line = str(error.value)
    assert line.removeprefix("config.").startswith(message) and "\n" not in line


def test_all_mistakes_are_told_at_once(tmp_path):
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
        ["config.mesh", "data=3 x fsdp=-1 x tensor=1 cannot be laid over 1 devices; use at most one"
         " -1 and sizes whose product divides 1"],
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


# --- Presets ---

DAPO = {
    "loss.clip_low": 0.2, "loss.clip_high": 0.28, "loss.kl_coef": 0.0, "loss.entropy_coef": 0.0,
    "loss.overlong_filter": "off", "reward.correct": 1.0, "reward.wrong": -1.0,
    "reward.overlong_penalty": 1.0, "dynamic_sampling.enabled": True, "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
}  # fmt: skip
PAPER = DAPO | {
    "rollout.groups": 512, "rollout.group_size": 16, "rollout.max_response_tokens": 20480,
    "reward.overlong_buffer_tokens": 4096, "optim.lr": 1e-6, "optim.minibatches": 16, "eval.k": 32,
    "eval.top_p": 0.7, "optim.b2": 0.999, "optim.clip_norm": 1.0, "advantage.ddof": 1,
    "dynamic_sampling.max_rounds": 10, "optim.warmup_steps": 20, "optim.weight_decay": 0.0,
}  # fmt: skip
ITS_LOSS = {"loss.normalizer": "batch_tokens", "loss.dual_clip": 0.0}
HOLDS = {
    "base": (config.base, DAPO | ITS_LOSS),
    "section 4.1": (config.paper, PAPER | ITS_LOSS),  # verl's reading of it: test_configs
    "grpo": (config.grpo, {
        "loss.clip_low": 0.2, "loss.clip_high": 0.2, "loss.normalizer": "sequence",
        "reward.overlong_penalty": 0.0, "dynamic_sampling.enabled": False,
    }),
    "grpo of the paper": (lambda: config.grpo(config.paper()), {
        "rollout.groups": 512, "loss.normalizer": "sequence",
    }),
}  # fmt: skip


@pytest.mark.parametrize("preset", HOLDS)
def test_a_preset_holds_what_was_published(preset):
    make, want = HOLDS[preset]
    flat = config.leaves(make())
    assert {name: flat[name] for name in want} == want


def test_sections_alone_know_their_names():
    with pytest.raises(gate.UnknownField, match=r"^config\.loss\.clip_hgh: no such field; did you"):
        _ = config.base().loss.clip_hgh
    assert not hasattr(config.base(), "nothing") and not hasattr(config.base(), "__nothing__")
