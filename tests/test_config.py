"""The schema: every field read, every mistake one line that names it, presets as published."""

import ast
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax import config, parallel
from dapo_jax.config import schema, validation
from dapo_jax.model import qwen2

PACKAGE = Path(dapo_jax.__file__).parent
SECTIONS = {name.split(".")[0] for name in config.SCHEMA if "." in name}

# ------------------------------------------------------------------------------------------------
# Every field is read
# ------------------------------------------------------------------------------------------------


def chain(node) -> list[str]:
    """a.b.c -> ['a', 'b', 'c']; [] where the root is no name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) else []


def reads(tree: ast.AST) -> set[str]:
    """Dotted names behind `c.` or `config.`, or behind a parameter named like a section, that the
    code reads; what it only assigns does not count."""
    found = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        parameters = {a.arg for a in function.args.args}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                root, *rest = chain(node) or [""]
                if root in ("c", "config"):
                    found.add(".".join(rest))
                elif root in SECTIONS & parameters:
                    found.add(".".join([root, *rest]))
    return found


def test_the_scan_tells_reading_from_writing():
    code = "def f(c, loss, x):\n c.optim.lr = c.seed\n x.optim.b1\n y = loss.clip_low + optim.b2"
    assert reads(ast.parse(code)) == {"seed", "optim", "loss.clip_low"}


def test_every_field_is_read_by_the_code():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        if file.name in ("validation.py", "presets.py"):  # checks and presets are no use of a field
            keep = {"row_tokens", "resolve_mesh"}
            tree.body = [n for n in tree.body if getattr(n, "name", "") in keep]
        found |= reads(tree)
    # Read as whole tables: `resolve_mesh` takes all of mesh, `parallel.spec` looks up by axis.
    assert {"mesh", "sharding.train", "sharding"} <= found
    tables = ("mesh.", "sharding.")
    unread = [n for n in config.SCHEMA if n not in found and not n.startswith(tables)]
    assert unread == []


def test_mesh_and_sharding_tables_hold_what_the_code_looks_up():
    c = config.base()
    assert tuple(c.mesh) == parallel.AXES
    used = set()
    for tied in (False, True):
        c.model.tie_embeddings = tied
        axes = qwen2.metadata(qwen2.shape_from_config(c), "axes")
        used |= {a for leaf in _tuples(axes) for a in leaf}
    for file in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and chain(call.func)[-1:] in (["constrain"], ["spec"]):
                for arg in ast.walk(ast.Tuple(call.args, ast.Load())):
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                        used.add(arg.value)
    assert set(c.sharding.train) == set(c.sharding.decode) == used
    for value in (*c.sharding.train.values(), *c.sharding.decode.values()):
        assert set(filter(None, value.split(","))) <= set(parallel.AXES)


def _tuples(tree):
    if isinstance(tree, tuple):
        return [tree]
    return [leaf for child in tree.values() for leaf in _tuples(child)]


def test_every_field_has_a_meaning_and_a_default_within_its_bounds():
    for name, field in config.SCHEMA.items():
        assert field.doc, name
        assert validation._check_field(name, field.default) is None


# ------------------------------------------------------------------------------------------------
# Validation
# ------------------------------------------------------------------------------------------------


def changed(c=None, **fields):
    """A config with `section__field=value` set, whatever the type."""
    c = c or config.base()
    with c.unlocked(), c.ignore_type():
        for name, value in fields.items():
            *parents, leaf = name.split("__")
            node = c
            for parent in parents:
                node = node[parent]
            node[leaf] = value
    return c


@pytest.mark.parametrize("devices", [1, 8])
def test_defaults_are_valid(devices):
    config.validate(config.base(), devices)


def test_presets_are_valid_for_a_real_model():
    for preset in (config.paper, config.verl, config.grpo):
        config.validate(changed(preset(), model__path="some/model", optim__micro_batch_rows=8), 8)


MISTAKES = [
    # out of range
    (dict(rollout__group_size=0), 1, "config.rollout.group_size: 0 is too small, at least 1"),
    (dict(rollout__group_size=1), 1, "config.rollout.group_size: 1 response makes no group"),
    (
        dict(rollout__group_size=1, dynamic_sampling__enabled=False),
        1,
        "config.rollout.group_size: 1 response makes no group",
    ),
    (dict(rollout__max_response_tokens=0), 1, "config.rollout.max_response_tokens: 0 is too small"),
    (dict(rollout__top_p=1.5), 1, "config.rollout.top_p: 1.5 is too large, at most 1"),
    (dict(rollout__top_p=0.0), 1, "config.rollout.top_p: 0.0 is too small"),
    (dict(rollout__temperature=0.0), 1, "config.rollout.temperature: 0.0 is too small"),
    (dict(loss__clip_low=-0.1), 1, "config.loss.clip_low: -0.1 is too small"),
    (dict(optim__lr=-1e-6), 1, "config.optim.lr: -1e-06 is too small"),
    (dict(optim__lr=float("nan")), 1, "config.optim.lr: wants a finite number, got nan"),
    (dict(steps=-1), 1, "config.steps: -1 is too small"),
    # type
    (dict(optim__lr="1e-6"), 1, "config.optim.lr: wants float, got '1e-6' (str)"),
    (dict(rollout__groups=8.0), 1, "config.rollout.groups: wants int, got 8.0 (float)"),
    (dict(dynamic_sampling__enabled=1), 1, "config.dynamic_sampling.enabled: wants bool"),
    (dict(rollout__groups=True), 1, "config.rollout.groups: wants int, got True (bool)"),
    (dict(model__path=None), 1, "config.model.path: wants str, got None (NoneType)"),
    # choice
    (dict(loss__normalizer="tokens"), 1, "config.loss.normalizer: 'tokens' is not one of"),
    (dict(model__dtype="float16"), 1, "config.model.dtype: 'float16' is not one of float32"),
    # beyond what a number can be
    (dict(seed=2**64), 1, "config.seed: 18446744073709551616 is too large, at most 2147483647"),
    (dict(steps=10**5000), 1, "config.steps: a number of that size is too large, at most"),
    (dict(optim__b1=1.0), 1, "config.optim.b1: 1.0 is too large, at most 0.999999"),
    (dict(optim__b2=1.0), 1, "config.optim.b2: 1.0 is too large, at most 0.999999"),
    (dict(optim__eps=0.0), 1, "config.optim.eps: 0.0 is too small, at least 1e-20"),
    (dict(supervised_warmup__batch=99999999999), 1, "config.supervised_warmup.batch: 99999999999"),
    (dict(optim__row_tokens=9999999999999), 1, "config.optim.row_tokens: 9999999999999 is too"),
    # mesh axes
    (dict(sharding__train__vocab="data,data"), 1, "config.sharding.train.vocab: 'data,data': "),
    (dict(sharding__decode__mlp="rows"), 1, "config.sharding.decode.mlp: 'rows': wants each of"),
    # names
    (dict(optim__learning_rate=1.0), 1, "config.optim.learning_rate: no such field"),
    # relations
    (dict(rollout__slots=100), 8, "config.rollout.slots = 100 is not divisible by 8"),
    (dict(rollout__prefill_prompts=4), 8, "config.rollout.prefill_prompts = 4 is not divisible"),
    (dict(rollout__groups=12), 1, "config.rollout.groups = 12 is not divisible by 8 (optim"),
    (dict(model__num_kv_heads=3), 1, "model.num_heads = 4 is not divisible by 3"),
    (dict(model__head_dim=15), 1, "model.head_dim = 15 must be even"),
    (dict(model__vocab_size=49, mesh__tensor=2), 8, "model.vocab_size = 49 is not"),
    (dict(model__intermediate_size=63, mesh__tensor=2), 8, "model.intermediate_size = 63 is not"),
    (dict(model__hidden_size=60), 8, "model.hidden_size = 60 is not divisible by 8 (mesh.fsdp)"),
    (dict(mesh__tensor=4), 8, "config.mesh.tensor = 4 does not divide the 2 key/value"),
    (dict(sharding__decode__kv_heads="fsdp,tensor"), 8,
     "model.num_kv_heads = 2 is not divisible by 8 (mesh fsdp,tensor, by sharding.decode"),
    (dict(optim__row_tokens=63), 1, "config.optim.row_tokens: 63 cannot hold"),
    (dict(reward__overlong_buffer_tokens=33), 1, "config.reward.overlong_buffer_tokens: 33"),
    (dict(loss__dual_clip=1.0), 1, "config.loss.dual_clip: 1.0 must exceed 1"),
    (dict(loss__importance_cap=2.0, loss__old_logprobs="reuse"), 1, "config.loss.importance_cap:"),
    (dict(rollout__cache_dtype="int8"), 1, "config.rollout.cache_dtype: 'int8' samples"),
    (
        dict(rollout__cache_dtype="int8", loss__old_logprobs="reuse"),
        1,
        "config.rollout.cache_dtype: 'int8' samples",
    ),
    (dict(rollout__cache_dtype="fp8"), 1, "config.rollout.cache_dtype: 'fp8' is not one of model,"),
    (
        dict(dynamic_sampling__surplus="carry", dynamic_sampling__enabled=False),
        1,
        "config.dynamic_sampling.surplus:",
    ),
    (dict(supervised_warmup__skill_steps=5, data__train="a.jsonl"), 1, "config.supervised_warmup:"),
    # curriculum
    (dict(curriculum__pass_rate_cap=1.5), 1, "config.curriculum.pass_rate_cap: 1.5 is too large"),
    (dict(curriculum__revisit_epochs=2), 1, "config.curriculum.revisit_epochs: wants pass"),
    (dict(curriculum__band_low=0.5, curriculum__band_high=0.5), 1, "config.curriculum.band_low: 0"),
    (
        dict(curriculum__band_high=0.8, dynamic_sampling__enabled=False),
        1,
        "config.curriculum.band_low: a band is a rule of Dynamic Sampling",
    ),
    (
        dict(curriculum__temperature_schedule="linear"),
        1,
        "config.curriculum.temperature_steps: schedule 'linear' needs",
    ),
    (
        dict(
            rollout__staleness=1,
            loss__old_logprobs="recompute",
            loss__importance_cap=5.0,
            curriculum__pass_rate_cap=0.9,
        ),
        1,
        "config.rollout.staleness: a curriculum chooses by what earlier steps have finished",
    ),
    (
        dict(curriculum__temperature_steps=9),
        1,
        "config.curriculum.temperature_schedule: 'constant' takes no temperature_steps",
    ),
    (
        dict(
            curriculum__temperature_schedule="cosine",
            curriculum__temperature_steps=9,
            dynamic_sampling__surplus="carry",
        ),
        1,
        "config.curriculum.temperature_schedule: the log-probs of groups carried over",
    ),
    # mesh
    (dict(mesh__data=3), 8, "config.mesh: data=3 x fsdp=-1 x tensor=1 cannot be laid over 8"),
    (dict(mesh__fsdp=4), 8, "config.mesh: data=1 x fsdp=4 x tensor=1 wants 4 devices and"),
    (dict(mesh__fsdp=2), 1, "config.mesh: data=1 x fsdp=2 x tensor=1 wants 2 devices and"),
    (dict(mesh__data=-1), 8, "config.mesh: data=-1 x fsdp=-1 x tensor=1 cannot be laid"),
    (dict(mesh__data=0), 8, "config.mesh: data=0 x fsdp=-1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "devices", "message"), MISTAKES, ids=[m[2][:45] for m in MISTAKES]
)
def test_a_mistake_is_one_line_that_names_its_field(fields, devices, message):
    with pytest.raises(config.ConfigError) as error:
        config.validate(changed(**fields), devices)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(config.ConfigError) as error:
        config.validate(changed(rollout__group_size=0, loss__normalizer="x", optim__lr="y"), 1)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "config.rollout.group_size",
        "config.loss.normalizer",
        "config.optim.lr",
    ]


def test_peers_names_are_not_ours_and_lead_to_fields():
    assert set(schema.PEERS) <= set(config.SCHEMA)
    assert not {*schema._OF_PEERS} & {*config.SCHEMA}


def test_missing_files_are_told_with_the_other_mistakes(tmp_path):
    here = tmp_path / "a.jsonl"
    here.write_text("")
    c = changed(data__train=f"{here},/nope.parquet", eval__files=f"x={here},y=/no", mesh__data=3)
    c = changed(c, model__path="/nothere", supervised_warmup__skill_steps=5)
    with pytest.raises(config.ConfigError) as error:
        config.validate(c, 1, files=True)
    assert [line.split(": ")[:2] for line in str(error.value).splitlines()] == [
        ["config.data.train", "/nope.parquet"],
        ["config.eval.files", "/no"],
        ["config.model.path", "/nothere"],
        ["config.mesh", "data=3 x fsdp=-1 x tensor=1 cannot be laid over 1 devices; use at most one"
         " -1 and sizes whose product divides 1"],
        ["config.supervised_warmup", str(error.value).splitlines()[-1].split(": ")[1]],
    ]  # fmt: skip


def test_one_array_is_split_once_over_a_mesh_axis():
    rules = {"vocab": "fsdp", "embed": "fsdp", "batch": "data"}
    with pytest.raises(ValueError, match="config.sharding: vocab='fsdp', embed='fsdp' are of one"):
        parallel.spec(("vocab", "embed", None), rules)


def test_a_missing_field_is_named():
    c = config.base()
    with c.unlocked():
        del c.optim.lr
    with pytest.raises(config.ConfigError, match=r"^config\.optim\.lr: missing$"):
        config.validate(c, 1)


def test_a_whole_number_is_a_float():
    config.validate(changed(optim__lr=1), 1)


def test_base_is_locked():
    c = config.base()
    with pytest.raises(AttributeError):
        c.optim.learning_rate = 1.0


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optim.learing_rate", "optim.lr"),
        ("lr", "optim.lr"),
        ("rollout.group_sise", "rollout.group_size"),
        ("temperature", "rollout.temperature"),
        ("loss.cliphigh", "loss.clip_high"),
        ("optim.clip_low", "loss.clip_low"),
        # peers' names
        ("optim.learning_rate", "optim.lr"),
        ("actor_rollout_ref.actor.clip_ratio_low", "loss.clip_low"),
        ("loss.eps_clip", "loss.clip_low"),
        ("n_samples", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("num_generations", "rollout.group_size"),
        ("no_resampling_pass_rate", "curriculum.pass_rate_cap"),
        ("dynamic_filtering_reward_range", "curriculum.band_low"),
        ("curriculum.revisit_epoch", "curriculum.revisit_epochs"),
        ("loss.loss_agg_mode", "loss.normalizer"),
        ("beta", "loss.kl_coef"),
        ("trainer.total_epochs", "steps"),
        ("algorithm.filter_groups.enable", "dynamic_sampling.enabled"),
        ("max_completion_lenght", "rollout.max_response_tokens"),
    ],
)
def test_nearest_names_what_was_meant(typed, meant):
    assert meant in config.nearest(typed).removeprefix("; did you mean ").rstrip("?").split(", ")


def test_nearest_is_silent_where_nothing_is_close():
    assert config.nearest("zzzzzzz") == ""


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        ((1, -1, 1), 8, (1, 8, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((-1, 2, 1), 8, (4, 2, 1)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((1, -1, 1), 1, (1, 1, 1)),
    ],
)
def test_resolve_mesh_fills_what_is_left(mesh, devices, sizes):
    c = changed(**{f"mesh__{a}": n for a, n in zip(parallel.AXES, mesh, strict=True)})
    assert tuple(config.resolve_mesh(c, devices).values()) == sizes


def test_row_tokens_is_derived_or_given():
    assert config.row_tokens(changed(data__max_prompt_tokens=30)) == 64  # 62, in eights
    assert config.row_tokens(changed(optim__row_tokens=100)) == 100


def test_leaves_are_the_schema():
    flat = config.leaves(config.base())
    assert list(flat) == list(config.SCHEMA)
    assert flat == {name: field.default for name, field in config.SCHEMA.items()}


# ------------------------------------------------------------------------------------------------
# Presets
# ------------------------------------------------------------------------------------------------


def holds(c, **fields):
    flat = config.leaves(c)
    want = {name.replace("__", "."): value for name, value in fields.items()}
    assert {name: flat[name] for name in want} == want


DAPO = dict(
    loss__clip_low=0.2,
    loss__clip_high=0.28,
    loss__kl_coef=0.0,
    loss__entropy_coef=0.0,
    loss__overlong_filter="off",
    reward__correct=1.0,
    reward__wrong=-1.0,
    reward__overlong_penalty=1.0,
    dynamic_sampling__enabled=True,
    rollout__temperature=1.0,
    rollout__top_p=1.0,
)
PAPER = DAPO | dict(
    rollout__groups=512,
    rollout__group_size=16,
    rollout__max_response_tokens=20480,
    reward__overlong_buffer_tokens=4096,
    optim__lr=1e-6,
    optim__minibatches=16,
    eval__k=32,
    eval__top_p=0.7,
)


def test_base_is_dapo():
    holds(config.base(), **DAPO, loss__normalizer="batch_tokens", loss__dual_clip=0.0)


def test_paper_holds_the_numbers_of_section_4_1():
    holds(
        config.paper(),
        **PAPER,
        optim__warmup_steps=20,
        optim__weight_decay=0.0,
        loss__normalizer="batch_tokens",
        loss__dual_clip=0.0,
    )


def test_verl_differs_from_the_paper_where_it_does():
    holds(
        config.verl(),
        **PAPER,
        optim__warmup_steps=10,
        optim__warmup_from_zero=True,
        optim__weight_decay=0.1,
        optim__b2=0.999,
        optim__clip_norm=1.0,
        loss__dual_clip=10.0,
        loss__normalizer="chunk_tokens",
        dynamic_sampling__max_rounds=10,
        advantage__ddof=1,
    )


def test_grpo_is_the_paper_s_starting_point():
    holds(
        config.grpo(),
        loss__clip_low=0.2,
        loss__clip_high=0.2,
        loss__normalizer="sequence",
        reward__overlong_penalty=0.0,
        dynamic_sampling__enabled=False,
    )
    holds(config.grpo(config.paper()), rollout__groups=512, loss__normalizer="sequence")


def test_warnings():
    assert config.warnings(config.base()) == []
    (line,) = config.warnings(changed(rollout__top_p=0.9))
    assert line.startswith("rollout.top_p=0.9")
    assert config.warnings(changed(loss__overlong_filter="group")) == []
    c = changed(loss__overlong_filter="group", reward__overlong_penalty=0.0)
    (line,) = config.warnings(c)
    assert "overlong_filter" in line and "overlong_penalty" in line


def test_rows_split_over_tensor_devices_must_divide():
    c = config.base()
    c.mesh.fsdp, c.mesh.tensor, c.optim.row_tokens = 4, 2, 65
    with pytest.raises(config.ConfigError, match="65 is not divisible by 2 .*multiple of 2"):
        config.validate(c, 8)
    c.sharding.train.sequence = ""  # no longer split
    config.validate(c, 8)
