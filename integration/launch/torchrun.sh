#!/usr/bin/env bash
# On every host: HOSTS=2 RANKS=8 RENDEZVOUS=node0:29500 integration/launch/torchrun.sh --out DIR ...
# Alone, with HOSTS unset, one host. Options go to python -m integration.train.
set -euo pipefail

exec python -m integration.train.launch.agent --hosts "${HOSTS:-1}" --ranks "${RANKS:-1}" \
    --rendezvous "${RENDEZVOUS:-localhost:0}" --join-timeout "${JOIN_TIMEOUT:-300}" \
    --restarts "${RESTARTS:-0}" --job "${JOB:-spmd}" -- "$@"
