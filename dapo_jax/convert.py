"""Checkpoints between Hugging Face and Orbax, and a check of the logits against `transformers`.

    python -m dapo_jax.convert to-orbax SRC DST  Hugging Face directory or hub name -> Orbax
    python -m dapo_jax.convert to-hf SRC DST     a run (or gs://), to-orbax's DST -> Hugging Face
    python -m dapo_jax.convert check DIR         this project's logits next to transformers'

The output of to-orbax has the layout of a run's `checkpoints/` at step 0 (without optimizer), for
`--config.init_from=DST`. `check` exits with 0 if logits agree, 1 if not or after an error, 2
without `transformers`.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from scipy.special import log_softmax

from dapo_jax import parallel
from dapo_jax.checkpoint import checkpoint, export, workdir
from dapo_jax.config import cli, schema
from dapo_jax.model import hf, hf_format, qwen2, rope
from dapo_jax.model.qwen2 import Params, Shape

KL_MAX = 1e-7  # nats at the worst position, float32
CHECKED = (2, 128)  # rows, tokens a row
# Fields that say how the network is computed; a checkpoint does not fix them.
_CHOICES = set(qwen2.compute_choices(schema.base()))


def save_params(directory: str | Path, shape: Shape, params: Params) -> None:
    """Save parameters and shape as step 0 of a new directory. ValueError: it is not empty."""
    path = hf.new_directory(directory)
    what = {k: v for k, v in shape._asdict().items() if k not in _CHOICES}
    state = ocp.args.JsonSave({"shape": what, "versions": checkpoint.versions()})
    arrays = ocp.args.StandardSave({"params": params})
    with checkpoint.manager(path, keep=1) as manager:
        manager.save(0, args=ocp.args.Composite(arrays=arrays, state=state))
        manager.wait_until_finished()


def load_params(directory: str | Path) -> tuple[Shape, Params]:
    """Shape and float32 parameters of a run's newest checkpoint (its workdir or its `checkpoints/`;
    adapters merged) or of `save_params`, split over all devices. ValueError: there is none."""
    path, state = _newest(directory)
    shape = _saved_shape(state)
    return shape, checkpoint.restore_merged(str(path), shape, *_layout(shape))


def _layout(shape: Shape) -> tuple[Mesh, parallel.Rules]:
    """A mesh over all devices, or over one where they cannot share the weights; and its rules."""
    devices = jax.devices() if shape.hidden_size % jax.device_count() == 0 else jax.devices()[:1]
    mesh = Mesh(np.reshape(devices, (1, -1, 1)), parallel.AXES)
    return mesh, schema.base().sharding.train.to_dict()


def _newest(directory: str | Path) -> tuple[epath.Path, dict]:
    """The directory that holds the steps, also in a bucket, and the newest step's state."""
    path = workdir.place(str(directory), str(directory))
    path = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not path.is_dir():
        raise ValueError(f"{directory}: no such directory")
    if not checkpoint.numbers(path):
        raise ValueError(f"{directory}: no checkpoint in it; give a run's workdir")
    step = checkpoint.find_step(path)
    with checkpoint.reader(path) as manager:
        return path, checkpoint.read_json(manager, step)


def _saved_shape(state: dict) -> Shape:
    c = schema.base()
    try:
        if "shape" in state:
            saved = dict(state["shape"])
            yarn = saved.get("yarn")
            return Shape(**saved | {"yarn": rope.Yarn(*yarn) if yarn else None})
        known = state["config"]  # a run's config, flat; older runs lack newer fields (= defaults)
        sizes = [k for k in schema.leaves(c.model) if not k.startswith("model.lora.")]  # merged
        c.update({k: known[k] for k in sizes if k in known})
    except (KeyError, TypeError) as error:
        raise ValueError(f"the checkpoint does not say which model it holds ({error})") from error
    if not c.model.path:
        return qwen2.shape_from_config(c)
    return hf.read_shape(hf.resolve(c.model.path, weights=False))


class Agreement(NamedTuple):
    """Distance of logits from reference logits."""

    max_diff: float  # largest |difference| of a logit
    max_kl: float  # largest KL(theirs || ours) of a position, nats
    top1: float  # share of positions with the same argmax


def agreement(ours_BxTxV, theirs_BxTxV) -> Agreement:
    """Compare in float64, a row at a time (real vocabularies are large)."""
    diff, kl, same = [], [], []
    for ours_TxV, theirs_TxV in zip(ours_BxTxV, theirs_BxTxV, strict=True):
        p, q = (log_softmax(np.asarray(x, np.float64), -1) for x in (theirs_TxV, ours_TxV))
        diff.append(np.abs(np.asarray(ours_TxV, np.float64) - theirs_TxV).max())
        kl.append((np.exp(p) * (p - q)).sum(-1).max())
        same.append(p.argmax(-1) == q.argmax(-1))
    return Agreement(float(np.max(diff)), float(np.max(kl)), float(np.mean(same)))


def transformers_logits(directory: Path, tokens_BxT: np.ndarray, dtype="float32") -> np.ndarray:
    """Logits [B, T, V] of the same directory by `transformers` on CPU, computed in `dtype`."""
    import torch
    import transformers

    how = dict(use_safetensors=True, local_files_only=True, attn_implementation="eager")
    dtype = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **how)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(np.asarray(tokens_BxT, np.int64))).logits.numpy()


def to_orbax(src: str, dst: str, dtype: str) -> int:
    hf.new_directory(dst)  # before anything is loaded
    directory = hf.resolve(src)
    shape = hf.read_shape(directory)
    save_params(dst, shape, hf.load_params(directory, shape, *_layout(shape), dtype=dtype))
    print(f"{dst}: {qwen2.param_count(shape):,} parameters in {dtype}")
    return 0


def to_hf(src: str, dst: str, dtype: str, tokenizer: str | None) -> int:
    hf.new_directory(dst)  # before anything is loaded
    steps, state = _newest(src)
    run, embedded = state.get("config", {}), steps.parent / "data"
    model, template = run.get("model.path"), "" if tokenizer else run.get("tokenizer.chat_template")
    tokenizer = tokenizer or run.get("tokenizer.path") or model
    if run and not tokenizer and embedded.is_dir():
        tokenizer = str(embedded)
    folders = [export.tokenizer_folder(named) if named else None for named in (tokenizer, model)]
    shape, params = load_params(src)
    hf.save(dst, shape, params, dtype, *folders, template)
    note = f"tokenizer of {tokenizer}" if tokenizer else "no tokenizer (see --tokenizer)"
    print(f"{dst}: {qwen2.param_count(shape):,} parameters in {dtype}, {note}")
    return 0


def check(src: str) -> int:
    if missing := [m for m in ("torch", "transformers") if not importlib.util.find_spec(m)]:
        how = "pip install -r benchmarks/requirements-peers.txt"
        print(f"check needs {' and '.join(missing)}: {how}", file=sys.stderr)
        return 2
    directory = hf.resolve(src)
    tokens_BxT = np.random.RandomState(0).randint(0, hf.read_shape(directory).vocab_size, CHECKED)
    with jax.default_matmul_precision("highest"):  # accelerators would multiply in bfloat16
        ours = np.asarray(hf.load(directory)(tokens_BxT))
    a = agreement(ours, transformers_logits(directory, tokens_BxT))
    agrees = a.max_kl <= KL_MAX  # False for NaN
    print(
        f"{'agrees' if agrees else 'DISAGREES'}: max |difference| {a.max_diff:.2e}, max KL"
        f" {a.max_kl:.2e} (allowed {KL_MAX:.0e}), top-1 agreement {a.top1:.2%}; float32,"
        f" {CHECKED[0]} x {CHECKED[1]} random tokens"
    )
    return 0 if agrees else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser("python -m dapo_jax.convert", description=__doc__)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("to-orbax", help="Hugging Face -> Orbax")
    made.set_defaults(run=to_orbax)
    made.add_argument("src", help="directory or hub name")
    made.add_argument("dst", help="new directory")
    dtype = "of the weights (default: %(default)s)"
    made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help=dtype)
    back = commands.add_parser("to-hf", help="Orbax -> Hugging Face")
    back.set_defaults(run=to_hf)
    back.add_argument("src", help="workdir of a run, or a directory written by to-orbax")
    back.add_argument("dst", help="new directory")
    back.add_argument("--dtype", default="bfloat16", choices=list(hf_format.DTYPES), help=dtype)
    back.add_argument("--tokenizer", help="directory or hub name; default: the run's own")
    judged = commands.add_parser("check", help="compare logits with transformers")
    judged.set_defaults(run=check)
    judged.add_argument("src", metavar="dir", help="directory or hub name")

    options = vars(parser.parse_args(argv))
    run = options.pop("run")
    try:
        return run(**options)
    except (ValueError, OSError) as error:
        cli.fail(str(error) or type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())
