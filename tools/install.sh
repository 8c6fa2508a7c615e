#!/usr/bin/env bash
# Installs this package, editable, with those extras, into a virtual environment:
#
#   tools/install.sh DIRECTORY [EXTRA[,EXTRA ...]]
#
# Does nothing if that was done before and setup.cfg has not changed since. PYTHON names the
# interpreter (default: python3).
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
venv=${1:?say which directory, as tools/install.sh .venv} extras=${2-}

stamp=$venv/installed-$extras
if [ -e "$stamp" ] && cmp -s setup.cfg "$stamp"; then
  exit 0
fi
# Without pip, it is what is left of an attempt that failed, as without Debian's python3-venv.
[ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
cp setup.cfg "$stamp"
