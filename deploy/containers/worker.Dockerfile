# A worker on NVIDIA GPUs. From the checkout's root:
#   docker build -f deploy/containers/worker.Dockerfile -t rolloutmq-worker .
# CUDA with its compiler, because SGLang compiles kernels at the first start; of the release that SGLang's torch wants.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04
# tini is process 1: it passes SIGTERM to the worker alone, and reaps what SGLang's processes leave behind.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 python3.12-dev python3.12-venv tini \
 && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3.12 -m venv /opt/rolloutmq \
 && /opt/rolloutmq/bin/pip install --no-cache-dir '/src[sglang,metrics,journal,otel]' \
 && rm -rf /src
# What is written at run time lies under /cache and /tmp: the root file system may be read-only.
RUN useradd --uid 10001 --home-dir /cache --create-home rolloutmq
USER 10001:10001
WORKDIR /cache
ENV PATH=/opt/rolloutmq/bin:$PATH PYTHONUNBUFFERED=1 HOME=/cache ROLLOUTMQ_ENGINE_CACHE_DIR=/cache/compiled
ENTRYPOINT ["tini", "--", "rolloutmq"]
CMD ["worker"]
