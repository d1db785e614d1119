"""Rows without their padding: states [Z, D] of the tokens that exist, put back into rows [B, T] for attention only.

Linears and norms know of no rows, so tokens of all rows can lie one behind the other; attention is a small part of a
pass's work and may keep its padding. Both ways are gathers, and so is the gradient of each: the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Packing(NamedTuple):
    """`places` [Z]: where in B * T each packed token is, B * T for none; `inverse` [B, T]: which of Z a place holds, Z
    for none."""

    places: jax.Array
    inverse: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """[B] int32: the tokens of each row, which are its first; 1 for a row without any, which has a softmax then."""
        return jnp.maximum((self.inverse < self.places.shape[0]).sum(axis=1, dtype=jnp.int32), 1)


def packing_of(places_Z: jax.Array, rows: int, width: int) -> Packing:
    """The packing of rows [`rows`, `width`] whose tokens are at `places_Z`."""
    count, room = places_Z.shape[0], rows * width
    # Padding is all at the one place beyond, which is dropped.
    inverse = jnp.full(room, count, jnp.int32).at[places_Z].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
    return Packing(places_Z, inverse.reshape(rows, width))


@jax.custom_vjp
def unpack(x: jax.Array, packing: Packing) -> jax.Array:
    """[Z, ...] -> [B, T, ...], zeros where there is no token."""
    return take(x, packing.inverse)


@jax.custom_vjp
def repack(x: jax.Array, packing: Packing) -> jax.Array:
    """[B, T, ...] -> [Z, ...], zeros for packed tokens that are none."""
    return take(x.reshape(-1, *x.shape[2:]), packing.places)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [N, ...] at `index` [I], int32 of any shape: [I, ...], zeros where an index is N."""
    return x.at[index].get(mode="fill", fill_value=0)


unpack.defvjp(lambda x, packing: (unpack(x, packing), packing), lambda packing, dy: (repack(dy, packing), None))
repack.defvjp(lambda x, packing: (repack(x, packing), packing), lambda packing, dy: (unpack(dy, packing), None))
