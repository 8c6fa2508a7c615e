#!/usr/bin/env bash
# Makes a virtual environment with TensorFlow Model Garden, to compare with its LARS:
#
#   tools/model_garden.sh DIRECTORY
#
# It contains only tf-models-official (60 MB) and the Keras 2 that it uses: it takes the TensorFlow of PYTHON
# (default: .venv/bin/python), and skips Model Garden's 26 other requirements, which LARS does not need. Does
# nothing if already done.
set -euo pipefail
directory=${1:?name a directory}
python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}

tensorflow=$("$python" -c 'import importlib.metadata as m; print(*m.version("tensorflow").split(".")[:2], sep=".")')
[ -x "$directory/bin/pip" ] || "$python" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check --no-deps tf-models-official==2.20.0 "tf_keras==$tensorflow.*"
site_packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$site_packages/host.pth"
