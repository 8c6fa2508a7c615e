#!/usr/bin/env bash
# Makes a virtual environment with TensorFlow Model Garden, to compare with its LARS:
#
#   tools/model_garden.sh DIRECTORY
#
# It contains only tf-models-official (60 MB): it uses the TensorFlow and tf_keras of PYTHON (default:
# .venv/bin/python), and skips Model Garden's 26 other requirements, which LARS does not need. Does
# nothing if already done.
set -euo pipefail
directory=${1:?name a directory}
python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}

[ -x "$directory/bin/pip" ] || "$python" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check --no-deps tf-models-official==2.20.0
site_packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$site_packages/host.pth"
