#!/usr/bin/env bash
# This package's own launcher: a TF_CONFIG cluster on this machine, for development.
set -euo pipefail
exec python -m tfstyle_dist.launch --workers "${WORKERS:-2}" "$(dirname "$0")/train.py"
