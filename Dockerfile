# mcore_bridge without a GPU, to try it: docker build -t mcore_bridge . && docker run --rm mcore_bridge
# For GPUs, install it into the image of your trainer instead: docs/start.md has the line.
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The version of the package, since .git is not in the image.
ARG VERSION=0.1.0.dev0
ENV SETUPTOOLS_SCM_PRETEND_VERSION_FOR_MCORE_HF=$VERSION \
    OMP_NUM_THREADS=1

WORKDIR /opt/mcore_bridge
COPY constraints/py311.txt constraints/
RUN pip install --no-cache-dir --constraint constraints/py311.txt --index-url "$TORCH_INDEX" torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints/py311.txt '.[cli]' && mcore-bridge doctor

WORKDIR /work
ENTRYPOINT ["mcore-bridge"]
CMD ["doctor"]
