"""The policy-gradient loss, and how much each row of a step counts. Pure functions of arrays.

What this is, against PPO and the original GRPO: no value network, no KL term, no entropy term, no division by the
group's standard deviation; the advantage is per token and given. A step's loss is a plain weighted sum over its tokens,
and the weights are fixed before it is cut into micro-batches, so the cutting cannot change the gradient.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

Normalisation = Literal["tokens", "microbatch", "sequence", "constant"]
NORMALISATIONS: tuple[str, ...] = get_args(Normalisation)


class LossStats(NamedTuple):
    """Sums over the trained tokens of one micro-batch: `loss` weighted; the rest over tokens, over `tokens`.

    `gap_sum`, `gap_max`: |logp - old_logp|, the distance between the training forward and the sampler.
    """

    loss: jax.Array
    tokens: jax.Array
    gap_sum: jax.Array
    gap_max: jax.Array
    clipped: jax.Array


def policy_gradient_loss(
    logp_M: jax.Array,
    old_logp_M: jax.Array,
    advantage_M: jax.Array,
    loss_mask_M: jax.Array,
    weight_M: jax.Array,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, LossStats]:
    """sum of weight * -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) over unmasked tokens.

    PPO's clipped surrogate (Schulman et al., 2017, eq. 7) with the two bounds of DAPO (Yu et al., 2025);
    ratio = exp(logp - old_logp). `old_logp` is what the sampler recorded under the very distribution it drew from, so
    on-policy the ratio is 1 up to the arithmetic's rounding, and where that rounding matters (bf16) the ratio is the
    importance weight that corrects it. Masked positions may hold anything, NaN included. All [M] fp32, mask bool.
    """
    for name, value in (("logp", logp_M), ("old_logp", old_logp_M), ("advantage", advantage_M), ("weight", weight_M)):
        assert value.ndim == 1 and value.dtype == jnp.float32, (
            f"{name} must be [M] fp32, is {value.shape} {value.dtype}"
        )
    assert loss_mask_M.dtype == jnp.bool_, f"loss_mask must be bool, is {loss_mask_M.dtype}"
    advantage_M = jax.lax.stop_gradient(jnp.where(loss_mask_M, advantage_M, 0.0))
    # Masked before exp: a masked token's gap may be inf, and inf * 0 is NaN, in the gradient too.
    gap_M = jnp.where(loss_mask_M, logp_M - jax.lax.stop_gradient(old_logp_M), 0.0)
    ratio_M = jnp.exp(gap_M)
    plain_M = ratio_M * advantage_M
    clipped_M = jnp.clip(ratio_M, 1 - clip_low, 1 + clip_high) * advantage_M
    loss = -(jnp.where(loss_mask_M, weight_M, 0.0) * jnp.minimum(plain_M, clipped_M)).sum()
    size_M = jax.lax.stop_gradient(jnp.abs(gap_M))
    return loss, LossStats(
        loss=loss,
        tokens=loss_mask_M.sum().astype(jnp.float32),
        gap_sum=size_M.sum(),
        gap_max=size_M.max(initial=0.0),
        clipped=(loss_mask_M & (clipped_M < plain_M)).sum().astype(jnp.float32),
    )


def row_weights(
    trained_tokens_B: np.ndarray,
    normalisation: Normalisation,
    cap_B: np.ndarray,
    chunks: int = 1,
    seed: tuple[int, ...] = (0,),
) -> np.ndarray:
    """[B] fp32: the weight of each trained token of a row, for all B trained rows of one cell's step.

    Rows whose advantage is 0 are in here: they count in the denominator.
    - `tokens`: 1 / all trained tokens of the step. The default.
    - `sequence`: 1 / (rows * the row's tokens): the mean over rows of each row's token mean.
    - `constant`: 1 / sum of caps (Dr. GRPO, Liu et al., 2025): rows * cap where all caps are one.
    - `microbatch`: rows permuted (by `seed`), cut into `chunks` equal chunks, 1 / (chunks * the chunk's tokens): what
      the published runs did. Fewer rows than chunks make one chunk a row.
    A step without a trained token gives zeros.

    Worked example, rows of 2 and 6 tokens with caps of 8: tokens (1/8, 1/8), sequence (1/4, 1/12),
    constant (1/16, 1/16), microbatch with 2 chunks (1/4, 1/12).
    """
    count_B = np.asarray(trained_tokens_B, np.float64)
    rows = int((count_B > 0).sum())
    if rows == 0:
        return np.zeros(count_B.shape, np.float32)
    if normalisation == "tokens":
        weight_B = np.full(count_B.shape, 1 / count_B.sum())
    elif normalisation == "sequence":
        weight_B = 1 / (rows * np.maximum(count_B, 1))
    elif normalisation == "constant":
        weight_B = np.full(count_B.shape, 1 / np.asarray(cap_B, np.float64)[count_B > 0].sum())
    elif normalisation == "microbatch":
        order = np.random.default_rng(seed).permutation(np.flatnonzero(count_B > 0))
        parts = np.array_split(order, min(chunks, rows))
        weight_B = np.zeros(count_B.shape)
        for part in parts:
            weight_B[part] = 1 / (len(parts) * count_B[part].sum())
    else:
        raise ValueError(f"unknown normalisation {normalisation!r}; choose from {', '.join(NORMALISATIONS)}")
    return np.where(count_B > 0, weight_B, 0).astype(np.float32)
