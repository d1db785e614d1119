"""What every test runs under: the CPU unless told otherwise, and JAX's strict rules on shapes and types."""

import os
from pathlib import Path

# Before anything imports jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

# A broadcast of [B] against [X, B] or a silent bf16 -> fp32 promotion is a mistake here, not a convenience.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

REPO = Path(__file__).resolve().parents[1]
LONGEST = ("test_sampler.py", "test_train.py", "test_qwen2.py", "test_update.py", "test_kernels.py")
"""Files that take a worker longest, and are begun first, so that no worker is left with one while the others rest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the repository: datasets and tokenizers too large to keep in it."""
    path = REPO.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"NOT TESTED: {path} is not there, so no real dataset or tokenizer can be read")
    return path


@pytest.fixture
def getkey():
    """A function that gives another key at each call: getkey()."""
    count = 0

    def get() -> jax.Array:
        nonlocal count
        count += 1
        return jax.random.fold_in(jax.random.key(0), count)

    return get
