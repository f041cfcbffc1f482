#!/usr/bin/env bash
# Several processes on this machine: one for each of its GPUs, or, to try a multi-host run, some that
# behave as the hosts of a pod.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/local.sh [--gpus=G | --processes=N --devices=D] [FLAG ...] [-- TRAINING FLAG ...]

  launch/local.sh --processes=2 --devices=4 -- --config=configs/quickstart.py --workdir=runs/local \
      --config.mesh.tensor=2
  launch/local.sh --gpus=8 -- --config=configs/gpus.py:8 --workdir=runs/gsm8k

With --gpus starts G processes, each with an NVIDIA GPU, the first G or those of CUDA_VISIBLE_DEVICES;
else N (default: 2) with D simulated CPU devices each (default: 1), which meet over loopback. Process
0 writes here, the others to WORKDIR.process_N.log (of a bucket: runs/NAME.process_N.log). Where one
fails the others are ended; Ctrl-C or SIGTERM asks all of them to save and leave. Exits with process
0's status, or with that of the first that failed.

  --extra=EXTRA         with --gpus, what to install: cuda (default: CUDA 12) or cuda13 (driver 580)
  --python=X.Y          use this Python, in .venv-X.Y
  --dry-run             print the commands, start nothing
TEXT
}

gpus=0 processes=2 devices=1 extra=cuda python="" dry_run="" training=()
dapo_flags "gpus=number:0:64 processes=number:1:1024 devices=number:1:1024 extra=word python=python
    dry-run=switch" "$@"
workdir="$(dapo_workdir)"
: "${workdir:=$DAPO_ROOT/runs/local}"
logs="${workdir%"${workdir##*[!/]}"}" logs="${logs/#\~\//$HOME/}"
[[ "$logs" != *://* ]] || logs="$DAPO_ROOT/runs/${logs##*/}"
training=("--workdir=$workdir" ${training[@]+"${training[@]}"})

if ((gpus)); then
    processes=$gpus
    IFS=", " read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-}"
    ((${#visible[@]} == 0 || ${#visible[@]} >= gpus)) || dapo_fail \
        "--gpus=$gpus: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names ${#visible[@]}" 2
    [[ -n "$dry_run" ]] || dapo_gpus "$gpus"
else
    extra=""
fi
[[ -n "$dry_run" ]] || dapo_setup "$extra" "$python"
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
((!gpus)) || dapo_gpu_environment

[[ -n "$dry_run" ]] || mkdir -p -- "$(dirname -- "$logs")"
children=()
for ((i = 0; i < processes; i++)); do
    own=()
    ((!gpus)) || own=("CUDA_VISIBLE_DEVICES=${visible[i]:-$i}")
    command=(env ${own[@]+"${own[@]}"} "${environment[@]}" "$(dapo_venv "$python")/bin/python" -m dapo_jax.train
        "${training[@]}" "--coordinator=127.0.0.1:$port" "--num_processes=$processes"
        "--process_id=$i")
    if [[ -n "$dry_run" ]]; then
        printf '%q ' "${command[@]}"
        printf '\n'
    elif ((i == 0)); then
        "${command[@]}" &
        children+=($!)
    else
        "${command[@]}" >"$logs.process_$i.log" 2>&1 &
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
    sleep 0.2 || true  # Ctrl-C ends it, too
done
exit "$status"
