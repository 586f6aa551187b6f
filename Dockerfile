# skilltrain in a container, for CUDA or for a CPU alone; it runs as a user without rights.
#   docker build --target cuda -t skilltrain .
#   docker run --rm --gpus all -v "$PWD/runs:/app/runs" skilltrain skilltrain train recipes/sr_emb_0.6b.yaml
# torch's CPU build, a fifth of the size, lies in an index of PyTorch's own, whose address its site names:
#   docker build --target cpu --build-arg TORCH_INDEX=THAT_ADDRESS -t skilltrain-cpu .
# No test builds this file, because neither our machines nor CI have Docker.
# Give ./runs to the user 1000 before you mount it. To serve from a container, see docs/guides/serve.md.
# The torch of the default index brings its own CUDA libraries, so the slim base needs no more than the host's GPU
# runtime. A base with a compiler is for DeepSpeed's kernels; it must hold Python 3.11.4 or newer as python3, with venv:
#   docker build --target cuda --build-arg BASE=YOUR_CUDA_IMAGE --build-arg EXTRAS=quickstart,deepspeed -t skilltrain .
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE} AS base
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false
WORKDIR /app
RUN python3 -m venv /opt/venv && useradd --create-home --uid 1000 skilltrain && mkdir runs && chown skilltrain runs
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
COPY data_pipelines data_pipelines
COPY launch launch
COPY examples examples
CMD ["skilltrain", "--help"]

FROM base AS cpu
ARG TORCH_INDEX
ARG EXTRAS=quickstart,serve
RUN test -n "$TORCH_INDEX" || { echo "give --build-arg TORCH_INDEX, the index of torch's CPU builds" >&2; exit 2; }
RUN pip install --no-cache-dir --retries 5 -c constraints.txt --extra-index-url "$TORCH_INDEX" torch==2.13.0+cpu
RUN pip install --no-cache-dir --retries 5 -c constraints.txt -e ".[${EXTRAS}]"
# The number of the user skilltrain: Kubernetes cannot tell from a name that it is not root.
USER 1000

FROM base AS cuda
ARG EXTRAS=quickstart,serve
RUN pip install --no-cache-dir --retries 5 -c constraints.txt -e ".[${EXTRAS}]"
# The number of the user skilltrain: Kubernetes cannot tell from a name that it is not root.
USER 1000
