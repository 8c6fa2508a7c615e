#!/usr/bin/env bash
# Installs this package with what its tests need, and runs them:
#
#   tools/test.sh [PYTEST-ARGUMENT ...]          current TensorFlow, all tests but the longest
#   tools/test.sh all [PYTEST-ARGUMENT ...]      with these
#   tools/test.sh addons [PYTEST-ARGUMENT ...]   TensorFlow 2.15 and Addons: the quick tests of what
#                                                computes with TensorFlow
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
  [ $# -gt 0 ] || set -- tests/{data,distribute,layers,models,optimizers,pipeline_parallel,plans,serving,training}
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
