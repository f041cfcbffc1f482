"""Before a run: what its config makes of its data, by its own reward, template and model.

    python -m dapo_jax.lab inspect --config=mine.py [--probe] [--json=FILE]

Every gold answer is graded by the run's reward, as a response that says nothing else, and those
that fail are named; so is an answer that belongs to another problem. Three prompts are shown as the
model gets them, and how many are too long. --probe draws the first 32 groups of the run's first
step and tells how many of them teach. `python -m dapo_jax.data inspect` needs no config, and counts
what files hold; it stands below the rewards and cannot ask them.
"""

import math
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from scipy import stats

from dapo_jax import build
from dapo_jax.config import cli, validation
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.reward import Grade
from dapo_jax.data import files, problems, prompts
from dapo_jax.data.problems import Problem
from dapo_jax.lab import redraw
from dapo_jax.log import metrics
from dapo_jax.model import hf
from dapo_jax.reward import grading
from dapo_jax.reward.functions import Failed
from dapo_jax.run import begin
from dapo_jax.variants import choose

# How a response may state its answer; tried in this order until the reward calls it right
FORMS = (
    "Answer: {}", "\\boxed{{{}}}", "<answer>{}</answer>", "<think>\n</think>\n<answer>{}</answer>",
    "{}", "#### {}",
)  # fmt: skip
SHOWN = 5  # of those that fail


class Gold(NamedTuple):
    """What a reward says of gold answers."""

    right: dict[str, int]  # form -> gold answers that are right in it, and in none before it
    failed: list[tuple[Problem, str]]  # right in no form; what was said of them in the usual one
    others: int  # answers of other problems that are right in that form, of as many as were asked
    asked: int
    scores: dict[str, float]  # mean score in that form of gold answers ('gold') and of others

    @property
    def usual(self) -> str:
        """The form that most gold answers are right in."""
        return max(FORMS, key=self.right.__getitem__)


def gold(judge: grading.Judge, asked: Sequence[Problem]) -> Gold:
    """Grade the gold answers, and of each problem another's. Of a reward that only scores, an
    answer is right where it scores more than an empty response."""
    own, right, left = [p.answer for p in asked], {}, list(range(len(asked)))
    bare = grading.said(judge, [(p, ("",)) for p in asked])

    def graded(form: str, answers: Sequence[str], at: Sequence[int]) -> dict[int, Grade | Failed]:
        groups = [(asked[i], (form.format(answers[i]),)) for i in at]
        return dict(zip(at, grading.said(judge, groups), strict=True))

    for form in FORMS:
        said = graded(form, own, left)
        still = [i for i in left if not _right(said[i], bare[i])]
        right[form], left = len(left) - len(still), still
    found = Gold(right, [], 0, 0, {})
    distinct = list(dict.fromkeys(own))
    after = {a: distinct[(i + 1) % len(distinct)] for i, a in enumerate(distinct)}
    every = range(len(asked) if len(distinct) > 1 else 0)
    others = graded(found.usual, [after[a] for a in own], every)
    mine = graded(found.usual, own, range(len(asked)))
    scores = lambda rows: [g.score for g in rows.values() if isinstance(g, Grade)]
    mean = lambda rows: float(np.mean(scores(rows) or 0))
    return found._replace(
        failed=[(asked[i], _why(mine[i])) for i in left],
        others=sum(_right(others[i], bare[i]) for i in every),
        asked=len(every),
        scores={"gold": mean(mine), "others": mean(others)},
    )


def _right(grade: Grade | Failed, nothing: Grade | Failed) -> bool:
    if not isinstance(grade, Grade):  # the function failed
        return False
    if grade.right is not None:
        return grade.right
    return grade.score > (nothing.score if isinstance(nothing, Grade) else -math.inf)


def _why(grade: Grade | Failed) -> str:
    if not isinstance(grade, Grade):
        return grade.cause
    return f"score {grade.score:g}, read as {grade.answer!r}"


def probed(config, text: build.Text, model_dir, problems_asked: int, say) -> dict[str, float]:
    """Numbers of the first groups that step 1 of the run draws, by the weights that it begins with:
    the share that teaches with its 95% interval (Wilson's), and what is logged of a step."""
    tok = text.tokenizer
    machine = build.build_machine(config, tok.vocab_size, tok.stop_ids, model_dir)
    with tempfile.TemporaryDirectory() as none:
        state, _ = begin.start_state(config, text, machine, none, lambda _: True, say)
    stream, method = problems.stream(range(len(text.train.ids)), config.seed), choose.of(config)
    first = redraw.Opened("", 1, config, method, text, machine, stream, state, [])
    groups = redraw.draw(first, range(problems_asked))
    n, teach = len(groups), sum(map(method.teaches, groups))
    tokens = sum(r.length for g in groups for r in g.responses)
    got = Collected([], [], groups, n, 1, 1.0)
    found = metrics.rollout_metrics(config, got, tokens)
    low, high = stats.binomtest(teach, n).proportion_ci(method="wilson")
    kept = {k: float(x) for k, x in found.items() if not isinstance(x, list) and "batch" not in k}
    return {"groups": n, "teach": teach, "teach_low": float(low), "teach_high": float(high), **kept}


def report(config, text: build.Text, found: Gold, probe: dict[str, float]) -> Iterator[str]:
    """Lines for the terminal."""
    train, most = text.train, config.data.max_prompt_tokens
    yield from text.notes
    lengths = [len(ids) for ids in train.ids]
    marks = (f"p{q} {np.percentile(lengths, q, method='higher')}" for q in (0, 50, 90, 99, 100))
    read = len(train.ids) + train.n_long * (config.data.on_long == "filter")
    yield f"prompts     {'  '.join(marks)} tokens, of {most} allowed"
    yield f"too long    {train.n_long:,} of {read:,} ({train.n_long / read:.1%}): data.on_long"
    n = len(train.problems)
    yield f"gold        {n - len(found.failed):,} of {n:,} answers are right by the run's reward"
    yield "    " + "; ".join(f"{f.format('A')!r} {k:,}" for f, k in found.right.items() if k)
    for problem, why in found.failed[:SHOWN]:
        yield f"    FAILS: problem {problem.id}, answer {problem.answer[:60]!r}: {why}"
    if found.failed[SHOWN:]:
        yield f"    and {len(found.failed) - SHOWN:,} more"
    yield f"others      {found.others:,} of {found.asked:,} answers of another problem are right"
    yield "    mean score: " + ", ".join(f"{k} {x:+.3f}" for k, x in found.scores.items())
    if probe:
        share, G = probe["teach"] / probe["groups"], config.rollout.group_size
        low, high = probe["teach_low"], probe["teach_high"]
        yield (
            f"probe       {probe['teach']:.0f} of {probe['groups']:.0f} groups of {G} teach:"
            f" {share:.0%}, 95% interval {low:.0%} to {high:.0%}"
        )
        goes_on = config.dynamic_sampling.enabled and config.dynamic_sampling.refill
        groups = config.rollout.groups / (max(share, 1 / 64) if goes_on else 1)
        drawn = groups * G * probe["response/length_mean"]
        yield f"    a step of {config.rollout.groups} groups would draw about {drawn:,.0f} tokens"
        tags = ("reward/mean", "reward/accuracy", "sampling/all_correct_frac")
        tags += ("sampling/all_wrong_frac", "response/length_mean", "response/truncated_frac")
        yield "    " + "  ".join(f"{t} {probe[t]:.3g}" for t in tags if t in probe)
    for problem, ids in list(zip(train.problems, train.ids, strict=True))[:3]:
        yield f"\n--- problem {problem.id}, answer {problem.answer}, {len(ids)} tokens, as rendered"
        yield text.tokenizer.decode(ids, skip_special=False)


def main() -> None:
    config, probe = cli.CONFIG.value, {}
    notes = redraw.lay_out(config)
    validation.validate(config, len(jax.devices()), files=True)
    for note in [*notes, *validation.warnings(config)]:
        print(f"note: {note}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        weights = flags.FLAGS.probe and not config.init_from
        model_dir = hf.resolve(config.model.path, weights) if config.model.path else None
        text = build.load_text(config, pathlib.Path(folder), model_dir)
        found = gold(text.judge, text.train.problems)
        if flags.FLAGS.probe:
            if not (config.model.path or config.init_from or validation.warm_up(config)):
                raise ValueError("--probe: the config names no model (model.path, init_from)")
            probe = probed(config, text, model_dir, 32, print)
    for line in report(config, text, found, probe):
        print(prompts.visible(line), flush=True)
    if flags.FLAGS.json:
        failed = [{"problem": p.id, "answer": p.answer, "why": why} for p, why in found.failed]
        out = found._asdict() | {"failed": failed, "probe": probe, "notes": text.notes}
        files.write_json(pathlib.Path(flags.FLAGS.json), out)


def define_flags() -> None:
    flags.DEFINE_boolean("probe", False, "Draw the first 32 groups of step 1: how many teach?")
    flags.DEFINE_string("json", "", "Write everything here.")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
