# skilltrain in a container, for CUDA or for a CPU alone; it runs as a user without rights.
#   docker build --target cuda -t skilltrain .
#   docker run --rm --gpus all -v "$PWD/runs:/app/runs" skilltrain skilltrain train recipes/sr_emb_0.6b.yaml
# torch's CPU build, a fifth of the size, lies in an index of PyTorch's own, whose address its site names:
#   docker build --target cpu --build-arg TORCH_INDEX=THAT_ADDRESS -t skilltrain-cpu .
# The target serve answers over HTTP. DEVICE is the target that it builds on (cuda or cpu). The router is mounted
# at /router, or named at the end as hf:OWNER/NAME@REVISION. Further options of `skilltrain serve` follow:
#   docker build --target serve --build-arg DEVICE=cuda -t skilltrain-serve .
#   docker run --gpus all -p 8765:8765 -e ROUTER_TOKEN -v "$PWD/runs/router:/router:ro" skilltrain-serve
# No test builds this file, because neither our machines nor CI have Docker. hadolint passes, and a test reads the file.
# Give ./runs to the user 1000 before you mount it. To serve from a container, see docs/guides/serve.md.
# The torch of the default index brings its own CUDA libraries, so the slim base needs no more than the host's GPU
# runtime. A base with a compiler is for DeepSpeed's kernels; it must hold Python 3.11.4 or newer as python3, with venv:
#   docker build --target cuda --build-arg BASE=YOUR_CUDA_IMAGE --build-arg EXTRAS=quickstart,deepspeed -t skilltrain .
ARG BASE=python:3.11.14-slim-bookworm
ARG DEVICE=cuda
FROM ${BASE} AS base
ARG EXTRAS=quickstart,serve
# The word TOKENIZERS makes hadolint look for a secret.
# hadolint ignore=DL3064
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false
WORKDIR /app
COPY pyproject.toml constraints.txt ./
# The dependencies are listed and installed before the source is copied. So a change of the source keeps their layer.
RUN python3 -m venv /opt/venv && useradd --create-home --uid 1000 skilltrain && mkdir runs && chown skilltrain runs \
    && python3 -c "import sys, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [project['optional-dependencies'][name] for name in sys.argv[1].split(',')]; \
print(*project['dependencies'], *sum(extras, []), sep='\n')" "$EXTRAS" > requirements.txt
CMD ["skilltrain", "--help"]

FROM base AS cpu
ARG TORCH_INDEX
RUN test -n "$TORCH_INDEX" || { echo "give --build-arg TORCH_INDEX, the index of torch's CPU builds" >&2; exit 2; }; \
    pip install --no-cache-dir --retries 5 -c constraints.txt --extra-index-url "$TORCH_INDEX" torch==2.13.0+cpu \
    && pip install --no-cache-dir --retries 5 -c constraints.txt -r requirements.txt
# .dockerignore lists the files to copy.
COPY . .
RUN pip install --no-cache-dir --retries 5 -c constraints.txt --no-deps -e .
# The number of the user skilltrain: Kubernetes cannot tell from a name that it is not root.
USER 1000

FROM base AS cuda
# faiss-gpu and faiss-cpu own the same Python module, so the first replaces the second.
RUN pip install --no-cache-dir --retries 5 -c constraints.txt -r requirements.txt \
    && pip uninstall -y faiss-cpu \
    && pip install --no-cache-dir --retries 5 -c constraints.txt faiss-gpu
# .dockerignore lists the files to copy.
COPY . .
RUN pip install --no-cache-dir --retries 5 -c constraints.txt --no-deps -e .
# The number of the user skilltrain: Kubernetes cannot tell from a name that it is not root.
USER 1000

FROM ${DEVICE} AS serve
USER 0
RUN mkdir /router /cache && chown skilltrain /cache
USER 1000
# Models and routers from the Hub stay in the volume /cache.
ENV XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
VOLUME ["/router", "/cache"]
EXPOSE 8765
# The server answers /health without the token. The name localhost must be an allowed host.
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://localhost:8765/health', timeout=4)"]
ENTRYPOINT ["skilltrain", "serve", "--mcp", "http", "--host", "0.0.0.0", "--port", "8765", \
    "--allowed-host", "localhost", "--token-env", "ROUTER_TOKEN"]
CMD ["/router"]
