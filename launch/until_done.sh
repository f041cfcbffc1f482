#!/usr/bin/env bash
# Run COMMAND, printing what it prints; exit with 75 instead of 0 where it was only told to leave (a
# preemption), so that whoever restarts what failed starts it again. The status is also written to
# the file DAPO_STATUS_FILE, if that is set.
set -euo pipefail

case "${1:-}" in
    "" | -h | --help) echo "usage: launch/until_done.sh COMMAND [ARGUMENT ...]"; exit 0 ;;
esac
log="$(mktemp)"
trap 'rm -f -- "$log"' EXIT
"$@" > >(tee -- "$log") 2>&1 &
child=$!
trap 'kill -TERM "$child"' TERM INT
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do  # a signal ended the wait; the child is saving
    status=0
    wait "$child" || status=$?
done
sleep 0.2  # tee's last lines
[[ $status != 0 ]] || ! grep -q '^terminated after step' "$log" || status=75
[[ -z "${DAPO_STATUS_FILE:-}" ]] || printf '%s\n' "$status" >"$DAPO_STATUS_FILE"
exit "$status"
