#!/usr/bin/env bash
# Trains an image classifier, from installation to predictions of the exported model:
#
#   tools/quickstart.sh [--data=fashion_mnist|digits] [--out=DIRECTORY]
#
# Installs this package into .venv, writes JPEG shards, trains with two worker processes, evaluates,
# exports a SavedModel and classifies a few test images with it. Uses Fashion-MNIST if Debian's
# package dataset-fashion-mnist is installed, otherwise scikit-learn's digits. Rerun it to resume.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."

fashion_mnist=/usr/share/datasets/fashion-mnist
data=digits
[ -d "$fashion_mnist" ] && data=fashion_mnist
out=runs/quickstart
for argument in "$@"; do
  case "$argument" in
    --data=fashion_mnist | --data=digits) data=${argument#*=} ;;
    --out=?*) out=${argument#*=} ;;
    --help | -h) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) echo "tools/quickstart.sh: unknown option $argument; see --help" >&2; exit 2 ;;
  esac
done
if [ "$data" = fashion_mnist ] && [ ! -d "$fashion_mnist" ]; then
  echo "tools/quickstart.sh: Fashion-MNIST is not in $fashion_mnist:" \
    "apt-get install dataset-fashion-mnist, or use --data=digits" >&2
  exit 2
fi

step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

if [ -d .venv ]; then
  step "Checking that .venv is complete"
else
  step "Installing into .venv, about 3 GB: several minutes, once"
fi
tools/install.sh .venv digits
export PATH="$PWD/.venv/bin:$PATH" TF_CPP_MIN_LOG_LEVEL=2

shards=$out/$data/shards run=$out/$data/run model=$out/$data/saved_model images=$out/$data/images
step "Writing JPEG shards to $shards"
if [ "$data" = fashion_mnist ]; then
  imagenet-fast prepare --source=idx --source_path="$fashion_mnist" --data_dir="$shards"
else
  imagenet-fast prepare --source=digits --data_dir="$shards"
fi

step "Training with two worker processes"
# On the CPU, unless CUDA_VISIBLE_DEVICES is set: two workers cannot share one GPU.
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-} python tools/launch_local.py --workers 2 -- \
  train --flagfile="$data" --data_dir="$shards" --model_dir="$run"

step "Evaluating the checkpoint in one process"
imagenet-fast evaluate --model_dir="$run"

step "Exporting a SavedModel to $model"
[ -d "$model" ] || imagenet-fast export --model_dir="$run" --saved_model="$model"

step "Classifying test images"
python tools/extract_images.py --data_dir="$shards" --out="$images" --count=8
imagenet-fast predict --saved_model="$model" "$images"/*.jpg

step "Done"
cat <<END
shards      $shards
report      $run/report.html
metrics     $run/metrics.jsonl, $run/summary.json; tensorboard --logdir $run/tensorboard
SavedModel  $model
images      $images (file names begin with the true class)

Next: open report.html, run \`source .venv/bin/activate\`, and try the commands in README.md.
END
