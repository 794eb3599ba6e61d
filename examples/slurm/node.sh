#!/usr/bin/env bash
# What train.sbatch starts once on each node: the launcher of the node's ranks, supervised.
#
# Slurm signals this process alone (it becomes `accel-fsdp supervise`), which passes that on; and what it ends with, srun
# and the job end with. Ranks that die or hang are started anew in place, up to three times; their logs lie in LOG_DIR.
set -euo pipefail

processes=${PROCESSES_PER_NODE:-$SLURM_GPUS_ON_NODE}
export PET_RDZV_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} # the launchers of one start find each other by it

exec accel-fsdp supervise "$RUN_DIR/checkpoints" --grace "$GRACE_S" -- \
  accelerate launch --config_file "$CONFIG" \
  --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * processes)) --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" --rdzv_backend c10d \
  --rdzv_conf "is_host=$((SLURM_NODEID == 0)),read_timeout=300" \
  --max_restarts 3 --tee 3 --log_dir "$LOG_DIR/node-$SLURM_NODEID" \
  examples/finetune_lm.py --output-dir "$RUN_DIR" --hang-limit 300 "$@"
