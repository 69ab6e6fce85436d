#!/usr/bin/env bash
# One host, N CPU workers (Gloo), one replica each. No port to choose: torchrun's --standalone finds a free one.
#
#   torchrun_configs/single_host_cpu.sh                                  # 2 workers, the quickstart
#   WORKERS=4 torchrun_configs/single_host_cpu.sh train.py --epochs 3    # your own script and its arguments
#
# Environment:
#   WORKERS          worker processes                       (default 2)
#   OMP_NUM_THREADS  threads of each worker for its math    (default: cores / WORKERS, at least 1)
#   THP_MEM_ALLOC_ENABLE  torch takes large tensors in huge pages; 0: not (default 1)
#   TORCHRUN         the launcher                           (default: torchrun, else .venv/bin/torchrun)
#   TFSTYLE_TIMEOUT_SECONDS  limit of every wait for another worker (default 300)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

workers=${WORKERS:-2}
cores=$(nproc)
threads=$((cores / workers))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Gradients are new memory in each step: in pages of 4 KB the kernel takes 12 of 81 ms for 84 MB of them.
export THP_MEM_ALLOC_ENABLE=${THP_MEM_ALLOC_ENABLE:-1}
export CUDA_VISIBLE_DEVICES=
launcher=${TORCHRUN:-$(command -v torchrun || echo .venv/bin/torchrun)}
if [ "$#" -eq 0 ]; then set -- examples/quickstart.py; fi

exec "$launcher" --standalone --nproc-per-node="$workers" "$@"
