"""One-line mistakes in the algorithm, the sampler and the resume that a named test must find.

    python tests/mutants.py [--only=WORDS] [--jobs=2]

Copies the repository to a temporary folder (one per job), puts one mistake after the other into the
copy, runs the test named beside it, and prints what lived: exit status 1 if anything did. The tests
are run once without a mistake first, since a test that fails anyway kills nothing.
`test_mutants.py` sees to it that every line is still there. The count is in docs/results/safety.md.

    python tests/mutants.py --generated=75 [--only=dapo/] [--seed=0] [--record]

takes instead so many that generated_mutants.py makes of operators and numbers. `--record` keeps the
verdicts in mutants_generated.json, where `why` says what is known of one that survived, and judges
none again that is found there.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import generated_mutants

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = ("dapo_jax", "tests", "configs", "benchmarks", "pyproject.toml", "README.md")
LIMIT = 600  # s, of one test: what hangs is found too
FOUND = ("killed", "timeout")  # the second of older records: a test that hung
GENERATED = ROOT / "tests" / "mutants_generated.json"


class Mutant(NamedTuple):
    file: str  # of the package
    old: str  # occurs in it once
    new: str
    test: str  # of tests/; kills it


# fmt: off
MUTANTS = [Mutant(*fields) for fields in (
    # --- Eq. 9: advantage ---
    ("dapo/advantage.py", "gap = np.where(counted, r - mean_Nx1, 0)", "gap = np.where(counted, mean_Nx1 - r, 0)", "test_advantage.py::test_sixteen_responses"),
    ("dapo/advantage.py", "np.maximum(n_Nx1 - settings.ddof, 1)", "np.maximum(n_Nx1, 1)", "test_advantage.py::test_sixteen_responses"),
    ("dapo/advantage.py", "else std_Nx1 + settings.epsilon", "else std_Nx1**2 + settings.epsilon", "test_advantage.py::test_sixteen_responses"),
    ("dapo/advantage.py", "np.where(counted, r, 0).sum(1, keepdims=True)", "r.sum(1, keepdims=True)", "test_advantage.py::test_responses_left_out_change_nothing_and_get_zero"),
    ("dapo/advantage.py", "<= 1e-12", "< 0", "test_advantage.py::test_a_group_of_equal_rewards_is_exactly_zero"),
    # --- Eq. 8: objective ---
    ("dapo/objective.py", "loss = jnp.maximum(unclipped_loss, clipped_loss)", "loss = jnp.minimum(unclipped_loss, clipped_loss)", "test_objective.py::test_each_case_of_the_clip"),
    ("dapo/objective.py", "jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_high)", "jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_low)", "test_objective.py::test_clip_higher_moves_only_the_upper_bound"),
    ("dapo/objective.py", "jnp.clip(logp - old_logp, -c.log_ratio_max, c.log_ratio_max)", "logp - old_logp", "test_objective.py::test_log_ratio_guard"),
    ("dapo/objective.py", "jnp.minimum(loss, bound),", "loss,", "test_objective.py::test_each_case_of_the_clip"),
    ("dapo/objective.py", "(clipped_loss > unclipped_loss) & (ratio < 1 - c.clip_low)", "ratio < 1 - c.clip_low", "test_objective.py::test_gradient_is_zero_exactly_where_a_bound_is_reported"),
    ("dapo/objective.py", "dual_clip=loss.dual_clip or np.inf", "dual_clip=loss.dual_clip", "test_objective.py::test_coefficients_from_config"),
    ("dapo/objective.py", "jnp.clip(old_logp - sampled_logp, ", "jnp.clip(sampled_logp - old_logp, ", "test_objective.py::test_importance_weight"),
    ("dapo/objective.py", "jnp.minimum(jnp.exp(gap), c.importance_cap)", "jnp.exp(gap)", "test_objective.py::test_importance_weight"),
    ("dapo/objective.py", "log_r = jnp.clip(ref_logp - logp, -20.0, 20.0)", "log_r = jnp.clip(logp - ref_logp, -20.0, 20.0)", "test_objective.py::test_k3_against_float64"),
    ("dapo/objective.py", "share_Q = np.full(tokens_Q.shape, 1 / max(tokens_Q.sum(), 1))", "share_Q = np.full(tokens_Q.shape, 1 / len(tokens_Q))", "test_objective.py::test_means_of_the_golden_case"),
    ("dapo/objective.py", "share_Q = 1 / (responses * np.maximum(tokens_Q, 1))", "share_Q = np.full(tokens_Q.shape, 1 / responses)", "test_objective.py::test_means_of_the_golden_case"),
    ("dapo/objective.py", "(np.cumsum(kept_Q) - 1) // chunk_sequences", "np.arange(len(kept_Q)) // chunk_sequences", "test_objective.py::test_weights_against_nested_means"),
    ("dapo/objective.py", "return np.where(kept_Q, share_Q, 0.0)", "return share_Q", "test_objective.py::test_weights_against_nested_means"),
    # --- other objectives and advantages ---
    ("variants/objectives.py", "ppo_clip(per_response.mean(logp - old_logp), 0.0,", "ppo_clip(per_response.sum(logp - old_logp), 0.0,", "test_objectives.py::test_golden_losses_and_gradients"),
    ("variants/objectives.py", "jax.lax.stop_gradient(mean - logp) + logp", "mean", "test_objectives.py::test_golden_losses_and_gradients"),
    ("variants/objectives.py", "jax.lax.stop_gradient(jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_high))", "jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_high)", "test_objectives.py::test_golden_losses_and_gradients"),
    ("variants/objectives.py", "(ratio >= c.importance_floor) & (ratio <= c.importance_cap)", "ratio <= c.importance_cap", "test_objectives.py::test_golden_importance_weights"),
    ("dapo/update.py", "total(x_RxT) / tokens()", "total(x_RxT)", "test_objectives.py::test_golden_losses_and_gradients"),
    ("variants/curriculum.py", "rates.rate_P >= c.pass_rate_cap", "rates.rate_P > c.pass_rate_cap", "test_curriculum.py::test_the_fewest_right_responses_that_retire_a_problem"),
    ("variants/curriculum.py", "(rates.epoch_P < epoch)", "(rates.epoch_P <= epoch)", "test_curriculum.py::test_a_problem_comes_back_after_its_epochs"),
    ("variants/curriculum.py", "epoch - rates.epoch_P <= c.revisit_epochs", "epoch - rates.epoch_P < c.revisit_epochs", "test_curriculum.py::test_a_problem_comes_back_after_its_epochs"),
    ("variants/curriculum.py", "if group.position < batch.next_position:", "if True:", "test_curriculum.py::test_steps_draw_what_is_due_whatever_the_rounds"),
    ("variants/curriculum.py", "c.band_low < pass_rate(group)", "c.band_low <= pass_rate(group)", "test_curriculum.py::test_an_open_band"),
    ("dapo/advantage.py", "gap = gap * n_Nx1 / np.maximum(n_Nx1 - 1, 1)", "gap = gap * n_Nx1", "test_objectives.py::test_without_std_by_the_batch_s_and_against_the_others"),
    ("dapo/advantage.py", '1.0 if settings.scale == "none" else std_Nx1', "std_Nx1", "test_objectives.py::test_the_loss_of_dr_grpo_through_the_batch"),
    ("dapo/objective.py", "1 / (responses * max_tokens)", "1 / max_tokens", "test_objectives.py::test_the_loss_of_dr_grpo_through_the_batch"),
    ("dapo/advantage.py", "n_Nx1.sum() - settings.ddof, 1)", "n_Nx1.sum(), 1)", "test_objectives.py::test_without_std_by_the_batch_s_and_against_the_others"),
    ("variants/objectives.py", "logp, ratio, low, high, jnp.zeros_like(low))", "logp, ratio, high, low, jnp.zeros_like(low))", "test_objectives.py::test_cispo_says_where_its_bounds_weigh"),
    ("variants/curriculum.py", "rates.draws_P[row] += 1", "rates.draws_P[row] = 1", "test_curriculum.py::test_steps_draw_what_is_due_whatever_the_rounds"),
    ("dapo/dynamic_sampling.py", "if len(used) == need and rounds:", "if len(used) == need:", "test_dynamic_sampling.py::test_rounds_by_hand"),
    # --- responses of several steps ---
    ("variants/staleness.py", "int(r.versions[0])", "int(r.versions[-1])", "test_carried.py::test_no_trained_token_is_too_old"),
    ("variants/staleness.py", "truncated = ended and int(", "truncated = False and int(", "test_carried.py::test_no_trained_token_is_too_old"),
    ("variants/staleness.py", "np.full(new, version, np.int32)", "np.full(new, version - 1, np.int32)", "test_carried.py::test_no_trained_token_is_too_old"),
    ("variants/staleness.py", "replayed=min(stats.replayed, clock.tokens)", "replayed=stats.replayed", "test_carried.py::test_no_trained_token_is_too_old"),
    ("variants/staleness.py", "before = max(version - 1, 0)", "before = version", "test_carried.py::test_groups_of_a_run_without_staleness_are_a_step_old"),
    ("variants/staleness.py", "most=config.dynamic_sampling.max_rounds * need", "most=10**9", "test_carried.py::test_a_step_that_finds_nothing_ends_after_its_rounds"),
    ("variants/clock.py", "(self.staleness + 1) * self.need and self.judged < self.most:", "(self.staleness + 1) * self.need:", "test_clock.py::test_nothing_that_teaches_ends_a_step_short"),
    ("variants/clock.py", "if len(used) < self.need and self.judged < self.most:", "if len(used) < self.need:", "test_clock.py::test_nothing_that_teaches_ends_a_step_short"),
    # --- the value model ---
    ("variants/vapo/update.py", "values_of.estimate(b.rows, v, numbers)", "values_of.estimate(b.rows, 0 * v, numbers)", "test_vapo.py::test_a_step_by_hand"),
    ("variants/vapo/update.py", "critic.Batch(batch.rows, old, of.returns_AxRxT", "critic.Batch(batch.rows, of.returns_AxRxT, of.returns_AxRxT", "test_vapo.py::test_a_step_by_hand"),
    ("variants/vapo/update.py", "[1 / 3, 2 / 3]", "[1 / 4, 3 / 4]", "test_vapo.py::test_thirds_by_length"),
    ("variants/vapo/critic.py", "self.of_model = jax.jit(self._of_model, out_shardings=self.param_shardings)", "self.of_model = self._of_model", "test_vapo.py::test_it_starts_from_a_model"),
    ("variants/vapo/update.py", "1.0 if step < c.pretrain_steps else c.lambda_value", "c.lambda_value", "test_vapo.py::test_targets_in_pre_training_are_monte_carlo"),
    ("dapo/minibatches.py", 'before + 1 if log["skipped"] else 0', 'before + 1 if log["skipped"] else before', "test_vapo.py::test_skipped_updates_in_a_row_by_hand"),
    # --- adapters on a model with norms of queries and keys ---
    ("model/qwen2.py", "        if self.c.lora:\n            q, k, v = (self._add(n, y, h, out=_to_heads) for n, y in zip(\"qkv\", (q, k, v)))  # noqa: B905\n        if self.c.qk_norm:\n            q = rms_norm(q, self.q_norm[...], self.c.rms_eps)\n            k = rms_norm(k, self.k_norm[...], self.c.rms_eps)\n", "        if self.c.qk_norm:\n            q = rms_norm(q, self.q_norm[...], self.c.rms_eps)\n            k = rms_norm(k, self.k_norm[...], self.c.rms_eps)\n        if self.c.lora:\n            q, k, v = (self._add(n, y, h, out=_to_heads) for n, y in zip(\"qkv\", (q, k, v)))  # noqa: B905\n", "test_lora.py::test_merged_equals_the_adapters_forward"),
    # --- rewards of one's own ---
    ("reward/functions.py", "len(parts) == 1 and parts[0].weight == 1.0", "len(parts) == 1", "test_rewards.py::test_a_weighted_sum_logs_each_by_name"),
    ("reward/functions.py", "if os.getpid() != own:", "if False:", "test_rewards.py::test_a_reward_that_forks_grades_once"),
    ("log/guards.py", "if share > _NEARLY_ALL:", "if False:", "test_guards.py::test_a_reward_that_fails_is_warned_about_and_ends_a_run_that_learns_nothing"),
    ("checkpoint/journal.py", "self._run + self._policy.encode()", "self._run", "test_journal.py::test_what_belongs_to_others_is_never_found"),
    ("lab/experiments/stats.py", "level / (len(found) - tried)", "level", "test_stats.py::test_many_comparisons_are_corrected"),
    # --- Eq. 13 and section 3.4: length ---
    ("dapo/reward.py", "np.minimum(-over / max(buffer_tokens, 1) * factor, 0.0)", "-over / max(buffer_tokens, 1) * factor", "test_reward.py::test_the_papers_lengths"),
    ("dapo/reward.py", "(max_tokens - buffer_tokens)", "max_tokens", "test_reward.py::test_the_papers_lengths"),
    ("dapo/reward.py", "return score + overlong_penalty(", "return score - overlong_penalty(", "test_reward.py::test_the_papers_lengths"),
    ("dapo/reward.py", '~truncated_NxG if overlong_filter == "group" else everything', '~truncated_NxG if overlong_filter == "loss" else everything', "test_train.py::test_the_three_readings_of_overlong_filtering"),
    ("dapo/reward.py", 'everything if overlong_filter == "off" else ~truncated_NxG', "everything", "test_train.py::test_the_three_readings_of_overlong_filtering"),
    # --- Eq. 11: Dynamic Sampling ---
    ("dapo/dynamic_sampling.py", "bool(right_G.any() and not right_G.all())", "bool(right_G.any())", "test_dynamic_sampling.py::test_first_mixed_groups_of_the_stream"),
    ("dapo/dynamic_sampling.py", "np.ptp(self.grades.score_G[counted_G]) > SPREAD", "self.grades.score_G[counted_G].max() > SPREAD", "test_dynamic_sampling.py::test_the_filter_sees_correctness_and_only_without_it_scores"),
    ("dapo/dynamic_sampling.py", "if self.grades.right_G is None:", "if True:", "test_dynamic_sampling.py::test_the_filter_sees_correctness_and_only_without_it_scores"),
    ("dapo/dynamic_sampling.py", "position = used[-1].position + 1", "position = used[-1].position", "test_dynamic_sampling.py::test_steps_lose_no_problem_and_use_none_twice"),
    ("dapo/dynamic_sampling.py", "missing = need - len(accepted)", "missing = need", "test_dynamic_sampling.py::test_rounds_by_hand"),
    ("dapo/dynamic_sampling.py", "accepted, drawn = list(carried), []", "accepted, drawn = [], []", "test_dynamic_sampling.py::test_rounds_by_hand"),
    ("dapo/dynamic_sampling.py", "and rounds < max_rounds:", "and rounds <= max_rounds:", "test_dynamic_sampling.py::test_rounds_by_hand"),
    ("dapo/dynamic_sampling.py", "min(math.ceil(wanted / accept_rate), MOST_AHEAD * need)", "math.ceil(wanted / accept_rate)", "test_dynamic_sampling.py::test_round_size"),
    # --- rows, update ---
    ("dapo/packing.py", "first = start + len(item.prompt) - 1 - n", "first = start + len(item.prompt) - n", "test_packing.py::test_round_trip"),
    ("dapo/packing.py", "rows.segments_AxRxT[cells] = segment", "rows.segments_AxRxT[cells] = 1", "test_update.py::test_gradient_against_dense_float64"),
    ("dapo/packing.py", "key=lambda i: (-lengths[i], i)", "key=lambda i: (lengths[i], i)", "test_packing.py::test_best_fit"),
    ("dapo/update.py", "bonus = c.entropy_coef * jnp.minimum(stats.entropy_RxT, c.entropy_enough)", "bonus = c.entropy_coef * stats.entropy_RxT", "test_update.py::test_gradient_against_dense_float64"),
    ("model/head.py", "head_f32.astype(dtype)) / temperature", "head_f32.astype(dtype))", "test_update.py::test_head_stats"),
    ("dapo/update.py", "weight = rows.weight_AxRxT * importance", "weight = rows.weight_AxRxT", "test_update.py::test_gradient_against_dense_float64"),
    ("model/kernels.py", "return keep(new_params, params), keep(new_state, opt_state), norm, ~finite", "return keep(new_params, params), new_state, norm, ~finite", "test_update.py::test_a_non_finite_gradient_keeps_the_old_state"),
    ("model/learner.py", "done = step if optim.warmup_from_zero else step + 1", "done = step", "test_update.py::test_linear_warm_up"),
    ("model/learner.py", "kernels.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),", "optax.identity(),", "test_update.py::test_optimizer_is_adamw"),
    ("model/kernels.py", "lambda p, u: p - lr * u", "lambda p, u: p + lr * u", "test_learning.py::test_a_few_steps_raise_accuracy"),
    # --- Algorithm 1 ---
    ("dapo/minibatches.py", "float(A)", "-float(A)", "test_learning.py::test_a_few_steps_raise_accuracy"),
    ("dapo/minibatches.py", "default_rng([config.seed, step])", "default_rng([config.seed])", "test_replay.py::test_updates_are_those_of_the_equations"),
    ("algorithm.py", "position=batch.next_position,", "position=counters.position,", "test_train.py::test_every_step_goes_on_in_the_stream"),
    ("dapo/minibatches.py", "tokens_NxG = np.where(trained_NxG, length_NxG, 0)", "tokens_NxG = length_NxG", "test_train.py::test_the_three_readings_of_overlong_filtering"),
    ("dapo/minibatches.py", 'loss.old_logprobs == "recompute", None', 'loss.old_logprobs == "reuse", None', "test_replay.py::test_updates_are_those_of_the_equations"),
    # --- the sampler ---
    ("rollout/draw.py", "scaled = scaled / temperature", "scaled = scaled * temperature", "test_draw.py::test_records_are_of_the_full_distribution_at_temperature"),
    ("rollout/draw.py", "enough_S = mass_S >= need_S", "enough_S = mass_S > need_S", "test_draw.py::test_nucleus_is_the_sorted_one"),
    ("rollout/draw.py", "passed_Sxn = live_Sxn & (cdf_Sxn > target_S[:, None])", "passed_Sxn = cdf_Sxn >= target_S[:, None]", "test_draw.py::test_a_token_of_weight_zero_is_never_drawn"),
    ("rollout/draw.py", "jnp.log(taken_S) - log_total_S, log_total_S - mean_shifted_S", "jnp.log(taken_S / kept.sum(-1)), log_total_S - mean_shifted_S", "test_draw.py::test_records_are_of_the_full_distribution_at_temperature"),
    ("rollout/draw.py", "jax.random.fold_in(jax.random.fold_in(seed_key, i), j)", "jax.random.fold_in(seed_key, i + j)", "test_draw.py::test_uniforms_belong_to_their_counter"),
    ("rollout/sampler.py", "emitted_S = slots.emitted_S + out.count_S", "emitted_S = out.count_S", "test_engine.py::test_tokens_depend_on_no_batch_chunk_or_mesh"),
    ("rollout/engine.py", "[: end or None]", "[:None]", "test_engine.py::test_cut_ends_a_response"),
    ("rollout/engine.py", "truncated = not end and int(tokens[-1]) not in self.stop_ids", "truncated = not end and active", "test_engine.py::test_ends_are_told_by_flag_and_length"),
    ("rollout/schedule.py", "full = len(prompt) // self.page_tokens", "full = -(-len(prompt) // self.page_tokens)", "test_engine.py::test_tokens_depend_on_no_batch_chunk_or_mesh"),
    ("rollout/schedule.py", "if sibling and rest > 0:", "if False:", "test_engine.py::test_tokens_depend_on_no_batch_chunk_or_mesh"),
    ("rollout/schedule.py", "last = prompt_tokens - 1 + min(emitted + self.chunk, limit)", "last = prompt_tokens - 1 + emitted", "test_engine.py::test_tokens_depend_on_no_batch_chunk_or_mesh"),
    # --- going on where a run was cut off ---
    ("checkpoint/checkpoint.py", "there), reverse=True)", "there))", "test_saver.py::test_newest_every_and_best_are_kept"),
    ("checkpoint/checkpoint.py", "*trained, groups, counters", "*trained, (), counters", "test_checkpoint.py::test_eight_devices_to_others_and_back"),
    ("checkpoint/seal.py", "if there != wanted:", "if there is None:", "test_seal.py::test_every_damage_to_any_file_breaks_the_seal"),
    ("checkpoint/seal.py", "jnp.sum(bits * (2 * place + 1), dtype=\"uint32\")", "jnp.sum(bits, dtype=\"uint32\")", "test_seal.py::test_content_sees_elements_that_change_places"),
    ("checkpoint/resume.py", "if meaningful and not allow:", "if False:", "test_resume.py::test_meaningful_changes_are_refused_unless_allowed"),
    ("checkpoint/resume.py", "(harmless if free else meaningful).append(line)", "harmless.append(line)", "test_resume.py::test_meaningful_changes_are_refused_unless_allowed"),
    ("checkpoint/saver.py", "if due or self._failures:", "if due:", "test_saver.py::test_a_full_disk_costs_no_checkpoint_and_the_next_step_is_saved"),
)]  # fmt: skip
# fmt: on


class Case(NamedTuple):
    """A mistake to judge: a file's text with it, the tests that may find it, and how it is shown.
    row: what `--record` keeps of one made by machine."""

    file: str
    text: bytes
    tests: tuple[str, ...]
    shown: str
    row: dict


def copy(to: pathlib.Path) -> pathlib.Path:
    to.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to)
    return to


def pytest(root: pathlib.Path, tests: Sequence[str], *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-rfE"]
    # No byte code: two mutants of a file may have one size and one time.
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command += [f"--timeout={LIMIT}", *flags, *(f"tests/{test}" for test in tests)]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def broken(tests: list[str], root: pathlib.Path, *flags: str) -> list[str]:
    """Tests that do not pass without a mutant."""
    done = pytest(root, tests, *flags)
    if done.returncode not in (0, 1):
        sys.exit(f"error: pytest's exit status {done.returncode}\n{done.stdout[-2000:]}")
    named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [t for t in tests if any(f" tests/{t}" in line for line in named)]


def verdict(case: Case, root: pathlib.Path, *flags: str) -> str:
    """'killed', 'survived', or what else became of the tests."""
    file = root / "dapo_jax" / case.file
    text = file.read_bytes()
    file.write_bytes(case.text)
    try:
        done = pytest(root, case.tests, "-x", *flags)
    finally:
        file.write_bytes(text)
    known = {0: "survived", 1: "killed", 2: "killed"}  # 2: the file cannot even be imported
    return known.get(done.returncode, f"exit status {done.returncode}: {done.stdout[-300:]}")


def by_hand(only: str) -> list[Case]:
    found = []
    for m in MUTANTS:
        text = (ROOT / "dapo_jax" / m.file).read_text()
        if only in " ".join(m):
            if text.count(m.old) != 1:
                sys.exit(f"error: {m.file}: {m.old!r} occurs {text.count(m.old)} times")
            shown, changed = f"{m.file}: {m.old!r} -> {m.new!r}", text.replace(m.old, m.new)
            found.append(Case(m.file, changed.encode(), (m.test,), shown, {}))
    return found


def by_machine(args, kept: dict) -> list[Case]:
    """Without those that are found already, where verdicts are kept."""
    found = []
    for m in generated_mutants.drawn(ROOT, args.generated, args.only, args.seed):
        data = (ROOT / "dapo_jax" / m.file).read_bytes()
        if not (args.record and kept.get((m.file, m.line, m.change), {}).get("verdict") in FOUND):
            changed = data[: m.start] + m.new.encode() + data[m.end :]
            tests = tuple(generated_mutants.JUDGES[m.file].split())
            row = {"file": m.file, "line": m.line, "change": m.change}
            found.append(Case(m.file, changed, tests, f"{m.file}:{m.line}: {m.change}", row))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose file, line or test has this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--generated", type=int, default=0, help="so many that are made by machine")
    parser.add_argument("--seed", type=int, default=0, help="which those are")
    parser.add_argument("--record", action="store_true", help="keep their verdicts")
    args = parser.parse_args()
    known = json.loads(GENERATED.read_text()) if GENERATED.exists() else []
    kept = {(r["file"], r["line"], r["change"]): r for r in known}
    cases = by_machine(args, kept) if args.generated else by_hand(args.only)
    if not cases:
        parser.error(f"--only={args.only}: no mutants")
    flags = ("-m", "not slow", "--timeout=120") if args.generated else ()
    with tempfile.TemporaryDirectory() as folder:
        roots = queue.SimpleQueue()
        for i in range(args.jobs):
            roots.put(copy(pathlib.Path(folder, str(i))))

        def judged(case: Case) -> str:
            root = roots.get()
            try:
                return verdict(case, root, *flags)
            finally:
                roots.put(root)

        tests = list(dict.fromkeys(t for c in cases for t in c.tests))
        already = broken(tests, pathlib.Path(folder, "0"), *flags)
        for test in already:
            print(f"fails without a mutant: {test}", flush=True)
        good, killed = [c for c in cases if not {*c.tests} & {*already}], 0
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for case, result in zip(good, pool.map(judged, good), strict=True):
                killed += result == "killed"
                if result != "killed":
                    print(f"{case.shown}\n    {' '.join(case.tests)}: {result}", flush=True)
                if case.row and args.record:
                    key = tuple(case.row.values())
                    kept[key] = kept.get(key, {}) | case.row | {"verdict": result}
                    rows = json.dumps([kept[k] for k in sorted(kept)], indent=1, ensure_ascii=False)
                    GENERATED.write_text(rows + "\n")
    print(f"killed {killed} of {len(cases)}")
    return int(killed < len(cases))


if __name__ == "__main__":
    sys.exit(main())
