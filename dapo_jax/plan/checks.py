"""Can this config run on this slice? launch/ calls `plan --check` before it makes a slice."""

from dapo_jax.config import schema, validation
from dapo_jax.model import qwen2
from dapo_jax.plan import footprint
from dapo_jax.plan.footprint import GB
from dapo_jax.plan.shapes import network, value_model
from dapo_jax.pods.slices import Pod


def mistakes(config, shape: qwen2.Shape | None, pod: Pod) -> str:
    """Why the config cannot run on that pod, a reason per line; '' if it can. Without a shape only
    what does not depend on it is checked."""
    try:
        validation.validate(config, pod.chips)
        sizes = validation.resolve_mesh(config, pod.chips)
        bad = validation.check_shape(shape, sizes, config.sharding) if shape else []
        if shape and config.critic.init_from and (value := value_model(config, shape)):
            wrong = validation.check_shape(value, sizes, config.sharding)
            bad += [f"the value model: {line}" for line in wrong]
        if sizes["data"] % pod.slices:
            bad.append(
                f"config.mesh.data = {sizes['data']} is no multiple of {pod.slices}, the slices,"
                " which are joined along `data`"
            )
    except schema.ConfigError as error:
        return str(error)
    return "\n".join(bad)


def check(config, pod: Pod, with_files: bool = False, with_memory: bool = True) -> str:
    """A doubt about running the config on that pod, or ''. ValueError: it cannot run.

    with_files: files with relative names have to exist here. with_memory: a config that by
    arithmetic does not fit cannot run; otherwise that is a doubt.
    """
    try:
        shape = network(config)
        value_model(config, shape)
    except ValueError as error:  # a directory of the hosts, or there is no network here
        shape, doubt = None, f"{error}: not checked whether the model fits"
    wrong = mistakes(config, shape, pod).splitlines()
    if with_files:
        hint = "here, where the slice gets its copy from; --prepare=COMMAND fetches it there"
        wrong += [f"{line} {hint}" for line in validation.missing(config) if ": /" not in line]
    if wrong:
        raise ValueError("\n".join(wrong))
    if shape is None:
        return doubt
    sizes = validation.resolve_mesh(config, pod.chips)
    peak = max(footprint.peaks(footprint.memory(config, shape, sizes)).values())
    if peak <= pod.chip.hbm:
        return ""
    doubt = (
        f"by arithmetic this needs {peak / GB:.1f} GB of a chip's {pod.chip.hbm / GB:.1f}: ask"
        f" python -m dapo_jax.plan --topology={pod.cloud} what fits"
    )
    if with_memory:
        raise ValueError(f"{doubt} (--skip-plan goes on all the same)")
    return doubt
