#!/usr/bin/env bash
# Every test, in processes by what they start; at the end one list of what was skipped, and how to get what it needs.
#
#   scripts/test.sh PYTEST
set -euo pipefail
cd "$(dirname "$0")/.."

pytest="$1"
RLHFLESS_SKIPPED="$(mktemp)"
export RLHFLESS_SKIPPED

skipped() {
    [ -n "${KUBECONFIG:-}" ] || echo "KUBECONFIG is not set: the chart is not tested on a cluster (kind create cluster)" >>"$RLHFLESS_SKIPPED"
    if [ -s "$RLHFLESS_SKIPPED" ]; then
        echo "Not tested here (number of tests, reason):"
        sort "$RLHFLESS_SKIPPED" | uniq -c | sort -rn
    else
        echo "Nothing was skipped."
    fi
    rm -f "$RLHFLESS_SKIPPED"
}
trap skipped EXIT

"$pytest" -m "not engine and not kubernetes" -n logical --dist loadfile
# In a process of its own: it joins a Ray of several nodes, and waits for ever behind tests that had a Ray before.
clusters=tests/functions/test_three_nodes.py
"$pytest" -m engine --ignore=$clusters
"$pytest" -m engine $clusters
if [ -n "${KUBECONFIG:-}" ]; then "$pytest" -m kubernetes; fi
