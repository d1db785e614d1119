"""The decode kernels, in Pallas' interpreter, against the plain model in fp32; and how rows and tiles lie."""

import jax
import jax.numpy as jnp
import pytest

from bench.kernels import compare, kernel_parts, make_case, plain_parts
from model.config import QWEN2_5_1_5B, ModelConfig
from model.fused import SHARED_BYTES, plan_of
from model.tiles import FEW, MANY, Rows

SMALL = ModelConfig(vocab=64, width=48, layers=1, heads=6, kv_heads=2, head_dim=8, mlp=96, qkv_bias=True)
"""Three query heads a key head; three tiles of every width."""


@pytest.mark.parametrize(
    "cells, batch",
    [(3, 9), pytest.param(1, 5, marks=pytest.mark.slow), pytest.param(2, 40, marks=pytest.mark.slow)],
)
def test_every_part_of_a_layer_is_the_plain_models(cells, batch):
    """Rows that don't fill their tiles, of several cells, a third of them the base's; a rank below a tile's."""
    records = compare(SMALL, cells, batch, 96, jnp.float32, rank=4)
    assert len(records) == 5 and all(record["ok"] for record in records), records


@pytest.mark.slow
def test_another_cells_adapter_would_be_noticed():
    case = make_case(SMALL, 2, 5, 64, jnp.float32, 4)
    mixed_up = case._replace(lora=jax.tree.map(lambda leaf: leaf[::-1], case.lora))
    got = kernel_parts(SMALL, mixed_up)
    want = plain_parts(SMALL, jnp.float32, case, got["qkv"])
    for name in ("qkv", "attention", "mlp"):
        assert float(jnp.abs(got[name] - want[name]).max()) > 0.05, name


@pytest.mark.parametrize(
    "rows, tile, count, slots, width",
    [
        (Rows(1, 5, 16, 32, 64), 16, 16, 1, 32),  # one cell in one tile
        (Rows(3, 24, 32, 32, 128), 128, 128, 4, 128),  # three cells in a tile with room for four
        (Rows(12, 32, 32, 16, 64), 64, 384, 12, 32),  # two cells a tile
        (Rows(2, 100, 128, 32, 64), 64, 256, 2, 32),  # two tiles a cell
    ],
)
def test_rows_lie_in_whole_tiles(rows, tile, count, slots, width):
    assert (rows.tile, rows.count, rows.slots, rows.width) == (tile, count, slots, width)


@pytest.mark.parametrize("tiles", [FEW, MANY])
@pytest.mark.parametrize("cells, batch, rank", [(1, 1, 8), (1, 32, 32), (3, 32, 64), (1, 200, 128), (36, 32, 32)])
def test_a_kernels_loads_fit_the_shared_memory(tiles, cells, batch, rank):
    plan = plan_of(QWEN2_5_1_5B, cells, batch, rank, tiles)
    for tile in (plan.tiles.qkv, plan.tiles.out):
        held = 2 * (plan.rows.tile + tile.columns + plan.rows.width) * tile.depth * tile.stages
        assert held <= SHARED_BYTES and QWEN2_5_1_5B.width % tile.depth == 0 and tile.depth >= 16
