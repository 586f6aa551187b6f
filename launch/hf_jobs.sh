#!/usr/bin/env bash
# Trains on a rented GPU of Hugging Face Jobs. Not run yet: a test only prints the job (--dry-run).
# Log in (`hf auth login`), and run it from the root of the repository with the data in runs/:
#   launch/hf_jobs.sh recipes/sr_emb_0.6b.yaml [key=value ...] [--resume]
# `hf` copies runs/, recipes/ and dist/ to a bucket of your account. The job writes its results to
# the copy of runs/, and `hf buckets` fetches them.
# HF_JOBS_OPTIONS has further options of `hf jobs run`, such as "--flavor a100-large" or --dry-run.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: launch/hf_jobs.sh RECIPE.yaml [key=value ...] [--resume]" >&2
  exit 2
fi

# The job installs this wheel, with the pinned releases of its dependencies.
python -m pip wheel --quiet --no-deps --wheel-dir dist .
cp constraints.txt dist/

# `$1` and `$@` are in single quotes, because the shell of the job reads them.
# shellcheck disable=SC2086
exec hf jobs run --flavor l4x1 --timeout 12h --secrets HF_TOKEN \
  --volume ./dist:/app/dist --volume ./recipes:/app/recipes --volume ./runs:/app/runs:rw \
  ${HF_JOBS_OPTIONS:-} python:3.11 bash -c '
    cd /app && pip install -q -c dist/constraints.txt dist/skilltrain-*.whl &&
    exec accelerate launch --num_processes gpu "$@"' launch "$@"
