#!/bin/sh
# Builds the image, runs the federation of compose.yaml as it stands, then once more with a node killed on the way.
# Each must end with status 0 and a completed run in docker/results. Needs a Docker engine; ends with all removed
# but the image and the results.
set -eu
cd "$(dirname "$0")/.."
compose() { docker compose -f docker/compose.yaml "$@"; }

# The summary of the newest run in docker/results.
newest() { ls -td docker/results/*/summary.json | head -n 1; }

# check FILE WORDS: fail unless the summary holds each of the words.
check() {
    file=$1; shift
    for words in "$@"; do
        grep -q "$words" "$file" || { echo "check: no $words in $file" >&2; cat "$file" >&2; exit 1; }
    done
    echo "check: $file is as it should be"
}

# Fail unless the audit log of each node is unbroken and has an event of the run.
audited() {
    for i in 0 1 2 3 4; do
        compose run --rm --no-deps -T "node-$i" audit /data/audit.jsonl | grep -q "run-begin" ||
            { echo "check: the audit log of node-$i is broken or empty" >&2; exit 1; }
        compose run --rm --no-deps -T "node-$i" audit /data/audit.jsonl --anchor
    done
}

trap 'compose down --volumes --timeout 5 >/dev/null 2>&1' EXIT
compose build
compose down --volumes

echo "check: as it stands"
compose up
check "$(newest)" '"status": "completed"' '"method": "feddrm"' '"rounds": 10'
audited

echo "check: with a node killed"
compose down --volumes
before=$(newest)
POSY_RUN="method=feddrm num-server-rounds=40 round-timeout=60" compose up &
up=$!
until [ "$(newest)" != "$before" ] && [ "$(wc -l < "$(dirname "$(newest)")/rounds.jsonl")" -ge 3 ]; do
    kill -0 $up
    sleep 0.2
done
docker kill "$(compose ps --quiet node-3)"
wait $up
check "$(newest)" '"status": "completed"' '"rounds": 40'
audited
grep -o '"dropped": {[^}]*}' "$(newest)" || true
