# SPDX-License-Identifier: BSD-3-Clause
# The package on the CPU build of torch, with the examples. `docker build --tag apex-parallel .`, then
#
#   docker run --rm apex-parallel                                               # the demo: two processes
#   docker run --rm apex-parallel torchrun --nproc_per_node=2 mnist/main.py     # an example
#   docker run --rm apex-parallel apex-doctor                                   # a report on the container
#
# --build-arg TORCH=2.14.1 or PYTHON=3.12 selects other versions, JOBS=4 the number of compilers (each takes 2 GiB).
# The stage "tools" has the compiler and the build dependencies. .devcontainer/devcontainer.json uses it.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS tools
ARG TORCH=2.13.0
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update && \
    apt-get install --yes --no-install-recommends g++ git && \
    rm -rf /var/lib/apt/lists/*
RUN pip install torch==${TORCH} --index-url https://download.pytorch.org/whl/cpu
RUN pip install "scikit-build-core>=1.1" "nanobind>=2.4" "cmake>=3.22" ninja

FROM tools AS build
ARG JOBS=2
COPY . /sources
RUN CMAKE_BUILD_PARALLEL_LEVEL=${JOBS} SKBUILD_CMAKE_DEFINE="APEX_UNITY_BUILD=ON" \
    pip install --no-build-isolation "/sources[examples]"

# No compiler, no sources: only Python's packages and the examples.
FROM python:${PYTHON}-slim-bookworm
COPY --from=build /usr/local /usr/local
COPY examples /examples
# Examples and the demo write into the current folder.
RUN useradd --create-home apex && chown -R apex /examples
USER apex
WORKDIR /examples
CMD ["python", "-m", "apex.demo"]
