"""The update: gradients of micro-batches, summed, clipped, and one AdamW step, for all cells at once.

The base is frozen and shared; adapters, optimiser states and batches have a leading cell axis X, over which forward,
gradient and update are `vmap`ped. Logits are computed for trained tokens only, in chunks, and once
(rollout.scorer). Executables are compiled ahead of time and counted.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from model.executables import compile_together
from model.programs import Program
from model.remat import Remat
from rl.batch import Batch
from rl.loss import LossStats, policy_gradient_loss
from rollout.distribution import Sampling, Shape
from rollout.sampler import over_cells
from rollout.scorer import selected_count, selected_logp


class TrainState(NamedTuple):
    """`step` scalar int32: updates done; `lora` and `opt_state` with leading cell axis X."""

    step: jax.Array
    lora: Any
    opt_state: Any


@dataclass(frozen=True)
class OptimConfig:
    """AdamW as published: peak `lr` falling linearly to 0 over `steps`, global-norm clip, no weight decay."""

    lr: float
    steps: int
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.28


def optimiser(config: OptimConfig) -> optax.GradientTransformation:
    schedule = optax.linear_schedule(config.lr, 0.0, config.steps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b1=0.9, b2=0.999, eps=1e-8, weight_decay=config.weight_decay),
    )


def init_state(lora: Any, config: OptimConfig) -> TrainState:
    """A fresh state for the cells of `lora`."""
    return TrainState(jnp.int32(0), lora, jax.vmap(optimiser(config).init)(lora))


def batch_loss(
    model: Any,
    lora: Any,
    scale: jax.Array,
    batch: Batch,
    count: jax.Array,
    shape: Shape,
    allowed_V: jax.Array,
    clip: tuple[float, float],
    remat: Remat,
) -> tuple[jax.Array, LossStats]:
    """One cell's share of the step's loss from one micro-batch, and its sums; `count`: of `select`, see the scorer."""
    scale_B = jnp.full((batch.tokens.shape[0],), scale)
    logp_M = selected_logp(
        model, lora, scale_B, batch.tokens, batch.select, count, shape, allowed_V, remat, batch.places
    )
    pick = lambda x: x.reshape(-1)[batch.select]  # noqa: E731 - a name for one gather, used four times
    return policy_gradient_loss(
        logp_M,
        pick(batch.old_logp),
        pick(batch.advantage),
        pick(batch.loss_mask),
        pick(batch.weight),
        *clip,
    )


class NonFiniteLoss(RuntimeError):
    """The loss or a gradient of a step is not finite; the update was not applied."""


class StepStats(NamedTuple):
    """Per cell [X]: the step's `loss`, `grad_norm` before clipping, trained `tokens`, the gap, clipped share."""

    loss: np.ndarray
    grad_norm: np.ndarray
    tokens: np.ndarray
    gap_mean: np.ndarray
    gap_max: np.ndarray
    clipped_frac: np.ndarray


@dataclass
class Learner:
    """Holds the executables of the update. `lora_scale` is alpha / rank; `remat`: see model.remat."""

    graph: Any
    base: Any
    lora_scale: float
    allowed_V: jax.Array
    config: OptimConfig
    sampling: Sampling
    remat: Remat
    compiles: dict[str, float] = field(default_factory=dict)
    loads: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"update": 0.0, "compile": 0.0})
    _executables: dict[tuple, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sampling.repetition_penalty != 1:
            raise ValueError(
                "training with a repetition penalty is refused: the loss would need the penalised distribution of "
                "every position; use it for evaluation only"
            )

    def update(self, state: TrainState, batches: list[Batch]) -> tuple[TrainState, StepStats]:
        """Sum the gradients of `batches`, then clip and apply. No batches (all flat) is a step of zero gradient.

        Raises NonFiniteLoss, naming the step and cells, before anything is applied.
        """
        compiling = self.seconds["compile"]
        started = time.perf_counter()
        grads = jax.tree.map(jnp.zeros_like, state.lora)
        sums = []
        apply = partial(apply_gradients, self.config)
        others = {
            "norm": Program(grad_norms, (grads,)),
            "apply": Program(apply, (grads, state.opt_state, state.lora), donate=(1, 2)),
        }
        self._prepare(self._gradients(state.lora, batches) | others)
        for batch in batches:
            grads, stats = self.accumulate(state.lora, grads, batch)
            sums.append(stats)
        cells = jax.tree.leaves(state.lora)[0].shape[0]
        stats, grad_norm = self._totals(sums, grads, cells)
        broken = ~(np.isfinite(stats.loss) & np.isfinite(grad_norm))
        if broken.any():
            raise NonFiniteLoss(
                f"step {int(state.step)}: loss {stats.loss.tolist()}, gradient norm {grad_norm.tolist()} for cells "
                f"{np.flatnonzero(broken).tolist()}; the update was not applied"
            )
        lora, opt_state = self._executables["apply"](grads, state.opt_state, state.lora)
        jax.block_until_ready(lora)
        self.seconds["update"] += time.perf_counter() - started - (self.seconds["compile"] - compiling)
        return TrainState(state.step + 1, lora, opt_state), stats._replace(grad_norm=grad_norm)

    def _prepare(self, programs: dict[str, Program]) -> None:
        """Load or compile those that are new, side by side, and count them."""
        new = {name: program for name, program in programs.items() if name not in self._executables}
        if not new:
            return
        started = time.perf_counter()
        built = dict(zip(new, compile_together(list(new.values())), strict=True))
        self._executables |= {name: one.executable for name, one in built.items()}
        seconds = time.perf_counter() - started
        for name, one in built.items():
            (self.loads if one.loaded else self.compiles)[name] = seconds / len(new)
        self.seconds["compile"] += seconds

    def _gradients(self, lora: Any, batches: list[Batch]) -> dict[str, Program]:
        """The program of each new shape among `batches`."""
        function = partial(add_gradient, self.graph, (self.config.clip_low, self.config.clip_high), self.remat)
        new = {gradient_name(b): b for b in batches if gradient_name(b) not in self._executables}
        return {
            name: Program(function, self._gradient_args(lora, lora, batch), donate=(2,), large=True)
            for name, batch in new.items()
        }

    def _gradient_args(self, lora: Any, grads: Any, batch: Batch) -> tuple:
        batch, shape = jax.tree.map(jnp.asarray, batch), self.sampling.arrays()
        return self.base, lora, grads, batch, shape, jnp.float32(self.lora_scale), self.allowed_V

    def accumulate(self, lora: Any, grads: Any, batch: Batch) -> tuple[Any, LossStats]:
        """Add one micro-batch's gradient to `grads` (which is donated)."""
        self._prepare(self._gradients(lora, [batch]))
        return self._executables[gradient_name(batch)](*self._gradient_args(lora, grads, batch))

    def _totals(self, sums: list[LossStats], grads: Any, cells: int) -> tuple[StepStats, np.ndarray]:
        norm = self._executables["norm"](grads)
        zero = np.zeros(cells, np.float32)
        got, grad_norm = jax.device_get((sums, norm))
        total = LossStats(*(sum((getattr(s, f) for s in got), zero) for f in LossStats._fields))
        seen = np.maximum(total.tokens, 1)
        gap_max = np.max([s.gap_max for s in got], axis=0) if got else zero
        return (
            StepStats(total.loss, grad_norm, total.tokens, total.gap_sum / seen, gap_max, total.clipped / seen),
            grad_norm,
        )


def add_gradient(
    graph: Any,
    clip: tuple[float, float],
    remat: Remat,
    base: Any,
    lora: Any,
    grads: Any,
    batch: Batch,
    shape: Shape,
    scale: jax.Array,
    allowed_V: jax.Array,
) -> tuple[Any, LossStats]:
    """`grads` plus the gradient of one micro-batch, and its sums, for every cell; `clip`: by how much the probability
    ratio may fall below 1 and rise above it."""
    model = nnx.merge(graph, base)
    cells, count = batch.cells, selected_count(batch.select)

    def slot(lora, batch):
        def loss(lora):
            return batch_loss(model, lora, scale, batch, count, shape, allowed_V, clip, remat)

        return jax.grad(loss, has_aux=True)(lora)

    new, stats = over_cells(slot)(jax.tree.map(lambda leaf: leaf[cells], lora), batch)
    count = jax.tree.leaves(lora)[0].shape[0]
    zero = jnp.zeros(count, jnp.float32)
    totals = jax.tree.map(lambda stat: zero.at[cells].add(stat), stats)
    totals = totals._replace(gap_max=zero.at[cells].max(stats.gap_max))
    return jax.tree.map(lambda total, part: total.at[cells].add(part), grads, new), totals


def grad_norms(grads: Any) -> jax.Array:
    """[X]: each cell's norm of its gradient."""
    return jax.vmap(optax.tree.norm)(grads)


def apply_gradients(config: OptimConfig, grads: Any, opt_state: Any, lora: Any) -> tuple[Any, Any]:
    """The cells' adapters after one AdamW step, and its state."""
    # optax raises floats to integer powers, which strict promotion (our tests) refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = jax.vmap(optimiser(config).update)(grads, opt_state, lora)
        return optax.apply_updates(lora, updates), opt_state


def gradient_name(batch: Batch) -> str:
    """The name of a micro-batch's shape: slots x rows x tokens, and how many may be trained; packed, are there."""
    return f"gradient {'x'.join(map(str, batch.tokens.shape))} for {batch.select.shape[1]}"
