#!/usr/bin/env bash
# TF_CONFIG by hand, as TensorFlow's own documentation does it: each process gets the cluster and its own task.
# On several hosts, run one of these lines on each, with the hosts' names.
set -euo pipefail
cluster="{\"worker\": [\"localhost:${PORT:-29610}\", \"localhost:${PORT_2:-29611}\"]}"
script="$(dirname "$0")/train.py"
TF_CONFIG="{\"cluster\": $cluster, \"task\": {\"type\": \"worker\", \"index\": 1}}" python "$script" &
TF_CONFIG="{\"cluster\": $cluster, \"task\": {\"type\": \"worker\", \"index\": 0}}" python "$script"
wait $!
