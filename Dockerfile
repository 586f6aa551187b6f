# skilltrain in a container. No test builds this file: neither our machines nor CI have Docker.
#   docker build -t skilltrain .
#   docker run --rm --gpus all -v "$PWD/runs:/app/runs" skilltrain skilltrain train recipes/sr_emb_0.6b.yaml
# On Linux, torch from the default package index brings its own CUDA libraries, so this slim base needs no more than
# the GPU runtime of the host. A CUDA base, with a compiler, is for building DeepSpeed's kernels; it must hold
# Python 3.11 or newer as python3, with venv:
#   docker build --build-arg BASE=YOUR_CUDA_IMAGE --build-arg EXTRAS=quickstart,deepspeed -t skilltrain .
# A CPU build of torch, a fifth of the size: give the index that holds it as PIP_EXTRA_INDEX_URL.
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG EXTRAS=quickstart
ARG PIP_EXTRA_INDEX_URL=""
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false

WORKDIR /app
RUN python3 -m venv /opt/venv
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --retries 5 -c constraints.txt -e ".[${EXTRAS}]"
COPY recipes recipes
COPY data_pipelines data_pipelines
COPY launch launch
COPY examples examples

RUN useradd --create-home skilltrain && mkdir runs && chown skilltrain runs
USER skilltrain
CMD ["skilltrain", "--help"]
