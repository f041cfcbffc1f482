"""Why does a run go wrong? Names the cause, with the figure that shows it.

    python -m dapo_jax.lab diagnose RUN [--json=FILE]

RUN is a workdir, on a disk or in a bucket, or another log that `compare` reads: of such a one there
are fewer figures. Only metrics.jsonl, rollouts/, eval/ and config.json are read; docs/diagnose.md
has the causes and how often they were found. What could not be judged, and why, is said.

Exit status: 0, nothing was found; 2, a cause is named; 3, nothing can be told, as there are too few
steps or figures; 1, RUN is no run.
"""

import math
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dapo_jax.config import cli, schema
from dapo_jax.data import files
from dapo_jax.lab import causes
from dapo_jax.lab.causes import Finding
from dapo_jax.lab.dynamics import browse, logs
from dapo_jax.lab.evidence import Answer, Evidence

NOTHING, FOUND, UNTOLD = 0, 2, 3  # exit status
STEPS_OF_SAMPLES = 40  # of rollouts/ that are read, at most: the first and the last


class Cause(NamedTuple):
    name: str
    remedy: str
    look: str  # command or page; RUN stands for the run


CAUSES = {
    "apart": Cause(
        "sampler and trainer are two policies",
        "set model.dtype=float32 and rollout.cache_dtype=model to see whether it is rounding;"
        " loss.importance_cap=2 weighs it out; a gap in float32 is a bug",
        "python -m dapo_jax.lab explain RUN",
    ),
    "template": Cause(
        "the prompt's template or the stop token is wrong",
        "render three prompts and compare them with what the model was taught; name the stop token"
        " in tokenizer_config.json; ask for the answer as the verifier reads it (data.template)",
        "python -m dapo_jax.lab inspect --config=FILE",
    ),
    "verifier": Cause(
        "the verifier, or gold answers, are wrong",
        "grade the gold answers by the run's own reward, and read wrong samples beside them",
        "python -m dapo_jax.lab inspect --config=FILE",
    ),
    "hacked": Cause(
        "the reward pays for something else than the task",
        "read what the last samples are paid for, and take that way to the reward away; evaluate by"
        " another reward than the one that trains (reward.by_source)",
        "python -m dapo_jax.lab explain RUN@STEP PROBLEM",
    ),
    "staleness": Cause(
        "responses are too old for the updates that they are used in",
        "lower rollout.staleness, optim.lr or the updates a step (optim.minibatches)",
        "docs/staleness.md",
    ),
    "lr high": Cause(
        "the learning rate is too high",
        "lower optim.lr tenfold, or take fewer updates a step; branch off from a checkpoint before"
        " the step above (init_from=RUN@STEP)",
        "python -m dapo_jax.lab sweep, over optim.lr",
    ),
    "length": Cause(
        "responses run away from, or do not fit, their limit",
        "raise rollout.max_response_tokens if whole solutions do not fit; else punish length softly"
        " (reward.overlong_penalty) and keep loss.normalizer=batch_tokens",
        "the longest samples: python -m dapo_jax.lab report RUN",
    ),
    "data": Cause(
        "the problems are used up",
        "give more or harder problems; curriculum.pass_rate_cap with revisit_epochs",
        "docs/curriculum.md",
    ),
    "entropy": Cause(
        "the policy's entropy has collapsed",
        "raise loss.clip_high, lower optim.lr, sample at rollout.temperature=1, or set"
        " loss.entropy_coef with loss.entropy_enough; a collapsed policy does not come back",
        "docs/reading_a_run.md",
    ),
    "signal": Cause(
        "groups have no signal",
        "all wrong: easier problems, more responses a problem, a better start; all right: harder"
        " problems",
        "python -m dapo_jax.lab inspect --config=FILE --probe",
    ),
    "lr low": Cause(
        "the updates change nothing: the learning rate is too low",
        "raise optim.lr tenfold, and look at optim.schedule, decay_steps and warmup_steps",
        "python -m dapo_jax.lab sweep, over optim.lr",
    ),
}  # fmt: skip


class Suspect(NamedTuple):
    """A cause and all figures that show it, in the order of the rules."""

    cause: str  # key of CAUSES
    figures: list[Finding]


class Diagnosis(NamedTuple):
    """suspects: the first is the answer, none: nothing found. untold: what could not be judged."""

    steps: int  # rollout steps of the run
    suspects: list[Suspect]
    judged: int  # rules that could say something
    untold: list[str]
    learns: bool | None  # whether the score rose, or is high; None: it is not logged

    @property
    def status(self) -> int:
        return FOUND if self.suspects else NOTHING if self.judged > 2 else UNTOLD


def read(path: str) -> Evidence:
    """What a run has left. ValueError, of one line: it is no run."""
    run, config = logs.read(path), logs.config_of(path)
    steps, half = [*logs.numbered(path, "rollouts")], STEPS_OF_SAMPLES // 2
    samples = browse.read(path, {*steps[:half], *steps[-half:]}) if steps else []
    fields = {} if config is None else schema.leaves(config)
    return Evidence(run.series, fields, samples, evaluated(path))


def evaluated(path: str) -> list[Answer]:
    """The answers of the first and the last evaluation that the limit did not cut off. Rows of
    another form are left out."""
    found, out = [*logs.numbered(path, "eval").items()], []
    for step, file in dict((*found[:1], *found[-1:])).items():
        for row in map(logs.json_object, logs.text_of(file, path).split("\n")):
            row = row or {}
            columns = [row.get(k) for k in ("extracted", "correct", "truncated")]
            ours = isinstance(row.get("gold"), str) and all(isinstance(x, list) for x in columns)
            for said, right, cut in zip(*columns, strict=False) if ours else ():
                if isinstance(said, str) and isinstance(right, bool) and not cut:
                    out.append(Answer(step, row["gold"], said, right))
    return out


def diagnose(e: Evidence) -> Diagnosis:
    """Ask every rule. A cause stands where its first rule that fires stands."""
    found: dict[str, list[Finding]] = {}
    untold: dict[str, str] = {}
    judged = 0
    for rule in causes.RULES:
        if why := lacks(e, rule):
            untold[f"{rule.cause}: {words(rule)}"] = why
            continue
        judged += 1
        if finding := rule.judge(e):
            found.setdefault(rule.cause, []).append(finding)
    suspects = [Suspect(cause, figures) for cause, figures in found.items()]
    told = e.learns if len(e.score.values) else None
    return Diagnosis(steps(e), suspects, judged, [f"{k}: {v}" for k, v in untold.items()], told)


def steps(e: Evidence) -> int:
    training = (tag for tag in e.series if not tag.startswith("eval/"))  # which have a step 0
    return max((len(e.curve(tag).steps) for tag in training), default=0)


def words(rule: causes.Rule) -> str:
    return rule.judge.__name__.replace("_", " ")


def lacks(e: Evidence, rule: causes.Rule) -> str:
    """What a rule needs and the run does not have; '' = nothing."""
    seen = []
    for need in rule.needs.split():
        if need in ("config", "samples"):
            if not getattr(e, need):
                return f"no {'config.json' if need == 'config' else 'samples in rollouts/'}"
            continue
        family, names = need.endswith("/"), need.split("|")
        tags = [t for t in e.series if (t.startswith(need) if family else t in names)]
        if not tags:
            return f"not logged: {need.replace('|', ' or ')}"
        if not family:
            seen.append(max(len(e.curve(t).values) for t in tags))
    if seen and min(seen) < rule.fewest:
        return f"{min(seen)} steps with figures, and it takes {rule.fewest}"
    return ""


def number(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:.3g}"


def report(path: str, d: Diagnosis) -> Iterator[str]:
    """Lines for the terminal."""
    for i, (key, figures) in enumerate(d.suspects):
        cause = CAUSES[key]
        if i == 1:
            yield "\nother suspects, which may follow from it:"
        yield f"{'cause: ' if not i else '  '}{cause.name} ({key})"
        for f in figures if not i else figures[:1]:
            yield f"  {f.tag} = {number(f.value)} from step {f.step} on (bound {number(f.bound)})"
            if not i:
                yield textwrap.fill(f.why, 96, initial_indent="    ", subsequent_indent="    ")
        if not i:
            yield textwrap.fill(
                f"try: {cause.remedy}", 98, initial_indent="  ", subsequent_indent="    "
            )
            step = str(figures[0].step)
            look = re.sub(r"\bRUN\b", lambda _: path, cause.look).replace("@STEP", f"@{step}")
            yield f"  look: {look}"
    if not d.suspects:
        yield "nothing found" if d.status == NOTHING else "nothing can be told"
        if d.learns is False and d.status == NOTHING:
            yield "  the score does not rise, and no figure says why: too few steps, or too hard"
    if d.untold:
        yield f"\nnot judged ({d.steps} steps):"
        yield from (f"  {line}" for line in d.untold)


def as_json(d: Diagnosis) -> dict[str, Any]:
    """Plain values; a number that is none is null."""
    plain = lambda f: {k: None if v != v else v for k, v in f._asdict().items()}
    suspects = [
        {"cause": s.cause, **CAUSES[s.cause]._asdict(), "figures": list(map(plain, s.figures))}
        for s in d.suspects
    ]
    first = d.suspects[0].cause if d.suspects else None
    return {"status": d.status, "first": first, **d._asdict(), "suspects": suspects}


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser("python -m dapo_jax.lab diagnose", description=__doc__)
    parser.add_argument("run", help="workdir, local or gs://, or another log")
    parser.add_argument("--json", default="", help="write everything here")
    a = parser.parse_args(argv)
    try:
        found = diagnose(read(a.run))
        if a.json:
            files.write_json(pathlib.Path(a.json), as_json(found))
    except (ValueError, OSError) as error:
        return cli.fail(str(error) or type(error).__name__)
    cli.tell(report(a.run, found))
    return found.status


if __name__ == "__main__":
    sys.exit(main())
