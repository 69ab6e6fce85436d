#!/usr/bin/env bash
# One to two hosts (or more), elastic: hosts may come and go, and a failed worker restarts all of them (c10d rendezvous).
# The program must go on from its last checkpoint when it starts anew; see docs/multi_worker.md.
#
#   RDZV_HOST=host0 torchrun_configs/two_hosts_elastic.sh train.py    # the same on every host
#
# Environment:
#   RDZV_HOST        name or address of the host where torchrun keeps its state; that host must stay  (required)
#   RDZV_PORT        a free port there                                     (default 29400)
#   RDZV_ID          name of the job, the same on all hosts                (default tfstyle)
#   MIN_NODES, MAX_NODES  hosts                                            (default 1 and 2)
#   MAX_RESTARTS     restarts after failures                               (default 3)
#   WORKERS          worker processes of each host: GPUs, or CPU workers   (default: GPUs, else 1)
#   OMP_NUM_THREADS  CPU threads of each worker                            (default: cores / WORKERS, at least 1)
#   TORCHRUN         the launcher                                          (default: torchrun, else .venv/bin/torchrun)
#   TFSTYLE_TIMEOUT_SECONDS  limit of every wait for another worker        (default 300)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${RDZV_HOST:?name or address of the host where torchrun keeps its state}"
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c . || true)
workers=${WORKERS:-$((gpus > 0 ? gpus : 1))}
threads=$(($(nproc) / workers))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
launcher=${TORCHRUN:-$(command -v torchrun || echo .venv/bin/torchrun)}
if [ "$#" -eq 0 ]; then set -- examples/quickstart.py --strategy multi_worker; fi

# With a shared store, torch 2.13 does not tell a host that comes later where worker 0 is.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
exec "$launcher" --nnodes="${MIN_NODES:-1}:${MAX_NODES:-2}" --nproc-per-node="$workers" \
    --max-restarts="${MAX_RESTARTS:-3}" --rdzv-backend=c10d --rdzv-id="${RDZV_ID:-tfstyle}" \
    --rdzv-endpoint="$RDZV_HOST:${RDZV_PORT:-29400}" "$@"
