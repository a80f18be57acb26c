#!/bin/sh
# Builds the image and runs the federation of compose.yaml three times: unchanged, with a run that the sites' policy
# refuses, and with a node that is killed. Checks the results in docker/results, the masks, and the audit log of each
# node. Needs a Docker engine. Removes all containers and volumes at the end, but keeps the image and the results.
set -eu
cd "$(dirname "$0")/.."
compose() { docker compose -f docker/compose.yaml "$@"; }
fail() { compose logs --tail 20 >&2; echo "check: $*" >&2; exit 1; }

# newest: print the path of the summary of the newest run in docker/results.
newest() { ls -td docker/results/*/summary.json 2>/dev/null | head -n 1; }

# rounds: print the number of finished rounds of this run.
rounds() { cat "$(dirname "$(newest)")/rounds.jsonl" 2>/dev/null | wc -l; }

# ended STATUS: fail unless `posy run` has ended with this status.
ended() {
    status=$(docker inspect --format '{{.State.ExitCode}}' "$(compose ps --all --quiet runner)")
    [ "$status" = "$1" ] || fail "posy run ended with status $status instead of $1"
}

# holds FILE WORDS...: fail unless the file contains each of the words.
holds() {
    file=$1; shift
    for words in "$@"; do
        grep -q -e "$words" "$file" || { cat "$file" >&2; fail "no $words in $file"; }
    done
}

# posy_on NODE WORDS...: run a posy command on the volume of a node, after its container has ended.
posy_on() { node=$1; shift; compose run --rm --no-deps -T "node-$node" "$@"; }

# audited WORDS...: fail unless the audit log of each node is unbroken and contains each of the words.
audited() {
    for i in 0 1 2 3 4; do
        posy_on $i audit /data/state --json >"$logs/node-$i.jsonl" || fail "the audit log of node-$i is broken"
        holds "$logs/node-$i.jsonl" '"event": "run-begin"' "$@"
        if grep -q '"masked": false' "$logs/node-$i.jsonl"; then fail "node-$i sent an update without a mask"; fi
        echo "check: the audit log of node-$i is unbroken and contains $*"
    done
}

logs=$(mktemp -d)
trap 'compose down --volumes --timeout 5 >/dev/null 2>&1; rm -rf "$logs"' EXIT
compose build
compose down --volumes

echo "check: unchanged"
compose up
ended 0
holds "$(newest)" '"status": "completed"' '"method": "feddrm"' '"rounds": 10' \
    '"client-scores": "not available: with secure-aggregation'
audited '"masked": true'
for i in 0 1 2 3 4; do posy_on $i audit /data/state --anchor >"$logs/anchor-$i"; done

echo "check: a run that the policy refuses"
compose stop --timeout 5 # a node that still waits for the SuperLink would exit during the run
POSY_RUN="secure-aggregation=false" compose up
ended 1
compose logs --no-log-prefix runner >"$logs/screen"
holds "$logs/screen" "the site's policy rejects this run, rule secure-aggregation"
audited '"decision": "secure-aggregation"'
for i in 0 1 2 3 4; do
    posy_on $i audit /data/state --run none --contains "$(cat "$logs/anchor-$i")" || fail "node-$i has lost events"
done

echo "check: with a node killed"
compose down --volumes
before=$(newest)
POSY_RUN="num-server-rounds=20 round-timeout=60" compose up &
up=$!
until [ "$(newest)" != "$before" ] && [ "$(rounds)" -ge 3 ]; do
    kill -0 $up || fail "the run ended before a node was killed"
    sleep 0.2
done
docker kill "$(compose ps --quiet node-3)"
wait $up
ended 0
holds "$(newest)" '"status": "completed"' '"rounds": 20'
audited '"masked": true'
sed -n '/"dropped": {/,/}/p' "$(newest)"
