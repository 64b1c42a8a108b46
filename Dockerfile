# hvd_novel with MPI and Gloo, and NCCL where the base image brings CUDA with nvcc:
#   docker build -t hvd-novel .
#   docker build -t hvd-novel:cuda --build-arg BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 .
#   docker run --rm -v "$PWD/novels:/novels" -v "$PWD/out:/out" hvd-novel scripts/quickstart /novels /out
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The launchers refuse to run as root unless told that this is meant; in a container it is.
ENV OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    HVD_NOVEL_CACHE=/opt/hvd_novel/cache \
    PATH=/opt/hvd_novel/.venv/bin:$PATH

WORKDIR /opt/hvd_novel
ARG TORCH_INDEX_URL
COPY . .
RUN TORCH_INDEX_URL=${TORCH_INDEX_URL} scripts/setup && rm -rf /root/.cache/pip

CMD ["hvd-novel", "--help"]
