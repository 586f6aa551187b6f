#!/usr/bin/env bash
# Records the results of a commit, to compare them with those of another commit.
#
#   bash benchmarks/golden_capture.sh COMMIT OUT
#   python benchmarks/golden_compare.py OUT1 OUT2
#
# Trains the tiny recipes and the quickstart in float32 on few lists with two threads, and keeps all
# tables, logs and metrics in OUT/runs. After a stop, the same command continues. Make both captures
# on the same machine, with the package installed in .venv. A capture takes about ten minutes on two
# idle cores.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$1 out=$(realpath -m "$2")
export PATH=$PWD/.venv/bin:$PATH PYTHONPATH=$out/src
export OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

mkdir -p "$out"
[ -d "$out/src" ] || git archive "$commit" | tar -x -C "$out"
cd "$out"
bash launch/tiny_data.sh
for recipe in sr_emb_0.6b sr_emb_8b sr_emb_8b_full r3_emb_0.6b sr_rank_0.6b sr_rank_0.6b_pointwise sr_rank_8b r3_rank_0.6b sr_rank_minilm; do
  settings=(training.precision=float32)
  [ "$recipe" = sr_rank_minilm ] && settings+=(data.max_lists=24)
  skilltrain train "recipes/tiny/$recipe.yaml" "${settings[@]}"
done
sed -i 's/skilltrain train "\$1"/& training.precision=float32 data.max_lists=96/g' launch/quickstart.sh
bash launch/quickstart.sh
