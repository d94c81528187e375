# syntax=docker/dockerfile:1
# vit_jax on NVIDIA GPUs. CUDA comes with the Python packages; the host needs a
# driver for CUDA 12 and the NVIDIA Container Toolkit.
#
#   docker build -f docker/gpu.Dockerfile -t vit_jax:gpu \
#     --build-arg=COMMIT="$(git rev-parse HEAD)" .
#   docker run --rm --init --gpus=all --shm-size=8g -v vit_runs:/runs \
#     vit_jax:gpu --config=vit_jax:quickstart --workdir=/runs/quickstart
#
# To write to a folder of the host instead, in place of `-v vit_runs:/runs`:
# --user="$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD/runs:/runs"
#
# The argument `--entrypoint=python` of docker run starts other programs:
# IMAGE -m vit_jax.tools.predict ...
FROM python:3.12-slim-bookworm

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

# For the extension that decodes crops of JPEGs.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends gcc libc6-dev libjpeg-dev && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /src

# Dependencies first: this layer is built again only if these files change.
COPY setup.py pyproject.toml README.md ./
# The versions are those of setup.py.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir vit_jax configs && pip install '.[cuda,gcs]'

COPY LICENSE ./
COPY configs configs
COPY vit_jax vit_jax
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps .

RUN useradd --create-home --uid 1000 vit && \
    mkdir /runs && chown vit:vit /runs
# The image has no git: record the commit that is built, for environment.json.
ARG COMMIT=
ENV VIT_JAX_COMMIT=$COMMIT
USER 1000
WORKDIR /home/vit

ENTRYPOINT ["python", "-m", "vit_jax.main"]
CMD ["--help"]
