#!/usr/bin/env bash
# Measures how much rejected skills help MiniLM as a reranker and as an encoder. Training and test
# groups share no skill.
#
#   benchmarks/r3_ablation.sh DATA [seeds='[1]']
#
# DATA holds pool/*.parquet and r3/judgements.jsonl. Writes runs/r3_ablation. After a stop, the same
# command continues. It trains twelve rerankers and twelve encoders. Each takes about ten minutes
# on two free cores (an estimate). At the end it measures gradients of rejections, untrained.
set -euo pipefail
data=$(realpath "$1"); shift
cd "$(dirname "$0")/.."
out=runs/r3_ablation
[ -d $out/split ] || python benchmarks/r3_split.py "$data" $out/split
skilltrain pool sources=$out/split/pool drop_duplicates=false out=$out/pool
skilltrain queries files="[$out/split/train.jsonl, $out/split/test.jsonl]" pool=$out/pool out=$out/queries
skilltrain queries files=$out/split/without/train.jsonl pool=$out/pool out=$out/without
for grid in benchmarks/r3/[0-9]_*.yaml; do skilltrain ablate "$grid" "$@"; done

# The gradients are those of the untrained models, on lists like those of the grids.
inputs="pool=$out/pool queries=$out/queries"
skilltrain candidates $inputs depth=30 system='{name: bm25, rankers: [{kind: lexical}]}' out=$out/bm25
skilltrain lists $inputs rankings=$out/bm25 quotas='{judged: 4, bm25: 4}' out=$out/encoder_lists
skilltrain lists $inputs rankings=$out/bm25 list_size=10 quotas='{judged: 5}' out=$out/reranker_lists
# gradients NAME MODEL [SETTING=VALUE ...]
gradients() {
  [ -d $out/gradients/$1 ] || skilltrain r3 gradients benchmarks/r3/gradients_$2.yaml "${@:3}" out=$out/gradients/$1
}
gradients negatives encoder
gradients terms encoder loss.push_share=0.5
gradients sides encoder 'loss.directions=[query_to_skill, skill_to_query]' loss.partition=per_direction
gradients grades reranker
