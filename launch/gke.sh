#!/usr/bin/env bash
# Train on a TPU slice of a GKE cluster: writes a JobSet manifest and applies it with kubectl.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
source "$DAPO_ROOT/launch/slice.sh"

usage() {
    cat <<'TEXT'
usage: launch/gke.sh COMMAND --name=NAME [FLAG ...] [-- TRAINING FLAG ...]

  run       apply the manifest and print the log of host 0, through restarts, until the job ends;
            exits with 0 where it has completed, with 1 and the reason where it has failed
  logs      the same for a job that is there
  delete    delete the job (its pods get SIGTERM and the grace of --spot or not, see below)

  launch/gke.sh run --name=dapo --type=v6e-256 --image=REGION-docker.pkg.dev/PROJECT/REPO/dapo_jax \
      -- --config=configs/dapo_qwen2_5_7b.py --workdir=gs://BUCKET/dapo

  --name=NAME            of the job
  --type=TYPE            v5p-256, v6e-8, v5litepod-256: node pools of that slice must be there;
                         several slices as one run: 2xv5p-256
  --image=IMAGE          with this repository as its working directory and dapo_jax[tpu] installed,
                         as the Dockerfile makes it
  --spot                 on nodes of Spot VMs. These have 30 s when they are taken away, of which
                         GKE gives pods 15, whatever they ask for; others get 10 minutes here
  --flex-start           on nodes of a pool made with --flex-start, which are there for 7 days at most
  --queue=NAME           of Kueue: the job waits in it; clusters of XPK and Cluster Toolkit want one
  --memory=GIB           of each node that is kept free for the pod (default: 16); it may use all
  --prepare=COMMAND      shell command in each pod before the training. Our image has no gcloud, but
                         python -c 'import fsspec; fsspec.filesystem("gs").get("gs://B/f", ".")'
  --disk=GIB             of each node for the image's writing, weights of the hub and logs
                         (default: 20; 32B: 80)
  --namespace=NAMESPACE  default: kubectl's
  --service-account=NAME Kubernetes account that may use the bucket     (default: default)
  --restarts=N           of the whole job after a failure (default: 100); those after a preemption
                         count only where the others notice it before the pod's own end does
  --skip-plan            go on where `dapo_jax.plan` says that the config does not fit
  --dry-run              print the manifest and the commands, run none
  --help                 print this

The compilation cache is WORKDIR/xla, the logs of all hosts are in WORKDIR/logs. The cluster needs
the JobSet API of 0.6 or later (https://jobset.sigs.k8s.io). Those who have XPK may let it do the
same, but for what a preemption means (exit status 75):
xpk workload create --cluster=CLUSTER --workload=NAME --tpu-type=TYPE --num-slices=N \
    --docker-image=IMAGE --command='python -um dapo_jax.hosts.until_done ...'
Pathways is not supported: its one process drives all chips, ours are one for each host.
TEXT
}

# shellcheck disable=SC2034  # some are read by name in manifest
action="" name="" type="" image="" namespace="" service_account=default restarts=100 dry_run=""
# shellcheck disable=SC2034
spot="" flex_start="" queue="" memory=16 prepare="" disk=20 skip_plan="" training=()
dapo_flags "COMMAND=|run|logs|delete| name=word type=word image=word namespace=word
    service-account=word restarts=number:0:1000000 spot=switch flex-start=switch queue=word
    memory=number:1:100000 prepare=any disk=number:1:10000 skip-plan=switch dry-run=switch" "$@"
[[ -n "$action" ]] || dapo_fail "say what to do: run, logs or delete (see --help)" 2
[[ -z "$spot" || -z "$flex_start" ]] || dapo_fail "--spot or --flex-start, not both" 2
LC_ALL=C  # of the letters below
[[ "$name" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || dapo_fail \
    "--name=$name: up to 40 lower-case letters, digits and dashes, from a letter on" 2

kube=(kubectl ${namespace:+"--namespace=$namespace"})

# Words as the items of a YAML list: in double quotes a YAML string is a JSON string, and these are the
# characters that need care. Kubernetes makes $$ a $, and a variable of $(NAME).
listed() {
    local one='$' two='$$' word text separator=""
    for word in "$@"; do
        text="${word//"$one"/$two}" text="${text//\\/\\\\}" text="${text//\"/\\\"}"
        text="${text//$'\n'/\\n}" text="${text//$'\r'/\\r}" text="${text//$'\t'/\\t}"
        printf '%s"%s"' "$separator" "$text"
        separator=", "
    done
}

# Line breaks and tabs aside, control characters are not for YAML.
check_characters() {
    local flag text
    for flag in "$@"; do
        text="${flag//[$'\n\r\t']/}"
        [[ "$text" == "$(dapo_plain "$text")" ]] || dapo_fail "'$flag' has a control character in it" 2
    done
}

# shellcheck disable=SC2034
manifest() {  # jobset.yaml with our values: words of flags and of the table of slices, then two lists
    local word list text grace=600 node="" toleration="" label="" host_network=false dns=ClusterFirst
    # A preempted run would leave with status 0: for Kubernetes, complete.
    local command=(python -um dapo_jax.hosts.until_done)
    # As a script whose arguments are the training's flags.
    [[ -z "$prepare" ]] || command=(bash -c "set -e"$'\n'"$prepare"$'\n'"exec ${command[*]} \"\$@\"" prepare)
    if [[ -n "$spot" ]]; then
        grace=15 node=', cloud.google.com/gke-spot: "true"'
        toleration='{key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}'
    elif [[ -n "$flex_start" ]]; then
        node=', cloud.google.com/gke-flex-start: "true"'
        toleration='{key: cloud.google.com/gke-flex-start, operator: Exists}, '
        toleration+='{key: cloud.google.com/gke-queued, operator: Exists}'
    fi
    # Between slices, as Google's manifests have it: no virtual network in the way of what they send.
    ((slices == 1)) || host_network=true dns=ClusterFirstWithHostNet
    [[ -z "$queue" ]] || label="kueue.x-k8s.io/queue-name: \"$queue\""
    text="$(grep -v '^#' "$DAPO_ROOT/launch/jobset.yaml")"
    for word in name label restarts slices hosts service_account grace host_network dns accelerator \
        shape node toleration disk memory chips image; do
        text="${text//"@$word@"/${!word}}"
    done
    # The second first: what a user says may hold the name of the other.
    list="$(listed "${meeting[@]}" "${training[@]}")"
    text="${text%%"@args@"*}$list${text#*"@args@"}"
    list="$(listed "${command[@]}")"
    printf '%s\n' "${text%%"@command@"*}$list${text#*"@command@"}"
}

# Print host 0's log, of one pod after another, until the job has ended.
follow() {
    local ended pods pod phase first="jobset.sigs.k8s.io/jobset-name=$name"
    first+=",jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    local job=("${kube[@]}" get jobset "$name" --output)
    local newest=("${kube[@]}" get pods "--selector=$first" --sort-by=.metadata.creationTimestamp
        --output 'jsonpath={range .items[*]}{.metadata.name} {.status.phase}{"\n"}{end}')
    local true_ones='jsonpath={range .status.conditions[?(@.status=="True")]}'
    true_ones+='{.type}: {.message}{"\n"}{end}'
    if [[ -n "$dry_run" ]]; then
        dapo_call "${job[@]}" "$true_ones"
        dapo_call "${newest[@]}"
        return
    fi
    scratch="$(mktemp -d)"
    trap 'rm -rf -- "$scratch"' EXIT
    while true; do
        # Before the log: what has ended by now will have printed its last line.
        ended="$("${job[@]}" "$true_ones" 2>"$scratch/said")" || {
            ended=""
            cat "$scratch/said" >&2
            ! grep -q NotFound "$scratch/said" || dapo_fail "there is no job $name"
        }
        pods="$("${newest[@]}" 2>"$scratch/said")" || pods=""
        read -r pod phase <<<"${pods##*$'\n'}" || true
        if [[ -n "$pod" && "$phase" != Pending && ! -e "$scratch/$pod.done" ]]; then
            [[ -e "$scratch/$pod" ]] || { dapo_say "log of $pod"; : >"$scratch/$pod"; }
            # Again after a connection that broke, but for the lines that were shown.
            "${kube[@]}" logs --follow --tail=-1 "$pod" \
                | tail -n "+$(($(grep -c '' "$scratch/$pod") + 1))" \
                | tee -a -- "$scratch/$pod" && [[ "$phase" != Running ]] && : >"$scratch/$pod.done"
        fi
        ended="$(grep -E '^(Completed|Failed): ' <<<"$ended")" || true
        case "$ended" in
            Completed*) dapo_say "$ended"; exit 0 ;;
            Failed*) dapo_fail "the job has failed: ${ended#Failed: }" ;;
        esac
        sleep "${DAPO_POLL_SECONDS:-15}"
    done
}

case "$action" in
    run)
        [[ -n "$image" ]] || dapo_fail "--image: which one has dapo_jax[tpu] in it?" 2
        [[ "$(dapo_workdir)" == gs://* ]] || dapo_fail \
            "give the training a bucket, --workdir=gs://...: pods share no disk" 2
        whole="$type"
        dapo_slice "$type"
        dapo_meeting
        ((slices == 1 || hosts > 1)) || dapo_fail \
            "--type=$whole: GKE joins slices of several hosts, and $type has one" 2
        check_characters "$prepare" "${training[@]}"
        dapo_check_training "$whole" "${training[@]}"
        text="$(manifest)"
        dapo_say "node pools: $slices of machine type $machine, topology $shape, $hosts nodes \
each${spot:+, Spot}"
        [[ "$type" != tpu7x-* || $hosts == 1 ]] || dapo_say \
            "which tpu7x wants made with --placement-policy=P and without --tpu-topology, P by: \
gcloud compute resource-policies create workload-policy P --type=HIGH_THROUGHPUT \
--accelerator-topology=$shape"
        if [[ -n "$dry_run" ]]; then
            printf '%s\n' "$text"
            dapo_call "${kube[@]}" apply --filename=-
        else
            printf '%s\n' "$text" | dapo_call "${kube[@]}" apply --filename=-
        fi
        follow ;;
    logs) follow ;;
    delete) dapo_call "${kube[@]}" delete jobset "$name" ;;
esac
