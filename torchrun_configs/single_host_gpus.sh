#!/usr/bin/env bash
# One host, one worker per GPU (NCCL), one replica each. Untested: see docs/status.md.
#
#   torchrun_configs/single_host_gpus.sh                                 # all GPUs, the quickstart
#   GPUS=0,1 torchrun_configs/single_host_gpus.sh train.py --epochs 3    # two of them, your own script
#
# Environment:
#   GPUS             numbers of the GPUs to use             (default: all)
#   OMP_NUM_THREADS  CPU threads of each worker             (default: cores / workers, at least 1)
#   TORCHRUN         the launcher                           (default: torchrun, else .venv/bin/torchrun)
#   TFSTYLE_TIMEOUT_SECONDS  limit of every wait for another worker (default 300)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CUDA_VISIBLE_DEVICES=${GPUS:-${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}}
workers=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
threads=$(($(nproc) / workers))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
launcher=${TORCHRUN:-$(command -v torchrun || echo .venv/bin/torchrun)}
if [ "$#" -eq 0 ]; then set -- examples/quickstart.py; fi

exec "$launcher" --standalone --nproc-per-node="$workers" "$@"
