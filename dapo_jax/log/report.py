"""Output for people: the console, and sampled responses as rows to read."""

import collections
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tqdm import tqdm

from dapo_jax import algorithm, build, parallel
from dapo_jax.build import Text
from dapo_jax.dapo import reward
from dapo_jax.dapo.dynamic_sampling import Collected, Group
from dapo_jax.dapo.state import Counters
from dapo_jax.model import qwen2
from dapo_jax.pods import topology
from dapo_jax.reward import grading
from dapo_jax.variants import choose


class Progress:
    """Progress of the run and the time left: a line per step, printed by `say`, and, where stderr
    is a terminal, a bar below them."""

    def __init__(self, steps: int, done: int, say: Callable):
        self._steps, self._done, self._say = steps, done, say
        self._seconds = collections.deque(maxlen=9)  # of the last steps, including evaluation
        self._since = time.monotonic()
        hidden = not (parallel.is_main_process() and sys.stderr.isatty())
        look = dict(desc="DAPO", unit="step")
        self._bar = tqdm(total=steps, initial=done, disable=hidden, **look)

    def update(self, log: dict) -> None:
        """Count one more step, and print its line."""
        now = time.monotonic()
        self._seconds.append(now - self._since)
        self._since, self._done = now, self._done + 1
        line = f"step {self._done}/{self._steps}  {short(log)}"
        if self._bar.disable:  # a bar has the time left
            left = (self._steps - self._done) * statistics.median(self._seconds)
            line += f"  eta {tqdm.format_interval(left)}"
        self._say(line)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class Phase:
    """A line every 30 s about a phase that takes longer, so that a log shows that it goes on."""

    EVERY_S = 30.0

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self.begins("start-up")

    def begins(self, name: str) -> None:
        if name != "chunk":  # of the phase that has begun
            self._name, self._finished = name, 0
            self._since = self._said = time.monotonic()

    def progress(self, finished: int) -> None:
        """finished: responses, since the call before."""
        self._finished += finished
        now = time.monotonic()
        if now - self._said >= self.EVERY_S:
            self._said = now
            took = tqdm.format_interval(now - self._since)
            self._say(f"  {self._name}: {self._finished:,} responses ended in {took}")


def short(log: dict[str, float]) -> str:
    """The main numbers of a step."""
    shown = (
        ("acc", "reward/accuracy", ".2f"),
        ("reward", "reward/mean", "+.2f"),
        ("len", "response/length_mean", ".1f"),
        ("ent", "policy/entropy", ".2f"),
        ("accept", "sampling/accept_frac", ".2f"),
        ("tok/s", "perf/tokens_per_s", ",.0f"),
    )
    return " ".join(f"{name} {log[tag]:{form}}" for name, tag, form in shown if tag in log)


def evaluation_lines(step: int, log: dict[str, float]) -> list[str]:
    """One line a set: '  step 20  heldout: avg@4 .59 ...'."""
    sets = collections.defaultdict(list)
    for tag, value in log.items():
        if tag.startswith("eval/") and "@" in tag:
            name, _, score = tag.removeprefix("eval/").rpartition("/")
            sets[name].append(f"{score} {value:.3f}")
    return [f"  step {step:4d}  {name:18s} {'  '.join(sets[name])}" for name in sorted(sets)]


def summary(config, name: str, counters: Counters, stop: str, cut: str, records: list[dict]) -> str:
    """The final report: how the run ended, its scores, where its files are. name: of the workdir.
    stop, cut: why it ended before its last step, if it did."""
    counted = f"{counters.samples:,} responses, {counters.tokens:,} tokens"
    done = f"done: {counters.step} steps, {counters.updates} updates, {counted}"
    lines = [f"stopped after step {counters.step}, saved: {stop}" if stop else cut or done]
    scored = [r for r in records if "time/eval_s" in r]
    # Tags of all records: a resumed run may evaluate on other sets than before.
    for tag in dict.fromkeys(t for r in scored for t in r if t.endswith("/avg@k")):
        path = " -> ".join("-" if r.get(tag) is None else f"{r[tag]:.2f}" for r in scored)
        lines.append(f"  {tag:32s} {path}")
    if alarmed := [r["step"] for r in records if r.get("alarms")]:
        lines.append(f"  alarms in {len(alarmed)} steps, the last in step {alarmed[-1]}")
    if config.log.tensorboard:
        lines.append(f"  curves: tensorboard --logdir {name}/tensorboard (pip install tensorboard)")
    checkpoints = config.checkpoint.directory or f"{name}/checkpoints"
    lines.append(f"  samples: {name}/rollouts, checkpoints: {checkpoints}")
    return "\n".join(lines)


def memory_line(config, machine: build.Machine) -> str:
    """Device memory that sampling and an update need. Compiles them, which the run then reuses."""
    programs = build.calls(config, machine)
    wanted = {
        "prefill": programs["prefill"],
        "decode": programs[f"decode_{algorithm.training_draw(choose.of(config)).mode}"],
        **{name: call for name, call in programs.items() if name.startswith("update")},
    }
    compiled = lambda call: call.program.lower(*call.arguments).compile()
    return topology.memory_line({label: compiled(call) for label, call in wanted.items()})


def describe(config, machine: build.Machine) -> str:
    """One line on model, devices and batch."""
    sizes = " x ".join(f"{k} {v}" for k, v in machine.mesh.shape.items())
    adapters = qwen2.adapter_count(machine.trainer.shape)
    trained = f" and {adapters:,} of adapters, which alone are trained" if adapters else ""
    for name, other in machine.others.items():
        trained += f"; {name} model: {qwen2.param_count(other.shape):,}"
    model = f"{qwen2.param_count(machine.shape):,} parameters{trained}"
    devices = f"{machine.mesh.size} {machine.mesh.devices.flat[0].platform} ({sizes})"
    groups = f"{config.rollout.groups} groups x {config.rollout.group_size}"
    batch = f"{groups}, {config.optim.minibatches} updates per step"
    return f"model: {model}; devices: {devices}; batch: {batch}"


def chosen(got: Collected, count: int) -> list[tuple[Group, int]]:
    """(group, response index) to show: the first right and the first wrong response, or those of
    the highest and lowest score, of each of the batch's first `count` groups; then up to `count`
    truncated ones, those of the batch first."""
    of = lambda pairs: {(group.position, i): (group, i) for group, i in pairs}
    values = lambda g: g.score_G if g.right_G is None else g.right_G
    ends = lambda g: sorted({int(values(g).argmax()), int(values(g).argmin())})
    graded = of((g, i) for g in got.groups[:count] for i in ends(g.grades))
    groups = [*got.groups, *got.drawn]
    truncated = of((g, i) for g in groups for i, r in enumerate(g.responses) if r.truncated)
    more = [pair for key, pair in truncated.items() if key not in graded]
    return [*graded.values(), *more[:count]]


def samples(config, text: Text, stream: Sequence[int], got: Collected) -> Iterator[dict]:
    """The `chosen` responses as rows of rollouts/step_NNNNNN.jsonl.

    stream: position -> row of the training set. Groups from before a restart have no answers, and
    are judged again. A row's `pieces`, `entropies` (nats) and `logps` have one entry per token; a
    token that is only part of a character decodes to U+FFFD.
    """
    tokenizer = text.tokenizer
    piece = functools.cache(lambda token: tokenizer.decode([token], skip_special=False))
    longest = config.rollout.max_response_tokens
    for group, i in chosen(got, config.log.samples):
        problem, response = text.train.problems[stream[group.position]], group.responses[i]
        grades, ids, n = group.grades, response.tokens.tolist(), response.length
        if grades.answers is None:
            grades = grading.grade(tokenizer, text.judge, group.responses, problem)
        verdict = {} if grades.right_G is None else {"correct": bool(grades.right_G[i])}
        logps = np.where(response.drawn, response.logps.astype(float), 0)
        yield {
            "position": group.position,
            "problem": problem.id,
            "source": problem.source,
            "prompt": tokenizer.decode(group.prompt),
            "response": tokenizer.decode(ids),
            "answer": problem.answer,
            "extracted": grades.answers[i],
            **verdict,
            "reward": float(reward.shaped(grades.score_G[i], n, longest, config.reward)),
            "tokens": len(ids),
            "truncated": bool(response.truncated),
            "mean_entropy": float(response.entropies[response.drawn].mean()),
            "pieces": [piece(token) for token in ids],
            "entropies": np.round(response.entropies.astype(float), 4).tolist(),
            "logps": np.round(logps, 4).tolist(),
            **({} if response.drawn.all() else {"drawn": response.drawn.astype(int).tolist()}),
        }
