#!/usr/bin/env bash
# Train on a TPU slice of a GKE cluster: writes a JobSet manifest and applies it with kubectl.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/gke.sh COMMAND --name=NAME [FLAG ...] [-- TRAINING FLAG ...]

  run       apply the manifest and print the log of host 0
  logs      print the log of host 0 of a running job
  delete    delete the job (its pods get SIGTERM: the run saves and leaves)

  launch/gke.sh run --name=dapo --type=v6e-256 --image=REGION-docker.pkg.dev/PROJECT/REPO/dapo_jax \
      -- --config=configs/dapo_qwen2_5_7b.py --workdir=gs://BUCKET/dapo

  --name=NAME            of the job
  --type=TYPE            v5p-256, v6e-256, v5litepod-256: node pools of that slice must be there;
                         several slices as one run: 2xv5p-256
  --image=IMAGE          with this repository as its working directory and dapo_jax[tpu] installed
  --namespace=NAMESPACE  default: kubectl's
  --service-account=NAME Kubernetes account that may use the bucket     (default: default)
  --restarts=N           of the whole job after a failure or preemption (default: 100)
  --dry-run              print the manifest and the commands, run none
  --help                 print this

The cluster needs the JobSet API (https://jobset.sigs.k8s.io). Those who have XPK may let it do the
same: xpk workload create --tpu-type=TYPE --docker-image=IMAGE --command='python -m dapo_jax.train ...'
TEXT
}

action="" name="" type="" image="" namespace="" account=default restarts=100 dry_run="" training=()
while (($#)); do
    case "$1" in
        --name=?*) name="${1#*=}" ;;
        --type=?*) type="${1#*=}" ;;
        --image=?*) image="${1#*=}" ;;
        --namespace=?*) namespace="${1#*=}" ;;
        --service-account=?*) account="${1#*=}" ;;
        --restarts=[0-9]*) restarts="${1#*=}" ;;
        --dry-run) dry_run=1 ;;
        -h | --help) usage; exit 0 ;;
        --) shift; training=("$@"); break ;;
        run | logs | delete) action="$1" ;;
        *) dapo_fail "unknown argument '$1' (flags are --name=value; see --help)" 2 ;;
    esac
    shift
done
[[ -n "$action" ]] || dapo_fail "say what to do: run, logs or delete (see --help)" 2
[[ "$name" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || dapo_fail \
    "--name=$name: up to 40 lower-case letters, digits and dashes, from a letter on" 2

call() {
    printf '+ ' >&2; printf '%q ' "$@" >&2; printf '\n' >&2
    [[ -n "$dry_run" ]] || "$@"
}
kube=(kubectl ${namespace:+"--namespace=$namespace"})

# A YAML string in double quotes is a JSON string: these are the characters that need care.
quoted() {
    local text="${1//\\/\\\\}"
    text="${text//\"/\\\"}"
    text="${text//$'\n'/\\n}"
    printf '"%s"' "${text//$'\t'/\\t}"
}

# Hosts of a slice have 4 chips (v5e and v6e pods of several hosts as well); the topology is the
# shape that Cloud gives the slice of that name.
topology() {
    [[ "$type" =~ ^(([1-9][0-9]?)x)?(v5p|v5litepod|v6e)-([0-9]+)$ ]] || dapo_fail \
        "--type=$type: wants v5p-N, v5litepod-N or v6e-N, or several of them as 2xv5p-N" 2
    local family="${BASH_REMATCH[3]}" size="${BASH_REMATCH[4]}"
    slices="${BASH_REMATCH[2]:-1}"
    case "$family" in
        v5p) accelerator=tpu-v5p-slice chips=$((size / 2)) ;;
        v5litepod) accelerator=tpu-v5-lite-podslice chips=$size ;;
        v6e) accelerator=tpu-v6e-slice chips=$size ;;
    esac
    case "$family:$chips" in
        v5p:4) shape=2x2x1 ;; v5p:8) shape=2x2x2 ;; v5p:16) shape=2x2x4 ;; v5p:32) shape=2x4x4 ;;
        v5p:64) shape=4x4x4 ;; v5p:128) shape=4x4x8 ;; v5p:256) shape=4x8x8 ;;
        v5p:512) shape=8x8x8 ;;
        v5litepod:4 | v6e:4) shape=2x2 ;; *:16) shape=4x4 ;; *:32) shape=4x8 ;; *:64) shape=8x8 ;;
        *:128) shape=8x16 ;; *:256) shape=16x16 ;;
        *) dapo_fail "--type=$type: no slice of that size is known here" 2 ;;
    esac
}

manifest() {
    local argument
    cat <<TEXT
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $restarts
  replicatedJobs:
  - name: hosts
    replicas: $slices
    template:
      spec:
        parallelism: $((chips / 4))
        completions: $((chips / 4))
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            serviceAccountName: $(quoted "$account")
            terminationGracePeriodSeconds: 600
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $accelerator
              cloud.google.com/gke-tpu-topology: $shape
            containers:
            - name: train
              image: $(quoted "$image")
              ports:
              - containerPort: 8471
              - containerPort: 8476
              - containerPort: 8482
              env:
              - {name: TF_CPP_MIN_LOG_LEVEL, value: "2"}
              # A preempted run leaves with status 0; for Kubernetes it is not complete.
              command: [bash, launch/until_done.sh, python, -um, dapo_jax.train]
              args:
TEXT
    # Pods come up as their nodes have fetched the image.
    for argument in --start_timeout=600 "${training[@]}"; do
        printf '              - %s\n' "$(quoted "$argument")"
    done
    cat <<TEXT
              resources:
                limits: {google.com/tpu: 4}
TEXT
}

follow() {
    local first="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0"
    first+=",batch.kubernetes.io/job-completion-index=0"
    # Refused at once while there is no such pod yet.
    until call "${kube[@]}" wait --for=condition=Ready --timeout=24h pod "--selector=$first"; do
        sleep "${DAPO_POLL_SECONDS:-15}"
    done
    call "${kube[@]}" logs --follow --tail=-1 "--selector=$first"
}

case "$action" in
    run)
        [[ -n "$image" ]] || dapo_fail "--image: which one has dapo_jax[tpu] in it?" 2
        [[ " ${training[*]-}" == *" --workdir=gs://"* ]] || dapo_fail \
            "give the training a bucket, --workdir=gs://...: pods share no disk" 2
        topology
        text="$(manifest)"
        if [[ -n "$dry_run" ]]; then
            printf '%s\n' "$text"
            call "${kube[@]}" apply --filename=-
        else
            printf '%s\n' "$text" | call "${kube[@]}" apply --filename=-
        fi
        follow ;;
    logs) follow ;;
    delete) call "${kube[@]}" delete jobset "$name" ;;
esac
