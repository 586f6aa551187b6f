#!/usr/bin/env bash
# Measures whether each stage of SkillFlow's cascade helps, with our own encoder.
#
#   benchmarks/cascade.sh POOL ENCODER BENCHMARK OUT
#
# ENCODER is trained with late interaction, as by benchmarks/community_pool.sh. Its text vectors
# make the first stage. Its token vectors make the two rerankers: one sees 128 tokens, the other the
# whole text. No chat model is used. OUT/report.md has the tables, and rankings.parquet has all
# rankings.
set -euo pipefail
pool=$1 encoder=$2 benchmark=$3 out=$4
mkdir -p "$out"
cat > "$out/cascade.yaml" <<YAML
stage: evaluate
pool: $pool
benchmark: $benchmark
measures: [Hit@1, Hit@10, MRR@10, Recall@5, Recall@10, Recall@20, Recall@100, Recall@1000, Precision@5, Precision@10]
depth: 1000
systems:
  - name: bm25
    rankers:
      - &bm25 {kind: lexical, keep: 1000}
  - name: bm25, description
    rankers:
      - {kind: lexical, fields: description, keep: 1000}
  - name: dense, whole text
    rankers:
      - &whole {kind: dense, source: $encoder, cache: $out/vectors, keep: 1000}
  - name: dense
    rankers:
      - &dense {<<: *whole, template: {query_chars: 1500, skill: {fields: description, description_chars: 1024}}}
  - name: dense → shallow
    rankers:
      - &dense100 {<<: *dense, keep: 100}
      - &shallow {kind: late, source: $encoder, max_tokens: 128, keep: 20}
  - name: dense → shallow → deep
    rankers:
      - *dense100
      - *shallow
      - &deep
        kind: late
        source: $encoder
        max_tokens: 512
        template: {query_chars: 1500, skill: {fields: full, description_chars: 300, body_chars: 8000}}
        keep: 10
  - name: hybrid
    rankers:
      - &hybrid {kind: fuse, of: [*bm25, *dense], method: rrf, keep: 1000}
  - name: hybrid → shallow
    rankers:
      - &hybrid100 {<<: *hybrid, keep: 100}
      - *shallow
  - name: hybrid → shallow → deep
    rankers:
      - *hybrid100
      - *shallow
      - *deep
out: $out/report
YAML
skilltrain evaluate "$out/cascade.yaml"
