#!/usr/bin/env bash
#SBATCH --job-name=skilltrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --output=slurm-%j.log
#
# Trains on the machines of a Slurm job, with one launcher per machine. Install skilltrain, and run
# it from the root of the repository:
#   sbatch launch/slurm.sh recipes/my_encoder.yaml out=runs/my_encoder
# Ten minutes before the job's time limit (or on `scancel --signal=TERM JOB`) it saves a checkpoint.
# Continue from the checkpoint:
#   sbatch launch/slurm.sh recipes/my_encoder.yaml out=runs/my_encoder --resume
# LAUNCH_CONFIG selects another accelerate config for the same machines.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch launch/slurm.sh RECIPE.yaml [key=value ...] [--resume]" >&2
  exit 2
fi
: "${SLURM_JOB_NODELIST:?is not set: start this script with sbatch}"
: "${SLURM_GPUS_ON_NODE:?is not set: ask for GPUs with --gpus-per-node}"

FIRST_MACHINE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export FIRST_MACHINE
export PORT=$((20000 + SLURM_JOB_ID % 20000))
export NUM_PROCESSES=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))
export LAUNCH_CONFIG=${LAUNCH_CONFIG:-launch/multi_node.yaml}
# Without `B:` in --signal, Slurm sends SIGTERM to the processes that srun started, the launchers.
# They pass it on to their workers, and kill workers that still save after this number of seconds.
# The launchers' default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# The quotes are single because SLURM_NODEID is only known on the machine on which srun starts the
# launcher. With `exec`, the launcher replaces the shell and gets Slurm's signals.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$LAUNCH_CONFIG" \
  --num_machines "$SLURM_NNODES" --num_processes "$NUM_PROCESSES" --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$FIRST_MACHINE" --main_process_port "$PORT" "$@"' launch "$@"
