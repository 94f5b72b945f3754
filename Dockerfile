# agentrl on a GPU host: the run in one Python environment, SGLang in another (docs/install.md says why).
#
#   docker build -t agentrl .
#   docker run --rm --gpus all --ipc host --network host -v "$PWD/runs:/agentrl/runs" agentrl \
#       train --env search_r1 sampler.sglang.python=/opt/sglang/bin/python
#
# This file has not been built by us: no machine that tests agentrl can pull the base image. Its steps are those of
# docs/start/install.md, and the wheel of the files that .dockerignore lets through is checked.

# CUDA 13 wants driver 580 or newer. The devel image has nvcc, with which SGLang's kernels are compiled when they are
# first used.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

ARG DEBIAN_FRONTEND=noninteractive
# Triton compiles with gcc and Python's headers at run time; libnuma1 is for SGLang; bubblewrap for sandboxes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap build-essential ca-certificates git libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The newest release that is built against torch 2.11; agentrl has trained with it on an H200 (docs/results.md).
ARG SGLANG_VERSION=0.5.17
RUN python3 -m venv /opt/sglang \
    && /opt/sglang/bin/pip install --no-cache-dir "sglang==${SGLANG_VERSION}"

# The same torch and NCCL on both sides: weights go from one to the other (weights.transport).
COPY . /opt/agentrl-source
ARG EXTRAS=all
RUN /opt/sglang/bin/pip freeze | grep -E '^(torch|nvidia-nccl-cu[0-9]+)==' > /opt/torch.txt \
    && python3 -m venv /opt/agentrl \
    && /opt/agentrl/bin/pip install --no-cache-dir --constraint /opt/torch.txt "/opt/agentrl-source[${EXTRAS}]"

ENV PATH=/opt/agentrl/bin:$PATH
WORKDIR /agentrl
ENTRYPOINT ["agentrl"]
CMD ["--help"]
