#!/usr/bin/env bash
# Builds the documentation, from docs/, other pages and docstrings, as an HTML site:
#
#   tools/docs.sh [OUTPUT]    default: docs/_build; open index.html there
#
# Installs its requirements into .venv. Warnings, such as for broken links, are errors.
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
