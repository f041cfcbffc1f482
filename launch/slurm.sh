#!/usr/bin/env bash
# Train on several GPU nodes through Slurm: one process a GPU, which find each other through it.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/slurm.sh --nodes=N [--gpus=G] [FLAG ...] [-- TRAINING FLAG ...]

  launch/slurm.sh --nodes=4 --gpus=8 --time=24:00:00 -- \
      --config=configs/dapo_qwen2_5_7b.py --workdir=/shared/runs/dapo

Installs dapo_jax[cuda] into .venv here (the checkout and the workdir must lie on a disk that all
nodes share) and submits a job. Two minutes before its time is up, and when it is preempted, Slurm
sends SIGTERM: the run saves and leaves, and the job puts itself into the queue again.

  --nodes=N             nodes
  --gpus=G              GPUs, and processes, a node                        (default: 8)
  --cpus-per-task=C     cores a process; 0 leaves it to Slurm, which may give one (default: 8)
  --time=HH:MM:SS       of the job                                         (default: 24:00:00)
  --name=NAME           of the job                                         (default: dapo_jax)
  --partition=, --account=, --qos=, --constraint=     go to sbatch
  --extra=EXTRA         what to install: cuda (default: CUDA 12), cuda13, which our measurements had
                        (driver 580 or later), or '' for CPU
  --python=X.Y          use this Python, in .venv-X.Y
  --dry-run             print the job script and the command, submit nothing
  --help                print this

JAX finds the nodes, the port of its coordinator and each process's GPU by Slurm's variables. NCCL
takes the fastest network that it finds; NCCL_SOCKET_IFNAME=, NCCL_IB_HCA= and the like, set where
you call this, go to all nodes (sbatch exports the environment), as does XLA_FLAGS.
TEXT
}

nodes="" gpus=8 cpus_per_task=8 time=24:00:00 name=dapo_jax extra=cuda python="" dry_run="" training=()
# shellcheck disable=SC2034  # read by name below
partition="" account="" qos="" constraint=""
dapo_flags "nodes=number:1:99999 gpus=number:0:1024 cpus-per-task=number:0:1024 time=word name=text partition=text account=text
    qos=text constraint=text extra=word0 python=python dry-run=switch" "$@"
[[ -n "$nodes" ]] || dapo_fail "--nodes: how many? (see --help)" 2

[[ -n "$dry_run" ]] || dapo_setup "$extra" "$python"
printf -v command ' %q' "$(dapo_venv "$python")/bin/python" -um dapo_jax.hosts.until_done \
    ${training[@]+"${training[@]}"}
to_sbatch=() cores=""
# To srun as well, which does not take it over from sbatch since Slurm 22.05.
((cpus_per_task == 0)) || cores="--cpus-per-task=$cpus_per_task"
((gpus == 0)) || to_sbatch+=("--gpus-per-node=$gpus")
for flag in partition account qos constraint; do
    [[ -z "${!flag}" ]] || to_sbatch+=("--$flag=${!flag}")
done

settings=""
if ((gpus)) && [[ -n "$extra" ]]; then
    dapo_gpu_environment
    printf -v settings 'export %s\n' "$(printf '%q ' "${environment[@]}")"
fi
# The signal goes to the step, not to this script: srun hands it on to the processes. Where one fails
# the others follow with its status; told to leave by Slurm they would say 75, and srun says the highest.
read -r -d '' job <<TEXT || true
#!/usr/bin/env bash
${settings}srun --kill-on-bad-exit=0${cores:+ $cores}$command
status=\$?
# Told to leave, and not done: into the queue again.
[[ \$status != 75 ]] || scontrol requeue "\$SLURM_JOB_ID"
exit \$status
TEXT
submit=(sbatch "--job-name=$name" "--nodes=$nodes" "--ntasks-per-node=$((gpus > 0 ? gpus : 1))" ${cores:+"$cores"}
    "--time=$time" --signal=TERM@120 --requeue --open-mode=append
    ${to_sbatch[@]+"${to_sbatch[@]}"})
if [[ -n "$dry_run" ]]; then
    printf '%q ' "${submit[@]}"
    printf '<<"JOB"\n%s\nJOB\n' "$job"
    exit 0
fi
printf '%s\n' "$job" | "${submit[@]}"
