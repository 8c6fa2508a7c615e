#!/usr/bin/env bash
# Runs on each host: installs a stack of gcp/stacks and this copy of the project.
#
#   install.sh STACK STAMP
#
# Writes STAMP to ~/imagenet_fast.installed when the installation is complete.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/../.."
stack=gcp/stacks/$1.txt stamp=$2 venv=$HOME/imagenet_fast_venv

rm -f "$HOME/imagenet_fast.installed"
if ! python3 -c 'import ensurepip' 2>/dev/null; then
  # Ubuntu's python3 lacks venv. New machines first update themselves and hold apt's lock.
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq -y install python3-venv
fi
# A new environment for each stack: packages such as tensorflow and tensorflow-tpu share files.
if [ ! -x "$venv/bin/python" ] || [ "$(cat "$venv.stack" 2> /dev/null)" != "$1" ]; then
  rm -f "$venv.stack"
  python3 -m venv --clear "$venv"
  printf '%s\n' "$1" > "$venv.stack"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# This package requires plain tensorflow, which would overwrite tensorflow-tpu. Therefore all is
# installed without dependencies, and then the missing dependencies by name, with the stack's pins.
pip install --no-deps --requirement "$stack"
pip install --no-deps --force-reinstall .
names=(imagenet_fast)
while IFS= read -r line; do
  names+=("${line%%==*}")
done < <(grep -v '^#' "$stack")
"$venv/bin/python" gcp/host/requirements.py "${names[@]}" > requirements.txt
pip install --requirement requirements.txt --constraint "$stack"

if [ "$1" = pod ]; then
  # TensorFlow 2.17 for TPUs hides OpenSSL from Python: importing hashlib after it crashes
  # (tensorflow/tensorflow#82208). A .pth file imports it first.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo 'import _hashlib, _ssl' > "$site/openssl_before_tensorflow.pth"
fi

# Write the stamp only if the imports work. Do not touch the TPU: another process may use it.
TPU_LOAD_LIBRARY=0 TPU_SKIP_MDS_QUERY=1 TF_CPP_MIN_LOG_LEVEL=2 "$venv/bin/python" \
  -c 'import tensorflow, keras, imagenet_fast'
printf '%s\n' "$stamp" > "$HOME/imagenet_fast.installed"
