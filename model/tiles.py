"""What the decode kernels share: how rows lie, what a program takes of them, and pieces that kernels are made of."""

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# jax 0.11 announces the end of this way to Triton at every compilation; pyproject.toml keeps jax below the version that
# may end it, so users needn't be told each time.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")


@dataclass(frozen=True)
class Tile:
    """A kernel's share of the work: `columns` of the output, `depth` of the sum at a time, warps and load stages."""

    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class Tiles:
    """What each kernel takes at a time. `down` None: XLA's own product; else its sum is in `down_splits` parts.
    `splits`: parts of an attention, 0: enough to give every multiprocessor two. `rows`: the most a tile has."""

    qkv: Tile
    out: Tile
    swiglu: Tile
    down: Tile | None
    join: Tile
    slots: Tile
    down_splits: int = 5
    splits: int = 0
    rows: int = 64


FEW = Tiles(
    qkv=Tile(16, 256, 2, 5),
    out=Tile(16, 512, 2, 3),
    swiglu=Tile(64, 64, 4, 1),
    down=Tile(64, 128, 2, 5),
    join=Tile(16, 32, 4, 1),
    slots=Tile(64, 64, 2, 3),
)
"""For at most `MOST_FEW` rows, by measurement on an H200 (bench.kernels --tune)."""

MANY = Tiles(
    qkv=Tile(32, 128, 4, 4),
    out=Tile(32, 128, 4, 4),
    swiglu=Tile(32, 64, 4, 1),
    down=None,
    join=Tile(64, 32, 8, 1),
    slots=Tile(64, 64, 4, 3),
)
"""For more."""

MOST_FEW = 48


@dataclass(frozen=True)
class Rows:
    """How rows lie: `cells` X, `real` B and `padded` P rows a cell, `rank` r of the low-rank halves, tiles of at most
    `most` rows."""

    cells: int
    real: int
    padded: int
    rank: int
    most: int = 128

    @property
    def tile(self) -> int:
        """Rows of a tile: a power of two; some whole cells, or a part of one."""
        return min(self.most, 1 << (self.cells * self.padded - 1).bit_length())

    @property
    def count(self) -> int:
        """M: all rows, in whole tiles."""
        return -(-self.cells * self.padded // self.tile) * self.tile

    @property
    def full(self) -> bool:
        """Is no row of any tile padding?"""
        return self.cells * self.real == self.count

    @property
    def slots(self) -> int:
        """X': the cells there is room for in M rows."""
        return self.count // self.padded

    @property
    def width(self) -> int:
        """Low-rank columns that the rows of one tile may own."""
        return max(1, self.tile // self.padded) * self.rank


class RowTile(NamedTuple):
    """A program's rows: where they are in M, which are real [T], which low-rank columns are each row's own [T, R],
    where these columns are in X' r, and which belong to a cell that exists [R]."""

    at: Any
    real: Any
    own: Any
    low_at: Any
    exists: Any


def rows_of(rows: Rows, index) -> RowTile:
    """The rows of the tile `index`."""
    tile = rows.tile
    at = index * tile + jnp.arange(tile)
    cell = over(at, rows.padded)
    real = (cell < rows.cells) & (at - cell * rows.padded < rows.real)
    first = over(index * tile, rows.padded)
    column_cell = first + over(jnp.arange(rows.width), rows.rank)
    own = (column_cell[None] == cell[:, None]) & real[:, None]
    low_at = pl.ds(first * rows.rank, rows.width)
    return RowTile(pl.ds(index * tile, tile), real, own, low_at, column_cell < rows.cells)


def over(n, by: int):
    """n // by of what isn't negative, in the one operation it takes."""
    return jax.lax.div(n, jnp.full_like(n, by))


def masked(mask, whole: bool) -> dict:
    """Arguments of a load: where `mask` is false it reads 0 and touches nothing; `whole`: the mask is all true."""
    return {} if whole else {"mask": mask, "other": 0}


def load_squares(squares_ref, mine: RowTile):
    """[tiles', T]: what the tiles that wrote x left, to be summed."""
    tiles = squares_ref.shape[0]
    some = 1 << (tiles - 1).bit_length()
    mask = (jnp.arange(some) < tiles)[:, None] & mine.real[None]
    return plgpu.load(squares_ref.at[pl.ds(0, some), mine.at], mask=mask, other=0.0)


def inverse_rms(squares, width: int, eps: float):
    """[T, 1], 1 / rms of each row."""
    return jax.lax.rsqrt(squares.sum(axis=0) / width + eps)[:, None]


def load_rows(ref, mine: RowTile, columns):
    """[T, columns] of an array [M, ...]; 0 where a row is padding."""
    return plgpu.load(ref.at[mine.at, columns], mask=mine.real[:, None], other=0)


def load_update(mine: RowTile, scale_ref, b_ref):
    """(each row's scale [T], B [R, columns])."""
    scale = plgpu.load(scale_ref.at[mine.at], mask=mine.real, other=0.0)
    return scale, plgpu.load(b_ref, mask=mine.exists[:, None], other=0)


def own_update(mine: RowTile, low, scale, b):
    """scale * (own columns of low) B, [T, columns] fp32."""
    return plgpu.dot(jnp.where(mine.own, low * scale[:, None], 0.0).astype(b.dtype), b)


def finish(mine: RowTile, columns, total, residual, out_ref, squares_ref):
    """Write residual + total, and the sums of its squares for the norm to come."""
    x = (total + residual.astype(jnp.float32)).astype(out_ref.dtype)
    plgpu.store(out_ref.at[mine.at, columns], x, mask=mine.real[:, None])
    x32 = jnp.where(mine.real[:, None], x.astype(jnp.float32), 0.0)
    plgpu.store(squares_ref.at[pl.program_id(0), mine.at], (x32 * x32).sum(axis=1))


def call_kernel(kernel, grid, out_shape, tile: Tile, name: str, aliases: dict[int, int] | None = None):
    gpu = jax.default_backend() == "gpu"

    def named(*refs):
        kernel(*refs)

    named.__name__ = name  # what a trace calls it
    return pl.pallas_call(
        named,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=not gpu,
        name=name,
    )
