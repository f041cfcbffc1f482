#!/usr/bin/env bash
# Run a training; exit with 75 (EX_TEMPFAIL) where it was only told to leave (a preemption), so that
# whoever restarts what failed starts it again. The status is also written to the file
# DAPO_STATUS_FILE, if that is set.
set -euo pipefail

case "${1:-}" in
    "" | -h | --help)
        echo "usage: launch/until_done.sh PYTHON -m dapo_jax.train [TRAINING FLAG ...]"
        exit 0 ;;
esac
child="" told="" again=1
trap 'told=1 again=1; [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null || true' TERM INT
"$@" --terminated_status=75 &
child=$!
[[ -z "$told" ]] || kill -TERM "$child" 2>/dev/null || true  # told before that line
while [[ -n "$again" ]]; do  # a signal ends the wait; the child is saving
    again="" status=0
    wait "$child" || status=$?
done
# 143: SIGTERM came before the training had anything to save, and ended it.
[[ $status != 143 || -z "$told" ]] || status=75
[[ -z "${DAPO_STATUS_FILE:-}" ]] || printf '%s\n' "$status" >"$DAPO_STATUS_FILE"
exit "$status"
