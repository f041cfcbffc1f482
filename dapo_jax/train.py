"""Train by DAPO: Algorithm 1 of the paper, one rollout step after the other.

    python -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

The same command resumes. WORKDIR receives config.json (resolved), metrics.jsonl, tensorboard/,
rollouts/ (text samples), eval/ and checkpoints/; it may be a bucket (gs://...). Any field of the
config can be overridden: --config.optim.lr=1e-6. On several hosts, run the same command on each
(hosts/processes.py). Exit code 0 at the end, or after SIGTERM once the running step is saved.
"""

import contextlib
import functools
import pathlib
import signal
import time

import jax
import numpy as np
from tqdm import tqdm

from dapo_jax import build, cli, grading, parallel, schema, validation, warmup
from dapo_jax.checkpoint import checkpoint, resume, saver as saver_lib, workdir as workdir_lib
from dapo_jax.checkpoint.checkpoint import State
from dapo_jax.dapo import advantage, objective, packing, reward, update
from dapo_jax.dapo.dynamic_sampling import Collected, Group, collect
from dapo_jax.data import problems, verifier
from dapo_jax.evaluate import evaluate_sets
from dapo_jax.hosts import processes
from dapo_jax.log import guards, metrics, report, trackers
from dapo_jax.model import hf, qwen2
from dapo_jax.pods import topology
from dapo_jax.rollout import engine
from dapo_jax.rollout.engine import Stats

# ------------------------------------------------------------------------------------------------
# Algorithm 1
# ------------------------------------------------------------------------------------------------


def train_step(config, text: build.Text, machine: build.Machine, stream, state: State):
    """One rollout step: sample until the batch is full of mixed groups, then U updates on it.
    Returns (state, metrics, what was sampled)."""
    started = time.perf_counter()

    # Lines 3-8: generate, verify, filter; N groups in problem order.
    got, stats = sample_batch(config, text, machine, stream, state)
    rollout_done = time.perf_counter()
    log = drawn_metrics(config, got, stats)
    state = state._replace(
        rounds=state.rounds + got.rounds,
        position=got.next_position,
        accept_rate=got.accept_rate,
        carried=got.carried,
        empty_steps=0 if got.groups else state.empty_steps + 1,
        tokens=state.tokens + stats.tokens,
        samples=state.samples + sum(len(g.responses) for g in got.drawn),
    )

    # Line 9: rewards with the length penalty, group-relative advantages, loss weights.
    minibatches = make_minibatches(config, got.groups, state.step)
    # Lines 10-12: old log-probs first, then the updates.
    state, update_log = update_policy(config, machine, state, minibatches)

    done = time.perf_counter()
    log |= update_log | {
        "optim/updates": state.updates,
        "spent/tokens": state.tokens,
        "spent/samples": state.samples,
        "time/rollout_s": rollout_done - started,
        "time/update_s": done - rollout_done,
        "time/step_s": done - started,
        "perf/tokens_per_s": stats.tokens / (done - started),
        "perf/slot_occupancy": stats.occupancy,
        "perf/cache_peak": stats.peak_cache,
        "sampling/evicted": stats.evicted,
    }
    return state._replace(step=state.step + 1), log, got


def sample_batch(config, text, machine, stream, state: State) -> tuple[Collected, Stats]:
    """Dynamic sampling with the policy as it is at the start of the step."""
    decode_params = machine.engine.decode_params(state.params)
    totals = []

    def sample(positions: range) -> list[Group]:
        rows = [stream[i] for i in positions]
        groups, stats = build.sample_groups(
            machine,
            decode_params,
            list(zip(positions, [text.train.ids[r] for r in rows], strict=True)),
            config.rollout.group_size,
            seed=config.seed,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        totals.append(stats)
        drawn = [text.train.problems[row] for row in rows]
        answers = [problem.answer for problem in drawn]
        graded = grading.grade_groups(text.tokenizer, groups, answers, config.reward.verifier)
        return [
            group._replace(correct=grades.correct, extras=grades._replace(source=problem.source))
            for group, grades, problem in zip(groups, graded, drawn, strict=True)
        ]

    got = collect(
        sample,
        start=state.position,
        need=config.rollout.groups,
        accept_rate=state.accept_rate,
        max_rounds=config.dynamic_sampling.max_rounds,
        dynamic=config.dynamic_sampling.enabled,
        surplus=config.dynamic_sampling.surplus,
        carried=state.carried,
    )
    return got, engine.total(totals)


def make_minibatches(config, groups: list[Group], step: int) -> list[list[packing.Item]]:
    """Groups -> advantages and loss weights -> U mini-batches of whole groups, shuffled."""
    if not groups:
        return []
    correct_NxG = np.stack([g.correct for g in groups])
    length_NxG = np.array([[len(r.tokens) for r in g.responses] for g in groups])
    truncated_NxG = np.array([[r.truncated for r in g.responses] for g in groups])
    reward_NxG = shaped_rewards(config, correct_NxG, length_NxG)
    filtered_NxG = truncated_NxG & (config.loss.overlong_filter != "off")
    advantage_NxG = advantage.group_normalize(
        reward_NxG,
        ddof=config.advantage.ddof,
        epsilon=config.advantage.epsilon,
        counted_NxG=~filtered_NxG if config.loss.overlong_filter == "group" else None,
    )
    trained_NxG = np.where(filtered_NxG, 0, length_NxG)

    order = np.random.default_rng([config.seed, step]).permutation(len(groups))
    size = (
        config.rollout.groups // config.optim.minibatches
    )  # groups a mini-batch; a short batch has fewer
    G = config.rollout.group_size
    minibatches = []
    for start in range(0, len(order), size):
        part = order[start : start + size]
        weights = objective.token_weights(
            trained_NxG[part].ravel(),
            np.repeat(part, G),
            config.loss.normalizer,
            config.loss.chunk_sequences,
        ).reshape(len(part), G)
        minibatches.append(
            [
                packing.Item(groups[n].prompt, r.tokens, r.logps, float(advantage_NxG[n, g]), w)
                for n, row in zip(part, weights, strict=True)
                for g, (r, w) in enumerate(zip(groups[n].responses, row, strict=True))
            ]
        )
    return minibatches


def shaped_rewards(config, correct: np.ndarray, length: np.ndarray) -> np.ndarray:
    return reward.shaped(
        correct,
        length,
        right=config.reward.correct,
        wrong=config.reward.wrong,
        max_tokens=config.rollout.max_response_tokens,
        buffer_tokens=config.reward.overlong_buffer_tokens,
        factor=config.reward.overlong_penalty,
    )


def update_policy(config, machine, state: State, minibatches) -> tuple[State, dict[str, float]]:
    """Old (and reference) log-probs of the whole batch, then one gradient update a mini-batch."""
    trainer = machine.trainer
    temperature = np.float32(config.rollout.temperature)
    coefficients = objective.Coefficients(*map(np.float32, objective.coefficients(config.loss)))
    lr = np.float32(update.learning_rate(config.optim, state.step))
    packed = pack_minibatches(config, machine, state, minibatches)
    params, opt_state, logs = state.params, state.opt_state, []
    for rows, old, ref, used in packed:
        params, opt_state, log = trainer.update(
            params, opt_state, rows, old, ref, used, lr, temperature, coefficients
        )
        logs.append(log)
    logs = parallel.to_host(logs)
    in_row = state.skipped_in_row
    for log in logs:
        in_row = in_row + 1 if log["skipped"] else 0
    state = state._replace(
        params=params,
        opt_state=opt_state,
        updates=state.updates + len(logs),
        skipped_in_row=in_row,
    )
    return state, metrics.update_metrics(logs, bool(config.loss.kl_coef)) | {"optim/lr": lr}


def pack_minibatches(config, machine, state: State, minibatches) -> list[tuple]:
    """(rows, old log-probs, reference log-probs, micro-batches in use) of each mini-batch of which
    anything is left, on the devices."""
    trainer, temperature = machine.trainer, np.float32(config.rollout.temperature)
    packed = []
    for items in minibatches:
        rows, used, _ = packing.pack(
            items,
            row_tokens=validation.row_tokens(config),
            micro_rows=config.optim.micro_batch_rows,
            max_items=build.minibatch_responses(config),
        )
        if not used:  # every response of it was filtered out
            continue
        rows, used = parallel.to_device(rows, trainer.row_sharding), np.int32(used)
        old = rows.sampled_logp_AxRxT
        if config.loss.old_logprobs == "recompute":
            old = trainer.log_probs(state.params, rows, used, temperature)
        ref = old
        if state.ref_params is not None:
            ref = trainer.log_probs(state.ref_params, rows, used, temperature)
        packed.append((rows, old, ref, used))
    return packed


def memory_lines(config, machine: build.Machine) -> list[str]:
    """What sampling and an update take of a device. Compiles them; the run finds them ready."""
    programs = build.calls(config, machine)
    decode = f"decode_{engine.draw_mode(config.rollout.temperature, config.rollout.top_p)}"
    return [
        topology.memory_line(name.split("_")[0], program.lower(*arguments).compile())
        for name in ("prefill", decode, "update")
        for program, arguments in [programs[name]]
    ]


def drawn_metrics(config, got: Collected, stats: Stats) -> dict[str, float | list[int]]:
    """`rollout_metrics` with the rewards of everything drawn, accepted or not."""
    correct = np.array([g.correct for g in got.drawn], bool).ravel()
    length = np.array([len(r.tokens) for g in got.drawn for r in g.responses])
    return metrics.rollout_metrics(
        got,
        outcomes=np.where(correct, config.reward.correct, config.reward.wrong),
        rewards=shaped_rewards(config, correct, length),
        tokens=stats.tokens,
        longest=config.rollout.max_response_tokens,
    )


# ------------------------------------------------------------------------------------------------
# The run around it
# ------------------------------------------------------------------------------------------------


def train(config, where: str | pathlib.Path, allow_config_change: bool = False) -> bool:
    """Run up to `c.steps` in the workdir `where`; False where SIGTERM cut it off.
    Raises ConfigError, ValueError or OSError for bad input, before anything compiles."""
    processes.agree(processes.identity(config, str(where)))
    validation.validate(config, len(jax.devices()), files=True)
    say = tqdm.write if parallel.first() else lambda _: None
    for warning in validation.warnings(config):
        say(f"warning: {warning}")
    if parallel.first():
        trackers.require(config)
    with workdir_lib.hold(where) as home:
        return run(config, home, allow_config_change, say)


def run(c, home: workdir_lib.Workdir, allow_config_change: bool, say) -> bool:
    workdir = home.local
    model_dir = hf.resolve(c.model.path) if c.model.path else None
    text = build.load_text(c, workdir, model_dir)
    processes.agree({"the set of problems (its hash)": build.digest(text)})
    machine = build.build_machine(c, text.tokenizer.vocab_size, text.tokenizer.stop_ids, model_dir)
    config, data = schema.leaves(c), resume.fingerprint(text.train)
    for note in [*text.notes, describe(c, machine), f"workdir: {home.name}"]:
        say(note)

    directory = c.checkpoint.directory or home.checkpoints
    accept = lambda saved: resume.check(saved, c, data, allow_config_change, say)
    state, resumed = start_state(c, text, machine, directory, accept, say)
    if parallel.first():
        checkpoint.dump_json(workdir / "config.json", config)
    if state.step < c.steps:
        for line in memory_lines(c, machine):
            say(line)
    say(f"resumed after step {state.step}" if resumed else "start")
    writer = metrics.Writer(workdir, state.step if resumed else -1, c, say)
    watchdog = guards.Watchdog(c.guard.hang_factor, c.guard.hang_floor_s)
    terminated: list[int] = []  # SIGTERM (a preemption): finish the step, save, leave
    handler = signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    with contextlib.ExitStack() as after:
        after.callback(send, home, say)
        after.callback(signal.signal, signal.SIGTERM, handler)
        after.callback(writer.close)
        saver = after.enter_context(saver_lib.Saver(directory, c, data, say))
        if not resumed:
            log = evaluate_policy(c, machine, text, state, writer, say)
            writer.record(0, log)
            saver.after_step(state, due=True, score=score(c, text, log))
        stream = problems.stream(range(len(text.train.ids)), c.seed)
        piece = functools.cache(lambda token: text.tokenizer.decode([token], skip_special=False))
        history = guards.recall(metrics.read(workdir / "metrics.jsonl"))
        progress = report.Progress(c.steps, state.step, say)
        after.callback(progress.close)
        stop = guards.why_stop(c, state, {})
        leaving = parallel.any_process(terminated)  # of one opinion: every step is a joint one
        while state.step < c.steps and not stop and not leaving:
            with watchdog.watch("rollout step"):
                state, log, got = train_step(c, text, machine, stream, state)
            evaluated = state.step == c.steps or due(state.step, c.eval.every)
            if evaluated:
                with watchdog.watch("evaluation"):
                    log |= evaluate_policy(c, machine, text, state, writer, say)
            history = guards.remember(history, log)
            state, broken = guards.count_alarms(c, state, log, history, say)
            log |= {"alarms": broken} if broken else {}
            writer.lines("rollouts", state.step, rows(c, text, stream, piece, got))
            writer.record(state.step, log)
            progress.update(log)
            if shortage := guards.shortage(c, log):
                say(f"warning: step {state.step}: {shortage}")
            stop = guards.why_stop(c, state, log)
            leaving = parallel.any_process(terminated)
            if state.step == c.steps or stop or leaving:
                saver.last(state, score(c, text, log))
            else:
                best = evaluated and c.checkpoint.keep_best
                now = bool(best) or due(state.step, c.checkpoint.every)
                saver.after_step(state, now, score(c, text, log))
            send(home, say)
    if parallel.first():
        records = metrics.read(workdir / "metrics.jsonl")
        say(report.summary(home.name, state, stop, leaving, records))
    return bool(stop) or state.step >= c.steps


def due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def send(home: workdir_lib.Workdir, say) -> None:
    """Metrics and samples to the bucket; what does not arrive now does after the next step."""
    try:
        workdir_lib.send(home)
    except OSError as error:
        say(f"warning: {home.name}: not written ({error}); trying again after the next step")


def score(config, text: build.Text, log: dict[str, float]) -> float | None:
    """What `checkpoint.keep_best` compares; None on a step without evaluation."""
    tag = config.checkpoint.best_metric or f"eval/{next(iter(text.evals), '')}/avg@k"
    if config.checkpoint.keep_best and "time/eval_s" in log and tag not in log:
        known = ", ".join(t for t in log if t.startswith("eval/"))
        raise schema.ConfigError(
            f"config.checkpoint.best_metric: no metric {tag!r}; there are {known}"
        )
    return float(log[tag]) if "time/eval_s" in log and tag in log else None


def start_state(
    config, text: build.Text, machine: build.Machine, directory, accept, say
) -> tuple[State, bool]:
    """(where the run begins, whether it goes on from a checkpoint):
    1. at the newest whole checkpoint of this run, if there is one that `accept` does not refuse;
    2. else with the parameters of `init_from`, if that is set;
    3. else with the model directory's weights, or random ones, after the warm-up if there is one.
    """
    trainer = machine.trainer
    shardings = State(trainer.param_shardings, trainer.opt_shardings, None, [])
    abstract = qwen2.abstract(machine.shape)
    like = State(abstract, jax.eval_shape(machine.tx.init, abstract), None, [])
    if config.loss.kl_coef:
        shardings = shardings._replace(ref_params=trainer.param_shardings)
        like = like._replace(ref_params=abstract)
    if (state := resume.newest(directory, like, shardings, accept, say)) is not None:
        return state, True
    if config.init_from:
        params = checkpoint.restore_params(config.init_from, abstract, trainer.param_shardings)
    else:
        params = build.initial_params(config, machine)
        if config.supervised_warmup.skill_steps + config.supervised_warmup.habit_steps:
            phases = warmup.usual(config)
            params = warmup.warm_up(
                config, machine.mesh, machine.shape, text.tokenizer, params, phases
            )
    ref = jax.tree.map(lambda w: w.copy(), params) if config.loss.kl_coef else None
    return State(params, trainer.init_opt_state(params), ref, []), False


def evaluate_policy(config, machine, text, state: State, writer, say) -> dict[str, float]:
    started = time.perf_counter()
    decode_params = machine.engine.decode_params(state.params)
    scores, rows = evaluate_sets(config, machine, decode_params, text)
    writer.lines("eval", state.step, rows)
    for line in report.evaluation_lines(state.step, scores):
        say(line)
    return scores | {"time/eval_s": time.perf_counter() - started}


def rows(config, text: build.Text, stream, piece, got: Collected):
    """What rollouts/ keeps of a step."""
    return report.samples(
        got,
        config.log.samples,
        lambda position: text.train.problems[stream[position]],
        text.tokenizer,
        piece,
        lambda response, answer: (
            verifier.verify(response, answer, config.reward.verifier).extracted
        ),
        functools.partial(shaped_rewards, config),
    )


def describe(config, machine: build.Machine) -> str:
    sizes = " x ".join(f"{k} {v}" for k, v in machine.mesh.shape.items())
    return (
        f"model: {qwen2.param_count(machine.shape):,} parameters; devices:"
        f" {machine.mesh.size} {machine.mesh.devices.flat[0].platform} ({sizes}); batch:"
        f" {config.rollout.groups} groups x {config.rollout.group_size},"
        f" {config.optim.minibatches} updates per step"
    )


def main() -> None:
    if not cli.WORKDIR.value:
        raise ValueError("--workdir: say where the run is to be kept")
    with processes.joined():
        train(cli.CONFIG.value, cli.WORKDIR.value, cli.ALLOW_CONFIG_CHANGE.value)


if __name__ == "__main__":
    cli.run(main)
