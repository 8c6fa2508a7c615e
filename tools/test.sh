#!/usr/bin/env bash
# Installs this package with its test requirements, and runs the tests:
#
#   tools/test.sh [PYTEST-ARGUMENT ...]          current TensorFlow, all tests but those marked long
#   tools/test.sh all [PYTEST-ARGUMENT ...]      all tests
#   tools/test.sh addons [PYTEST-ARGUMENT ...]   TensorFlow 2.15 and Addons: the first case of each
#                                                test of what differs there
#   tools/test.sh compile [PYTEST-ARGUMENT ...]  with jax, libtpu and CUDA's compiler: training
#                                                steps for TPUs and GPUs, and optimizers under
#                                                Keras' JAX backend (-m compile: also the long tests)
#   tools/test.sh beam [PYTEST-ARGUMENT ...]     with Apache Beam: prepare --runner=beam
#   tools/test.sh install                        no tests: installs what the last three need
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."

# Whether one of the arguments, besides options, is a file, a folder or a test in a file.
names_tests() {
  local argument
  for argument; do
    [ ! -e "${argument%%::*}" ] || return 0
  done
  return 1
}

# Makes .venv-EXTRA, which adds an extra to what .venv has.
add_environment() {
  local site='import sysconfig; print(sysconfig.get_path("purelib"))'
  tools/install.sh .venv test
  [ -x ".venv-$1/bin/pip" ] || .venv/bin/python -m venv ".venv-$1"
  .venv/bin/python -c "$site" >"$(".venv-$1/bin/python" -c "$site")/venv.pth"
  tools/install.sh ".venv-$1" "$1"
}

if [ "${1-}" = install ]; then
  tools/install.sh .venv-addons test,addons
  add_environment compile
  add_environment beam
  exit
fi
export TF_CPP_MIN_LOG_LEVEL=2
# Modules are compiled once, and not by each of the many processes that tests start.
unset PYTHONDONTWRITEBYTECODE
# One file more than cores at a time, because many tests wait for processes that they start.
# A test that ends its process, as one does that hangs, is tried once more.
at_once=(--numprocesses="$(($(nproc) < 8 ? $(nproc) + 1 : 8))" --dist=loadfile --no-loadscope-reorder
  --max-worker-restart=2)
if [ "${1-}" = addons ]; then
  shift
  # Tests of what depends most on the TensorFlow version: Keras's optimizers, layers, models and files,
  # strategies, tf.data, and ops compiled for TensorFlow. What our own code does in further cases, the
  # other TensorFlow shows.
  of_addons=("$@")
  if ! names_tests "$@"; then
    of_addons+=(tests/optimizers/test_addons.py)
    set -- "$@" --first-cases tests/{layers,optimizers} tests/models/test_models.py \
      tests/data/test_dataset.py tests/data/jpeg/test_image_ops.py \
      tests/distribute/test_{all_reduce,strategy}.py \
      tests/serving/test_export.py \
      tests/training/{test_train,checkpoints/test_checkpoint,step/test_classifier}.py
  fi
  tools/install.sh .venv-addons test,addons
  .venv-addons/bin/python -m pytest "${at_once[@]}" -m "not slow and not long and not addons" "$@"
  # Separately, because importing Addons affects loading models. Status 5: no tests selected.
  .venv-addons/bin/python -m pytest --numprocesses=2 -m addons "${of_addons[@]}" || [ $? -eq 5 ]
  exit
fi
if [ "${1-}" = compile ]; then
  shift
  names_tests "$@" || set -- "$@" tests/lab/xla_compile tests/optimizers/test_momentum.py
  # In .venv itself jax would make each import of TensorFlow slower.
  add_environment compile
  # Two at once: one file is about TPUs, the other about GPUs.
  exec .venv-compile/bin/python -m pytest --numprocesses=2 --dist=loadfile \
    -m "compile and not long" "$@"
fi
if [ "${1-}" = beam ]; then
  shift
  names_tests "$@" || set -- "$@" tests/data/prepare/test_beam_writer.py
  # Beam needs older versions of protobuf and pyarrow.
  add_environment beam
  exec .venv-beam/bin/python -m pytest -m "not long" "$@"
fi
selection=(-m "not long")
if [ "${1-}" = all ]; then
  shift
  selection=()
fi
tools/install.sh .venv test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Types, and the direction of imports; neither tool supports Python 3.9.
if [ -e .venv/bin/mypy ]; then
  .venv/bin/mypy
  .venv/bin/lint-imports
fi
exec .venv/bin/python -m pytest "${at_once[@]}" "${selection[@]}" "$@"
