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
  logs      print the log of host --worker of the first slice, and what comes
  stop      ask the training to save and leave
  fetch     copy metrics, samples and the logs of all hosts from the bucket to --to (checkpoints
            with --checkpoints)
  delete    delete the slice and its request

  launch/tpu_vm.sh run --name=dapo --zone=us-east5-a --type=v5p-256 --spot \
      -- --config=configs/dapo_qwen2_5_32b.py --workdir=gs://BUCKET/dapo

  --name=NAME, --zone=ZONE   of the slice
  --project=PROJECT          default: gcloud's
  --type=TYPE                Cloud's name of the slice: v5p-256, v6e-256, v5litepod-256; several
                             as one run: 2xv5p-256 (logs and stop want it then, too)
  --runtime=VERSION          default: what Google names for the type
  --spot | --reserved        how to ask for it                    (default: on demand)
  --flex-start=DURATION      or: wait until it is there, then keep it so long (4h; at most 7d)
  --prepare=COMMAND          shell command on every host after the install, such as
                             'gcloud storage cp gs://BUCKET/dapo-math-17k.parquet dapo_jax/'
  --weights-dir=DIR          of the hosts, for weights of the hub or a bucket (HF_HOME, TMPDIR). The
                             boot disk has 100 GB, which gcloud cannot change: 32B (65 GB) wants
                             a folder in memory (/dev/shm/weights) or on a --data-disk
  --batch-size=N             hosts at a time for ssh and scp      (default: gcloud's; iap: 16)
  --retries=N                starts after a failure that is no preemption, in a row (default: 2);
                             an hour of training begins a new row
  --skip-plan                go on where `dapo_jax.plan` says that the config does not fit
  --delete                   run: delete the slice after the training has ended
  --workdir=gs://...         fetch: the run's; run takes it from the training flags
  --worker=N                 logs: which host                     (default: 0)
  --to=DIR, --checkpoints    fetch: where to, and whether with checkpoints
  --dry-run                  print every command, run none
  --help                     print this

As gcloud's `queued-resources create` takes them (--data-disk: source=DISK,mode=read-only;
--boot-disk's keys are about its encryption):
  --service-account=EMAIL --scopes=LIST --network=NAME --subnetwork=NAME --tags=LIST
  --labels=KEY=VALUE,... --data-disk=KEY=VALUE,... --boot-disk=KEY=VALUE,...
  --valid-until-duration=TIME --internal-ips
  --ssh=internal | iap       how to reach hosts without public addresses (--internal-ips): from
                             within their network (default), or by a tunnel (gcloud's alpha)

FILE names in training flags are names on the hosts, relative to the checkout.
TEXT
}

action="" name="" zone="" project="" type="" runtime="" spot="" reserved="" prepare="" retries=2
delete="" workdir="" to="" checkpoints="" dry_run="" worker=0 skip_plan="" training=()
# shellcheck disable=SC2034  # read by name in create_slice
service_account="" scopes="" network="" subnetwork="" tags="" labels="" data_disk="" boot_disk=""
# shellcheck disable=SC2034
valid_until_duration="" internal_ips="" ssh="" flex_start="" batch_size="" weights_dir=""
dapo_flags "COMMAND=|run|logs|stop|fetch|delete| name=word zone=word project=word type=word
    runtime=word spot=switch reserved=switch prepare=any retries=number:0:1000000 delete=switch
    workdir=text to=text checkpoints=switch worker=number:0:100000 skip-plan=switch dry-run=switch
    service-account=word scopes=word network=word subnetwork=word tags=word labels=pairs
    data-disk=pairs boot-disk=pairs flex-start=word batch-size=number:1:100000 weights-dir=text
    valid-until-duration=word internal-ips=switch ssh=word" "$@"
[[ -n "$action" ]] || dapo_fail "say what to do: run, logs, stop, fetch or delete (see --help)" 2
case "${spot:+1}${reserved:+1}${flex_start:+1}" in
    11*) dapo_fail "--spot, --reserved or --flex-start: one of them" 2 ;;
esac
[[ -z "$internal_ips" ]] || : "${ssh:=internal}"
tpu_vm=(compute tpus tpu-vm) by=()
case "$ssh" in
    "") ;;
    internal) by=(--internal-ip) ;;
    iap) tpu_vm=(alpha "${tpu_vm[@]}") by=(--tunnel-through-iap) batch_size="${batch_size:-16}" ;;
    *) dapo_fail "--ssh=$ssh: internal or iap" 2 ;;
esac
[[ -z "$batch_size" ]] || by+=("--batch-size=$batch_size")
# Several slices of one request are nodes NAME-0, NAME-1, ...; Cloud tells their hosts of each other.
whole="$type" slices=1 nodes=("$name")
if [[ -n "$type" ]]; then
    given="$runtime"
    dapo_slice "$type"
    runtime="${given:-$runtime}"
    [[ "$runtime" == *[!-]* ]] || dapo_fail \
        "--type=$whole: no TPU VM of it is known (--runtime= names one); GKE: launch/gke.sh" 2
fi
if ((slices > 1)); then
    nodes=()
    for ((i = 0; i < slices; i++)); do nodes+=("$name-$i"); done
fi

scope=(${zone:+"--zone=$zone"} ${project:+"--project=$project"} --quiet)

# What a `describe` of gcloud prints; nothing where there is no such thing. Where gcloud cannot say,
# for want of a network or a right, its words go to stderr and this prints UNKNOWN.
described() {
    gcloud "$@" "${scope[@]}" 2>"$scratch/said" || grep -qE "NOT_FOUND|not found" "$scratch/said" || {
        dapo_say "$(tail -n 1 "$scratch/said")"
        echo UNKNOWN
    }
}
# State of the request for the slice and of the slice itself: of several, the first that is not ready.
request_state() {
    described compute tpus queued-resources describe "$name" '--format=value(state.state)'
}
node_state() {
    local node state=""
    for node in "${nodes[@]}"; do
        state="$(described compute tpus tpu-vm describe "$node" '--format=value(state)')"
        [[ "$state" == READY ]] || break
    done
    printf '%s\n' "$state"
}

on_hosts() {  # on_hosts WORKER COMMAND: 'all' of every slice, at the same time, or one of the first
    local node pid one pids=() status=0 call=(gcloud "${tpu_vm[@]}" ssh)
    local flags=("${scope[@]}" ${by[@]+"${by[@]}"} "--worker=$1" "--command=$2")
    if [[ "$1" != all || $slices == 1 ]]; then
        dapo_call "${call[@]}" "${nodes[0]}" "${flags[@]}"
        return
    fi
    for node in "${nodes[@]}"; do
        [[ -z "$dry_run" ]] || { dapo_call "${call[@]}" "$node" "${flags[@]}"; continue; }
        dapo_call "${call[@]}" "$node" "${flags[@]}" &
        pids+=($!)
    done
    for pid in ${pids[@]+"${pids[@]}"}; do
        one=0
        wait "$pid" || one=$?
        # Where a child ends just as the wait begins, bash may say -1 once.
        [[ $one != -1 ]] || { one=0; wait "$pid" || one=$?; }
        [[ $one == 0 ]] || status=$one
    done
    return "$status"
}

delete_slice() {
    dapo_call gcloud compute tpus queued-resources delete "$name" "${scope[@]}" --force
}

create_slice() {
    local flag value named=("--node-id=$name") given=() tpus=(compute tpus)
    for flag in service-account scopes network subnetwork tags labels data-disk boot-disk \
        valid-until-duration; do
        value="${flag//-/_}"
        [[ -z "${!value}" ]] || given+=("--$flag=${!value}")
    done
    ((slices == 1)) || named=("--node-count=$slices" "--node-prefix=$name")
    [[ -z "$flex_start" ]] || {
        tpus=(alpha "${tpus[@]}")
        given+=(--provisioning-model=flex-start "--max-run-duration=$flex_start")
    }
    dapo_call gcloud "${tpus[@]}" queued-resources create "$name" "${scope[@]}" "${named[@]}" \
        "--accelerator-type=$type" "--runtime-version=$runtime" ${spot:+--spot} ${reserved:+--reserved} \
        ${internal_ips:+--internal-ips} ${given[@]+"${given[@]}"}
}

known=""  # whether gcloud has ever answered: before that, what is wrong will not pass
# Until the slice is there: made, waited for, or made again after a preemption. Prints a line at
# each change.
ensure_slice() {
    local state seen="" ours="" reason
    if [[ -n "$dry_run" ]]; then
        create_slice
        return
    fi
    while true; do
        state="$(request_state)"
        [[ "$state" == "$seen" ]] || { dapo_say "slice $name: ${state:-not there}"; seen="$state"; }
        [[ "$state" != UNKNOWN || -n "$known" ]] || dapo_fail "gcloud cannot say what there is of $name"
        known=1
        case "$state" in
            ACTIVE)
                case "$(node_state)" in
                    READY) return ;;
                    PREEMPTED | TERMINATED | STOPPED | "") delete_slice ;;
                esac ;;
            "") create_slice; ours=1 ;;
            SUSPENDED) delete_slice ;;
            FAILED)
                reason="$(described compute tpus queued-resources describe "$name" \
                    '--format=value(state.failedData.error.message)')"
                # The same request would fail again; one that was there before is none of ours.
                [[ -z "$ours" ]] || dapo_fail "slice $name: Cloud has refused the request: \
${reason:-it does not say why}"
                dapo_say "slice $name: an earlier request failed (${reason:-no reason given})"
                delete_slice ;;
        esac
        sleep "${DAPO_POLL_SECONDS:-15}"
    done
}

# The checkout without what git and the runs have put there.
install() {
    local archive="$scratch/dapo_jax.tar.gz" node
    dapo_call tar -czf "$archive" -C "$DAPO_ROOT" --exclude=./.git '--exclude=./.venv*' \
        --exclude=./.xla_gpu --exclude=./runs --exclude=__pycache__ '--exclude=./run.*' .
    for node in "${nodes[@]}"; do
        dapo_call gcloud "${tpu_vm[@]}" scp "$archive" "$node:dapo_jax.tar.gz" "${scope[@]}" \
            ${by[@]+"${by[@]}"} --worker=all || return
    done
    # In parentheses: an `||` of --prepare is not for an install that has failed.
    on_hosts all "mkdir -p dapo_jax && tar -xzf dapo_jax.tar.gz -C dapo_jax && \
bash dapo_jax/launch/worker.sh install tpu${prepare:+ && (set -e; $prepare)}"
}

# Whether the slice is at work already: then there is nothing to copy or start. 255: ssh cannot say.
running() {  # running ARGUMENTS
    local status=0
    [[ -z "$dry_run" ]] || return 1
    on_hosts 0 "bash dapo_jax/launch/worker.sh alive$1" 2>/dev/null || status=$?
    [[ $status != 3 ]] || dapo_fail "slice $name is at work with other flags: stop it, or give those" 2
    return "$status"
}

run() {
    local code failures=0 arguments place="" began state shown="$scratch/shown"
    dapo_meeting
    printf -v arguments ' %q' "${meeting[@]}" "${training[@]}"
    [[ -z "$weights_dir" ]] || printf -v place 'mkdir -p %q && HF_HOME=%q TMPDIR=%q ' \
        "$weights_dir" "$weights_dir" "$weights_dir"
    : >"$shown"
    while true; do
        code=1
        ensure_slice
        running "$arguments" || {
            [[ $? != 255 ]] && : >"$shown" && install \
                && on_hosts all "${place}bash dapo_jax/launch/worker.sh start$arguments"
        } && {
            code=0 began=$SECONDS
            # From the line on to which it was shown already, before the connection broke.
            on_hosts 0 "bash dapo_jax/launch/worker.sh follow $(grep -c '' "$shown")" \
                | tee -a -- "$shown" || code=$?
            ((SECONDS - began < 3600)) || failures=0
        }
        [[ $code != 0 ]] || break
        state="$(request_state) $(node_state)"
        if [[ "$state" == "ACTIVE READY" || "$state" == *UNKNOWN* ]]; then
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
    logs) on_hosts "$worker" "bash dapo_jax/launch/worker.sh follow" ;;
    stop) on_hosts all "bash dapo_jax/launch/worker.sh stop" ;;
    fetch)
        [[ "$workdir" == gs://* && -n "$to" ]] || dapo_fail \
            "fetch: give --workdir=gs://... and --to=DIR" 2
        dapo_call mkdir -p -- "$to"
        exclude='--exclude=(checkpoints.*|export|journal|profile|rewound|xla)/.*'
        [[ -z "$checkpoints" ]] || exclude='--exclude=(export|journal|profile|xla)/.*'
        dapo_call gcloud storage rsync --recursive "$exclude" "$workdir" "$to" ;;
    delete) delete_slice ;;
esac
