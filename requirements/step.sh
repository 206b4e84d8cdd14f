#!/bin/sh
# Runs one step of the set-up, says what it is and how long it took. What the command says is added
# to LOG, which is named with its last lines if the step fails.
# Usage: step.sh LOG TITLE COMMAND...
set -eu

log=$1 title=$2
shift 2
printf 'set-up: %s ... ' "$title" >&2
start=$(date +%s)
echo "== $title: $*" >>"$log"
if "$@" >>"$log" 2>&1; then
    echo "$(($(date +%s) - start)) s" >&2
else
    status=$?
    echo failed >&2
    tail -n 5 "$log" >&2
    echo "all of it is in $log" >&2
    exit "$status"
fi
