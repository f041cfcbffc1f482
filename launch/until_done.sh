#!/usr/bin/env bash
# Run a training; exit with 75 (EX_TEMPFAIL) where it was only told to leave (a preemption), so that
# whoever restarts what failed starts it again.
#
#   DAPO_STATUS_FILE=FILE   gets the status as well
#   DAPO_LOG=FILE           what the training prints goes there too, and, as it grows, to
#                           WORKDIR/logs: a file per start and host
set -euo pipefail

case "${1:-}" in
    "" | -h | --help)
        echo "usage: launch/until_done.sh PYTHON -m dapo_jax.train [TRAINING FLAG ...]"
        exit 0 ;;
esac
workdir=""
for word in "$@"; do [[ "$word" != --workdir=* ]] || workdir="${word#*=}"; done
keeper="" tee=""
if [[ -n "${DAPO_LOG:-}" ]]; then
    : >"$DAPO_LOG"
    if [[ -n "$workdir" ]]; then
        "$1" -m dapo_jax.hosts.keep_log "$DAPO_LOG" "${workdir%/}/logs" &
        keeper=$!
    fi
    exec 3>&1 > >(trap '' TERM INT; exec tee -a -- "$DAPO_LOG") 2>&1  # signals are for the training
    tee=$!
fi

child="" told="" again=1
trap 'told=1 again=1; [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null || true' TERM INT
"$@" --terminated_status=75 &
child=$!
[[ -z "$told" ]] || kill -TERM "$child" 2>/dev/null || true  # told before that line
while [[ -n "$again" ]]; do  # a signal ends the wait; the child is saving
    again="" status=0
    wait "$child" || status=$?
    # Of a child that ends just as the wait begins bash says 255 (its waitpid finds that the handler
    # of SIGCHLD was first), and its own status when asked again.
    [[ $status != 255 ]] || { status=0; wait "$child" || status=$?; }
done
# 143: SIGTERM came before the training had anything to save, and ended it.
[[ $status != 143 || -z "$told" ]] || status=75
[[ -z "${DAPO_STATUS_FILE:-}" ]] || printf '%s\n' "$status" >"$DAPO_STATUS_FILE"
if [[ -n "$tee" ]]; then
    exec >&3 2>&3
    # It ends with the last writer, for which nobody waits long.
    for _ in {1..20}; do kill -0 "$tee" 2>/dev/null || break; sleep 0.05; done
fi
if [[ -n "$keeper" ]]; then  # copies what is new since its last look; it has a limit of its own
    kill -TERM "$keeper" 2>/dev/null || true
    wait "$keeper" || true
fi
exit "$status"
