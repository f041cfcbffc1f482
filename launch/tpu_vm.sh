#!/usr/bin/env bash
# Train on a Cloud TPU pod slice through gcloud, from this machine.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
source "$DAPO_ROOT/launch/slice.sh"

usage() {
    cat <<'TEXT'
usage: launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [FLAG ...] [-- TRAINING FLAG ...]

  run       create the slice or reuse it, copy this checkout, install, train on all of its hosts,
            and print the log of host 0. After a preemption: all of it again, which resumes. Ends
            with the training's exit status. Breaking off leaves the training alone; the same
            command follows it again.
  stop      ask the training to save and leave
  fetch     copy metrics and samples from the bucket to --to (checkpoints with --checkpoints)
  delete    delete the slice and its request

  launch/tpu_vm.sh run --name=dapo --zone=us-east5-a --type=v5p-256 --spot \
      -- --config=configs/dapo_qwen2_5_32b.py --workdir=gs://BUCKET/dapo

  --name=NAME, --zone=ZONE   of the slice
  --project=PROJECT          default: gcloud's
  --type=TYPE                Cloud's name of the slice: v5p-256, v6e-256, v5litepod-256; several
                             as one run: 2xv5p-256 (stop wants it then, too)
  --runtime=VERSION          default: what Google names for the type
  --spot | --reserved        how to ask for it                    (default: on demand)
  --prepare=COMMAND          shell command on every host after the install, such as
                             'gcloud storage cp gs://BUCKET/dapo-math-17k.parquet dapo_jax/'
  --retries=N                starts after a failure that is no preemption, in a row (default: 2)
  --delete                   run: delete the slice after the training has ended
  --workdir=gs://...         fetch: the run's; run takes it from the training flags
  --to=DIR, --checkpoints    fetch: where to, and whether with checkpoints
  --dry-run                  print every command, run none
  --help                     print this

FILE names in training flags are names on the hosts, relative to the checkout.
TEXT
}

action="" name="" zone="" project="" type="" runtime="" spot="" reserved="" prepare="" retries=2
delete="" workdir="" to="" checkpoints="" dry_run="" training=()
dapo_flags "COMMAND=|run|stop|fetch|delete| name=word zone=word project=word type=word runtime=word
    spot=switch reserved=switch prepare=any retries=number:0:1000000 delete=switch workdir=text
    to=text checkpoints=switch dry-run=switch" "$@"
[[ -n "$action" ]] || dapo_fail "say what to do: run, stop, fetch or delete (see --help)" 2
[[ -z "$spot" || -z "$reserved" ]] || dapo_fail "--spot or --reserved, not both" 2
# Several slices of one request are nodes NAME-0, NAME-1, ...; Cloud tells their hosts of each other.
whole="$type" slices=1 nodes=("$name")
if [[ -n "$type" ]]; then
    given="$runtime"
    dapo_slice "$type"
    runtime="${given:-$runtime}"
fi
if ((slices > 1)); then
    nodes=()
    for ((i = 0; i < slices; i++)); do nodes+=("$name-$i"); done
fi

scope=(${zone:+"--zone=$zone"} ${project:+"--project=$project"} --quiet)

# State of the request for the slice ('' = there is none) and of the slice itself: of several, the
# first that is not ready.
request_state() {
    gcloud compute tpus queued-resources describe "$name" "${scope[@]}" \
        '--format=value(state.state)' 2>/dev/null || true
}
node_state() {
    local node state=""
    for node in "${nodes[@]}"; do
        state="$(gcloud compute tpus tpu-vm describe "$node" "${scope[@]}" \
            '--format=value(state)' 2>/dev/null || true)"
        [[ "$state" == READY ]] || break
    done
    printf '%s\n' "$state"
}

on_hosts() {  # on_hosts WORKER COMMAND: 'all' of every slice, at the same time, or one of the first
    local node pid pids=() status=0 ssh=(gcloud compute tpus tpu-vm ssh)
    local flags=("${scope[@]}" "--worker=$1" "--command=$2")
    if [[ "$1" != all || $slices == 1 ]]; then
        dapo_call "${ssh[@]}" "${nodes[0]}" "${flags[@]}"
        return
    fi
    for node in "${nodes[@]}"; do
        [[ -z "$dry_run" ]] || { dapo_call "${ssh[@]}" "$node" "${flags[@]}"; continue; }
        dapo_call "${ssh[@]}" "$node" "${flags[@]}" &
        pids+=($!)
    done
    for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid" || status=$?; done
    return "$status"
}

delete_slice() {
    dapo_call gcloud compute tpus queued-resources delete "$name" "${scope[@]}" --force
}

create_slice() {
    local named=("--node-id=$name")
    ((slices == 1)) || named=("--node-count=$slices" "--node-prefix=$name")
    dapo_call gcloud compute tpus queued-resources create "$name" "${scope[@]}" "${named[@]}" \
        "--accelerator-type=$type" "--runtime-version=$runtime" ${spot:+--spot} ${reserved:+--reserved}
}

# Until the slice is there: made, waited for, or made again after a preemption. Prints a line at
# each change.
ensure_slice() {
    local state seen=""
    if [[ -n "$dry_run" ]]; then
        create_slice
        return
    fi
    while true; do
        state="$(request_state)"
        [[ "$state" == "$seen" ]] || { dapo_say "slice $name: ${state:-not there}"; seen="$state"; }
        case "$state" in
            ACTIVE)
                case "$(node_state)" in
                    READY) return ;;
                    PREEMPTED | TERMINATED | STOPPED | "") delete_slice ;;
                esac ;;
            "") create_slice ;;
            FAILED | SUSPENDED) delete_slice ;;
        esac
        sleep "${DAPO_POLL_SECONDS:-15}"
    done
}

# The checkout without what git and the runs have put there.
install() {
    local archive="$scratch/dapo_jax.tar.gz" node
    dapo_call tar -czf "$archive" -C "$DAPO_ROOT" --exclude=./.git '--exclude=./.venv*' \
        --exclude=./runs --exclude=__pycache__ '--exclude=./run.*' .
    for node in "${nodes[@]}"; do
        dapo_call gcloud compute tpus tpu-vm scp "$archive" "$node:dapo_jax.tar.gz" "${scope[@]}" \
            --worker=all || return
    done
    on_hosts all "mkdir -p dapo_jax && tar -xzf dapo_jax.tar.gz -C dapo_jax && \
bash dapo_jax/launch/worker.sh install tpu${prepare:+ && $prepare}"
}

running() {  # whether the slice is at work already: then there is nothing to copy or start
    [[ -z "$dry_run" ]] && on_hosts 0 "bash dapo_jax/launch/worker.sh alive" 2>/dev/null
}

run() {
    local code failures=0 arguments
    printf -v arguments ' %q' "${training[@]}"
    while true; do
        code=1
        ensure_slice
        if running || { install && on_hosts all "bash dapo_jax/launch/worker.sh start$arguments"; }
        then
            code=0
            on_hosts 0 "bash dapo_jax/launch/worker.sh follow" || code=$?
        fi
        [[ $code != 0 ]] || break
        if [[ "$(request_state)" == ACTIVE && "$(node_state)" == READY ]]; then
            # The slice is well: a connection that broke (ssh's 255), or the run itself failed.
            [[ $code == 255 || $code == 75 ]] || ((++failures <= retries)) || break
            dapo_say "exit status $code with the slice in order: once more"
        else
            failures=0
            dapo_say "the slice was taken away: asking for another"
        fi
        sleep "${DAPO_POLL_SECONDS:-15}"
    done
    [[ -z "$delete" ]] || delete_slice
    exit "$code"
}

[[ "$action" == fetch || (-n "$name" && -n "$zone") ]] || dapo_fail "give --name and --zone" 2
case "$action" in
    run)
        workdir="$(dapo_workdir)"
        [[ "$workdir" == gs://* ]] || dapo_fail \
            "give the training a bucket, --workdir=gs://...: hosts share no disk, and a preempted \
slice loses its own" 2
        [[ -n "$type" ]] || dapo_fail "--type: which slice? v5p-256, v6e-256, v5litepod-256, ..." 2
        dapo_check_training "$whole" "${training[@]}"
        scratch="$(mktemp -d)"
        trap 'rm -rf -- "$scratch"' EXIT
        run ;;
    stop) on_hosts all "bash dapo_jax/launch/worker.sh stop" ;;
    fetch)
        [[ "$workdir" == gs://* && -n "$to" ]] || dapo_fail \
            "fetch: give --workdir=gs://... and --to=DIR" 2
        dapo_call mkdir -p -- "$to"
        exclude='--exclude=checkpoints/.*'
        [[ -z "$checkpoints" ]] || exclude=""
        dapo_call gcloud storage rsync --recursive ${exclude:+"$exclude"} "$workdir" "$to" ;;
    delete) delete_slice ;;
esac
