#!/usr/bin/env bash
# Does training improve when readers have judged the hard negatives? Trains the encoder of `fit` on
# requests for 287 skills with three kinds of lists, and compares the encoders on held-out requests.
#
#   benchmarks/train_on_verdicts.sh DATA OUT VERDICTS
#
# DATA and OUT are those of learning_curve.sh, which must have run for 287 skills. VERDICTS is a CSV
# file with the columns query_id, skill_id and verdict (required, serves or no): a reader judged the
# first three semantic and the first three BM25 candidates of each request in OUT/filtered.
# Takes about an hour on two CPU cores.
set -euo pipefail
data=$1 out=$2 verdicts=$3
cd "$(dirname "$0")/.."
run="$out/verdicts"
mkdir -p "$run"

# Skills that the reader accepts become `useful`, a positive with half the gain of the gold skill.
python - "$verdicts" "$out"/requests/{,terse_}287.jsonl "$run/judged.jsonl" <<'PYTHON'
import csv
import json
import sys
from pathlib import Path

verdicts, *requests, out = map(Path, sys.argv[1:])
accepted: dict[str, list[str]] = {}
for row in csv.DictReader(verdicts.open(encoding="utf-8")):
    if row["verdict"] != "no":
        accepted.setdefault(row["query_id"], []).append(row["skill_id"])
lines = []
for line in (line for file in requests for line in file.open(encoding="utf-8")):
    request = json.loads(line)
    useful = set(accepted.get(request["query_id"], [])).difference(request["skill_ids"])
    lines.append(json.dumps(request | {"useful": sorted(useful)}) + "\n")
out.write_text("".join(lines), encoding="utf-8")
PYTHON

# `drawn` draws negatives from the first 50 candidates, as `fit` does. `top` takes the first ones.
# The lists of `judged` are those of `top` with the verdicts: no negative is a skill that serves.
make_lists() { skilltrain lists pool="$out/pool" rankings="$out/filtered" quotas='{semantic: 1, lexical: 1}' "$@"; }
skilltrain queries files="[$run/judged.jsonl]" split=train pool="$out/pool" out="$run/queries"
make_lists queries="$out/287/queries" out="$run/drawn/lists"
make_lists queries="$out/287/queries" best_of="[semantic, lexical]" out="$run/top/lists"
make_lists queries="$run/queries" best_of="[semantic, lexical]" out="$run/judged/lists"

systems="{name: bm25, rankers: [{kind: lexical}]}"
for cell in drawn top judged; do
  skilltrain train recipes/tiny/sr_emb_minilm.yaml data.pool="$out/pool" data.lists="$run/$cell/lists" \
    late_interaction.weight=1 late_interaction.temperature=0.01 out="$run/$cell/encoder"
  dense="{kind: dense, source: $run/$cell/encoder, cache: $out/vectors}"
  systems+=", {name: $cell, rankers: [$dense]}
    , {name: bm25 + $cell, rankers: [{kind: fuse, of: [{kind: lexical}, $dense], weights: [1, 0.5]}]}"
done
skilltrain evaluate pool="$out/pool" clusters="$out/clusters" benchmark="$out/dev_queries" systems="[$systems]" \
  out="$run/report"
