# What `launch/gke.sh --image=...` runs: this checkout with dapo_jax[tpu], at the tested versions.
#
#   docker build --tag=REGION-docker.pkg.dev/PROJECT/REPOSITORY/dapo_jax .
#   docker build --build-arg=EXTRA=cuda13 --tag=dapo_jax .    for NVIDIA GPUs (or cuda: CUDA 12)
#   docker run --gpus=all dapo_jax python -m dapo_jax.train ...
#
# CUDA comes with the packages; the host needs NVIDIA's driver and its Container Toolkit.
# Files of problems that lie in the checkout come along (.dockerignore says what does not).
FROM python:3.11-slim-bookworm

ARG EXTRA=tpu
WORKDIR /dapo_jax
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
# Of a GPU's memory; jax takes .75 of itself.
ENV XLA_PYTHON_CLIENT_MEM_FRACTION=.9

# The packages, as on a TPU VM, in a layer that a change of the sources leaves alone. The Python is
# DAPO_TPU_PYTHON of launch/common.sh; where the one above is another, uv fetches it.
COPY launch/common.sh launch/flags.sh launch/worker.sh launch/uv.txt launch/
COPY requirements.txt setup.py ./
RUN mkdir dapo_jax && touch dapo_jax/__init__.py && bash launch/worker.sh install "$EXTRA" \
    && ln -s "$(dirname "$(dirname "$(cat run.python)")")" /opt/venv

COPY . .
