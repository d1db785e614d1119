"""Set a study up: problems, tokenizer, cells, policy, learner, fresh state, in the order that fails cheapest first."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import model
from model import weights
from model.config import QWEN2_5_1_5B, ModelConfig
from model.lora import LoraConfig, init_lora
from model.tokenizer import ChatTokenizer
from rl.collect import Cell, Settings
from rl.config import Config, ConfigError
from rl.update import Learner, OptimConfig, TrainState, init_state
from rollout.distribution import Sampling
from rollout.play import longest_prompt
from rollout.policy import Policy, bucket_ladder
from tasks.base import Problem, Task
from tasks.registry import TASKS, DataOptions, Problems, TaskOptions, load_problems

BUILTIN = Path(model.__file__).parent / "builtin"
BUILTINS = {"builtin": BUILTIN, "builtin-hard": BUILTIN.with_name("builtin_hard")}
LORA_KEY = 0
"""Folded into a seed's key for the adapter's initial values."""


@dataclass
class Study:
    """Everything a run holds. `state` and `policy.lora` are of the same step."""

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
    state: TrainState

    @property
    def train_sampling(self) -> Sampling:
        return _train_sampling(self.config)

    @property
    def settings(self) -> Settings:
        """How a step is collected."""
        c = self.config
        rows = c.problems_per_step * c.episodes_per_problem
        return Settings(c.episodes_per_problem, c.rereads, rows, self.train_sampling)

    @property
    def eval_sampling(self) -> Sampling:
        c = self.config
        return Sampling(c.eval_temperature, c.eval_top_p, c.eval_top_k, c.eval_repetition_penalty)


def prepare(config: Config) -> Study:
    """Build a study; raises errors that name the setting, file or problem at fault."""
    tasks, cells = _cells(config)
    tokenizer, model_dir = _tokenizer(config)
    problems = _problems(config, tokenizer, list(tasks.values()))
    model_config, graph, base = _base(config, model_dir)
    if model_config.vocab < tokenizer.base_vocab:
        raise ConfigError(
            f"the tokenizer has {tokenizer.base_vocab} ids and the model's embedding {model_config.vocab} rows: "
            f"they don't belong together"
        )
    lora_config = LoraConfig(config.rank, config.alpha)
    state = init_state(_init_adapters(cells, model_config, lora_config), _optim(config))
    rows = config.problems_per_step * config.episodes_per_problem * _most_turns_in_a_round(tasks)
    policy = Policy(
        config=model_config,
        graph=graph,
        base=base,
        lora=state.lora,
        lora_scale=lora_config.scale,
        tokenizer=tokenizer,
        prompt_buckets=config.prompt_buckets or bucket_ladder(config.max_prompt_tokens, _first_bucket(config)),
        row_buckets=tuple(sorted({rows, config.eval_rows or rows})),
        force_length=config.force_length,
    )
    longest_row = config.max_prompt_tokens + max(config.message_tokens, config.answer_tokens)
    learner = Learner(
        graph=graph,
        base=base,
        lora_scale=lora_config.scale,
        allowed_V=policy.allowed_V,
        config=_optim(config),
        sampling=_train_sampling(config),
        remat=config.remat,
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
        train_buckets=config.train_buckets or bucket_ladder(longest_row, _first_bucket(config)),
        state=state,
    )


def _cells(config: Config) -> tuple[dict[str, Task], list[Cell]]:
    """Each arm's task, and the study's cells (arm x credit x seed)."""
    spec = TASKS[config.task]
    options = TaskOptions(
        message_tokens=config.message_tokens,
        answer_tokens=config.answer_tokens,
        prompt_style=config.prompt_style,
        copies=config.copies,
        degree=config.degree,
        deal=config.deal,
    )
    tasks = {arm: spec.build(arm, options) for arm in config.arms or list(spec.arms)[:1]}
    cells = [
        Cell(task, credit, seed)
        for arm, task in tasks.items()
        for credit in config.credit or [spec.arms[arm]]
        for seed in config.seeds
    ]
    return tasks, cells


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


def _first_bucket(config: Config) -> int:
    """Short tasks start their ladder at 64 tokens, long ones at 256, so that neither compiles many shapes."""
    return 64 if config.max_prompt_tokens <= 256 else 256


def _tokenizer(config: Config) -> tuple[ChatTokenizer, Path | None]:
    if config.model == "random":
        if config.tokenizer is None:
            raise ConfigError("--model random has no tokenizer of its own; name one with --tokenizer")
        return ChatTokenizer.load(weights.resolve(config.tokenizer)), None
    path = BUILTINS.get(config.model) or weights.resolve(config.model, config.revision)
    weights.load_config(path)  # an unsupported model is refused before its tokenizer is read
    own = path if config.tokenizer is None else weights.resolve(config.tokenizer)
    return ChatTokenizer.load(own), path


def _base(config: Config, path: Path | None) -> tuple[ModelConfig, Any, Any]:
    dtype = jnp.dtype(config.dtype)
    if path is None:
        sizes = QWEN2_5_1_5B if config.preset == "qwen2.5-1.5b" else weights.load_config(BUILTIN)
        return (sizes, *weights.random_base(sizes, config.data_seed, dtype))
    return weights.load(path, dtype)


def _problems(config: Config, tokenizer: ChatTokenizer, tasks: list[Task]) -> Problems:
    def unfit(problem: Problem) -> str | None:
        for task in tasks:
            if (reason := task.unsuitable(problem)) is not None:
                return reason
            if longest_prompt(tokenizer.encode_chat, task, problem) > config.max_prompt_tokens:
                return "too long"
        return None

    try:
        problems = load_problems(
            DataOptions(
                source=config.data,
                split_rule=config.split,
                train=config.train_problems,
                heldout=config.heldout_problems,
                seed=config.data_seed,
                revision=config.data_revision,
            ),
            any(task.parts > 1 for task in tasks),
            unfit,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"--data {config.data}: {error}") from error
    for name, have, asked in (
        ("train", problems.train, config.train_problems),
        ("heldout", problems.heldout, config.heldout_problems),
    ):
        if len(have) < asked:
            raise ConfigError(
                f"--{name}-problems asks for {asked} and {len(have)} are left ({problems.dropped}); ask for fewer, or "
                f"raise --max-prompt-tokens"
            )
    return problems


def _init_adapters(cells: list[Cell], sizes: ModelConfig, lora: LoraConfig) -> Any:
    """Adapters with leading axis X; a cell's depend on its seed alone, so arms of one seed start alike."""

    def one(seed: jax.Array) -> Any:
        return init_lora(jax.random.fold_in(jax.random.key(seed), LORA_KEY), sizes, lora)

    each = [jax.jit(one)(jnp.uint32(cell.seed)) for cell in cells]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def _most_turns_in_a_round(tasks: dict[str, Task]) -> int:
    return max(sum(turn.round == r for turn in task.turns) for task in tasks.values() for r in task.rounds)
