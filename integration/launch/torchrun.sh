#!/usr/bin/env bash
# On every host: HOSTS=2 RANKS=8 RENDEZVOUS=node0:29500 integration/launch/torchrun.sh --out DIR ...
# Alone, with HOSTS unset, one host. Options go to python -m integration.train.
set -euo pipefail

hosts=${HOSTS:-1}
rendezvous=${RENDEZVOUS:-localhost:0}
seconds=${JOIN_TIMEOUT:-300}
place="127.0.0.1 1"
if [ "$hosts" -gt 1 ]; then
    place=$(python -m integration.train.agent "$rendezvous" "$seconds")
fi
read -r address is_host <<<"$place"

exec torchrun --nnodes "$hosts" --nproc-per-node "${RANKS:-1}" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id "${JOB:-spmd}" \
    --rdzv-conf "is_host=$is_host,join_timeout=$seconds,read_timeout=$seconds" \
    --local-addr "$address" -m integration.train "$@"
