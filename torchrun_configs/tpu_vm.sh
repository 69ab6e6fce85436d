#!/usr/bin/env bash
# A TPU VM: one process on every host of the slice; torch_xla finds the chips and the other hosts by itself. Needs
# pip install 'tfstyle_dist[tpu]' and TPUStrategy in the program. Untested on a TPU: see docs/status.md.
#
#   torchrun_configs/tpu_vm.sh train.py                                     # on the one host of a small slice
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \
#       --command='cd project && torchrun_configs/tpu_vm.sh train.py'       # on all hosts of a larger one
#
# Environment:
#   PJRT_DEVICE      TPU, or CPU to try the program without one  (default TPU)
#   PYTHON           the interpreter                             (default: .venv/bin/python if it exists, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$#" -eq 0 ]; then echo "usage: $0 program.py [arguments]" >&2; exit 2; fi
export PJRT_DEVICE=${PJRT_DEVICE:-TPU}
# torchrun's variables would hide the slice from torch_xla.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}

exec "$python" "$@"
