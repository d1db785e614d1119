"""Reinforcement learning: credit, loss, update, the training loop."""

import os

# Before jax starts: one process must not starve another on the same card.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# transformers only reads tokenizers here; that torch is missing is no news.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
