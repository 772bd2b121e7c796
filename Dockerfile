# syntax=docker/dockerfile:1.7
# Images of dynamo-vllm; docs/containers.md shows how they are used.
#
#   docker build --build-arg DEVICE=cpu  -t dynamo-vllm:0.3.0.dev0-cpu .
#   docker build --build-arg DEVICE=cuda -t dynamo-vllm:0.3.0.dev0-cuda .
#   docker build --build-arg DEVICE=cuda --build-arg EXTRAS=omni -t dynamo-vllm:0.3.0.dev0-cuda-omni .
#   docker build --build-arg DEVICE=cuda --build-arg VLLM=0.31.0 -t dynamo-vllm:0.3.0.dev0-cuda-vllm0.31.0 .
#
# Python packages are those of scripts/setup.py, which installs what requirements/ pins for both devices: the
# default vLLM unless VLLM names another; with EXTRAS=omni the one that vLLM-Omni needs.

ARG DEVICE=cpu

# --- what stays: Python, and a compiler, which torch and Triton call while an engine starts -------------
FROM python:3.12.11-slim-bookworm AS cpu-base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

# With nvcc: some kernels are compiled for the GPU they meet. The last two are for NIXL over InfiniBand.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda-base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ libnuma1 python3 python3-dev python3-venv ibverbs-providers librdmacm1t64 \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# --- packages ---------------------------------------------------------------------------------------------
FROM ${DEVICE}-base AS build
# A stage sees only the arguments it names.
ARG DEVICE
ARG EXTRAS=""
ARG VLLM=""
WORKDIR /opt/dynamo-vllm
COPY LICENSE pyproject.toml ./
COPY requirements requirements
COPY scripts/setup.py scripts/setup_packages.py scripts/setup_report.py scripts/torchvision_without_ops.py scripts/
COPY packages packages
COPY src src
# All bytecode now: whoever runs the image writes none.
RUN DYNAMO_VLLM_DEVICE=$DEVICE DYNAMO_VLLM_EXTRAS=$EXTRAS DYNAMO_VLLM_VLLM=$VLLM \
    PIP_NO_CACHE_DIR=1 UV_COMPILE_BYTECODE=1 \
    python3 scripts/setup.py \
    && rm -rf .venv/uv
COPY deploy/docker/healthy.py deploy/docker/

# --- image ------------------------------------------------------------------------------------------------
FROM ${DEVICE}-base AS image
ARG DEVICE
LABEL org.opencontainers.image.title="dynamo-vllm" \
      org.opencontainers.image.description="A vLLM backend for the Dynamo runtime, with vLLM for $DEVICE" \
      org.opencontainers.image.version="0.3.0.dev0" \
      org.opencontainers.image.licenses="Apache-2.0"
# A volume of models belongs to whom the folder belongs to.
RUN groupadd --gid 10001 dynamo \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp dynamo \
    && install --directory --owner 10001 --group 10001 /models /shared /data /usage /kv
COPY --from=build /opt/dynamo-vllm /opt/dynamo-vllm
ENV PATH=/opt/dynamo-vllm/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/models/huggingface
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=12 \
    CMD ["python", "/opt/dynamo-vllm/deploy/docker/healthy.py"]
ENTRYPOINT ["dynamo-vllm"]
CMD ["--help"]
