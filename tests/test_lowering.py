"""What only a GPU runs, as far as a machine without one can go: traced, and lowered to Triton for CUDA.

The kernels' own tests interpret them, and the interpreter takes indices, shapes and types that Triton refuses. And a
GPU must get the kernels, not what they stand for: each is named in what is lowered.
"""

import argparse
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from bench.gradient import rows_of
from model import fused
from model.attention import attend
from model.config import QWEN2_5_1_5B
from model.lora import LoraConfig, init_lora
from model.qwen2 import Qwen2, init_cache
from rl.batch import pack
from rl.update import Learner, OptimConfig
from rollout.distribution import Sampling

# model.tiles has Python ignore it, and pytest has it listen again.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
CONFIG = replace(QWEN2_5_1_5B, layers=2, vocab=512)
CARD = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


@pytest.fixture
def gpu(monkeypatch):
    """JAX says that it has a GPU, and lowers for one."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=CARD)):
        yield


def kernels(function, *args) -> set[str]:
    """The names of Triton's kernels in `function`, lowered for CUDA."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r'@__gpu\$xla\.gpu\.triton.*, name = "(\w+)"', text))


def shapes(cells):
    """(graph, the base's and the cells' adapters' shapes), in bf16 and fp32."""
    base = jax.eval_shape(lambda: nnx.state(Qwen2(CONFIG, nnx.Rngs(0), jnp.bfloat16)))
    one = lambda: init_lora(jax.random.key(0), CONFIG, LoraConfig(32, 64.0))  # noqa: E731 - two lines, else
    lora = jax.eval_shape(lambda: jax.tree.map(lambda leaf: jnp.stack([leaf] * cells), one()))
    return nnx.graphdef(nnx.eval_shape(lambda: Qwen2(CONFIG, nnx.Rngs(0)))), base, lora


@pytest.mark.parametrize(
    "cells, batch, but_for", [(1, 32, set()), (3, 32, {"down", "attention_join"}), (1, 128, {"down", "attention_join"})]
)
def test_a_decode_step(gpu, cells, batch, but_for):
    """Beyond 48 rows down is XLA's, and attention isn't split."""
    graph, base, lora = shapes(cells)
    plan = fused.plan_of(CONFIG, cells, batch, 32)

    def step(base, lora, cache, rows):
        laid_out = fused.fuse(nnx.merge(graph, base), lora, jnp.ones((cells, batch)), plan)
        return fused.fused_hidden(CONFIG, plan, laid_out, rows, rows, cache, jnp.int32(9), rows)

    cache = jax.eval_shape(lambda: init_cache(CONFIG, cells * batch, 128, jnp.bfloat16))
    every = {"qkv", "attention", "attention_join", "out", "swiglu", "down", "join"}
    assert kernels(step, base, lora, cache, jax.ShapeDtypeStruct((cells, batch), jnp.int32)) == every - but_for


@pytest.mark.parametrize("cells, packed", [(1, False), (3, True)])
def test_a_gradient(gpu, monkeypatch, cells, packed):
    """Of one cell's padded rows, and of several cells' packed ones. Ours stands in for cuDNN's attention, which needs
    cuDNN to be there."""

    def attention(q, k, v, lengths_B=None):
        mask = jnp.ones((q.shape[0], q.shape[1], q.shape[1]), bool)
        return attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask)

    monkeypatch.setattr("model.qwen2.attend_causally", attention)
    graph, base, lora = shapes(cells)
    learner = Learner(
        graph=graph,
        base=base,
        lora_scale=2.0,
        allowed_V=jnp.ones(CONFIG.vocab, bool),
        config=OptimConfig(lr=1e-4, steps=1),
        sampling=Sampling(1.0),
        remat="products",
    )
    asked = argparse.Namespace(rows=4, prompt_tokens=20, new_tokens=9)
    rows_X = [rows_of(asked, CONFIG.vocab) for _ in range(cells)]
    batch = pack(rows_X, 4, (32, 64), packed=packed).batches[0]
    ((_, program),) = learner._gradients(lora, [batch]).items()
    assert kernels(program.function, *program.args) == {"norm_gradient", "rope_gradient"}
