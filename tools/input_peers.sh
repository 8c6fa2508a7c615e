#!/usr/bin/env bash
# Makes virtual environments with other input pipelines for `imagenet-fast benchmark input`, and prints
# the flags that select them:
#
#   tools/input_peers.sh DIRECTORY [NAME ...]
#
# Names: model_garden (0.3 GB; it uses the TensorFlow of PYTHON, default .venv/bin/python), pytorch (5.5
# GB: PyPI's wheels include CUDA), dali (1.1 GB) and ffcv (6 GB, with PyTorch; it is compiled, which needs
# a C++ compiler, pkg-config, OpenCV and libjpeg-turbo: Debian's libopencv-dev and libturbojpeg0-dev);
# default: all. Skips existing ones.
set -euo pipefail
directory=${1:?name a directory}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=(model_garden pytorch dali ffcv)
tools=$(dirname "$0")
export PYTHON=${PYTHON:-$tools/../.venv/bin/python}

for name in "${names[@]}"; do
  case $name in
    # What its reader imports; it does not use Model Garden's other requirements.
    model_garden) packages=(gin-config pyyaml tensorflow-datasets) ;;
    pytorch) packages=(torch torchvision) ;;
    dali) packages=(nvidia-dali-cuda120 numpy) ;;
    # FFCV itself is installed below: it asks for another OpenCV.
    ffcv) packages=(torch numba opencv-python-headless pillow tqdm psutil fastargs terminaltables) ;;
    *)
      echo "unknown pipeline $name: must be model_garden, pytorch, dali or ffcv" >&2
      exit 1
      ;;
  esac
  environment=$directory/$name
  if [ "$name" = model_garden ]; then
    "$tools/model_garden.sh" "$environment"
  elif [ ! -x "$environment/bin/pip" ]; then
    "$PYTHON" -m venv "$environment"
  fi
  "$environment/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
  if [ "$name" = ffcv ]; then
    "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps ffcv
    echo "--ffcv_raw=$environment"
  fi
  echo "--$name=$environment"
done
