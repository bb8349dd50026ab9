#!/usr/bin/env bash
# Tests, in processes by what they start; at the end one list of what was skipped, and how to get what it needs.
#
#   scripts/test.sh PYTEST short   what `make test` runs: 20 to 25 minutes on two cores
#   scripts/test.sh PYTEST long    the rest: long faults, nodes of a cluster, live benchmarks, the chart on a cluster
#   scripts/test.sh PYTEST ci      the rest without live benchmarks, which find the least a minute
set -euo pipefail
cd "$(dirname "$0")/.."

pytest="$1" part="$2"
RLHFLESS_SKIPPED="$(mktemp)"
export RLHFLESS_SKIPPED

skipped() {
    [ "$part" = short ] || [ -n "${KUBECONFIG:-}" ] || echo "KUBECONFIG is not set: the chart is not tested on a cluster (kind create cluster)" >>"$RLHFLESS_SKIPPED"
    [ "$part" != ci ] || echo "the benchmarks that start engines are not run in CI (make test-all)" >>"$RLHFLESS_SKIPPED"
    if [ -s "$RLHFLESS_SKIPPED" ]; then
        echo "Not tested here (number of tests, reason):"
        sort "$RLHFLESS_SKIPPED" | uniq -c | sort -rn
    else
        echo "Nothing was skipped."
    fi
    rm -f "$RLHFLESS_SKIPPED"
}
trap skipped EXIT

if [ "$part" = short ]; then
    "$pytest" -m "not engine and not kubernetes and not long" -n logical --dist loadfile
    "$pytest" -m "engine and not long"
    exit
fi
# In a process of its own: it joins a Ray of several nodes, and waits for ever behind tests that had a Ray before.
clusters=tests/fleet/test_three_nodes.py
without=""
if [ "$part" = ci ]; then without=" and not benchmark"; fi
"$pytest" -m "long and not kubernetes$without" --ignore=$clusters
"$pytest" -m engine $clusters
if [ -n "${KUBECONFIG:-}" ]; then "$pytest" -m kubernetes; fi
