#!/usr/bin/env bash
# A parameter server cluster on one machine: a chief, workers and servers, each a process with its own TF_CONFIG. The
# program must build a ParameterServerStrategy in the chief and run a Server in the other tasks.
#
#   torchrun_configs/ps_cluster.sh train.py                     # 1 chief, 2 workers, 1 parameter server
#   WORKERS=4 PS=2 torchrun_configs/ps_cluster.sh train.py --steps 1000
#
# On several hosts start the program once for each task by hand, with TF_CONFIG as docs/multi_worker.md shows.
#
# Environment:
#   WORKERS          tasks "worker"            (default 2)
#   PS               tasks "ps"                (default 1)
#   GRACE            seconds from SIGTERM to SIGKILL when stopping  (default 10)
#   OMP_NUM_THREADS  CPU threads of each task  (default: cores / (WORKERS + 1), at least 1)
#   PYTHON           the interpreter           (default: .venv/bin/python if it exists, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$#" -eq 0 ]; then echo "usage: $0 program.py [arguments]" >&2; exit 2; fi
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}

exec "$python" -m tfstyle_dist.launch --chief --workers "${WORKERS:-2}" --ps "${PS:-1}" --grace "${GRACE:-10}" "$@"
