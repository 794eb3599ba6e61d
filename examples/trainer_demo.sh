#!/usr/bin/env bash
# examples/trainer_callback.py without interruption; then again, killed in the middle of an epoch, and the same command
# once more; then prove both ends equal. A tiny model: under two minutes on two cores.
#
#   bash examples/trainer_demo.sh
#
# Environment: DEMO_PYTHON, an interpreter that has everything; DEMO_CONFIG, another Accelerate config; DEMO_DIR, where
# the runs go (default runs/trainer_demo).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${DEMO_PYTHON:-python}
config=${DEMO_CONFIG:-accelerate_configs/fsdp2_cpu.yaml}
out=${DEMO_DIR:-runs/trainer_demo}
kill_at=10 # of 12 steps, 6 in an epoch; the last checkpoint then is that of step 8
export HF_HUB_OFFLINE=1 # nothing is downloaded
mkdir -p "$out"
rm -rf "$out/uninterrupted" "$out/interrupted"

train() {
  "$python" -m accelerate.commands.launch --config_file "$config" examples/trainer_callback.py "$@"
}

echo "== 1. a run that is never interrupted"
train --output-dir "$out/uninterrupted"

echo "== 2. the same run, killed at step $kill_at in the middle of the second epoch"
if train --output-dir "$out/interrupted" --kill-at-step "$kill_at" 2>"$out/killed.log"; then
  echo "the run was to be killed, and was not" >&2
  exit 1
elif ! grep -q "Signal 9 (SIGKILL)" "$out/killed.log"; then
  cat "$out/killed.log" >&2 # it died of something else
  exit 1
fi

echo "== 3. the same command again"
train --output-dir "$out/interrupted" --kill-at-step "$kill_at"

echo "== 4. are they equal?"
"$python" examples/compare_runs.py "$out/uninterrupted" "$out/interrupted" --plot "$out/comparison.png"
