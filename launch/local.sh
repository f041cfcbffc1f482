#!/usr/bin/env bash
# Several processes on this machine that behave as the hosts of a pod: to try a multi-host run.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/local.sh [--processes=N] [--devices=D] [--python=X.Y] [--dry-run] [-- TRAINING FLAG ...]

  launch/local.sh --processes=2 --devices=4 -- --config=configs/quickstart.py --workdir=runs/local \
      --config.mesh.tensor=2

Starts N processes (default: 2) with D simulated CPU devices each (default: 1), which meet over
loopback. Process 0 writes here, the others to WORKDIR.process_N.log. Where one fails the others are
ended; Ctrl-C or SIGTERM asks all of them to save and leave. Exits with process 0's status, or with
that of the first that failed.
TEXT
}

processes=2 devices=1 python="" dry_run="" training=()
dapo_flags "processes=number:1:1024 devices=number:1:1024 python=python dry-run=switch" "$@"
workdir="$(dapo_workdir)"
: "${workdir:=$DAPO_ROOT/runs/local}"
training=("--workdir=$workdir" ${training[@]+"${training[@]}"})

[[ -n "$dry_run" ]] || dapo_setup "" "$python"
# A port that is free now; nothing else on this machine is likely to take it within a second.
port="${DAPO_PORT:-}"
if [[ -n "$port" ]]; then
    dapo_want number:1:65535 DAPO_PORT "$port"
else
    port=8476
    [[ -n "$dry_run" ]] || port="$("$DAPO_PYTHON" -c \
        'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
fi
# XLA takes NPROC for the size of its thread pools; with few threads a simulated device, collectives
# wait for each other until they are aborted.
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
threads=$((4 * devices > cores ? 4 * devices : cores))
environment=(JAX_PLATFORMS=cpu "NPROC=${NPROC:-$threads}" "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$devices"
    "TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}")

children=()
for ((i = 0; i < processes; i++)); do
    command=(env "${environment[@]}" "$(dapo_venv "$python")/bin/python" -m dapo_jax.train
        "${training[@]}" "--coordinator=127.0.0.1:$port" "--num_processes=$processes"
        "--process_id=$i")
    if [[ -n "$dry_run" ]]; then
        printf '%q ' "${command[@]}"
        printf '\n'
    elif ((i == 0)); then
        "${command[@]}" &
        children+=($!)
    else
        mkdir -p -- "$(dirname -- "$workdir")"
        "${command[@]}" >"$workdir.process_$i.log" 2>&1 &
        children+=($!)
    fi
done
[[ -z "$dry_run" ]] || exit 0

# One is enough: the processes agree on where to stop.
trap 'kill -TERM "${children[0]}" 2>/dev/null || true' INT TERM
status=0 left=("${children[@]}")
while ((${#left[@]})); do
    running=()
    for child in "${left[@]}"; do
        if kill -0 "$child" 2>/dev/null; then
            running+=("$child")
            continue
        fi
        code=0
        wait "$child" || code=$?
        if [[ $code != 0 && $status == 0 ]]; then
            status=$code
            kill -TERM "${children[@]}" 2>/dev/null || true
        fi
    done
    left=(${running[@]+"${running[@]}"})
    sleep 0.2
done
exit "$status"
