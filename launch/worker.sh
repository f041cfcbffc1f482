#!/usr/bin/env bash
# The half of tpu_vm.sh that runs on the hosts of a pod slice, in a copy of the repository. Its `install`
# makes the image of the Dockerfile, too: there is one Python, jax and libtpu for a run.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/worker.sh install [EXTRA [PYTHON]] | start ARGUMENT ... | alive [ARGUMENT ...] | follow [LINES] | stop

  install   install uv (if need be) and dapo_jax with this extra (default: tpu) for this Python
            (default: DAPO_TPU_PYTHON of common.sh)
  start     run `python -m dapo_jax.train ARGUMENT ...` in the background, in place of an older one
  alive     exit with 0 where it runs, with 3 where it was started with other arguments
  follow    print its log, without its first LINES, until it ends, then exit with its status, or
            with 75 where the machine told it to stop (a preemption) and the same command would go on
  stop      ask it to save and leave (SIGTERM)
TEXT
}

log="$DAPO_ROOT/run.log" pid="$DAPO_ROOT/run.pid" status="$DAPO_ROOT/run.status"
asked="$DAPO_ROOT/run.asked"  # is there where `stop` was called
flags="$DAPO_ROOT/run.flags"  # what it was started with
alive() { [[ -f "$pid" ]] && kill -0 "$(<"$pid")" 2>/dev/null; }

case "${1:-}" in
    install)
        export PATH="$HOME/.cache/dapo_jax/uv/bin:$HOME/.local/bin:$PATH"
        command -v uv >/dev/null || python3 -m pip install --quiet --disable-pip-version-check \
            --target="$HOME/.cache/dapo_jax/uv" --no-deps --only-binary=:all: --require-hashes \
            --requirement="$DAPO_ROOT/launch/uv.txt" >&2 || dapo_fail \
            "no uv here, and the host's pip could not fetch it: install uv, then run this again"
        dapo_setup "${2:-tpu}" "${3:-$DAPO_TPU_PYTHON}"
        printf '%s\n' "$DAPO_PYTHON" >"$DAPO_ROOT/run.python"
        ;;
    start)
        shift
        if alive; then  # of a run whose other hosts have failed
            kill -KILL -- "-$(<"$pid")" 2>/dev/null || true
        fi
        python="$(<"$DAPO_ROOT/run.python")"
        rm -f -- "$status" "$asked"
        export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
        cd -- "$DAPO_ROOT"
        : >"$log"
        printf '%q ' "$@" >"$flags"
        DAPO_STATUS_FILE="$status" DAPO_LOG="$log" setsid nohup \
            "$python" -um dapo_jax.hosts.until_done "$@" >/dev/null 2>&1 </dev/null &
        echo $! >"$pid"
        ;;
    alive)
        shift
        alive
        [[ $# == 0 || ! -f "$flags" || "$(printf '%q ' "$@")" == "$(<"$flags")" ]] || exit 3 ;;
    follow)
        [[ -f "$pid" ]] || dapo_fail "nothing was started here"
        dapo_want number:0:1000000000 follow "${2:-0}"
        tail -n "+$((10#${2:-0} + 1))" -F -s "${DAPO_POLL_SECONDS:-1}" --pid="$(<"$pid")" \
            -- "$log" 2>/dev/null
        [[ -f "$status" ]] || exit 75  # killed without a word
        code="$(<"$status")"
        [[ $code != 75 || ! -f "$asked" ]] || code=0
        exit "$code"
        ;;
    stop)
        touch -- "$asked"
        ! alive || kill -TERM "$(<"$pid")"
        ;;
    -h | --help) usage ;;
    *) usage >&2; exit 2 ;;
esac
