#!/usr/bin/env bash
# Makes a virtual environment with TensorFlow Model Garden, for comparisons with its LARS:
#
#   tools/model_garden.sh DIRECTORY
#
# It holds tf-models-official alone (60 MB): TensorFlow and tf_keras are taken from where PYTHON
# (default: .venv/bin/python) has them, and the 26 other packages that Model Garden asks for are left
# out, because its LARS needs none. Does nothing if that was done before.
set -euo pipefail
directory=${1:?say in which directory}
python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}

[ -x "$directory/bin/pip" ] || "$python" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check --no-deps tf-models-official==2.20.0
own=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$own/host.pth"
