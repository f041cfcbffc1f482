#!/usr/bin/env bash
# From a fresh clone to a trained model: set up, then train on the embedded task.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/quickstart.sh [--config=FILE] [--workdir=DIR] [--config.FIELD=VALUE ...]

Makes .venv and installs dapo_jax into it (once), then runs `python -m dapo_jax.train`.
The same command again resumes the run in DIR.

  --config=FILE           the experiment                   (default: configs/quickstart.py)
  --workdir=DIR           metrics, rollouts, checkpoints   (default: runs/quickstart)
  --config.FIELD=VALUE    change one field of the config
  --extra=tpu|cuda|cuda13 install jax for this accelerator (default: CPU)
  --python=X.Y            use this Python, in .venv-X.Y
  --dry-run               print the command, do nothing
  --help                  print this

FILE and DIR are taken from where you stand, the defaults from the repository.
TEXT
}

config="$DAPO_ROOT/configs/quickstart.py"
workdir="$DAPO_ROOT/runs/quickstart"
overrides=() extra="" version="" dry_run=""
for arg in "$@"; do
    case "$arg" in
        --config=?*) config="${arg#*=}" ;;
        --workdir=?*) workdir="${arg#*=}" ;;
        --config.?* | --noconfig.?* | --verbosity=?*) overrides+=("$arg") ;;
        --extra=?*) extra="${arg#*=}"; dapo_want word --extra "$extra" ;;
        --python=?*) version="${arg#*=}"; dapo_want python --python "$version" ;;
        --dry-run) dry_run=1 ;;
        -h | --help) usage; exit 0 ;;
        *) dapo_fail "unknown argument '$arg' (flags are --name=value; see --help)" 2 ;;
    esac
done

environment=()
# setenv NAME VALUE: unless the user has set NAME.
setenv() {
    [[ -n "${!1+set}" ]] || { export "$1=$2"; environment+=("$1=$2"); }
}

# Huge pages for scratch memory: 24-35 % less wall time on CPU steps that allocate much of it (the
# kernel's page faults). Read by glibc before main(), so it cannot be set from Python.
if [[ "${GLIBC_TUNABLES:-}" != *glibc.malloc.hugetlb=* ]]; then
    export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1"
    environment+=("GLIBC_TUNABLES=$GLIBC_TUNABLES")
fi
# Compiled programs outlive the process: a second start, or a resume, compiles nothing.
setenv JAX_COMPILATION_CACHE_DIR "${XDG_CACHE_HOME:-$HOME/.cache}/dapo_jax/xla"
# Keep every program: the quickstart's are small, and quick to compile one by one but not in sum.
setenv JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS 0
setenv JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES -1
# XLA's notes on start-up would bury the progress bar; its errors still show.
setenv TF_CPP_MIN_LOG_LEVEL 2

[[ -n "$dry_run" ]] || dapo_setup "$extra" "$version"
command=("$(dapo_venv "$version")/bin/python" -m dapo_jax.train "--config=$config"
    "--workdir=$workdir" ${overrides[@]+"${overrides[@]}"})
if [[ -n "$dry_run" ]]; then
    printf '%q ' env ${environment[@]+"${environment[@]}"} "${command[@]}"
    printf '\n'
    exit 0
fi
exec "${command[@]}"
