# rldsl with everything that its programs may use. BASE: any image with Python 3.11 or later; for GPUs, one that
# contains torch for the driver at hand.
ARG BASE=python:3.11-slim
FROM ${BASE}

COPY . /src
# the tested versions, except of a torch that the image has
RUN if python -c "import torch"; then sed -i /^torch==/d /src/constraints.txt; fi && \
    pip install --no-cache-dir -c /src/constraints.txt "/src[all]" && rm -r /src

WORKDIR /work
CMD ["rlc", "--help"]
