#!/usr/bin/env bash
# Tests, in processes by what they start; at the end one list of what was skipped, and how to get what it needs.
#
#   scripts/test.sh PYTEST short   what `make test` runs
#   scripts/test.sh PYTEST long    the rest: long faults, nodes of a cluster, live benchmarks, the chart if KUBECONFIG is set
#   scripts/test.sh PYTEST ci      the rest without live benchmarks and what is marked `seldom`, which find the least a minute
#   scripts/test.sh PYTEST chart   the chart on the cluster of KUBECONFIG
#
# Several processes of tests can run beside each other; what they print is shown one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."

pytest="$1" part="$2"
logs="$(mktemp -d)"
export RLHFLESS_SKIPPED="$logs/skipped"
names=() pids=() failed=() run=() showing=
SECONDS=0

# set_run NAME MINUTES   sets `run`, which runs tests with an end and with a cache of their own, where those that fail are
# noted. A command and not a function: in the background it is then the process that gets the signals.
set_run() {
    run=(env --default-signal=INT timeout --signal=INT --kill-after=60 "${2}m"
        "$pytest" -o cache_dir="$logs/$1.cache" --durations=25 --durations-min=4)
}

# beside NAME MINUTES ARGUMENT...   starts tests in the background. They have an end even if pytest has none: pytest-xdist
# waits for ever for a worker that was lost. It is an interrupt, at which pytest says what has failed and what it was at.
# A shell lets what it starts in the background ignore interrupts, and tests make some, too.
beside() {
    local name=$1 minutes=$2
    shift 2
    : >"$logs/$name"
    printf '%q ' "$@" >"$logs/$name.arguments"
    set_run "$name" "$minutes"
    "${run[@]}" "$@" >"$logs/$name" 2>&1 &
    names+=("$name") pids+=($!)
}

# again NAME   runs up to three tests that failed once more, with nothing beside them: a fault fails again, and a test that
# the machine was too slow for passes. The list at the end names it, so that it is repaired.
again() {
    local arguments failures="$logs/$1.cache/v/cache/lastfailed"
    [ -s "$failures" ] && [ "$(grep -c ': true' "$failures")" -le 3 ] || return 1
    grep -o '".*"' "$failures" | sed 's/^/passed only at the second try: /' >"$logs/again"
    eval "arguments=($(cat "$logs/$1.arguments"))"
    printf '\n== Once more, alone: what failed of the tests %s\n' "$1"
    set_run "$1" 15
    "${run[@]}" "${arguments[@]}" --last-failed --last-failed-no-failures none -n 0 || return 1
    cat "$logs/again" >>"$RLHFLESS_SKIPPED"
}

# Shows what the tests in the background print, and waits for their ends.
finish() {
    local index code
    for index in "${!pids[@]}"; do
        printf '\n== Tests: %s\n' "${names[index]}"
        tail -n +1 -s 0.5 --pid="${pids[index]}" -f "$logs/${names[index]}" &
        showing=$!
        wait $showing || true # a shell that waits, unlike one that runs a program, hears signals at once
        code=0
        wait "${pids[index]}" || code=$?
        printf '%4d:%02d %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "${names[index]}" >>"$logs/ends"
        unset "pids[index]"
        [ $code = 0 ] || { [ $code = 1 ] && again "${names[index]}"; } || failed+=("${names[index]}")
        if [ $code = 124 ] || [ $code = 137 ]; then
            echo "These tests were ended after the time that they have at most (scripts/test.sh): one hangs, or a worker of pytest was lost."
        fi
    done
    names=() pids=()
}

report() {
    if [ ${#pids[@]} -gt 0 ]; then # this script was ended
        kill -INT "${pids[@]}" 2>/dev/null || true
        kill $showing 2>/dev/null || true
        finish
    fi
    [ "$part" != long ] || [ -n "${KUBECONFIG:-}" ] || echo "KUBECONFIG is not set: the chart is not tested on a cluster (kind create cluster)" >>"$RLHFLESS_SKIPPED"
    [ "$part" != ci ] || echo "benchmarks that start engines, and tests marked seldom, are not run in CI (make test-all)" >>"$RLHFLESS_SKIPPED"
    if [ -s "$RLHFLESS_SKIPPED" ]; then
        echo "Not tested here, or to be looked at (number of tests, reason):"
        sort "$RLHFLESS_SKIPPED" | uniq -c | sort -rn
    else
        echo "Nothing was skipped."
    fi
    if [ -f "$logs/ends" ]; then echo "Minutes from the start to the end of the tests:" && cat "$logs/ends"; fi
    rm -rf "$logs"
}
trap report EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# with MARK   the files that have tests with a mark: a process that reads them alone does not import the rest, which takes
# 20 s of its processor.
with() { grep -rl --include='test_*.py' "mark\.$1" tests; }

# Of these files those with tests of runs, which hold devices of this machine and wait for each other's, and the others:
# an engine's start takes one core, so that the two kinds run beside each other.
of_runs() { with "$1" | grep "$runs"; }
of_engines() { with "$1" | grep -v "$runs"; }
runs='^tests/\(e2e\|control\|extending\|benchmarks\|selftest\|fleet/test_three_nodes\)'

# A Ray of several nodes, and one that is short of memory: each in a process of its own.
nodes=tests/fleet/test_three_nodes.py
memory=tests/e2e/test_memory_pressure.py
# About half of the long tests' time: those that share the run without faults (the fixture `whole`).
faults=(tests/e2e/test_{faults,joined_cluster,live_turns,service,terminated}.py)

if [ "$part" = short ]; then
    # One worker more than cores, because many tests wait for processes that they start; so each has one thread.
    OMP_NUM_THREADS=1 beside "without engines" 40 -m "not engine and not kubernetes and not long" \
        -n $(($(nproc) + 1)) --dist loadfile --no-loadscope-reorder
    finish # engines beside them took twice their time, and a run in which actors are drained was too slow to be caught at it
    beside "of engines" 40 -m "engine and not long" $(of_engines engine)
    beside "of runs" 40 -m "engine and not long" $(of_runs engine)
elif [ "$part" != chart ]; then
    long="long and not kubernetes"
    if [ "$part" = ci ]; then long+=" and not benchmark and not seldom"; fi
    OMP_NUM_THREADS=1 beside "long ones without engines" 30 -m "$long and not engine" -n "$(nproc)" --dist worksteal $(with long)
    finish
    long+=" and engine"
    beside "nodes of a cluster" 20 -m "$long" "$nodes" # alone, because they wait for limits of seconds
    finish
    beside "long ones of engines" 50 -m "$long" $(of_engines long)
    beside "faults of runs" 50 -m "$long" "${faults[@]}"
    finish
    beside "other runs" 50 -m "$long" $(of_runs long | grep -vxF "$(printf '%s\n' "$nodes" "$memory" "${faults[@]}")")
    finish
    [ "$part" = ci ] || beside "memory runs short" 10 -m "$long" "$memory" # it is seldom, and pytest fails with no test
    finish
fi
if [ "$part" = chart ] || { [ "$part" = long ] && [ -n "${KUBECONFIG:-}" ]; }; then
    beside "the chart on a cluster" 30 -m "kubernetes${RLHFLESS_TEST_CI:+ and not seldom}" tests/kubernetes
fi
finish
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: tests %s\n' "${failed[@]}"
    exit 1
fi
