"""VAPO beside DAPO where a value model can know: long responses, decided in their first fifth.

    python -m benchmarks credit                     one run of each, from one base
    python -m benchmarks credit --full --write      the runs that count (docs/vapo.md)
    python -m benchmarks credit --kept              the comparison, from the records that are kept
    python -m benchmarks credit --ladder [--full]   VAPO's techniques added, and each left out

A response has 63 tokens. The first 12 decide it: to each of four letters a sign, of which one is
the letter's own; after the other one there is `?` for its number, and in the end for the answer.
The rest is a countdown with free words. The base knows what follows from a sign, and takes the
right one with probability .7. What is in the folder of the runs is not made again.
"""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from benchmarks import harness, paired, rungs
from benchmarks.harness import Flag
from benchmarks.rungs import TOKENS, UPDATES
from dapo_jax import build, config, parallel, train
from dapo_jax.config import presets
from dapo_jax.dapo import packing
from dapo_jax.data import arithmetic, worked
from dapo_jax.lab.experiments import bases, pool, stats
from dapo_jax.log import metrics
from dapo_jax.run import warmup

PAIRS = 4  # letters of a problem, each with a number
ROWS = 16  # of the countdown behind the working
SIGNS = (arithmetic.PLUS, arithmetic.MINUS)
FREE = (*SIGNS, arithmetic.ASK, arithmetic.WAIT)  # words of the countdown
LIMIT = 3 * PAIRS + 3 * ROWS + 3  # TOKENS of a response, end-of-text included
PARTS = (0, 1 / 6, 1 / 3, 2 / 3)  # of a response, where values are looked at
KEPT, KNOWN = harness.RESULTS / "credit.jsonl.gz", "explained"
SIGN = dict(zip(arithmetic.LABELS, "+--+-++-+--++-+-", strict=True))  # of each letter, the right


def problem(rng) -> tuple[str, str]:
    """(prompt, answer): `f 4 c 12 k 7 a 0 ?`, and the last number."""
    letters = rng.choice(list(arithmetic.LABELS), PAIRS, replace=False)
    numbers = rng.integers(arithmetic.MAX_VALUE + 1, size=PAIRS)
    words = [str(x) for pair in zip(letters, numbers, strict=True) for x in pair]
    return " ".join([*words, arithmetic.ASK]), words[-1]


def response(rng, prompt: str, right: float) -> str:
    """Each letter with a sign and its number, `f + 4 c - 12`; but after a sign that is not the
    letter's own there is `?` for this number and the answer. Then a countdown of ROWS rows with
    two free words each, which tells nothing. right: probability of the letter's own sign."""
    words, lost = [], False
    for letter, number in zip(prompt.split()[:-1:2], prompt.split()[1::2], strict=True):
        good = rng.random() < right
        sign = SIGN[letter] if good else SIGNS[SIGN[letter] == SIGNS[0]]
        words += [letter, sign, number if good else arithmetic.ASK]
        lost |= not good
    for row in reversed(range(ROWS)):
        words += [str(row), *rng.choice(FREE, 2)]
    return " ".join([*words, arithmetic.ANSWER, arithmetic.ASK if lost else number])


class Imitation(NamedTuple):
    """A phase of warm-up, as `warmup.Phase`, of such responses."""

    name: str
    steps: int
    lr: float
    right: float
    seed: int
    cap: int = LIMIT

    def pairs(self, n: int, tokenizer) -> Iterator[worked.Pair]:
        rng = np.random.default_rng([self.seed, 3])
        asked = (problem(rng)[0] for _ in range(n))
        made = (arithmetic.Trace(p, response(rng, p, self.right), True) for p in asked)
        return warmup.encode(made, tokenizer)


SHOWN, SHOWN_LR, RIGHT = 200, 1e-2, 0.7  # steps of imitation, their rate; the right sign's share
VALUES = {"vapo": 12, "vapo_longer": 24}  # rollout steps of value pre-training
METHODS = ("dapo", *VALUES)
RATE = 5e-4  # of the policy, for each the best of 2.5e-4, 5e-4, 1e-3 and 2e-3
STEPS, COMPARED = 8, 32  # rollout steps of the policy; updates compared
VAPO = presets.LADDERS["vapo"]
WHOLE, LONGEST = VAPO.cumulative[-1], "vapo_longer"  # the ladder's last rung, which is this
KEPT_LADDER = harness.RESULTS / "credit_rungs.jsonl.gz"
PAIRED = [  # rungs and what each is compared with: the one below, or all of VAPO
    *zip(VAPO.cumulative[1:], VAPO.cumulative, strict=False),
    *((name, WHOLE) for name in VAPO.leave_one_out[:-1]),
    (WHOLE, VAPO.bare),
]


def get_config(method: str, out: pathlib.Path):
    c, data = config.base(), out.absolute() / "data"
    c.data.train, c.tokenizer.path = str(data / "train.jsonl"), str(data / "tokenizer.model")
    c.eval.files, c.eval.max_problems = f"heldout={data / 'heldout.jsonl'}", 0
    c.eval.every, c.eval.k, c.eval.top_p, c.eval.max_response_tokens = 2, 2, 1.0, LIMIT
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 16, 8, 8
    c.rollout.max_response_tokens, c.reward.overlong_penalty = LIMIT, 0.0
    c.loss.old_logprobs, c.steps, c.optim.lr = "reuse", STEPS, RATE
    c.checkpoint.every, c.checkpoint.journal_gb, c.log.tensorboard = 0, 0, False
    if method == "dapo":
        c.optim.share_prompts = True  # a value model cannot
        return c
    c = presets.vapo(c)
    c.critic.lr, c.critic.length_alpha = 1e-3, 1.5
    c.critic.pretrain_steps = VALUES.get(method, VALUES[LONGEST])
    if method not in VALUES:
        c = presets.rung(c, method, VAPO)
    c.steps += c.critic.pretrain_steps
    return c


def make_base(where: pathlib.Path, seed: int) -> dict:
    """A task of the pool: the problems, imitation, a checkpoint."""
    logging.set_verbosity(logging.WARNING)
    write_problems(where.parent / "data")
    c = get_config("dapo", where.parent)
    c.seed, c.supervised_warmup.optimizer = seed, "muon"
    text, machine = rungs.machine_of(c, where)
    params = build.initial_params(c, machine)
    shown = Imitation("signs", SHOWN, SHOWN_LR, RIGHT, seed)
    params = warmup.warm_up(c, machine, text.tokenizer, params, [shown])
    bases.save(where, c, machine, params)
    return {}


def write_problems(directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for part, (name, count) in enumerate((("train", 4096), ("heldout", 192))):
        rng = np.random.default_rng([0, part])
        made = [arithmetic.Problem(*problem(rng), PAIRS) for _ in range(count)]
        arithmetic.write_problems(directory / f"{name}.jsonl", made)
    arithmetic.write_tokenizer(directory / "tokenizer.model")


def explained(c, where: pathlib.Path, params, groups) -> list[float]:
    """Share of the variance of the rewards that values explain at PARTS of the responses."""
    _, machine = rungs.machine_of(c, where)
    critic = machine.others["critic"]
    drawn = [(g.prompt, r.tokens, float(x)) for g in groups
             for r, x in zip(g.responses, g.grades.right_G, strict=True)]  # fmt: skip
    items = [packing.Item(p, r, np.zeros(len(r), np.float32), 0.0, 1.0) for p, r, _ in drawn]
    layout = packing.Layout(c.data.max_prompt_tokens + LIMIT, 4, len(items))
    rows, used, places = packing.pack(items, layout)
    rows = parallel.to_program(rows, critic.row_sharding)
    values = np.asarray(critic.values(params, rows, np.int32(used)))
    of = [values[place] for place in places]
    at = np.array([[v[int(part * len(v))] for part in PARTS] for v in of])
    reward = np.array([2 * x - 1 for _, _, x in drawn])
    return (1 - np.var(reward[:, None] - at, axis=0) / np.var(reward)).tolist()


def run(where: pathlib.Path, fields: Mapping[str, Any]) -> list[float]:
    """A task of the pool: trains. With a value model, what it explained of the responses of the
    last step of its pre-training, by its values before that step."""
    c, before, found = config.base(), None, []
    c.update(fields)

    def step(state, record) -> None:
        nonlocal before
        left = c.critic.pretrain_steps - state.counters.step
        if c.critic.enabled and left == 1:
            before = jax.device_get(state.memory["critic"]["params"])
        if before and left == 0:
            found.extend(explained(c, where, before, record.batch.groups))

    if not train.train(c, where, hooks=train.Hooks(step=step)):
        raise RuntimeError("cut off by SIGTERM; the same command goes on")
    return found


def task(method: str, seed: int, base: pool.Task, out: pathlib.Path) -> pool.Task:
    fields = config.leaves(get_config(method, out)) | {"seed": seed}
    fields["init_from"] = str((out / base.folder / "checkpoints").absolute())
    return pool.Task(f"{method}/seed_{seed}", run, (fields,), (base.folder,))


def accuracies(runs: Mapping[str, Sequence], budgets: Mapping[str, tuple[str, float]]):
    """Column -> method -> accuracy [seeds]. budgets: column -> over what, and its end."""
    return {head: rungs.accuracies(runs, rungs.TAG, *budget) for head, budget in budgets.items()}


def compared(found: Mapping[str, Sequence[Mapping]]) -> harness.Table:
    """found: records of each run by its folder, the first of a run with values' `explained`."""
    runs = paired.by_arm(found, METHODS)
    last = min(run[-1][UPDATES] for of in runs.values() for run in of)
    tokens = min(run[-1][TOKENS] for of in runs.values() for run in of)
    budgets = {f"at {COMPARED} updates": (UPDATES, COMPARED), f"at {last:.0f} updates":
               (UPDATES, last), f"at {tokens / 1e6:.3f} M tokens": (TOKENS, tokens)}  # fmt: skip
    at = accuracies(runs, budgets)
    parts = [f"explained after {part:.2f} of it" for part in PARTS]
    table = harness.Table("method", *at, "M tokens", *parts, name="credit")
    for method, of in runs.items():
        cells = [stats.interval(accuracy[method]) for accuracy in at.values()]
        cells.append(f"{np.mean([run[-1][TOKENS] for run in of]) / 1e6:.3f}")
        known = [run[0].get(KNOWN) for run in of]
        cells += [f"{stats.interval(x):.2f}" for x in np.transpose(known)]  # [runs][PARTS or none]
        table.row(*[method, *cells, *[""] * len(PARTS)][: len(table.columns)])
    for (head, *pair), change in paired.told(at, [(m, "dapo") for m in VALUES]).items():
        table.note(f"{' less '.join(pair)} {head}: {change}.")
    return table


def climbed(found: Mapping[str, Sequence[Mapping]]) -> harness.Table:
    """A row for each rung, with its change from what PAIRED compares it with, told apart after
    Holm over all of them. found: records of each run by its folder."""
    runs = paired.by_arm(found, VAPO.rungs)
    fewest = min(map(len, runs.values()))  # seeds, from 0 on, that every rung has
    runs = {name: of[:fewest] for name, of in runs.items()}
    ends = {f"at {COMPARED} updates": COMPARED, f"at {COMPARED * 2} updates": COMPARED * 2}
    at = accuracies(runs, {head: (UPDATES, end) for head, end in ends.items()})
    heads = [cell for head in at for cell in (f"right {head}", "change", "verdict")]
    part = PARTS.index(1 / 3)
    beside = ("M tokens", "explained after a third")
    table = harness.Table("rung", "paper", "compared with", *heads, *beside, name="credit_ladder")
    told = [paired.told({head: of}, PAIRED) for head, of in at.items()]
    for name, of in runs.items():
        beside_it = next((b for a, b in PAIRED if a == name), "")
        cells = [name, VAPO.paper.get(name, ""), beside_it]
        for (head, accuracy), each in zip(at.items(), told, strict=True):
            change = each[head, name, beside_it].cells() if beside_it else ["", ""]
            cells += [stats.interval(accuracy[name]), *change]
        known = [run[0][KNOWN][part] for run in of if run[0].get(KNOWN)]
        tokens = np.mean([run[-1][TOKENS] for run in of])
        table.row(*cells, f"{tokens / 1e6:.3f}", f"{stats.interval(known):.2f}" if known else "")
    for head, each in zip(at, told, strict=True):
        table.note(f"{WHOLE} less {VAPO.bare} {head}: {each[head, WHOLE, VAPO.bare]}.")
    return table


FLAGS = {
    "seeds": Flag(1, 8, "runs of each method, all from one base"),
    "kept": Flag(False, False, "the comparison alone, from the records that are kept"),
    "ladder": Flag(False, False, "VAPO's rungs, in place of VAPO beside DAPO"),
    "out": Flag("", "", "folder of the runs; runs/credit without it"),
    "jobs": Flag(0, 0, "runs at a time; 0: one per core"),
}


def measure(args) -> list[harness.Table]:
    path, methods, table = KEPT, METHODS, compared
    if args.ladder:
        path, methods, table = KEPT_LADDER, VAPO.rungs, climbed
    if args.kept:
        return [table(harness.kept(path))]
    out = pathlib.Path(args.out or harness.ROOT / "runs" / "credit")
    base = pool.Task("base", make_base, (0,))
    tasks = [task(method, s, base, out) for s in range(args.seeds) for method in methods]
    known = pool.run_all([base, *tasks], out, args.jobs)
    found = {of.folder: metrics.read(out / of.folder / "metrics.jsonl") for of in tasks}
    for name, records in found.items():
        records[0][KNOWN] = known[name]
    if args.write:
        harness.keep(path, found, {KNOWN, "step", UPDATES, TOKENS, rungs.TAG})
    return [table(found)]
