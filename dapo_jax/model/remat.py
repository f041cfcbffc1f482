"""What is kept of the forward pass for the backward pass, which makes the rest again."""

import jax

from dapo_jax.model import adapters, attention_kernels as splash

_policies = jax.checkpoint_policies
_DOTS = _policies.dots_with_no_batch_dims_saveable
_ATTENTION = _policies.save_only_these_names(splash.SAVED)
_KEPT = {
    "full": _policies.nothing_saveable,
    "attention": _ATTENTION,
    "dots": _DOTS,
    "dots_attention": _policies.save_from_both_policies(_DOTS, _ATTENTION),
}


def policy(remat: str, lora: adapters.Lora | None):
    """The policy of `jax.checkpoint` for `config.model.remat`, which is not 'none'."""
    kept = _KEPT[remat]
    return _but_adapters(kept, lora.rank) if lora else kept


def _but_adapters(policy, rank: int):
    """`policy`, which keeps no product over the `rank` numbers that adapters make of a token: it is
    as large as the product of the weights to which it is added, and made again at once."""

    def kept(primitive, *arrays, **how):
        if primitive is jax.lax.dot_general_p:
            (axes, _), _ = how["dimension_numbers"]
            if [arrays[0].shape[i] for i in axes] == [rank]:
                return False
        return policy(primitive, *arrays, **how)

    return kept
