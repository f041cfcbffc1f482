# shellcheck shell=bash
# What tpu_vm.sh and gke.sh know of a slice, and what they check before they make one. Needs
# common.sh. The table is dapo_jax/pods/slices.txt, which `python -m dapo_jax.plan` reads too.

# Sets slices, type (of one of them), shape, hosts and chips (per host), accelerator, machine, runtime.
dapo_slice() {  # dapo_slice TYPE
    local LC_ALL=C cloud size one_host shapes counted all known="no TPU slice is called that \
(v5p-256, v6e-256, v5litepod-256, 2xv5p-256, ...; the table is dapo_jax/pods/slices.txt)"
    [[ "$1" =~ ^(([1-9][0-9]?)x)?([a-z0-9]+)-([1-9][0-9]{0,5})$ ]] || dapo_fail "--type=$1: $known" 2
    # shellcheck disable=SC2034  # for the callers
    slices="${BASH_REMATCH[2]:-1}" type="${BASH_REMATCH[3]}-${BASH_REMATCH[4]}"
    # shellcheck disable=SC2162,SC2034  # without -r a backslash joins lines
    while read _ cloud size one_host accelerator machine runtime shapes; do
        for shape in $shapes; do
            all=$((${shape//x/*})) counted=$((all * size))
            [[ "$cloud-$counted" == "$type" ]] || continue
            hosts=1 chips=$all
            ((all <= one_host)) || hosts=$((all / 4)) chips=4
            machine+="-${chips}t"
            return
        done
    done < <(grep -v '^#' "$DAPO_ROOT/dapo_jax/pods/slices.txt")
    dapo_fail "--type=$1: $known" 2
}

# Sets meeting: flags of the training, before the user's. A slice that does not know the others would
# be a run of its own in their workdir; so it waits for them, and says so.
dapo_meeting() {
    # shellcheck disable=SC2034  # for the callers
    meeting=("--num_processes=$((slices * hosts))")
    ((slices * hosts == 1)) || meeting+=(--start_timeout=600)  # hosts come up one after the other
}

# The training's flags, before anything is made: the config file is there, its files are, and `plan`
# has nothing against it on slices of this TYPE. Names of files are those on the hosts, relative to
# the checkout, so that they have to be in this one unless $prepare brings them. With $skip_plan a
# model that by arithmetic does not fit is only a warning.
dapo_check_training() {  # dapo_check_training TYPE FLAG ...
    local type="$1" flag config=configs/quickstart.py python check=(--check)
    shift
    for flag in "$@"; do [[ "$flag" != --config=* ]] || config="${flag#*=}"; done
    config="${config%%:*}"  # the rest is the config's own argument
    if [[ "$config" == /* ]]; then
        dapo_say "--config=$config is a file of the hosts: not checked here"
        return
    fi
    [[ -f "$DAPO_ROOT/$config" ]] || dapo_fail "--config=$config: no such file in $DAPO_ROOT" 2
    [[ -n "${prepare:-}" ]] || check+=(--check_files)
    [[ -z "${skip_plan:-}" ]] || check+=(--nocheck_memory)
    for python in "$(dapo_venv)/bin/python" python3 python; do
        (cd -- "$DAPO_ROOT" && "$python" - 2>/dev/null) <<'PYTHON' || continue
import importlib.util
needed = ("dapo_jax.plan", "absl", "flax", "jax", "orbax.checkpoint")
raise SystemExit(not all(importlib.util.find_spec(name) for name in needed))
PYTHON
        (cd -- "$DAPO_ROOT" && "$python" -m dapo_jax.plan "${check[@]}" "--topology=$type" "$@") \
            || exit 2
        return
    done
    dapo_say "dapo_jax is not installed here: whether the config is right for $type shows on the hosts"
}
