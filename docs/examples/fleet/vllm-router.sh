#!/bin/sh
# Trinity nodes behind vllm-router 0.1.17 (pip install vllm-router). Set the nodes and the listen address.
# --policy consistent_hash instead of power_of_two: affinity by the header x-session-id; cache_aware: by the start of the
# prompt; round_robin: for a single node. Health checks are frequent because their default of a minute exceeds a node's
# drain notice.
exec vllm-router --host 127.0.0.1 --port 9000 \
    --worker-urls http://127.0.0.1:8081 http://127.0.0.1:8082 http://127.0.0.1:8083 \
    --policy power_of_two \
    --health-check-interval-secs 1 --health-check-timeout-secs 2 --health-failure-threshold 2 \
    --worker-startup-check-interval 1 --request-timeout-secs 3600 --log-level warning "$@"
