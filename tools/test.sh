#!/usr/bin/env bash
# Installs this package with what its tests need, and runs them:
#
#   tools/test.sh [PYTEST-ARGUMENT ...]          current TensorFlow, all tests but the long ones
#   tools/test.sh all [PYTEST-ARGUMENT ...]      with these
#   tools/test.sh addons [PYTEST-ARGUMENT ...]   TensorFlow 2.15 and Addons: tests of what differs
#                                                there
#   tools/test.sh compile [PYTEST-ARGUMENT ...]  jax, libtpu and CUDA's compiler: training steps
#                                                for TPUs and GPUs
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."

export TF_CPP_MIN_LOG_LEVEL=2
# Two files at a time: many tests wait for processes that they have started.
at_once=(--numprocesses=2 --dist=loadfile --no-loadscope-reorder)
if [ "${1-}" = addons ]; then
  shift
  # Where this package meets what differs there: Keras' optimizers, layers, models and files,
  # strategies, tf.data, ops compiled for this TensorFlow. The rest is the same code.
  [ $# -gt 0 ] || set -- tests/{layers,optimizers} tests/models/test_models.py \
    tests/data/test_{decode,pipeline,resize_op,service,shards}.py \
    tests/distribute/test_{all_reduce,strategy}.py \
    tests/pipeline_parallel/test_{gpipe,in_stages}.py tests/serving/test_export.py \
    tests/training/test_{checkpoint,classifier,train}.py
  tools/install.sh .venv-addons test,addons
  .venv-addons/bin/python -m pytest "${at_once[@]}" -m "not slow and not long and not addons" "$@"
  # Apart, because of what importing Addons does to loading models. 5: nothing was selected.
  .venv-addons/bin/python -m pytest -m addons "$@" || [ $? -eq 5 ]
  exit
fi
if [ "${1-}" = compile ]; then
  shift
  [ $# -gt 0 ] || set -- tests/xla_compile
  tools/install.sh .venv-compile test,compile
  exec .venv-compile/bin/python -m pytest -m compile "$@"
fi
selection=(-m "not long")
if [ "${1-}" = all ]; then
  shift
  selection=()
fi
tools/install.sh .venv test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Types, and the direction of imports; with Python 3.9 there is neither tool.
if [ -e .venv/bin/mypy ]; then
  .venv/bin/mypy
  .venv/bin/lint-imports
fi
exec .venv/bin/python -m pytest "${at_once[@]}" "${selection[@]}" "$@"
