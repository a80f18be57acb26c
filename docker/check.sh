#!/bin/sh
# Builds the image and runs the federation of compose.yaml four times: unchanged, with a run that the sites' policy
# refuses, with a node that is killed, and with the service `serve`. Checks the results in docker/results, the masks, the
# audit log of each node, and the service's answers. Needs a Docker engine and curl. Removes all containers and volumes at the end, but keeps the image and the results.
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

# ask PATH OPTIONS...: print the answer of the service, which curl requests with these options.
ask() { path=$1; shift; curl --silent --show-error --max-time 60 --cacert "$logs/ca.pem" "https://localhost:8080$path" "$@"; }

# query: print the router's answer to a patient.
query() {
    ask /v2/models/router/infer --fail-with-body -H "Authorization: Bearer $token" -d '{"inputs": [{"name": "features",
        "datatype": "FP64", "shape": [1, 10], "data": [17.99, 10.38, 122.8, 1001, 0.1184, 0.2776, 0.3001, 0.1471,
        0.2419, 0.07871]}]}' >"$logs/answer" || { cat "$logs/answer" >&2; fail "the service does not answer"; }
    cat "$logs/answer"; echo
}

# output NAME: print the first value of an output in the last answer.
output() { python3 -c 'import json, sys
print(next(o["data"][0] for o in json.load(open(sys.argv[1]))["outputs"] if o["name"] == sys.argv[2]))' "$logs/answer" "$1"; }

export COMPOSE_PROFILES= # without the service
logs=$(mktemp -d)
trap 'compose --profile serve down --volumes --timeout 5 >/dev/null 2>&1; rm -rf "$logs"' EXIT
compose build
compose --profile serve down --volumes

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

echo "check: the service"
compose down --volumes
export COMPOSE_PROFILES=serve
compose up &
up=$!
until [ "$(docker inspect --format '{{.State.Health.Status}}' "$(compose ps --all --quiet serve)" 2>/dev/null)" = healthy ]; do
    kill -0 $up || fail "the federation ended before the service was ready"
    sleep 1
done
ended 0
compose cp superlink:/superlink/certificates/ca.pem "$logs"
token=$(compose exec -T superlink cat /superlink/tokens.txt)
[ "$(ask /v2/models/router -o "$logs/screen" -w '%{http_code}')" = 401 ] || fail "the service answers without a token"
until compose logs serve | grep -q "5 clients can answer queries"; do sleep 1; done
query
first=$(output client)
[ "$(output skipped)" = "" ] || fail "the first client has not answered"
docker kill "$(compose ps --quiet "$first")"
query
[ "$(output skipped)" = "$first" ] || fail "$first has ended, but no other client has answered for it"
compose stop --timeout 5
wait $up || true # stopped services have other statuses than 0
audited '"masked": true'
for node in "$first" "$(output client)"; do
    holds "$logs/$node.jsonl" query:answer
    echo "check: the audit log of $node contains the answers"
done
