#!/usr/bin/env bash
# On every host: HOSTS=2 RANKS=8 RENDEZVOUS=node0:29500 integration/launch/torchrun.sh --out DIR ...
# Alone, with HOSTS unset, one host. Options go to python -m integration.train.
set -euo pipefail

hosts=${HOSTS:-1}
rendezvous=${RENDEZVOUS:-localhost:0}
name=${rendezvous%:*} port=${rendezvous##*:}
# The address by which other hosts reach this one: torchrun would hand out this machine's name,
# and decide by it who holds the store.
address=$(python -c 'import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((sys.argv[1], int(sys.argv[2]) or 9)); print(s.getsockname()[0])' "$name" "$port")
first=$(python -c 'import socket, sys; print(socket.gethostbyname(sys.argv[1]))' "$name")

exec torchrun --nnodes "$hosts" --nproc-per-node "${RANKS:-1}" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id "${JOB:-spmd}" \
    --rdzv-conf "is_host=$([ "$first" = "$address" ] && echo 1 || echo 0),join_timeout=${JOIN_TIMEOUT:-300},read_timeout=${JOIN_TIMEOUT:-300}" \
    --local-addr "$address" -m integration.train "$@"
