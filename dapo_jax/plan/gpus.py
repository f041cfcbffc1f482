"""`plan --topology=h100-8`: NVIDIA GPUs as the planner sees them, by the cost model of the slices.

    config, pod = presets.one_chip(), gpus.parse("h100-1")
    gpus.plan(config, pod, plan.Traffic(128, 256), room=0.1)     as `planner.plan`, by gpus.txt

Up to 8 GPUs of a host behind one switch; hosts (2xh100-8) are joined as slices of TPUs are. Memory
is the same arithmetic with a GPU's cache; seconds rest on one measurement of one H100. XLA:GPU
compiles for a card that it is only told of (`Gpus.described`).
"""

import importlib.metadata
import importlib.util
import pathlib
import re
from typing import Any

import numpy as np
from jax.experimental import topologies

from dapo_jax.config import presets
from dapo_jax.plan import constants, planner, roofline, simulate
from dapo_jax.plan.constants import CONSTANTS, VALUES
from dapo_jax.plan.roofline import Scene
from dapo_jax.plan.shapes import published
from dapo_jax.plan.simulate import Packed, Traffic
from dapo_jax.pods import slices
from dapo_jax.pods.slices import Chip, Pod

FAMILIES = {name: f"NVIDIA {name.upper()}" for name in ("a100", "h100", "h200", "b200")}
FAMILIES["rtx4090"] = "NVIDIA GeForce RTX 4090"  # as jax calls it
A_HOST = 8
# Of the memory, for programs: XLA_PYTHON_CLIENT_MEM_FRACTION as launch/ sets it (jax's own is .75).
SHARE = 0.9
_OWN = constants.read(pathlib.Path(__file__).with_name("gpus.txt").read_text(), FAMILIES)
_SHIPPED = dict(CONSTANTS)  # before the user's `--constants`


def _chip(family: str) -> Chip:
    memory, *peaks = (_OWN[f"{name}.{family}"].value for name in ("memory", "flops", "hbm"))
    return Chip(int(SHARE * memory * 2**20), *peaks)


CHIPS = {family: _chip(family) for family in FAMILIES}


# stream_executor's GpuTargetConfigProto. What is a number here is so of all the families. XLA takes
# four fifths of the memory for programs where no allocator says how much it has.
_CARD = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {multiprocessors:.0f} fpus_per_core: {lanes:.0f} clock_rate_ghz: {boost}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads:.0f}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {core:.0f} shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block:.0f} l2_cache_size: {cache:.0f}
  memory_bandwidth: {hbm:.0f} device_memory_size: {bytes:.0f}
}}
platform_name: "CUDA" device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
"""
_PLUGINS = "jax_cuda13_plugin", "jax_cuda12_plugin"


def compiler() -> dict[str, str]:
    """The versions of jax and of the package that holds XLA:GPU; {} where there is none."""
    there = [name for name in _PLUGINS if importlib.util.find_spec(name)][:1]
    names = ["jax", *(name.replace("_", "-") for name in there)] if there else []
    return {name: importlib.metadata.version(name) for name in names}


class Gpus(Pod):
    """`slices` hosts of `sides[0]` GPUs each."""

    platform = "gpu"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.family]

    @property
    def topology(self) -> str:
        return f"{self.family}:{self.sides[0]}"

    @property
    def cloud(self) -> str:
        """'h100-8', of two hosts '2xh100-8'."""
        return (f"{self.slices}x" if self.slices > 1 else "") + f"{self.family}-{self.sides[0]}"

    def described(self) -> list:
        if not compiler():
            raise ImportError("compiling for GPUs needs XLA:GPU: pip install 'jax[cuda13]'")
        own = {
            n.partition(".")[0]: c.value for n, c in _OWN.items() if n.endswith(f".{self.family}")
        }
        major, minor = str(own["capability"]).split(".")
        card = _CARD.format(
            **own, kind=FAMILIES[self.family], major=major, minor=minor, core=1024 * own["shared"],
            block=1024 * (own["shared"] - 1), cache=2**20 * own["l2"], bytes=self.chip.hbm / 0.8,
        )  # fmt: skip
        # As PJRT has it: slices, hosts of one, GPUs of one.
        how = dict(topology=f"1x{self.slices}x{self.sides[0]}", target_config=card)
        return topologies.get_topology_desc(platform="cuda", **how).devices

    def compiler(self) -> dict[str, str]:
        return compiler()

    def larger(self) -> list[Pod]:
        more = (n for n in (2, 4, A_HOST) if n > self.sides[0])
        hosts = (n for n in (2, 4, 8, 16) if n > self.slices)
        one = [Gpus(self.family, (n,)) for n in more] if self.slices == 1 else []
        return one + [Gpus(self.family, (A_HOST,), n) for n in hosts]


def parse(name: str) -> Pod:
    """GPUs or a TPU slice by name. ValueError: there is nothing of that name."""
    match = re.fullmatch(rf"(?:(\d+)x)?({'|'.join(FAMILIES)})-(\d+)", name)
    hosts, n = (int(match[1] or 1), int(match[3])) if match else (0, 0)
    if hosts and n in (1, 2, 4, A_HOST):
        return Gpus(match[2], (n,), hosts)
    if match:
        raise ValueError(f"{name!r}: wants 1, 2, 4 or 8 GPUs a host; hosts stand before: 2xh100-8")
    try:
        return slices.parse(name)
    except ValueError as error:
        raise ValueError(f"{error}; or GPUs, h100-8: {', '.join(FAMILIES)}") from None


def plan(config, pod: Pod, traffic: Traffic, room: float, with_staleness=False) -> dict[str, Any]:
    """`planner.plan`; for GPUs with the constants of gpus.txt in the place of those that the user
    has left as they were, and with 'measured': what was measured on an H100, beside the model's."""
    if pod.platform == "tpu":
        return planner.plan(config, pod, traffic, room, with_staleness)
    kept = dict(VALUES), dict(CONSTANTS)
    try:
        own = {n: c for n, c in _OWN.items() if CONSTANTS.get(n) is _SHIPPED.get(n)}
        CONSTANTS.update(own)
        VALUES.update({name: c.value for name, c in own.items()})
        out = planner.plan(config, pod, traffic, room, with_staleness)
        return out | {"measured": measured(), "share": SHARE}
    finally:
        for table, old in zip((VALUES, CONSTANTS), kept, strict=True):
            table.clear()
            table.update(old)


# docs/results/gpu.md, 2026-11-26, one H100: tokens a second of sampling (equal lengths, long tail)
# and of an update, in the sizes of benchmarks/gpu.py; the update's remat and rows of a pass.
MEASURED = {"0.5B": (115_651, 56_706, 110_760), "1.5B": (55_677, 29_457, 45_782)}
_UPDATES = {"0.5B": ("none", 16), "1.5B": ("dots_attention", 8)}


def sampling_rate(lengths_Nx1, prompt: int, scene: Scene, k: constants.Values) -> float:
    """Tokens a second by the model: responses of these lengths after prompts of `prompt` tokens."""
    trace = simulate.sample(lengths_Nx1, prompt, int(lengths_Nx1.max()), scene.sizes)
    seconds, _ = roofline.sampling(roofline.call(trace, 1, scene), scene, k)
    return lengths_Nx1.sum() / sum(seconds.values())


def measured() -> list[dict[str, Any]]:
    """Tokens a second that were measured, and by the model with the constants in use."""
    prompt, slots, equal, cap, rows, row = 256, 256, 512, 2048, 64, 2048
    c, pod, out = presets.paper(), parse("h100-1"), []
    c.data.max_prompt_tokens, c.rollout.max_response_tokens = prompt, cap
    c.rollout.slots, c.rollout.chunk, c.rollout.prefill_prompts = slots, 64, 32
    c.optim.row_tokens = row
    tailed_Nx1 = simulate.lengths(Traffic(prompt, equal), cap, 2 * slots, 1)
    tokens = {"equal": np.full((slots, 1), equal), "tailed": tailed_Nx1}
    for size, found in MEASURED.items():
        remat, c.optim.micro_batch_rows = _UPDATES[size]
        shape = published(f"Qwen/Qwen2.5-{size}", scan_layers=True, remat=remat, attention="auto")
        scene = Scene(c, shape, dict(data=1, fsdp=1, tensor=1), pod)
        rates = [sampling_rate(x_Nx1, prompt, scene, VALUES) for x_Nx1 in tokens.values()]
        pairs = simulate.blocks([row]) * simulate.BLOCK**2 * 4
        packed = Packed(rows // c.optim.micro_batch_rows, 0, rows * row, pairs, 1.0)
        rates.append(rows * row / roofline.training(packed, scene, VALUES)["update"])
        for what, theirs, ours in zip((*tokens, "update"), found, rates, strict=True):
            out.append(dict(size=size, what=what, measured=theirs, here=float(ours)))
    return out
