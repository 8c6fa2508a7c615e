#!/usr/bin/env bash
# Makes virtual environments with the input pipelines that `imagenet-fast benchmark input` compares
# with, and prints the flags that name them:
#
#   tools/input_peers.sh DIRECTORY [NAME ...]
#
# The names are model_garden (0.3 GB; TensorFlow is taken from where PYTHON, default
# .venv/bin/python, has it), pytorch (5.5 GB: PyPI's wheels bring CUDA) and simplejpeg (0.3 GB);
# without names, all of them. Does nothing for those that were made before.
set -euo pipefail
directory=${1:?say in which directory}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=(model_garden pytorch simplejpeg)
tools=$(dirname "$0")
export PYTHON=${PYTHON:-$tools/../.venv/bin/python}

for name in "${names[@]}"; do
  case $name in
    # What its reader imports; the other packages that Model Garden asks for have no part in it.
    model_garden) packages=(gin-config tensorflow-datasets) ;;
    pytorch) packages=(torch torchvision) ;;
    simplejpeg) packages=(simplejpeg) ;;
    *) echo "there is no $name; the names are model_garden, pytorch and simplejpeg" >&2; exit 1 ;;
  esac
  environment=$directory/$name
  if [ "$name" = model_garden ]; then
    "$tools/model_garden.sh" "$environment"
  elif [ ! -x "$environment/bin/pip" ]; then
    "$PYTHON" -m venv "$environment"
  fi
  "$environment/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
  echo "--$name=$environment"
done
