#!/usr/bin/env bash
# Measures how much rejected skills help MiniLM as a reranker and as an encoder. Training and test
# groups share no skill.
#
#   benchmarks/r3_ablation.sh DATA [seeds='[1]']
#
# DATA holds pool/*.parquet and r3/judgements.jsonl. Writes runs/r3_ablation. After a stop, the same
# command continues. It trains fifteen rerankers and twelve encoders. Each takes about ten minutes
# on two free cores (an estimate).
set -euo pipefail
data=$(realpath "$1"); shift
cd "$(dirname "$0")/.."
out=runs/r3_ablation
[ -d $out/split ] || python benchmarks/r3_split.py "$data" $out/split
skilltrain pool sources=$out/split/pool drop_duplicates=false out=$out/pool
skilltrain queries files="[$out/split/train.jsonl, $out/split/test.jsonl]" pool=$out/pool out=$out/queries
skilltrain queries files=$out/split/without/train.jsonl pool=$out/pool out=$out/without
for grid in benchmarks/r3/[0-9]_*.yaml; do skilltrain ablate "$grid" "$@"; done
for directions in '[query_to_skill]' '[query_to_skill, skill_to_query]'; do
  name=$out/gradients_$(echo "$directions" | tr -dc , | wc -c)
  [ -d "$name" ] || skilltrain r3 gradients $out/steps/encoder-*/recipe.yaml "loss.directions=$directions" \
    loss.partition=per_direction loss.push_share=0 "out=$name"
done
