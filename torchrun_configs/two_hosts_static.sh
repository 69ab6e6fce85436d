#!/usr/bin/env bash
# Two hosts (or more), a fixed number of workers, static rendezvous. Run it on every host with its own NODE_RANK.
#
#   MASTER_ADDR=host0 NODE_RANK=0 torchrun_configs/two_hosts_static.sh train.py    # on host0, where worker 0 runs
#   MASTER_ADDR=host0 NODE_RANK=1 torchrun_configs/two_hosts_static.sh train.py    # on host1
#
# Environment:
#   MASTER_ADDR      name or address of host 0, reachable from all hosts  (required)
#   NODE_RANK        number of this host, from 0                          (required)
#   MASTER_PORT      a free port of host 0                                (default 29500)
#   NODES            hosts                                                (default 2)
#   WORKERS          worker processes of each host: GPUs, or CPU workers  (default: GPUs, else 1)
#   OMP_NUM_THREADS  CPU threads of each worker                           (default: cores / WORKERS, at least 1)
#   TORCHRUN         the launcher                                         (default: torchrun, else .venv/bin/torchrun)
#   TFSTYLE_START_TIMEOUT_SECONDS  how long to wait for all hosts         (default 300)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${MASTER_ADDR:?name or address of host 0}" "${NODE_RANK:?number of this host, from 0}"
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c . || true)
workers=${WORKERS:-$((gpus > 0 ? gpus : 1))}
threads=$(($(nproc) / workers))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
launcher=${TORCHRUN:-$(command -v torchrun || echo .venv/bin/torchrun)}
if [ "$#" -eq 0 ]; then set -- examples/quickstart.py --strategy multi_worker; fi

exec "$launcher" --nnodes="${NODES:-2}" --nproc-per-node="$workers" --rdzv-backend=static \
    --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" "$@"
