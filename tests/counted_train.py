"""`python tests/counted_train.py HUB --config=... --workdir=...`: `stubbed_train`, or, with
`evaluate` before HUB, `dapo_jax.evaluate`, where the folder HUB is the Hugging Face hub. After each
step, or at the end, WORKDIR/counts_<process>.json says what this start has cost: calls of the hub,
bytes from it, bytes of weights read, programs compiled here for all hosts' devices."""

import fnmatch
import functools
import json
import pathlib
import shutil
import sys
import tempfile

import huggingface_hub
import jax
import stubbed_train
from jax._src import compiler

from dapo_jax import evaluate, train
from dapo_jax.config import cli
from dapo_jax.model import hf

EVALUATE = sys.argv[1] == "evaluate" and bool(sys.argv.pop(1))
HUB = pathlib.Path(sys.argv.pop(1))
COUNTS = dict.fromkeys(("hub_calls", "hub_bytes", "weight_bytes", "compiled_for_all"), 0)
compile_and_load, read = compiler.backend_compile_and_load, hf._read


def snapshot_download(name, allow_patterns):
    COUNTS["hub_calls"] += 1
    here = tempfile.mkdtemp()
    for file in (HUB / name).iterdir():
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
            COUNTS["hub_bytes"] += file.stat().st_size
            shutil.copy(file, here)
    return here


def counted_compile(backend, module, devices, *rest):
    COUNTS["compiled_for_all"] += len({device.process_index for device in devices}) > 1
    return compile_and_load(backend, module, devices, *rest)


def counted_read(*arguments):
    out = read(*arguments)
    COUNTS["weight_bytes"] += out.nbytes
    return out


def told(*_) -> None:
    name = f"counts_{jax.process_index()}.json"
    pathlib.Path(cli.WORKDIR.value, name).write_text(json.dumps(COUNTS))


stubbed_train.know_programs_of_others(sys.argv)
huggingface_hub.snapshot_download = snapshot_download
compiler.backend_compile_and_load, hf._read = counted_compile, counted_read
if __name__ == "__main__" and EVALUATE:
    evaluate.define_flags()
    cli.run(lambda: told(evaluate.main(stubbed_train.JUDGE)))
elif __name__ == "__main__":
    cli.run(functools.partial(train.main, score=stubbed_train.JUDGE, hooks=train.Hooks(step=told)))
