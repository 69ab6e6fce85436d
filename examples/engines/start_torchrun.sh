#!/usr/bin/env bash
# torchrun, one host; torchrun_configs/ has files for several.
set -euo pipefail
exec torchrun --standalone --nproc-per-node="${WORKERS:-2}" "$(dirname "$0")/train.py"
