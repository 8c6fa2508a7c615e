#!/usr/bin/env bash
# Builds the documentation from docs/, the other pages and the docstrings, as a site of HTML files:
#
#   tools/docs.sh [OUTPUT]    default: docs/_build; open its index.html
#
# Installs what it needs into .venv. A warning, such as a link to what is not there, is an error.
set -euo pipefail
unset CDPATH
output=${1:-$(dirname "$0")/../docs/_build}
mkdir -p "$output"
output=$(realpath "$output")
cd "$(dirname "$0")/.."

export TF_CPP_MIN_LOG_LEVEL=2
tools/install.sh .venv docs
.venv/bin/python -m sphinx --fresh-env --fail-on-warning --keep-going --nitpicky --quiet \
  --conf-dir=docs . "$output"
echo "$output/index.html"
