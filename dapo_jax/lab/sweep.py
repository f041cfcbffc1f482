"""A sweep: every combination of the values of some fields, once per seed, and what comes of them.

    python -m dapo_jax.lab sweep --config=configs/quickstart.py --workdir=runs/sweep \\
        --over=optim.lr=1e-4,3e-4,1e-3 --seeds=2

Each run is an ordinary workdir, WORKDIR/optim.lr=0.0001/seed_0 and so on; the same command goes on
where it stopped, and with more values or seeds it makes only what is missing. Where the config has
a supervised warm-up, all seeds start from the same base model, WORKDIR/base/0: one is made for each
combination of those swept fields that the warm-up depends on. At the end stands the table of `lab
compare`, a column a combination, in compare.txt, .json and .png; of one field, over_FIELD.png too.
"""

import csv
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags

from dapo_jax.config import cli, schema, validation
from dapo_jax.data import files
from dapo_jax.lab import compare, pictures
from dapo_jax.lab.experiments import pool, training
from dapo_jax.lab.experiments.training import SEEDS

OVER = flags.DEFINE_multi_string("over", [], "FIELD=VALUE,...; more than once. Comma: in quotes.")
# What a base model depends on: these sections, and the lengths that its examples may have.
_OF_BASE = ("model.", "tokenizer.", "data.", "supervised_warmup.", "sharding.", "mesh.")
_OF_BASE += ("rollout.max_response_tokens", "optim.row_tokens", "optim.micro_batch_rows")

Setting = Mapping[str, Any]  # swept field -> its value


def settings(over: Sequence[str]) -> list[Setting]:
    """All combinations of the values of 'FIELD=VALUE,VALUE', the last field's values changing
    first. ValueError: a line for each that is no such thing."""
    axes: dict[str, list] = {}
    bad: list[str] = []
    for text in over:
        shown = " ".join(text.split())
        name, _, values = text.partition("=")
        try:
            (cells,) = csv.reader([values]) if values else ([],)
        except csv.Error:  # the end of a line in it
            cells = []
        field = name.strip()
        found = [cli.overrides([(field, cell.strip())], bad).get(field) for cell in cells]
        if not cells:
            bad.append(f"--over={shown}: write --over=FIELD=VALUE,VALUE,...")
        elif field in axes:
            bad.append(f"--over={shown}: {field} is swept already; name all its values at once")
        elif field == "seed":
            bad.append(f"--over={shown}: --seeds=N runs each combination with N seeds")
        elif twice := [x for i, x in enumerate(found) if x is not None and x in found[:i]]:
            bad.append(f"--over={shown}: {field} is {twice[0]} twice; name each value once")
        axes[field] = found
    if not over:
        bad.append("--over: name a field, as --over=optim.lr=1e-6,3e-6")
    if bad:
        raise ValueError("\n".join(dict.fromkeys(bad)))
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def folder(setting: Setting) -> str:
    """A name for the setting's runs, of 255 bytes at most and without what paths and shells give a
    meaning to. Where that leaves something out, @ and a digest tell such settings apart."""
    said = "_".join(f"{k}={v}" for k, v in setting.items())
    name = re.sub(r"[^\w.=+-]+", "-", said)
    if name == said and said.count("=") == len(setting) and len(said.encode()) <= 255:
        return name
    digest = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:12]
    return f"{name.encode()[: 255 - 13].decode(errors='ignore')}@{digest}"


def bases_of(out: pathlib.Path) -> dict[str, pool.Task]:
    """What decides a base model -> its task, of those that earlier commands have made in `out`."""
    found = {}
    for file in out.glob("base/*/result.json"):
        arguments = json.loads(file.read_text())["arguments"]
        task = pool.Task(f"base/{file.parent.name}", training.run, tuple(arguments))
        found[_of_base(arguments[0])] = task
    return found


def _of_base(fields: Mapping[str, Any]) -> str:
    return str({k: v for k, v in fields.items() if k.startswith((*_OF_BASE, "seed"))})


def tasks(
    config, wanted: Sequence[Setting], seeds: int, known: Mapping[str, pool.Task] = {}
) -> list[pool.Task]:
    """The base models, if the config has a warm-up that makes them, and the runs. known: as
    `bases_of`. ValueError: a line for each mistake in a config."""
    bad, bases, runs = {}, {}, []
    taken = {task.folder for task in known.values()}
    free = (name for n in itertools.count() if (name := f"base/{n}") not in taken)
    for setting in wanted:
        made = schema.base()
        made.update(schema.leaves(config))
        cli.apply(made, setting)
        fields = schema.leaves(made)
        try:
            validation.validate(made, len(jax.devices()), files=True)
        except ValueError as error:
            bad |= dict.fromkeys(str(error).splitlines())
        after = ()
        if validation.warm_up(made) and not made.init_from:
            if (key := _of_base(fields)) not in bases:
                own = (fields | {"steps": 0},)
                bases[key] = known.get(key) or pool.Task(next(free), training.run, own)
            after = (bases[key].folder,)
        for seed in range(config.seed, config.seed + seeds):
            name = f"{folder(setting)}/seed_{seed}"
            runs.append(pool.Task(name, training.run, (fields | {"seed": seed}, *after), after))
    if bad:
        raise ValueError("\n".join(bad))
    return [*bases.values(), *runs]


def main() -> None:
    config, out = cli.CONFIG.value, pathlib.Path(cli.WORKDIR.value)
    if not cli.WORKDIR.value or "://" in cli.WORKDIR.value:
        raise ValueError(f"--workdir={cli.WORKDIR.value}: give a directory of this machine")
    wanted = settings(OVER.value)
    todo = tasks(config, wanted, SEEDS.value or 1, bases_of(out))
    training.run_all(todo, out, "sweep")
    done = [str(out / t.folder) for t in todo if not t.folder.startswith("base/")]
    columns = compare.read(done, pool_seeds=True)
    text = compare.write(columns, str(out / "compare.json"), str(out / "compare.png"))
    text += pictures.over(columns, wanted, out)
    files.write(out / "compare.txt", text + "\n")
    print(f"{text}\n\n{out}/compare.txt, compare.json, compare.png; the runs beside them")


if __name__ == "__main__":
    cli.run(main)
