# What `launch/gke.sh --image=...` runs: this checkout with dapo_jax[tpu], at the tested versions.
#
#   docker build --tag=REGION-docker.pkg.dev/PROJECT/REPOSITORY/dapo_jax .
#
# Files of problems that lie in the checkout come along (.dockerignore says what does not).
FROM python:3.11-slim-bookworm

WORKDIR /dapo_jax
ENV VIRTUAL_ENV=/opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY launch/uv.txt launch/uv.txt
RUN python -m venv "$VIRTUAL_ENV" \
    && python -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
    --only-binary=:all: --require-hashes --requirement=launch/uv.txt

# The packages, in a layer that a change of the sources leaves alone.
COPY requirements.txt setup.py ./
RUN mkdir dapo_jax && touch dapo_jax/__init__.py \
    && uv pip install --no-cache -c requirements.txt -e '.[tpu]'

COPY . .
