#!/usr/bin/env bash
# Runs on each host: installs a stack of gcp/stacks and this copy of the project beside it.
#
#   install.sh STACK STAMP
#
# STAMP is written to ~/imagenet_fast.installed when all is done.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/../.."
stack=gcp/stacks/$1.txt stamp=$2 venv=$HOME/imagenet_fast_venv

rm -f "$HOME/imagenet_fast.installed"
if ! python3 -c 'import ensurepip' 2>/dev/null; then
  # Ubuntu's python3 cannot make virtual environments by itself. New machines update themselves
  # first, which holds the lock.
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq -y install python3-venv
fi
# Stacks have other packages with the same files, such as tensorflow and tensorflow-tpu.
if [ ! -x "$venv/bin/python" ] || [ "$(cat "$venv.stack" 2> /dev/null)" != "$1" ]; then
  rm -f "$venv.stack"
  python3 -m venv --clear "$venv"
  printf '%s\n' "$1" > "$venv.stack"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# tf_keras asks for plain tensorflow, which would overwrite tensorflow-tpu: nothing brings what it
# asks for, and what is missing then is installed by name, with the pins as they are.
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
  # (tensorflow/tensorflow#82208). What a .pth file imports comes first.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo 'import _hashlib, _ssl' > "$site/openssl_before_tensorflow.pth"
fi

# The stamp says that it works. The TPU is left alone: another process may have it.
TPU_LOAD_LIBRARY=0 TPU_SKIP_MDS_QUERY=1 TF_CPP_MIN_LOG_LEVEL=2 "$venv/bin/python" \
  -c 'import tensorflow, tf_keras, imagenet_fast'
printf '%s\n' "$stamp" > "$HOME/imagenet_fast.installed"
