"""The run around Algorithm 1 (algorithm.py): from a config to a finished workdir.

    python -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

The same command resumes. WORKDIR receives config.json (resolved), metrics.jsonl, tensorboard/,
rollouts/ (text samples), eval/, events.jsonl (where time went) and checkpoints/; it may be a bucket
(gs://...). Any field of the config can be overridden: --config.optim.lr=1e-6. On several hosts, run
the same command on each (hosts/processes.py). Exit code 0 at the end, or after SIGTERM or Ctrl-C,
which are heard between two chunks of decoding and between two updates (--terminated_status=N gives
another for that); a second Ctrl-C ends at once, with 130. While a run starts, SIGTERM ends
it with 143 and Ctrl-C with 130.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from tqdm import tqdm

from dapo_jax import algorithm, build, parallel
from dapo_jax.algorithm import Algorithm, State, StepRecord
from dapo_jax.checkpoint import branch, checkpoint, export, remembered, resume, workdir
from dapo_jax.checkpoint.journal import Journal
from dapo_jax.checkpoint.saver import Saver
from dapo_jax.config import cli, schema, validation
from dapo_jax.data import files, problems
from dapo_jax.evaluation import beside
from dapo_jax.evaluation.sampling import Evaluator, best_metric, evaluate_sets, rank
from dapo_jax.hosts import leaving, processes, start
from dapo_jax.hosts.watchdog import Watchdog
from dapo_jax.log import goodput, guards, hardware, metrics, profiler, report, trackers
from dapo_jax.reward import grading
from dapo_jax.run import begin
from dapo_jax.variants import choose


class Hooks(NamedTuple):
    """What a caller may hear of a run; it must change nothing of what it is given."""

    # 'start-up', 'rollout', 'update', 'evaluation', 'save' as each begins; 'chunk' after tokens
    phase: Callable[[str], None] = lambda phase: None
    # (state after the step, what happened in it), before anything of it is written
    step: Callable[[State, StepRecord], None] = lambda state, record: None
    profile: int = 0  # the step to trace into WORKDIR/profile


QUIET = Hooks()


def train(
    config,
    where: str | pathlib.Path,
    allow_config_change: bool = False,
    score: grading.Score | None = None,
    hooks: Hooks = QUIET,
) -> bool:
    """Run up to `config.steps` in the workdir `where`; False where SIGTERM or Ctrl-C cut it off.
    score: the judge of responses, in place of what `config.reward` names. Raises ConfigError,
    ValueError or OSError for bad input, before anything compiles."""
    began = time.time()
    hooks.phase("start-up")
    processes.agree(processes.identity(config, str(where)))
    validation.validate(config, len(jax.devices()), files=True)
    say = tqdm.write if parallel.is_main_process() else lambda _: None
    for warning in validation.warnings(config):
        say(f"warning: {warning}")
    if parallel.is_main_process():
        trackers.require(config)
    watchdog, first = Watchdog(config.guard), start.FirstToken()
    phase = report.Phase(say)
    listening = (hooks.phase, watchdog.phase, first.phase, phase.begins)
    hooks = hooks._replace(phase=lambda name: [hear(name) for hear in listening])
    with watchdog, workdir.hold(where, config.checkpoint.directory) as home:
        start.share_programs(home)
        checkpoints = config.checkpoint.directory or home.checkpoints
        resume.require_own(home, checkpoints)
        start.count(home, checkpoints)
        model_dir = start.model_directory(config, home, checkpoints)
        text = build.load_text(config, home.local, model_dir, score)
        processes.agree(resume.identity(text) | choose.files(config))
        best_metric(config, text.evals)  # ConfigError: there is none
        tok = text.tokenizer
        machine = build.build_machine(config, tok.vocab_size, tok.stop_ids, model_dir)
        for note in [*text.notes, report.describe(config, machine), f"workdir: {home.name}"]:
            say(note)

        def progress(finished: int) -> None:
            hooks.phase("chunk")
            phase.progress(finished)

        machine = machine._replace(watch=machine.watch._replace(progress=progress))
        book = goodput.Book(home.local, began)
        return run(config, home, text, machine, allow_config_change, say, hooks, first, book)


def run(
    config,
    home: workdir.Workdir,
    text: build.Text,
    machine: build.Machine,
    allow_config_change: bool,
    say: Callable[[str], None],
    hooks: Hooks,
    first: start.FirstToken,
    book: goodput.Book,
) -> bool:
    """Steps, evaluations, records and checkpoints up to the end. However it ends, what was opened
    is closed in the reverse order: saver, progress, writer; then the bucket gets what they left."""
    inputs = resume.inputs(text, config)
    keep = config.checkpoint
    directory = keep.directory or home.checkpoints
    accept = lambda saved: resume.check(saved, config, inputs, allow_config_change, say)
    state, resumed = begin.start_state(config, text, machine, directory, accept, say, home.local)
    if parallel.is_main_process():
        files.write_json(home.local / "config.json", schema.leaves(config))
    if state.counters.step < config.steps:
        say(report.memory_line(config, machine))
    say(f"resumed after step {state.counters.step}" if resumed else "start")
    book.note("resume", step=state.counters.step)
    stream, since = problems.stream(range(len(text.train.ids)), config.seed), state.counters.step
    state, method = choose.resumed(config, text, stream, state), choose.of(config)
    stop, cut, last = "", "", since >= config.steps
    kept = state if resumed else None  # the newest whose record is written
    with contextlib.ExitStack() as after:
        asked = after.enter_context(leaving.signals())
        after.callback(workdir.try_to_send, home, say)
        after.callback(lambda: book.note("leave", finished=bool(stop or last) and kept is state))
        trace = profiler.Profiler(home.local, hooks.profile, since, say)
        after.callback(trace.close)
        hooks = goodput.beside(hooks, book, trace)
        writer = metrics.Writer(home.local, since if resumed else -1, config, say, home.name)
        after.callback(writer.close)
        progress = report.Progress(config.steps, state.counters.step, say)
        after.callback(progress.close)
        journal = after.enter_context(Journal(home, config, inputs, state.counters.step, say))
        machine = machine._replace(watch=remembered.watch(machine.watch, journal, asked.check))
        text = text._replace(judge=remembered.judge(text.judge, journal))
        saver = after.enter_context(Saver(directory, config, inputs, say, journal.covered))
        ahead = beside.Ahead()

        def evaluate() -> dict[str, float]:
            step, sampler = state.counters.step, machine
            if joined := config.eval.with_rollout and step < config.steps:
                journal.at(step)
                sampler = ahead.machine(machine, (method, text), (stream, state))
            hooks.phase("rollout" if joined else "evaluation")
            log = evaluate_policy(config, sampler, text, state, writer, say)
            return log | {"time/eval_s": log["time/eval_s"] - ahead.seconds}

        try:
            if not resumed:
                evaluation = evaluate()
                writer.record(0, evaluation | first.told())
                kept = state
                hooks.phase("save")
                workdir.try_to_send(home, say)  # a checkpoint has the records of its steps
                saver.after_step(state, due=True, score=rank(config, text.evals, evaluation))
            elif not saver.has(state.counters.step):  # a branch, whose origin may be removed
                saver.after_step(state, due=True)
            history = guards.recall(metrics.read(home.local / "metrics.jsonl"))
            stop, hinted = guards.why_stop(config, state.counters, {}), False
            while state.counters.step < config.steps and not stop:
                asked.check()
                journal.at(state.counters.step)
                doing, early = ahead.step(method)
                state, record, clocks = timed_step(doing, text, machine, stream, state, hooks)
                clocks = clocks._replace(started=clocks.started - early)
                step = state.counters.step
                hooks.step(state, record)
                log = metrics.step_metrics(config, state, record, clocks, len(text.train.ids))
                log |= book.ledger.shares()
                others = [(other.shape, 4) for other in machine.others.values()]
                log |= hardware.step_metrics(config, machine.shape, record, clocks, others)
                last = step == config.steps
                evaluation = evaluate() if last or due(step, config.eval.every) else {}
                log |= evaluation | first.told()
                history = guards.remember(history, log)
                state, history, broken = guards.count_alarms(
                    config, state, log, history, say, writer.alarm
                )
                log |= {"alarms": broken} if broken else {}
                writer.lines("rollouts", step, report.samples(config, text, stream, record.batch))
                writer.record(step, log)
                kept = state
                progress.update(log)
                for warning in filter(None, (guards.shortage(config, log), guards.misses(log))):
                    say(f"warning: step {step}: {warning}")
                if not hinted and (hint := guards.hint(config, log)):
                    say(f"hint: step {step}: {hint}")
                    hinted = True
                stop = guards.why_stop(config, state.counters, log)
                hooks.phase("save")
                workdir.try_to_send(home, say)
                ranked = rank(config, text.evals, evaluation)
                if last or stop:
                    saver.last(state, ranked)
                else:
                    best = bool(evaluation and keep.keep_best)
                    saver.after_step(state, best or due(step, keep.every), ranked)
                if keep.export_every and (last or stop or due(step, keep.export_every)):
                    export.export(config, home, machine, state, say)
        except leaving.Leave:
            cut = "terminated within a step; the same command does it again, but for what is kept"
            journal.flush()
            if kept and checkpoint.is_there(kept):
                saver.last(kept)
                done = f"terminated after step {kept.counters.step}, saved"
                cut = f"{done}; the same command goes on from there"
    if parallel.is_main_process():
        records = metrics.read(home.local / "metrics.jsonl")
        say(report.summary(config, home.name, state.counters, stop, cut, records))
        say(goodput.summary(book.ledger))
    return not cut


def timed_step(
    method: Algorithm, text, machine, stream, state: State, hooks: Hooks
) -> tuple[State, StepRecord, metrics.Clocks]:
    """`algorithm.step` with the clock that it does not look at."""
    began: dict[str, float] = {}

    def on_phase(phase: str) -> None:
        began[phase] = time.perf_counter()
        hooks.phase(phase)

    state, record = algorithm.step(method, text, machine, stream, state, on_phase)
    return state, record, metrics.Clocks(began["rollout"], began["update"], time.perf_counter())


def due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def evaluate_policy(config, machine, text, state: State, writer, say) -> dict[str, float]:
    started = time.perf_counter()
    machine = build.talking(config, machine, text)
    evaluator = Evaluator(machine, machine.decode_params(state.params), text, config.eval.k)
    scores, rows = evaluate_sets(config, evaluator)
    step = state.counters.step
    writer.lines("eval", step, rows)
    for line in report.evaluation_lines(step, scores):
        say(line)
    return scores | {"time/eval_s": time.perf_counter() - started}


def main(score: grading.Score | None = None, hooks: Hooks = QUIET) -> int | None:
    """score, hooks: of a program of one's own that starts runs by this command line."""
    if not cli.WORKDIR.value:
        raise ValueError("--workdir: say where the run is to be kept")
    given = cli.CONFIG.value, cli.WORKDIR.value
    with processes.joined():
        if branch.REWIND.value is not None:
            return branch.rewind(*given, branch.REWIND.value)
        hooks = hooks._replace(profile=cli.PROFILE.value or hooks.profile)
        ended = train(*given, cli.ALLOW_CONFIG_CHANGE.value, score, hooks)
        leaving.ending()
    return 0 if ended else cli.TERMINATED_STATUS.value


if __name__ == "__main__":
    cli.run(main)
