"""Does this config fit this pod, and how long is a step? Arithmetic, without a TPU.

    python -m dapo_jax.plan --config=configs/dapo_qwen2_5_32b.py --topology=v5p-256 [--json=FILE]
    python -m dapo_jax.plan --config=configs/dapo_qwen2_5_32b.py --topology=v5p-256 --compile
    python -m dapo_jax.plan --check --topology=v5p-256 TRAINING FLAG ...
    python -m dapo_jax.plan --config=configs/one_chip.py --topology=h100-8

Prints the bytes that a device needs while sampling and while updating, item by item; the expected
seconds of a step and of the run with a low and a high figure, from the run's own schedule over
assumed lengths and a table of constants, none of them measured on a TPU. Bytes of parameters,
optimizer and cache are exact; those of activations estimate what XLA keeps.

`--compile` compiles the run's own programs for the slice, or the GPUs, and says what XLA keeps
(compile.py; minutes for a large model; for a slice JAX_OPTIMIZATION_LEVEL=O0 takes a third of the
time and assigns nearly the same memory). `--kernels` counts the instructions that libtpu makes of
the decode kernel, for constants.txt (seconds). `--check` is what launch/ runs before it makes a
slice: would `train` take these flags there?
"""

import json
import pathlib
import sys

import jax
from absl import flags

from dapo_jax.config import cli, schema
from dapo_jax.hosts import processes  # noqa: F401  (`--check` takes the flags of a training)
from dapo_jax.plan import Traffic, check, compile as plan_compile, gpus, kernels, network, plan
from dapo_jax.plan.constants import override
from dapo_jax.plan.drafts import compared
from dapo_jax.plan.report import report


def define_flags() -> None:
    """Not at import: tests and others use the functions alone."""
    flags.DEFINE_bool("check", False, "Only check that the config is right for the slice.")
    flags.DEFINE_bool("check_files", False, "And that its files, relative to here, are there.")
    flags.DEFINE_bool("check_memory", True, "And that by arithmetic it fits; else only warn.")
    flags.DEFINE_string("topology", None, "Slice: v5p-256, v6e-256, v5p:4x4x8; GPUs: h100-8.")
    most = schema.SCHEMA["rollout.max_response_tokens"].high
    for name, share in (("mean_response", "a quarter"), ("mean_prompt", "an eighth")):
        said = f"Assumed mean tokens; default: {share} of the most."
        flags.DEFINE_integer(name, 0, said, lower_bound=0, upper_bound=most)
    default = Traffic._field_defaults
    flags.DEFINE_float("sigma", default["sigma"], "Assumed std of log response length.", 0, 3)
    flags.DEFINE_float("accept", default["accept"], "Assumed share of mixed groups.", 0, 1)
    flags.DEFINE_integer("eval_problems", default["eval_problems"], "Assumed problems of a set.", 0)
    flags.DEFINE_bool("staleness", False, "Simulate staleness 0, 1, 2.")
    said = "Shares of guessed tokens that are right, as .4,.5; or a run that drew with guesses."
    flags.DEFINE_list("draft_acceptance", [], said)
    flags.DEFINE_float("room", 0.1, "Share of the memory that suggestions leave free.", 0, 0.9)
    flags.DEFINE_bool("compile", False, "Compile the run's programs for the slice or GPUs, too.")
    flags.DEFINE_bool("kernels", False, "Count libtpu's bundles of the decode kernel as well.")
    flags.DEFINE_string("json", "", "File for all of it; '-' = print JSON instead.")
    flags.DEFINE_list(
        "constants", [], "In place of those of constants.txt (no others): decode_beside=1,..."
    )
    flags.mark_flag_as_required("topology")


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # shapes only: leave an accelerator to others
    given, config = flags.FLAGS, cli.CONFIG.value
    pod = gpus.parse(given.topology)
    if pod.platform == "gpu" and given.kernels:
        raise ValueError("--kernels: libtpu's bundles; for GPUs there is --compile")
    if given.check:
        if doubt := check(config, pod, given.check_files, given.check_memory):
            print(f"warning: {doubt}", file=sys.stderr)
        return 0
    override(given.constants)
    file = pathlib.Path(given.json)  # looked at before minutes of work
    if not file.parent.is_dir() or (file.name and file.is_dir()):
        what = "is a folder" if file.is_dir() else f"no folder {file.parent}"
        raise ValueError(f"--json={given.json}: wants a file on this machine; {what}")
    prompt = given.mean_prompt or max(config.data.max_prompt_tokens // 8, 1)
    response = given.mean_response or max(config.rollout.max_response_tokens // 4, 1)
    rest = {name: given[name].value for name in ("sigma", "accept", "eval_problems")}
    traffic = Traffic(prompt, response, **rest)
    text = given.json != "-"
    show = lambda lines: text and print("\n".join(lines), flush=True)
    result = plan(config, pod, traffic, given.room, given.staleness)
    show(report(result))
    if given.draft_acceptance and not result["mistakes"]:
        result["drafts"] = compared(config, pod, traffic, given.draft_acceptance)
        show(result["drafts"]["text"])
    if (given.compile or given.kernels) and not pod.compiler():
        print(plan_compile.WANTED[pod.platform], file=sys.stderr)
    elif not result["mistakes"]:
        if given.kernels:
            result["kernels"] = kernels.counted(config, pod)
            show(result["kernels"]["text"])
        if given.compile:
            result["compiled"] = plan_compile.check(config, network(config), pod)
            show(plan_compile.report(result["compiled"]))
    if given.json:
        whole = json.dumps(result, indent=2, default=float) + "\n"
        file.write_text(whole) if text else print(whole, end="")
    return 0 if result.get("compiled", result)["fits"] else 1


if __name__ == "__main__":
    define_flags()
    cli.run(main)
