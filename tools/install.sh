#!/usr/bin/env bash
# Installs this package, editable and with the given extras, into a virtual environment:
#
#   tools/install.sh DIRECTORY [EXTRA[,EXTRA ...]]
#
# Does nothing if already done and setup.cfg is unchanged. PYTHON selects the interpreter (default:
# python3).
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
venv=${1:?name a directory, as in tools/install.sh .venv} extras=${2-}

stamp=$venv/installed-$extras
if [ -e "$stamp" ] && cmp -s setup.cfg "$stamp"; then
  exit 0
fi
# Without pip, it is left from a failed attempt, for example without Debian's python3-venv.
[ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --editable ".${extras:+[$extras]}"
# Compiles the modules that training imports; the others, many times as many, when they are first used.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "import imagenet_fast.training.train" >/dev/null 2>&1 || true
cp setup.cfg "$stamp"
