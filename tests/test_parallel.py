"""The table from logical axes to mesh axes, and the ways between host and devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from dapo_jax import parallel

RULES = {"batch": "data,fsdp", "embed": "fsdp", "heads": "tensor", "head_dim": ""}


@pytest.fixture(scope="module")
def mesh():
    return parallel.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})


def test_mesh_and_spec_follow_the_table(mesh):
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert parallel.spec(("embed", "heads", "head_dim"), RULES) == P("fsdp", "tensor", None)
    assert parallel.spec(("batch", None), RULES) == P(("data", "fsdp"), None)
    assert parallel.spec((), RULES) == P()
    with pytest.raises(KeyError):
        parallel.spec(("depth",), RULES)


def test_constrain_pins_the_layout_inside_use_only(mesh):
    x = jnp.arange(64.0).reshape(8, 8)
    assert parallel.constrain(x, "batch", "heads") is x

    def f(x):
        with parallel.mesh_scope(mesh, RULES):
            return parallel.constrain(x * 2, "batch", "heads")

    out = jax.jit(f, in_shardings=parallel.replicated(mesh))(x)
    assert out.sharding == NamedSharding(mesh, P(("data", "fsdp"), "tensor"))
    with pytest.raises(RuntimeError), parallel.mesh_scope(mesh, RULES):
        raise RuntimeError  # the scope ends with it
    assert parallel.constrain(x, "batch", "heads") is x


def described(platform):
    """A mesh of one device, of which only the platform is known."""
    return SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))


@pytest.mark.parametrize("platform", ["gpu", "cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_a_gpu_multiplies_float32_in_float32(platform, dtype):
    """Where it would take TF32; on other platforms nothing is said, programs stay as they are."""
    with parallel.mesh_scope(described(platform), RULES, dtype):
        (product,) = jax.make_jaxpr(jnp.dot)(np.ones((2, 2)), np.ones((2, 2))).eqns
    highest = (jax.lax.Precision.HIGHEST,) * 2
    exact = (platform, dtype) == ("gpu", "float32")
    assert product.params["precision"] == (highest if exact else None)


@pytest.mark.parametrize("capability", ["7.5", "8.0", "10.0", ""])
def test_gpus_from_ampere_on_run_triton(capability):
    """One that does not say what it is counts as such; a CPU runs none."""
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    with parallel.mesh_scope(SimpleNamespace(devices=np.array([device])), RULES):
        assert parallel.runs_triton() == (capability != "7.5")
    with parallel.mesh_scope(described("cpu"), RULES):
        assert not parallel.runs_triton()


def test_options_of_a_program(monkeypatch):
    """GPUs alone have to be told to add up in one order, whatever else they are told."""
    said = lambda kind: [parallel.compiler_options(described(kind), x) for x in (False, True)]
    ordered = {"xla_gpu_exclude_nondeterministic_ops": True}
    cublas = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    assert said("gpu") == [cublas, cublas | ordered]
    assert said("tpu") == [None, None]
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    pair = SimpleNamespace(devices=np.repeat(described("gpu").devices, 2), shape=dict(data=2))
    told = parallel.compiler_options(pair, same_bits=True)
    hidden = "xla_gpu_enable_latency_hiding_scheduler"
    assert told[hidden] and told.items() > (cublas | ordered).items()
    split = SimpleNamespace(devices=pair.devices, shape=dict(data=1, fsdp=2))
    merged = told.items() - parallel.compiler_options(split, same_bits=True).items()
    assert dict(merged) == {"xla_gpu_dot_merger_threshold_mb": 0}
    monkeypatch.setenv("XLA_FLAGS", f"--{hidden}=false")
    assert told == {hidden: True} | parallel.compiler_options(pair, same_bits=True)
    monkeypatch.delenv("XLA_FLAGS")
    level, width = "xla_backend_optimization_level", "xla_cpu_prefer_vector_width"
    assert said("cpu") == [{level: 2, width: 512}] * 2
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=0")
    assert said("cpu") == [{width: 512}] * 2
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=0 --{width}=256")
    assert said("cpu") == [None, None]


def test_this_jaxlib_knows_the_options_of_gpus():
    """XLA's compilers share their options: that for CPUs, too, refuses a name or value."""
    pair = SimpleNamespace(devices=np.repeat(described("gpu").devices, 2), shape=dict(data=2))
    told = parallel.compiler_options(pair, same_bits=True)
    program = jax.jit(lambda x: x + 1).lower(1.0)
    assert program.compile(compiler_options=told)(1.0) == 2
    for name, value in told.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such"):
            program.compile(compiler_options={f"{name}s": value})


def test_one_cpu_takes_numpy_values_as_they_are():
    one, two = (jax.sharding.Mesh(np.array(jax.devices()[:n]), "x") for n in (1, 2))
    values = dict(x=np.arange(4), y=np.float32(1))
    rep = [parallel.replicated(m) for m in (one, two)]
    assert parallel.to_program(values, rep[0]) is values
    assert parallel.for_program(values, rep[0]) is values
    for told in (parallel.to_program(values, rep[1]), parallel.for_program(values, rep[1])):
        assert told["x"].sharding == rep[1] and told["y"].dtype == np.float32
