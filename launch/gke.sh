#!/usr/bin/env bash
# Train on a TPU slice of a GKE cluster: writes a JobSet manifest and applies it with kubectl.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
source "$DAPO_ROOT/launch/slice.sh"

usage() {
    cat <<'TEXT'
usage: launch/gke.sh COMMAND --name=NAME [FLAG ...] [-- TRAINING FLAG ...]

  run       apply the manifest and print the log of host 0
  logs      print the log of host 0 of a running job
  delete    delete the job (its pods get SIGTERM: the run saves and leaves)

  launch/gke.sh run --name=dapo --type=v6e-256 --image=REGION-docker.pkg.dev/PROJECT/REPO/dapo_jax \
      -- --config=configs/dapo_qwen2_5_7b.py --workdir=gs://BUCKET/dapo

  --name=NAME            of the job
  --type=TYPE            v5p-256, v6e-8, v5litepod-256: node pools of that slice must be there;
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

action="" name="" type="" image="" namespace="" service_account=default restarts=100 dry_run=""
training=()
dapo_flags "COMMAND=|run|logs|delete| name=word type=word image=word namespace=word
    service-account=word restarts=number:0:1000000 dry-run=switch" "$@"
[[ -n "$action" ]] || dapo_fail "say what to do: run, logs or delete (see --help)" 2
LC_ALL=C  # of the letters below
[[ "$name" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || dapo_fail \
    "--name=$name: up to 40 lower-case letters, digits and dashes, from a letter on" 2

kube=(kubectl ${namespace:+"--namespace=$namespace"})

# A YAML string in double quotes is a JSON string: these are the characters that need care.
quoted() {
    local text="${1//\\/\\\\}"
    text="${text//\"/\\\"}" text="${text//$'\n'/\\n}" text="${text//$'\r'/\\r}"
    printf '"%s"' "${text//$'\t'/\\t}"
}

# Line breaks and tabs aside, control characters are not for YAML; Unicode's neither (C1, line and
# paragraph separators).
check_characters() {
    local flag
    for flag in "$@"; do
        case "${flag//[$'\n\r\t']/}" in
            *[[:cntrl:]]* | *$'\xc2'[$'\x80'-$'\x9f']* | *$'\xe2\x80'[$'\xa8\xa9']*) dapo_fail \
                "training flag '$flag' has a control character in it" 2 ;;
        esac
    done
}

manifest() {
    local flag one='$' two='$$'  # Kubernetes makes $$ a $, and a variable of $(NAME)
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
        parallelism: $hosts
        completions: $hosts
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            serviceAccountName: $(quoted "$service_account")
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
              # A preempted run would leave with status 0: for Kubernetes, complete.
              command: [bash, launch/until_done.sh, python, -um, dapo_jax.train]
              args:
TEXT
    for flag in "${flags[@]}" "${training[@]//"$one"/$two}"; do
        printf '              - %s\n' "$(quoted "$flag")"
    done
    cat <<TEXT
              resources:
                limits: {google.com/tpu: $chips}
TEXT
}

follow() {
    local first="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0"
    first+=",batch.kubernetes.io/job-completion-index=0"
    # Refused at once while there is no such pod yet.
    until dapo_call "${kube[@]}" wait --for=condition=Ready --timeout=24h pod "--selector=$first"; do
        sleep "${DAPO_POLL_SECONDS:-15}"
    done
    dapo_call "${kube[@]}" logs --follow --tail=-1 "--selector=$first"
}

case "$action" in
    run)
        [[ -n "$image" ]] || dapo_fail "--image: which one has dapo_jax[tpu] in it?" 2
        [[ "$(dapo_workdir)" == gs://* ]] || dapo_fail \
            "give the training a bucket, --workdir=gs://...: pods share no disk" 2
        whole="$type"
        dapo_slice "$type"
        flags=(--start_timeout=600)  # pods come up as their nodes have fetched the image
        if ((hosts == 1)); then
            ((slices == 1)) || dapo_fail \
                "--type=$whole: GKE joins slices of several hosts, and $type has one" 2
            flags=(--num_processes=1)  # nobody to meet
        fi
        check_characters "${training[@]}"
        dapo_check_training "$whole" "${training[@]}"
        text="$(manifest)"
        dapo_say "node pools: $slices of machine type $machine, topology $shape, $hosts nodes each"
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
