"""Objectives that need a number of the whole mini-batch: entries of `loss.objective`.

Clip-Cov and KL-Cov choose tokens by a covariance over the mini-batch, the 80/20 mask by entropy;
P3O's bound is the effective sample size of its ratios. Each is found exactly, with the policy as it
is before this update, over all tokens of the mini-batch: the papers' batch, where their code often
takes a micro-batch. So packing, micro-batches, rows and mesh change nothing. It costs a forward
pass more per update; in a step's first update log-probs are the old ones, if these are recomputed.

A token that leaves the loss keeps its share of the normaliser, and its KL and entropy terms.

Dims: A micro-batches, R rows, T cells.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import parallel
from dapo_jax.algorithm import Algorithm
from dapo_jax.dapo import objective, update
from dapo_jax.dapo.packing import Item
from dapo_jax.dapo.state import State
from dapo_jax.variants.settings import Tokens


class Seen(NamedTuple):
    """What a method decides by; arrays are [A, R, T], 0 outside trained cells."""

    trained: jax.Array  # bool
    value: jax.Array  # float32, the policy's log-prob of each token, or its entropy in nats
    old_logp: jax.Array  # float32
    advantage: jax.Array  # float32
    weight: jax.Array  # float32, of a token in the loss
    uniform: jax.Array | None  # float32 in [0, 1), of each token, where the method draws lots
    count: jax.Array  # int32, tokens to choose
    moved: jax.Array  # bool: the policy is no longer the old one
    loss: objective.Coefficients


class Change(NamedTuple):
    """What the update takes in place of its own; None = nothing."""

    metrics: dict[str, jax.Array]
    advantage: jax.Array | None = None
    term: jax.Array | None = None  # weights of the method's `LossTerm`
    loss: objective.Coefficients | None = None


def covariance(s: Seen) -> jax.Array:
    """(log pi - its mean) (A - its mean) of each trained token (arXiv 2505.22617, Eq. 10)."""
    mean = lambda x: jnp.sum(jnp.where(s.trained, x, 0.0)) / jnp.maximum(s.trained.sum(), 1)
    return (s.value - mean(s.value)) * (s.advantage - mean(s.advantage))


def smallest(x: jax.Array, inside: jax.Array, count: jax.Array) -> jax.Array:
    """Which cells `inside` have one of its `count` smallest numbers; all that tie with the last."""
    x = jnp.where(inside, x, jnp.inf)
    return inside & (x <= jnp.sort(x, axis=None)[count - 1])


def chosen_frac(s: Seen, chosen: jax.Array) -> dict[str, jax.Array]:
    return {"tokens/chosen_frac": chosen.sum() / jnp.maximum(s.trained.sum(), 1)}


def clip_cov(s: Seen, settings: Tokens) -> Change:
    """PPO's loss, and none of floor(r N) tokens drawn by lot from those whose covariance is between
    two bounds and which PPO's clip leaves (Eq. 11-12). The authors: r 2e-4, bounds 1 and 5, ratios
    clipped at 1 +- 1 (loss.clip_low=1 clip_high=1); as in their code at least one is drawn."""
    cov = covariance(s)
    term = objective.ppo_clip(s.value, s.old_logp, s.advantage, s.loss)
    within = (cov > settings.clip_cov_low) & (cov < settings.clip_cov_high)
    free = s.trained & within & ~(term.clipped_low | term.clipped_high)
    chosen = smallest(s.uniform, free, s.count)
    return Change(chosen_frac(s, chosen), advantage=jnp.where(chosen, 0.0, s.advantage))


def kl_cov(s: Seen, settings: Tokens) -> Change:
    """-ratio A without a clip, and beta |log ratio| on the share k of tokens with the largest
    covariance (Eq. 13-14; the sampled KL of their code). The authors: beta 1, k 2e-3 (7B) or 2e-4
    (32B). Where the policy still is the old one |log ratio| is 0, and has no gradient."""
    chosen = smallest(-covariance(s), s.trained, s.count)
    weight = jnp.where(chosen & s.moved, settings.kl_cov_coef * s.weight, 0.0)
    return Change(chosen_frac(s, chosen), term=weight)


def unclipped(logp, old_logp, advantage, c, per_response) -> objective.TokenLoss:
    """-ratio A, whatever the ratio: KL-Cov's loss of most tokens (arXiv 2505.22617, Eq. 14)."""
    ratio = objective.ratio_of(logp - old_logp, c)
    never = jnp.zeros_like(ratio, bool)
    return objective.TokenLoss(-ratio * advantage, ratio, never, never, never)


def high_entropy(s: Seen, settings: Tokens) -> Change:
    """PPO's loss of the share rho of tokens with the highest entropy, none of the others (arXiv
    2506.01939: rho .2 with DAPO; ceil(rho N) tokens, as `get_global_entropy_top_mask` there)."""
    chosen = smallest(-s.value, s.trained, s.count)
    return Change(chosen_frac(s, chosen), advantage=jnp.where(chosen, s.advantage, 0.0))


def ess(s: Seen, settings: Tokens) -> Change:
    """-min(ratio, e) A log pi + (1 - e) KL(policy || old policy), no gradient through min and e,
    the normalised effective sample size (sum ratio)^2 / (N sum ratio^2) (P3O, arXiv 2605.12380,
    Eq. 11-12): CISPO's loss with that bound, and k3. The old policy is to be the one that sampled:
    loss.old_logprobs=reuse."""
    ratio = jnp.where(s.trained, objective.ratio_of(s.value - s.old_logp, s.loss), 0.0)
    spread = jnp.maximum(s.trained.sum() * jnp.sum(ratio**2), 1e-30)
    e = jnp.minimum(jnp.sum(ratio) ** 2 / spread, 1.0)
    loss = s.loss._replace(clip_low=jnp.float32(1.0), clip_high=e - 1, kl_coef=1 - e)
    return Change({"tokens/ess": e}, loss=loss)


def pull(logp, old, weight) -> jax.Array:
    """sum of weight |log ratio|, whose gradient at 0 is 0 (that of JAX's own is 1)."""
    return jnp.sum(weight * jax.lax.stop_gradient(jnp.sign(logp - old)) * (logp - old))


PULL = update.LossTerm("cov_kl", pull)  # what KL-Cov adds to the loss


class Method(NamedTuple):
    change: Callable[[Seen, Tokens], Change]
    count: Callable[[Tokens, int], int] = lambda settings, N: 1  # tokens to choose of N
    term: update.LossTerm | None = None
    by_entropy: bool = False  # `Seen.value` is the entropy
    lots: bool = False  # it draws lots


METHODS = {
    "clip_cov": Method(
        clip_cov, lambda settings, N: max(int(settings.clip_cov_share * N), 1), lots=True
    ),
    "kl_cov": Method(kl_cov, lambda settings, N: max(int(settings.kl_cov_share * N), 1), PULL),
    "high_entropy": Method(
        high_entropy,
        lambda settings, N: max(int(settings.entropy_share * N + 0.9999), 1),
        by_entropy=True,
    ),
    "ess": Method(ess),
}


def apply(config, algorithm: Algorithm) -> Algorithm:
    """The algorithm whose updates first look at their mini-batch, where the objective needs it."""
    if not (method := METHODS.get(config.loss.objective)):
        return algorithm
    terms = [(method.term, lambda groups, tokens_MxG: np.zeros(tokens_MxG.shape))]
    return algorithm._replace(
        learn=functools.partial(learn, method, algorithm.learn),
        terms=(*algorithm.terms, *terms[: method.term is not None]),
    )


def learn(
    method: Method, inner: Callable, algorithm: Algorithm, machine, state: State,
    minibatches: Sequence[Sequence[Item]], knobs: update.Knobs,
) -> tuple[State, list[dict], dict]:  # fmt: skip
    """`inner`, an `Algorithm.learn`, each of whose updates is given what the method changes."""
    config, trainer, found = algorithm.config, machine.trainer, []
    value, change = programs(trainer, method, *config.tokens.to_dict().values())
    recompute = config.loss.old_logprobs == "recompute"
    drawn = [sum(np.count_nonzero(i.sampled_logps != np.inf) for i in items if i.weight)
             for items in minibatches]  # fmt: skip
    counts = [np.int32(method.count(config.tokens, N)) for N in drawn if N]

    def changed(params, opt_state, batch: update.Batch, knobs: update.Knobs):
        rows, moved = batch.rows, bool(found) or not recompute
        cells = batch.old_logp_AxRxT
        if moved or method.by_entropy:
            cells = value(params, rows, batch.micro_batches, knobs.temperature)
        *terms, uniform = *batch.terms, None
        if method.lots:
            *terms, uniform = batch.terms
        given = rows, cells, batch.old_logp_AxRxT, uniform, counts[len(found)], np.bool_(moved)
        made = change(*given, knobs.loss)
        machine.watch.between(made)
        found.append(made.metrics)
        if made.advantage is not None:
            rows = rows._replace(advantage_AxRxT=made.advantage)
        if made.term is not None:
            terms[-1] = made.term
        batch = batch._replace(rows=rows, terms=tuple(terms))
        knobs = knobs._replace(loss=made.loss or knobs.loss)
        return trainer.update(params, opt_state, batch, knobs)

    if method.lots:
        rng = np.random.default_rng([config.seed, state.counters.step, len(METHODS)])
        minibatches = [[with_lots(item, rng) for item in items] for items in minibatches]
    watched = copy.copy(trainer)
    watched.update = changed
    state, logs, metrics = inner(
        algorithm, machine._replace(trainer=watched), state, minibatches, knobs
    )
    found = parallel.to_host(found)
    means = {tag: np.mean([x[tag] for x in found]) for tag in (found[0] if found else ())}
    return state, logs, metrics | means


def with_lots(item: Item, rng: np.random.Generator) -> Item:
    """An item whose last term weight is a uniform number per token."""
    lots = rng.random(len(item.response), np.float32)
    return item._replace(term_weights=(*item.term_weights, lots))


@functools.lru_cache(maxsize=8)
def programs(trainer: update.Trainer, method: Method, *numbers: float) -> tuple[Any, Any]:
    """((params, rows, micro_batches, temperature) -> each token's value; (rows, value, old
    log-probs, uniforms, count, moved, loss) -> Change). numbers: of `Tokens`."""
    settings, how = Tokens(*numbers), dict(compiler_options=parallel.compiler_options(trainer.mesh))

    def entropies(params, rows, micro_batches, temperature):
        def entropy(*given):
            return update.row_stats(trainer.shape, *given, temperature, trainer.kernel).entropy_RxT

        return trainer.per_cell(entropy, params, rows, micro_batches)

    @functools.partial(jax.jit, **how)
    def change(rows, value, old_logp, *others) -> Change:
        cells = value, old_logp, rows.advantage_AxRxT, rows.weight_AxRxT
        cells = (jnp.where(rows.trained_AxRxT, x, 0.0) for x in cells)
        made = method.change(Seen(rows.trained_AxRxT, *cells, *others), settings)
        lay = lambda x: jax.lax.with_sharding_constraint(x, trainer.row_sharding) if x.ndim else x
        return jax.tree.map(lay, made)

    if method.by_entropy:
        return jax.jit(entropies, out_shardings=trainer.row_sharding, **how), change
    return trainer.log_probs, change
