"""Set a study up: problems, tokenizer, cells, policy, learner, fresh state, in the order that fails cheapest first."""

import dataclasses
from dataclasses import dataclass
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp

from eval.results import data_facts, versions
from eval.suite import Subject
from model import weights
from model.config import ModelConfig
from model.lora import LoraConfig, init_lora
from model.tokenizer import ChatTokenizer
from rl.collect import Cell, Settings
from rl.config import Config, to_json
from rl.credit import ChatOptions
from rl.memory import free_bytes, plan_memory
from rl.update import Learner, OptimConfig, TrainState, init_state
from rollout.distribution import Sampling
from rollout.policy import Policy, bucket_ladder
from rollout.setup import (
    build_tasks,
    cells_of,
    eval_sampling,
    first_bucket,
    load_base,
    load_task_problems,
    load_tokenizer,
    make_policy,
    stack,
)
from tasks.base import Task
from tasks.registry import Problems

LORA_KEY = 0
"""Folded into a seed's key for the adapter's initial values."""


@dataclass
class Study:
    """Everything a run holds. `state` and `policy.lora` are of the same step; `slots` of the update's micro-batches."""

    config: Config
    cells: list[Cell]
    tasks: dict[str, Task]
    problems: Problems
    tokenizer: ChatTokenizer
    base_fingerprint: str
    model_config: ModelConfig
    lora_config: LoraConfig
    policy: Policy
    learner: Learner
    train_buckets: tuple[int, ...]
    slots: int
    state: TrainState

    @property
    def train_sampling(self) -> Sampling:
        return _train_sampling(self.config)

    @property
    def settings(self) -> Settings:
        """How a step is collected."""
        c = self.config
        chat = ChatOptions(*(getattr(c, field.name) for field in dataclasses.fields(ChatOptions)))
        return Settings(c.episodes_per_problem, c.rereads, self.train_sampling, chat)

    @property
    def subjects(self) -> list[Subject]:
        """The cells, as evaluation knows them."""
        return [Subject(c.name, c.credit, c.seed, c.task, x) for x, c in enumerate(self.cells)]

    def facts(self, seconds: dict[str, float], device: str) -> dict[str, Any]:
        """What a run directory doesn't tell of a run; see eval.results."""
        compiles = {f"sample {'x'.join(map(str, k))}": s for k, s in self.policy.compiles.items()}
        return {
            "config": to_json(self.config),
            "steps": int(self.state.step),
            "sampling": {"train": vars(self.train_sampling), "evaluation": vars(eval_sampling(self.config))},
            "data": data_facts(self.problems, self.tokenizer, self.base_fingerprint),
            "versions": versions(),
            "device": device,
            "seconds": seconds,
            "compiles": compiles | self.learner.compiles,
        }


def prepare(config: Config) -> Study:
    """Build a study; raises errors that name the setting, file or problem at fault."""
    Thread(target=jax.devices).start()  # a GPU takes seconds to wake, in which tokenizer and problems can be read
    tasks = build_tasks(config)
    cells = [Cell(*cell) for cell in cells_of(config, tasks)]
    tokenizer, model_dir = load_tokenizer(config)
    problems = load_task_problems(config, tokenizer, list(tasks.values()))
    base = load_base(config, model_dir, tokenizer)
    model_config, graph, frozen = base
    lora_config = LoraConfig(config.rank, config.alpha)
    state = init_state(_init_adapters(cells, model_config, lora_config), _optim(config))
    policy = make_policy(config, base, state.lora, lora_config.scale, tokenizer, list(tasks.values()))
    longest_row = config.max_prompt_tokens + max(config.message_tokens, config.answer_tokens)
    train_buckets = config.train_buckets or bucket_ladder(longest_row, first_bucket(config))
    wanted = None if config.remat == "auto" else config.remat
    row_tokens = config.micro_rows * train_buckets[-1]
    memory = plan_memory(wanted, free_bytes(), model_config, config.dtype, config.rank, len(cells), row_tokens)
    learner = Learner(
        graph=graph,
        base=frozen,
        lora_scale=lora_config.scale,
        allowed_V=policy.allowed_V,
        config=_optim(config),
        sampling=_train_sampling(config),
        remat=memory.remat,
    )
    return Study(
        config=config,
        cells=cells,
        tasks=tasks,
        problems=problems,
        tokenizer=tokenizer,
        base_fingerprint=weights.fingerprint(model_dir) if model_dir else "random",
        model_config=model_config,
        lora_config=lora_config,
        policy=policy,
        learner=learner,
        train_buckets=train_buckets,
        slots=memory.slots,
        state=state,
    )


def _train_sampling(config: Config) -> Sampling:
    return Sampling(config.temperature, config.top_p, config.top_k)


def _optim(config: Config) -> OptimConfig:
    return OptimConfig(
        lr=config.lr,
        steps=config.steps,
        clip_norm=config.clip_norm,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )


def _init_adapters(cells: list[Cell], sizes: ModelConfig, lora: LoraConfig) -> Any:
    """Adapters with leading axis X; a cell's depend on its seed alone, so arms of one seed start alike."""

    def one(seed: jax.Array) -> Any:
        return init_lora(jax.random.fold_in(jax.random.key(seed), LORA_KEY), sizes, lora)

    each = [jax.jit(one)(jnp.uint32(cell.seed)) for cell in cells]
    return stack(each)
