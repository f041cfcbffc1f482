"""LoRA: adapters beside the weights of a block, against float64 and NumPy; what is trained, saved
and published."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from levels import compiled_soon, slow
from rounding import EPS, assert_near, reference
from test_qwen2 import QWEN3, SEGMENTS, TINY, hidden, oracle_logits
from test_train import arrays, assert_same_bits, run, small, without_clocks
from test_update import ALL_ON, RULES, SHAPE, knobs, make_batch, mesh_of, oracle_loss, packed, start

from dapo_jax import build, config, convert, plan
from dapo_jax.config import schema, validation
from dapo_jax.dapo import update
from dapo_jax.log import metrics
from dapo_jax.model import adapters, hf, learner, qwen2
from dapo_jax.pods import topology
from dapo_jax.run import policy

LORA = adapters.Lora(4, 10.0, qwen2.LINEAR, "float32")


def model(shape, seed=0, size=0.1):
    """A model with adapters that are far from zero."""
    params = qwen2.adapted(shape, qwen2.init(shape.merged, jax.random.key(7)), jax.random.key(8))
    rng = np.random.default_rng(seed)
    random = lambda w: jnp.asarray(size * rng.normal(size=w.shape), jnp.float32)
    return adapters.with_trained(params, jax.tree.map(random, adapters.trained(params)))


def merged(params, lora, xp=np):
    """W + alpha / r A B; by NumPy in float64."""
    if xp is np:
        params = jax.tree.map(np.float64, jax.device_get(params))
    blocks = {k: w for k, w in params["blocks"].items() if k != "lora"}
    for name in lora.targets:
        a, b = (params["blocks"]["lora"][f"{name}_{x}"] for x in "ab")
        flat = a.reshape(len(a), -1, lora.rank), b.reshape(len(b), lora.rank, -1)
        product = xp.einsum("lir,lro->lio", *flat).reshape(blocks[name].shape)
        blocks[name] = blocks[name] + lora.alpha / lora.rank * product
    return params | {"blocks": blocks}


FORWARD = [
    (QWEN3, qwen2.LINEAR),  # its norms come behind the adapters of q and k
    *(
        slow(SHAPE._replace(scan_layers=scan), targets)
        for scan in (False, True)
        for targets in (qwen2.LINEAR, ("q", "v"), ("o", "down"))
    ),
]


@pytest.mark.parametrize(("shape", "targets"), FORWARD)
def test_merged_equals_the_adapters_forward(shape, targets):
    shape = shape._replace(lora=LORA._replace(targets=targets))
    params, tokens = model(shape), np.random.default_rng(1).integers(0, shape.vocab_size, (3, 17))

    def oracle(p):
        whole = merged(p, shape.lora, jnp)
        return whole, oracle_logits(shape, whole, tokens, jnp)

    want = reference(oracle, params)
    logits = qwen2.bind(shape, params)(tokens)
    whole = jax.jit(functools.partial(adapters.merge, shape.lora))(params)
    for got in (logits, qwen2.bind(shape.merged, whole)(tokens)):
        assert_near((whole, got), want)
    without = qwen2.bind(shape.merged, adapters.base(params))(tokens)
    assert np.abs(logits - without).max() > 0.1  # adapters that say something


def test_a_backward_pass_makes_the_adapters_second_products_again():
    """As large as those of the weights, which alone are kept; by the FLOPs of both passes."""
    shape = TINY._replace(lora=LORA._replace(rank=3), attention="splash", scan_layers=True)
    params = model(shape)
    loss = lambda p, remat: hidden.__wrapped__(shape._replace(remat=remat), p).sum()
    traced = lambda remat: jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params, remat)
    flops = lambda remat: topology.matmul_flops(traced(remat).jaxpr)
    widths = 4 * 4 + 2 * 2 * 4 + 16 + 2 * 24  # q, k and v, o, gate and up; `down` ends a block
    again = flops("dots_attention") - flops("none")
    assert again == 2 * SEGMENTS.size * 3 * widths * shape.num_layers


@pytest.fixture(scope="module")
def truth():
    """(shape, parameters, batch, `reference` of the adapters' gradient by the dense oracle of
    test_update.py at merged weights)."""
    shape = SHAPE._replace(lora=LORA)
    params = model(shape, size=0.02)
    whole = jax.tree.map(np.float32, merged(params, LORA))
    batch = make_batch(whole, [-0.6, -0.1, 0.0, 0.1, 0.4, 2.6])

    def loss(own, params):
        whole = merged(adapters.with_trained(params, own), LORA, jnp)
        return oracle_loss(whole, batch, ALL_ON)[0]

    params = jax.device_get(params)
    return shape, params, batch, reference(jax.grad(loss), adapters.trained(params), params)


MESHES = [dict(), dict(data=2, fsdp=2, tensor=2)]


@pytest.mark.parametrize("sizes", [MESHES[0], slow(MESHES[1])], ids=str)
def test_gradients_are_the_adapters_alone_and_right(truth, sizes):
    shape, params, batch, want = truth
    setup = learner.Setup(mesh_of(**sizes), RULES, learner.optax.trace(decay=0.0), "float32")
    programs = update.Trainer(shape, setup)
    given, _ = packed(programs, batch, micro_rows=4)
    how = knobs(ALL_ON)._replace(lr=np.float32(0.5))
    after, opt_state, log = programs.update(*start(programs, params), given, how)
    got, after = jax.device_get((opt_state.trace, after))
    assert not log["skipped"]
    assert jax.tree.structure(got) == jax.tree.structure(adapters.trained(params))
    assert_near(got, want)
    assert_same_bits(adapters.base(after), adapters.base(params))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), adapters.trained(after), got)
    assert all(jax.tree.leaves(moved))


@compiled_soon()
def test_adapters_begin_as_nothing_and_do_not_depend_on_the_mesh():
    shape = SHAPE._replace(lora=LORA)
    made = []
    for sizes in MESHES:
        setup = learner.Setup(mesh_of(**sizes), RULES, learner.optax.sgd(1.0), "float32")
        trainer = update.Trainer(shape, setup)
        params = trainer.init_params(np.array([0, 3], np.uint32))
        made.append(jax.device_get(trainer.adapted(params, np.array([0, 4], np.uint32))))
    for other in made[1:]:
        # jax 0.12 rounds the inverse of the error function otherwise where it is split.
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=5e-7), other, made[0])
    for name, x in made[0]["blocks"]["lora"].items():
        assert (x == 0).all() if name.endswith("_b") else x.std() > 0.5 * x[0, ..., 0].size ** -0.5
    setup = learner.Setup(mesh_of(), RULES, learner.optax.sgd(1.0), "float32")
    full = update.Trainer(SHAPE, setup)
    assert_same_bits(adapters.base(made[0]), full.init_params(np.array([0, 3], np.uint32)))
    assert_same_bits(adapters.merge(shape.lora, made[0]), adapters.base(made[0]))


def test_what_stays_is_in_the_compute_dtype_and_has_no_moments():
    shape = SHAPE._replace(lora=LORA._replace(dtype="bfloat16"))
    tx = learner.optimizer(0.9, 0.95, 1e-8, 0.01, 1.0)
    trainer = update.Trainer(shape, learner.Setup(mesh_of(), RULES, tx, "bfloat16"))
    params = trainer.adapted(trainer.init_params(np.zeros(2, np.uint32)), np.ones(2, np.uint32))
    kinds = {k: str(w.dtype) for k, w in flatten_dict(params).items()}
    assert kinds == {k: "float32" if "lora" in k else "bfloat16" for k in kinds}
    abstract, opt_state, *_ = trainer.abstract(1, 1, 8)
    assert {k: str(w.dtype) for k, w in flatten_dict(abstract).items()} == kinds
    wide = plan.published("Qwen/Qwen2.5-7B")._replace(lora=LORA._replace(rank=32))
    assert qwen2.adapter_count(wide) == 80_740_352  # as PEFT counts them
    n = qwen2.adapter_count(shape)
    assert sum(x.size for x in jax.tree.leaves(opt_state)) == 2 * n + 1  # and a count
    text = trainer.update.lower(*trainer.abstract(1, 1, 8)).as_text()
    whole = "x".join(map(str, params["blocks"]["up"].shape))
    assert f"tensor<{whole}xbf16>" in text and f"tensor<{whole}xf32>" not in text


def adapted(steps, **fields):
    return small(steps, **dict(model__lora__rank=4, optim__lr=3e-3) | fields)


@pytest.fixture(scope="module")
@compiled_soon()
def whole_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("lora") / "run"
    run(adapted(3, loss__kl_coef=0.1, checkpoint__export_every=3, checkpoint__keep=9), workdir)
    return workdir


@pytest.mark.slow
@compiled_soon()
def test_resume_continues_bit_for_bit(whole_run, tmp_path):
    c = lambda n: adapted(n, loss__kl_coef=0.1, checkpoint__keep=9)
    run(c(1), tmp_path / "cut")
    run(c(3), tmp_path / "cut")
    assert_same_bits(arrays(tmp_path / "cut", 3), arrays(whole_run, 3))
    logs = [without_clocks(w)[-1] for w in (whole_run, tmp_path / "cut")]
    assert logs[0]["policy/entropy"] == logs[1]["policy/entropy"]


@pytest.mark.slow
def test_a_run_trains_and_saves_adapters_and_leaves_the_base(whole_run):
    start, end = (arrays(whole_run, step) for step in (0, 3))
    assert_same_bits(adapters.base(end["params"]), adapters.base(start["params"]))
    assert all(x.any() for x in jax.tree.leaves(adapters.trained(end["params"])))
    assert start["ref_params"].keys() == {"blocks"} and "lora" in end["ref_params"]["blocks"]
    assert_same_bits(end["ref_params"], adapters.trained(start["params"]))
    moments = [x for x in jax.tree.leaves(end["opt_state"]) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(
        x.size for x in jax.tree.leaves(adapters.trained(end["params"]))
    )
    for record in metrics.read(whole_run / "metrics.jsonl")[1:]:
        assert record["policy/sampler_trainer_logprob_gap"] < 1e-4  # merged there, not here
    assert metrics.read(whole_run / "metrics.jsonl")[-1]["policy/ref_kl"] > 0


@pytest.mark.slow
@compiled_soon()
def test_every_reader_gets_merged_weights(whole_run, tmp_path):
    """Evaluation, `init_from`, export while training, convert."""
    c = adapted(3)
    lora = qwen2.lora_choice(c)
    want = merged(arrays(whole_run, 3)["params"], lora)
    # A sum of rank products and an addition; both sizes are below 8.
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=8 * (lora.rank + 1) * EPS)
    for reader in (c, small(3)):
        m = build.build_machine(reader, 48, (0, 1), None)
        got = policy.load_params(reader, m, policy.find_given(str(whole_run)))
        jax.tree.map(near, jax.device_get(got), want)
    shape, got = convert.load_params(whole_run)
    assert shape.lora is None
    jax.tree.map(near, jax.device_get(got), want)
    exported = whole_run / "export" / "step_3"
    rounded = jax.tree.map(lambda w: np.asarray(jnp.asarray(w, "bfloat16"), np.float32), want)
    found = hf.load_params(exported, hf.read_shape(exported))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2**-7), jax.device_get(found), rounded
    )
    run(adapted(0, init_from=str(whole_run), model__lora__rank=2), tmp_path / "next")
    jax.tree.map(near, adapters.base(arrays(tmp_path / "next", 0)["params"]), want)


def test_the_page_is_a_run_and_tells_the_fields(tmp_path):
    page = (pathlib.Path(__file__).parent.parent / "docs" / "lora.md").read_text()
    (text,) = re.findall(r"```python\n(.*?)```", page, re.S)
    made = {}
    exec(text, made)
    c = made["get_config"]()
    assert c.optim.lr == pytest.approx(10 * config.paper().optim.lr)
    validation.validate(c, 8)
    assert plan.network(c).lora == adapters.Lora(32, 32.0, qwen2.LINEAR, "bfloat16")
    table = re.findall(r"^\| `(model\.lora\.\w+)` \| (\S+) \|", page, re.M)
    fields = {k: str(f.default) for k, f in schema.SCHEMA.items() if k.startswith("model.lora.")}
    assert dict(table) == fields
