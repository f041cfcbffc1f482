"""A config for the first run on data of one's own, sized by this machine.

    python -m dapo_jax.plan.first --model=DIR --train=FILE [--eval=FILE] [--reward=FILE.py:NAME]

reads the devices and their memory, and writes a config in which slots, micro-batches and, where it
has to be, lengths fit by the arithmetic of `footprint`. It is `presets.one_chip` but for the lines
in the file, which are there to be changed: slots and rows of a micro-batch alter no sample and no
update, groups and lengths do.
"""

import contextlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from dapo_jax.config import cli, presets, validation
from dapo_jax.plan import footprint
from dapo_jax.plan.shapes import network

SHARE = {"cpu": 0.6, "gpu": 0.9, "tpu": 0.9}  # of the memory; a CPU's holds everything else too
# Of a container, in bytes: cgroup v2, v1.
LIMITS = [pathlib.Path("/sys/fs/cgroup/memory.max")]
LIMITS += [pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
GROUP = 8  # responses of a problem, as in one_chip
# From much to little: (groups, longest response) of an accelerator, of a CPU.
SIZES = {"cpu": ((8, 128), (4, 64)), "gpu": ((16, 512), (16, 256), (8, 128))}
SIZES["tpu"] = SIZES["gpu"]


class Machine(NamedTuple):
    kind: str
    platform: str
    devices: int
    free: float  # bytes of one device that programs may have


class Choice(NamedTuple):
    fields: dict[str, Any]  # of the config, over one_chip's
    peaks: dict[str, float]  # phase -> bytes per device


def machine() -> Machine:
    """This one, its memory as it is now. ValueError: a device does not tell its memory."""
    here = jax.local_devices()
    platform = here[0].platform if here[0].platform in SHARE else "gpu"
    if platform == "cpu":
        kind = f"CPU of {os.cpu_count()} cores"
        return Machine(kind, "cpu", len(here), SHARE["cpu"] * _available() / len(here))
    stats = here[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(f"{here[0].device_kind}: does not tell its memory; ask dapo_jax.plan")
    return Machine(here[0].device_kind, platform, len(here), SHARE[platform] * stats["bytes_limit"])


def _available() -> float:
    """Bytes that this machine can give to programs; where it does not say, half of all. No more
    than the container may have that this is."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    with contextlib.suppress(OSError, AttributeError):
        file = pathlib.Path("/proc/meminfo").read_text()
        free = 1024.0 * int(re.search(r"^MemAvailable: *(\d+) kB", file, re.M)[1])
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none of that kind; "max"
            free = min(free, float(int(limit.read_text())))
    return free


def choices(found: Machine) -> Iterator[dict[str, Any]]:
    """The fields that may be tried, the most wanted first."""
    for groups, longest in SIZES[found.platform]:
        n, most = found.devices, groups * GROUP
        for slots in (x // n * n for x in (128, 64, 32, 16, 8) if most >= x >= n):
            for rows in (x * n for x in (8, 4, 2, 1)):
                yield {
                    "rollout.groups": groups, "rollout.slots": slots, "rollout.chunk": 32,
                    "rollout.prefill_prompts": max(min(slots, groups) // n, 1) * n,
                    "rollout.max_response_tokens": longest, "optim.micro_batch_rows": rows,
                    "reward.overlong_buffer_tokens": longest // 4,
                    "model.dtype": "float32" if found.platform == "cpu" else "bfloat16",
                    "mesh.data": -1, "mesh.fsdp": 1,
                }  # fmt: skip


def choose(found: Machine, model: str) -> Choice:
    """The first of `choices` that fits. ValueError: none does, or there is no such model."""
    least = float("inf")
    for fields in choices(found):
        c = presets.one_chip()
        c.update({"model.path": model, **fields})
        sizes = validation.resolve_mesh(c, found.devices)
        platform = "tpu" if found.platform == "tpu" else "gpu"  # a CPU keeps what a GPU does
        peaks = footprint.peaks(footprint.memory(c, network(c), sizes, platform))
        if (peak := max(peaks.values())) <= found.free:
            return Choice(fields, peaks)
        least = min(least, peak)
    gb = f"{least / footprint.GB:.1f} GB of the {found.free / footprint.GB:.1f}"
    raise ValueError(f"{model}: needs at least {gb} that a device has; a smaller one, or LoRA")


def text(found: Machine, chosen: Choice, named: dict[str, str]) -> str:
    """The config file. named: the fields that the user gave."""
    of = f"{found.devices} x {found.kind}, {found.free / footprint.GB:.1f} GB of each for programs"
    needs = ", ".join(f"{n / footprint.GB:.2f} GB while {p}" for p, n in chosen.peaks.items())
    fields = named | chosen.fields
    shown = lambda x: json.dumps(x) if isinstance(x, str) else repr(x)
    lines = [f"    c.{name} = {shown(value)}" for name, value in fields.items()]
    return "\n".join([
        '"""A first run on data of my own.', "", f"Sized for {of}; by arithmetic:", f"{needs}.",
        '"""', "", "from dapo_jax.config import presets", "", "", "def get_config():",
        "    c = presets.one_chip()", *lines, "    return c", "",
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser("python -m dapo_jax.plan.first", description=__doc__)
    parser.add_argument("--model", required=True, help="directory as those of Hugging Face, or hub")
    parser.add_argument("--train", required=True, help="problems, as config.data.train")
    parser.add_argument("--eval", default="", help="other problems, to be evaluated on")
    parser.add_argument("--reward", default="", help="FILE.py:FUNCTION, as config.reward.function")
    parser.add_argument("--out", default="mine.py", help="the config that is written")
    a = parser.parse_args(argv)
    out = pathlib.Path(a.out)
    sets = f"test={a.eval}" if a.eval and not {*"=,"} & {*a.eval} else a.eval  # one file
    named = {"model.path": a.model, "data.train": a.train, "eval.files": sets}
    named |= {"reward.function": a.reward} if a.reward else {}
    try:
        if out.exists():
            raise ValueError(f"{out}: is there already; name another by --out")
        found = machine()
        written = text(found, choose(found, a.model), named)
        out.write_text(written, encoding="utf-8")
    except (ValueError, OSError) as error:
        return cli.fail(str(error) or type(error).__name__)
    print(written)
    for command in ("lab inspect", "train --workdir=runs/mine"):
        print(f"next: python -m dapo_jax.{command} --config={out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
