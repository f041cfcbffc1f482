"""Shared set-up: eight simulated CPU devices, so that the mesh tests need no accelerator."""

import gc
import os
import random
from pathlib import Path

import hub
import hypothesis
import pytest
import typed

# Before jax is imported. An accelerator is used only where the user asks for it: the tests'
# tolerances hold for float32 on CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs compiled by one test are there for the next process and the next run: half the CPU time.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dapo_jax/xla-tests")),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax

# By configuration, not by environment: processes that a test starts keep their own device count.
if "JAX_NUM_CPU_DEVICES" not in os.environ and (
    "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "")
):
    jax.config.update("jax_num_cpu_devices", 8)
    # XLA takes NPROC for the size of its thread pools, and reads it when the devices are made. In
    # jaxlib 0.10 a pool of fewer than two threads a device can run dry while programs with
    # collectives are queued: the process hangs and is aborted after 40 s.
    if "NPROC" not in os.environ:
        os.environ["NPROC"] = "16"
        jax.devices()
        del os.environ["NPROC"]

# Of the seconds that tracing takes, a tenth went to the collector at its usual pace.
gc.set_threshold(50_000)

# No deadline, nor one for drawing examples: the first compiles, and a machine may be busy. Under
# CI the examples are always the same.
hypothesis.settings.register_profile(
    "dapo_jax",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("dapo_jax")


# The files that take longest are begun first: the workers then end together.
LONGEST = (
    "test_several", "test_compile", "test_learning", "test_chaos", "test_vapo", "test_damage",
    "test_leave", "test_kill", "test_system", "test_explain", "test_notebooks",
    "test_curriculum", "test_pages", "test_train", "test_evaluate_cli", "test_lora",
    "test_qwen2", "test_named_evaluation", "test_update", "test_gpus", "test_hf",
)  # fmt: skip

# Files of whole runs and of what is around a program: compiled as `typed.SOON` says, here and in
# processes that they start. Those of formulas and programs are compiled so with --soon alone.
SOON = (
    "test_attention_kernels", "test_beside", "test_carried", "test_curriculum",
    "test_evaluate_cli", "test_explain", "test_export", "test_mechanisms",
    "test_named_evaluation", "test_own_reward", "test_pages", "test_start", "test_sweep",
    "test_tags", "test_train", "test_turns", "test_vapo", "test_warm_start",
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--soon", action="store_true", help="compile with few of XLA's optimisations")
    parser.addoption("--kills", type=int, default=15, help="random moments of tests/faults")
    parser.addoption("--seeds", type=int, default=1, help="of each slow run of test_learning")
    parser.addoption(
        "--all_configs", action="store_true", help="test_compile: large models too, minutes each"
    )
    parser.addoption("--kill_seed", type=int, default=None, help="the seed it has printed")


def pytest_configure(config):
    if config.option.kill_seed is None:  # drawn once: the workers inherit it
        config.option.kill_seed = random.SystemRandom().randrange(2**32)


def pytest_collection_modifyitems(config, items):
    """The longest files first, but as given under -x; a slow test's limit of time: long enough for
    the pods' compiler beside other work."""
    if not config.option.maxfail:
        items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real data (tokenizer files, trained weights, model text) to test against."""
    folder = os.environ.get("DAPO_JAX_ASSETS")
    if not folder:
        pytest.skip("DAPO_JAX_ASSETS is unset: no real data to test against")
    if not Path(folder).is_dir():
        pytest.fail(f"DAPO_JAX_ASSETS={folder} is not a folder")
    return Path(folder)


@pytest.fixture(scope="session")
def shell():
    """Runs commands of the package, each in a process of its own, as `typed.Shell` does."""
    shell = typed.Shell()
    yield shell
    shell.close()


@pytest.fixture(scope="module", autouse=True)
def _level(request):
    """Programs of another level are forgotten."""
    if request.path.stem not in SOON and not request.config.option.soon:
        yield
        return
    import stubbed_train
    from levels import compiled_soon

    with compiled_soon():
        stubbed_train.forget_programs()
        jax.clear_caches()
        yield
    stubbed_train.forget_programs()
    jax.clear_caches()


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The workdir of one training run of 0 steps (tests/data/tiny_config.py): a random model,
    evaluated and saved. Tests may add evaluations to it."""
    import tiny_config

    from dapo_jax import train

    workdir = tmp_path_factory.mktemp("run")
    train.train(tiny_config.get_config(), workdir)
    return workdir


@pytest.fixture
def server():
    with hub.serving() as found:
        yield found


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """gs://b is this folder, for all that opens files by etils.epath."""
    from etils.epath import backend

    from benchmarks import cloud

    get = cloud.file_systems(tmp_path / "gs")
    monkeypatch.setattr(type(backend.fsspec_backend), "_get_filesystem", get)
    (tmp_path / "gs" / "b").mkdir(parents=True)
    return tmp_path / "gs" / "b"
