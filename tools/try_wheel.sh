#!/usr/bin/env bash
# Builds an sdist, a wheel from it, installs the wheel into a new environment, and trains and predicts
# with it from an empty folder:
#
#   tools/try_wheel.sh [DIRECTORY]
#
# DIRECTORY (default: dist) receives both files. PYTHON selects the interpreter (default: python3).
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
dist=$(realpath -m "${1-dist}") python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check build
rm -rf "$dist"
"$scratch/venv/bin/python" -m build --outdir "$dist" .
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "$(echo "$dist"/*.whl)[digits]"

mkdir "$scratch/empty"
cd "$scratch/empty"
export PATH="$scratch/venv/bin:$PATH" TF_CPP_MIN_LOG_LEVEL=2
unset PYTHONPATH
imagenet-fast recipes digits
imagenet-fast prepare --source=digits --data_dir=data
imagenet-fast train --flagfile=digits --data_dir=data --model_dir=run --saved_model=exported \
  --duration="3 epochs" --decay_at="2 epochs" --eval_every="3 epochs"
python -c '
import sys, tensorflow as tf
for record in tf.data.TFRecordDataset(tf.io.gfile.glob("data/validation-*")).take(3):
    example = tf.train.Example.FromString(record.numpy()).features.feature
    with open(f"{len(sys.argv)}.jpg", "wb") as file:
        file.write(example["image/encoded"].bytes_list.value[0])
    sys.argv.append("")'
imagenet-fast predict --saved_model=exported ./*.jpg
printf '\nBuilt, installed and tried:\n'
ls "$dist"
