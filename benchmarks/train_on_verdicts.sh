#!/usr/bin/env bash
# Does training improve when readers have judged the hard negatives? Trains the encoder of `fit` on
# requests for 287 skills with three kinds of lists, and compares the encoders on held-out requests.
#
#   benchmarks/train_on_verdicts.sh DATA OUT VERDICTS
#
# DATA and OUT are those of learning_curve.sh, which must have run for 287 skills. If there is no file
# VERDICTS, the script writes one and ends: a CSV file with the pairs of request and skill to judge.
# They are the first three semantic and the first three BM25 candidates of each request. A reader
# fills the column `verdict` (required, serves or no). Then run the script again: it trains and takes
# about an hour on two CPU cores.
#
# `evaluate` compares each system with the first one, the encoder `drawn`, and with the one before it.
# Other differences, such as those to `bm25 + drawn`, come from OUT/verdicts/report/per_query.jsonl.
set -euo pipefail
data=$1 out=$2 verdicts=$3
cd "$(dirname "$0")/.."
run="$out/verdicts"
mkdir -p "$run"

# Write the sheet of pairs to judge.
if [ ! -e "$verdicts" ]; then
  python - "$out" "$verdicts" <<'PYTHON'
import sys
from pathlib import Path

from skilltrain.metrics.verdicts import write_sheet
from skilltrain.tables import RANKINGS, read_queries, read_skills, read_table

out, sheet = map(Path, sys.argv[1:])
queries = {query.query_id: query for query in read_queries(out / "287" / "queries")}
skills = {skill.skill_id: skill for skill in read_skills(out / "pool")}
candidates: dict[tuple[str, str], list[str]] = {}  # skill ids by request and source
for row in sorted(read_table(out / "filtered", RANKINGS).to_pylist(), key=lambda row: row["rank"]):
    candidates.setdefault((row["query_id"], row["stage"]), []).append(row["skill_id"])
pairs = set()
for query_id in queries:
    for source in ("semantic", "lexical"):
        pairs.update((query_id, skill_id) for skill_id in candidates.get((query_id, source), [])[:3])
write_sheet([(queries[query_id], skills[skill_id]) for query_id, skill_id in sorted(pairs)], sheet)
PYTHON
  echo "fill the column verdict of $verdicts, and run this again"
  exit
fi

# Skills that the reader accepts become `useful`, a positive with half the gain of the gold skill.
python - "$verdicts" "$out"/requests/{,terse_}287.jsonl "$run/judged.jsonl" <<'PYTHON'
import json
import sys
from pathlib import Path

from skilltrain.metrics.verdicts import read_pair_verdicts

sheet, *files, out = map(Path, sys.argv[1:])
accepted: dict[str, set[str]] = {}
for verdicts in read_pair_verdicts([sheet]).values():
    for (query_id, skill_id), verdict in verdicts.items():
        if verdict != "no":
            accepted.setdefault(query_id, set()).add(skill_id)
lines = []
for file in files:
    for line in file.open(encoding="utf-8"):
        request = json.loads(line)
        useful = accepted.get(request["query_id"], set()).difference(request["skill_ids"])
        lines.append(json.dumps(request | {"useful": sorted(useful)}) + "\n")
out.write_text("".join(lines), encoding="utf-8")
PYTHON

# `drawn` draws negatives from the first 50 candidates, as `fit` does. `top` takes the first ones.
# The lists of `judged` are those of `top` with the verdicts: accepted skills are no negatives.
make_lists() { skilltrain lists pool="$out/pool" rankings="$out/filtered" quotas='{semantic: 1, lexical: 1}' "$@"; }
skilltrain queries files="[$run/judged.jsonl]" split=train pool="$out/pool" out="$run/queries"
make_lists queries="$out/287/queries" out="$run/drawn/lists"
make_lists queries="$out/287/queries" best_of="[semantic, lexical]" out="$run/top/lists"
make_lists queries="$run/queries" best_of="[semantic, lexical]" out="$run/judged/lists"

systems=""
for cell in drawn top judged; do
  skilltrain train recipes/tiny/sr_emb_minilm.yaml data.pool="$out/pool" data.lists="$run/$cell/lists" \
    late_interaction.weight=1 late_interaction.temperature=0.01 out="$run/$cell/encoder"
  dense="{kind: dense, source: $run/$cell/encoder, cache: $out/vectors}"
  systems+="{name: $cell, rankers: [$dense]},
    {name: bm25 + $cell, rankers: [{kind: fuse, of: [{kind: lexical}, $dense], weights: [1, 0.5]}]}, "
done
skilltrain evaluate pool="$out/pool" clusters="$out/clusters" benchmark="$out/dev_queries" systems="[$systems {name: bm25, rankers: [{kind: lexical}]}]" \
  out="$run/report"
