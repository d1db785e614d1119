"""From settings to what plays: tasks, tokenizer, base weights, problems, policy.

Training and evaluation both start here. Reads files and hubs and builds; decides nothing about training.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

import model
from model import weights
from model.config import QWEN2_5_1_5B, ModelConfig
from model.lora import LoraConfig
from model.peft import load_adapter
from model.tokenizer import ChatTokenizer
from rollout.distribution import Sampling
from rollout.play import longest_prompt
from rollout.policy import Policy, bucket_ladder
from tasks.base import Problem, Task
from tasks.registry import TASKS, DataOptions, Problems, TaskOptions, load_problems

BUILTIN = Path(model.__file__).parent / "builtin"
BUILTINS = {"builtin": BUILTIN, "builtin-hard": BUILTIN.with_name("builtin_hard")}


class ConfigError(ValueError):
    """A setting that cannot be run; the message says which and what would do."""


class PlaySettings(Protocol):
    """What is read here of a configuration (rl.config.Config, or a run directory's config.json)."""

    task: str
    preset: str
    arms: Sequence[str]
    credit: Sequence[str]
    seeds: Sequence[int]
    model: str
    tokenizer: str | None
    revision: str | None
    dtype: str
    data: str
    data_revision: str | None
    split: str
    data_seed: int
    train_problems: int
    heldout_problems: int
    problems_per_step: int
    episodes_per_problem: int
    copies: int
    degree: int
    deal: str
    message_tokens: int
    answer_tokens: int
    prompt_style: str
    max_prompt_tokens: int
    prompt_buckets: Sequence[int]
    base_evaluations: int
    eval_episodes: int
    eval_rows: int
    eval_temperature: float
    eval_top_p: float
    eval_top_k: int
    eval_repetition_penalty: float
    force_length: bool


def read_settings(run: Path) -> PlaySettings:
    """The settings of a run directory. Raises ConfigError where there is no config.json to read."""
    path = run / "config.json"
    try:
        return SimpleNamespace(**json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{run} is not a run directory: its config.json can't be read ({error})") from error


def build_tasks(c: PlaySettings) -> dict[str, Task]:
    """Each arm's task; without arms, the first one's."""
    return {arm: build_task(c, arm) for arm in c.arms or list(TASKS[c.task].arms)[:1]}


def build_task(c: PlaySettings, arm: str) -> Task:
    """One arm's task."""
    options = TaskOptions(
        message_tokens=c.message_tokens,
        answer_tokens=c.answer_tokens,
        prompt_style=c.prompt_style,
        copies=c.copies,
        degree=c.degree,
        deal=c.deal,
    )
    return TASKS[c.task].build(arm, options)


def cells_of(c: PlaySettings, tasks: Mapping[str, Task]) -> list[tuple[Task, str, int]]:
    """A study's cells, (task, credit rule, seed): every arm x rule x seed; without rules, each arm's own."""
    return [
        (task, credit, seed)
        for arm, task in tasks.items()
        for credit in c.credit or [TASKS[c.task].arms[arm]]
        for seed in c.seeds
    ]


def cell_name(task: Task, credit: str, seed: int) -> str:
    """What a cell is called in every file: 'channel_on-grpo-17'."""
    return f"{task.arm}-{credit}-{seed}"


def load_adapters(folders: Sequence[Path], sizes: ModelConfig) -> tuple[Any, LoraConfig]:
    """PEFT adapters side by side, leading axis X. ConfigError unless they have one rank and alpha."""
    loaded, configs = zip(*(load_adapter(folder, sizes) for folder in folders), strict=True)
    if len(set(configs)) > 1:
        raise ConfigError(f"adapters side by side need one rank and alpha; {folders[0]} and others differ")
    return stack(loaded), configs[0]


def load_tokenizer(c: PlaySettings) -> tuple[ChatTokenizer, Path | None]:
    """The tokenizer, and the base model's directory (None: random weights)."""
    if c.model == "random":
        if c.tokenizer is None:
            raise ConfigError("--model random has no tokenizer of its own; name one with --tokenizer")
        return ChatTokenizer.load(weights.resolve(c.tokenizer)), None
    path = BUILTINS.get(c.model) or weights.resolve(c.model, c.revision)
    weights.load_config(path)  # an unsupported model is refused before its tokenizer is read
    own = path if c.tokenizer is None else weights.resolve(c.tokenizer)
    return ChatTokenizer.load(own), path


def load_base(c: PlaySettings, path: Path | None, tokenizer: ChatTokenizer) -> tuple[ModelConfig, Any, Any]:
    """(sizes, graph, frozen weights) of the model in `path`, or random ones; ConfigError if the tokenizer isn't its."""
    dtype = jnp.dtype(c.dtype)
    if path is None:
        sizes = QWEN2_5_1_5B if c.preset == "qwen2.5-1.5b" else weights.load_config(BUILTIN)
        graph, base = weights.random_base(sizes, c.data_seed, dtype)
    else:
        sizes, graph, base = weights.load(path, dtype)
    if sizes.vocab < tokenizer.base_vocab:
        raise ConfigError(
            f"the tokenizer has {tokenizer.base_vocab} ids and the model's embedding {sizes.vocab} rows: "
            f"they don't belong together"
        )
    return sizes, graph, base


def load_task_problems(c: PlaySettings, tokenizer: ChatTokenizer, tasks: Sequence[Task]) -> Problems:
    """Training and held-out problems that all the tasks can be played with; ConfigError where there are too few."""

    def unfit(problem: Problem) -> str | None:
        for task in tasks:
            if (reason := task.unsuitable(problem)) is not None:
                return reason
            if longest_prompt(tokenizer.encode_chat, task, problem) > c.max_prompt_tokens:
                return "too long"
        return None

    options = DataOptions(
        source=c.data,
        split_rule=c.split,
        train=c.train_problems,
        heldout=c.heldout_problems,
        seed=c.data_seed,
        revision=c.data_revision,
    )
    try:
        return load_problems(options, any(task.parts > 1 for task in tasks), unfit)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--data {c.data}: {error}") from error


def make_policy(
    c: PlaySettings,
    base: tuple[ModelConfig, Any, Any],
    lora: Any,
    lora_scale: float,
    tokenizer: ChatTokenizer,
    tasks: Sequence[Task],
) -> Policy:
    """The policy that plays `tasks` with the adapters `lora`, leading axis X."""
    sizes, graph, frozen = base
    rows = c.problems_per_step * c.episodes_per_problem * _most_turns_in_a_round(tasks)
    return Policy(
        config=sizes,
        graph=graph,
        base=frozen,
        lora=lora,
        lora_scale=lora_scale,
        tokenizer=tokenizer,
        prompt_buckets=tuple(c.prompt_buckets) or bucket_ladder(c.max_prompt_tokens, first_bucket(c)),
        row_buckets=tuple(sorted({rows, c.eval_rows or rows})),
        force_length=c.force_length,
    )


def eval_sampling(c: PlaySettings) -> Sampling:
    """The evaluation's distribution."""
    return Sampling(c.eval_temperature, c.eval_top_p, c.eval_top_k, c.eval_repetition_penalty)


def first_bucket(c: PlaySettings) -> int:
    """Short tasks start their ladder at 64 tokens, long ones at 256, so that neither compiles many shapes."""
    return 64 if c.max_prompt_tokens <= 256 else 256


def stack(trees: Sequence[Any]) -> Any:
    """Adapters side by side, leading axis X."""
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)


def _most_turns_in_a_round(tasks: Sequence[Task]) -> int:
    return max(sum(turn.round == r for turn in task.turns) for task in tasks for r in task.rounds)
