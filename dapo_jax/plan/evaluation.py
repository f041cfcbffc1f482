"""An evaluation on its way through the slots: in a call of its own, or beside a round of a step."""

from dapo_jax.plan import simulate
from dapo_jax.plan.simulate import Sizes, Trace, Traffic


def simulated(
    config, traffic: Traffic, sizes: Sizes, problems: int, largest: tuple[int, Trace] | None = None
) -> list[tuple[int, Trace]]:
    """(sign, call): an evaluation takes the seconds of the calls with +1, less those with -1.
    problems: of one set; 0 = none. largest: problems and trace of a step's largest round; with
    `eval.with_rollout` both are drawn in one call, from which the round alone is taken off."""
    if not problems:
        return []
    settings = 1 + (config.eval.top_p < 1)
    sets = max(len([x for x in config.eval.files.split(",") if x]), 1)
    G, cap = config.rollout.group_size, config.rollout.max_response_tokens
    longest = config.eval.max_response_tokens or cap
    own = traffic._replace(response=min(traffic.response, longest // 2))
    drawn = simulate.lengths(own, longest, settings * sets * problems, config.eval.k)
    if not (config.eval.with_rollout and largest):
        return [(1, simulate.sample(drawn, traffic.prompt, longest, sizes))]
    n, alone = largest
    round_, ends = simulate.lengths(traffic, cap, n, G), simulate.ends(config, traffic, n)
    both = simulate.sample(round_, traffic.prompt, max(cap, longest), sizes, ends, drawn)
    return [(1, both), (-1, alone)]
