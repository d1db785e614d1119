"""The one configuration of a run, its presets, and the checks that need no model. Every field is a flag."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.loss import Normalisation
from rl.rules import CREDITS, TWIN
from rollout.distribution import Sampling
from rollout.setup import ConfigError
from tasks.board import BoardSizes
from tasks.registry import TASKS


@dataclass(frozen=True)
class Config:
    """Train copies of one model to be useful to each other, and evaluate what they learned."""

    task: Literal["talk_to_solve", "talk_three", "ask_to_solve", "message_board", "board_writers"] = "talk_to_solve"
    """What the copies play."""
    preset: Literal["tiny", "tiny-hard", "qwen2.5-1.5b"] = "tiny"
    """Defaults for every other flag: `tiny` runs on a laptop in minutes, `tiny-hard` starts where most groups are flat,
    `qwen2.5-1.5b` is the published setting."""
    arms: tuple[str, ...] = ()
    """Arms of the task, by default its first; each arm x credit x seed is one cell, and all train side by side."""
    credit: tuple[str, ...] = ()
    """Credit rules: how graded answers become advantages. By default each arm's own."""
    seeds: tuple[int, ...] = (17,)
    """Training seeds: adapter initialisation, order of problems, sampling."""

    model: str = "builtin"
    """Base model: `builtin`, `builtin-hard`, a Hugging Face directory or hub id, or `random` (random weights of the
    preset's shape)."""
    tokenizer: str | None = None
    """Tokenizer directory or hub id; by default the model's own."""
    revision: str | None = None
    """Revision of a model on the hub; pin it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the frozen base and of activations. Adapters, optimiser, norms, softmax, logits and loss are float32."""
    remat: Literal["auto", "none", "products", "all"] = "auto"
    """What the backward pass computes again instead of keeping it: nothing; all but large `products` and attention; or
    all. `auto`: on a GPU `products` if they fit in its memory, else `all`; on a CPU nothing."""
    rank: int = 32
    """LoRA rank."""
    alpha: float = 64.0
    """LoRA alpha; an adapter is multiplied by alpha / rank."""

    data: str = "stories"
    """Problems: `stories` (built in), a directory with train.jsonl and test.jsonl, or a hub id such as openai/gsm8k."""
    data_revision: str | None = None
    """Revision of a data set on the hub; pin it."""
    split: Literal["clean", "published"] = "clean"
    """How a problem's text is cut into facts (SPEC 2.3)."""
    data_seed: int = 0
    """Chooses training and held-out problems; the same for every training seed."""
    train_problems: int = 1024
    """Training problems, count."""
    heldout_problems: int = 300
    """Held-out problems, count."""

    steps: int = 50
    """Optimiser updates; the learning rate falls linearly to 0 over them."""
    problems_per_step: int = 8
    """Problems in each step, of each cell."""
    episodes_per_problem: int = 4
    """Episodes of each problem in a step: the group that shares a baseline."""
    copies: int = 4
    """Copies at a board."""
    degree: int = 2
    """Notes that a reader reads on the ring of board_writers; every note then has as many readers."""
    deal: Literal["whole", "dealt"] = "dealt"
    """What a copy at a board sees: the whole problem, or one half of its facts (copy j holds half j mod 2)."""
    rereads: int = 1
    """Re-readings of each other board, for credit rules that compare boards; continuations of each prefix of a chat,
    for `prefix_value`."""
    ada_rounds: int = 3
    """Rounds of chats that reinforce_ada draws of a problem at most, the first included."""
    ada_flat: Literal["equal", "binary"] = "equal"
    """reinforce_ada calls a problem flat if its chats' team rewards are all equal, or if none or all are full wins."""
    ada_replay: Literal["flat", "all_wrong"] = "flat"
    """Which flat problems reinforce_ada draws again: all, or those without any reward."""
    ada_keep_flat: bool = True
    """Problems that stay flat keep their tokens in the loss's denominator."""
    ada_baseline: Literal["drawn", "kept"] = "drawn"
    """reinforce_ada's baseline: the mean of every chat drawn, or of the chats kept."""
    raft_norm: Literal["tokens", "win_tokens"] = "tokens"
    """raft divides its loss by the tokens of all chats, or of the winners."""
    reliability_every: int = 10
    """Steps between measurements of the split-half reliability of note credit (two re-readings); 0: never."""
    message_tokens: int = 24
    """Cap of a message or note, tokens, end-of-turn included."""
    answer_tokens: int = 28
    """Cap of an answer, tokens, end-of-turn included."""
    prompt_style: Literal["short", "full"] = "short"
    """Wording of the prompts."""
    max_prompt_tokens: int = 160
    """Longest prompt, tokens; problems that could exceed it are left out at load, with a count."""
    prompt_buckets: tuple[int, ...] = ()
    """Prompt lengths that the sampler compiles for, tokens, ascending; empty: a ladder up to max_prompt_tokens."""
    train_buckets: tuple[int, ...] = ()
    """Row lengths that the update compiles for, tokens, ascending; empty: a ladder."""

    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    clip_norm: float = 1.0
    """Global-norm clip of each cell's gradient."""
    clip_low: float = 0.2
    """Lower ratio clip: 1 - this."""
    clip_high: float = 0.28
    """Upper ratio clip: 1 + this."""
    normalisation: Normalisation = "tokens"
    """What a step's loss is divided by: all its trained tokens, or see rl.loss.row_weights."""
    normalisation_chunks: int = 4
    """Equal chunks of the `microbatch` normalisation."""
    micro_rows: int = 8
    """Rows (utterances) in a micro-batch, of each cell; on a GPU as many as have no more tokens than so many of the
    longest training bucket. Never changes the gradient."""

    temperature: float = 0.9
    """Sampling temperature in training."""
    top_p: float = 1.0
    """Nucleus mass in training; 1 is off."""
    top_k: int = 0
    """Tokens kept in training; 0 is off."""
    eval_temperature: float = 0.9
    """Sampling temperature in evaluation."""
    eval_top_p: float = 0.95
    """Nucleus mass in evaluation."""
    eval_top_k: int = 0
    """Tokens kept in evaluation; 0 is off."""
    eval_repetition_penalty: float = 1.0
    """Repetition penalty in evaluation; 1 is off."""
    base_evaluations: int = 3
    """Evaluations of the untrained base, each with fresh draws; 3 measure how far two evaluations differ by luck."""
    eval_episodes: int = 2
    """Episodes of each held-out problem in an evaluation."""
    eval_rows: int = 0
    """Rows of each cell the sampler takes at a time in evaluation; 0: as many as in training, so none is compiled."""

    out: Path | None = None
    """Run directory; by default runs/<task>-<date>-<time>."""
    compile_cache: Path | None = None
    """Directory in which compiled executables are kept, so that later runs of the same shapes start at once. It must be
    trusted: what lies there is run."""
    checkpoint_every: int = 10
    """Steps between checkpoints."""
    episodes_every: int = 10
    """Steps between the steps whose episodes are written to episodes.jsonl."""
    show_every: int = 10
    """Steps between the chats shown in the terminal; 0: none."""
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Live tracking beside metrics.jsonl, under the same names (needs the `tracking` extra)."""
    force_length: bool = False
    """Ignore the end-of-turn token, so that every reply is as long as its cap. For timing only."""
    evaluate: bool = True
    """Evaluate on held-out problems before and after."""


def check(config: Config) -> None:
    """Refuse what cannot be run, before anything is loaded. Raises ConfigError."""
    spec = TASKS[config.task]
    _choices("--arms", config.arms, tuple(spec.arms), f"task {config.task}")
    _choices("--credit", config.credit, tuple(CREDITS), "this stack")
    useless = [c for c in config.credit if not CREDITS[c].serves(spec.boards)]
    if useless:
        useful = ", ".join(name for name, rule in CREDITS.items() if rule.serves(spec.boards))
        raise ConfigError(f"--credit {useless[0]} is of no use to task {config.task}; it takes {useful}")
    if "grpo_equal_compute" in config.credit and TWIN not in config.credit:
        raise ConfigError(f"--credit grpo_equal_compute draws as many chats as {TWIN} does; add it to the study")
    if spec.boards:
        try:
            BoardSizes(config.copies, config.degree, config.message_tokens, config.answer_tokens)
        except ValueError as error:
            raise ConfigError(f"--copies {config.copies} --degree {config.degree}: {error}") from error
    for name in ("arms", "credit", "seeds"):
        values = getattr(config, name)
        if len(set(values)) != len(values) or (name == "seeds" and not values):
            raise ConfigError(f"--{name} must name at least one value and none twice; got {list(values)}")
    positive = (
        "rank steps problems_per_step episodes_per_problem message_tokens answer_tokens max_prompt_tokens micro_rows "
        "rereads ada_rounds train_problems heldout_problems checkpoint_every episodes_every "
        "base_evaluations eval_episodes normalisation_chunks"
    )
    for name in positive.split():
        if getattr(config, name) < 1:
            raise ConfigError(f"{_flag(name)} is {getattr(config, name)}; it must be at least 1")
    for name in ("lr", "alpha", "clip_norm"):
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{_flag(name)} is {getattr(config, name)}; it must be a finite number, 0 or more")
    for prefix, penalty in (("", 1.0), ("eval_", config.eval_repetition_penalty)):
        try:
            Sampling(*(getattr(config, prefix + name) for name in ("temperature", "top_p", "top_k")), penalty)
        except ValueError as error:
            raise ConfigError(f"{_flag(prefix)}{error}") from error
    for name in ("show_every", "eval_rows", "reliability_every"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{_flag(name)} is {getattr(config, name)}; it must be 0 or more")
    for seed in (*config.seeds, config.data_seed):
        if not 0 <= seed < 1 << 32:
            raise ConfigError(f"seed {seed} of --seeds or --data-seed is not a 32-bit number: 0 to {(1 << 32) - 1}")
    if config.train_problems < config.problems_per_step:
        raise ConfigError(
            f"--train-problems {config.train_problems} is fewer than --problems-per-step {config.problems_per_step}"
        )
    for name in ("prompt_buckets", "train_buckets"):
        buckets = getattr(config, name)
        if list(buckets) != sorted(set(buckets)):
            raise ConfigError(f"{_flag(name)} must ascend; got {list(buckets)}")
    if config.prompt_buckets and config.prompt_buckets[-1] < config.max_prompt_tokens:
        raise ConfigError(
            f"the longest of --prompt-buckets, {config.prompt_buckets[-1]}, must hold --max-prompt-tokens "
            f"{config.max_prompt_tokens}"
        )


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _choices(flag: str, values: tuple[str, ...], valid: tuple[str, ...], whose: str) -> None:
    unknown = [v for v in values if v not in valid]
    if unknown:
        raise ConfigError(f"{flag} {unknown[0]!r} is unknown to {whose}; choose from {', '.join(valid)}")


def to_json(config: Config) -> dict[str, Any]:
    """The config as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(raw: dict[str, Any]) -> Config:
    """A config from `to_json`'s form. Raises ConfigError naming unknown or missing fields."""
    names = {f.name for f in dataclasses.fields(Config)}
    if set(raw) != names:
        wrong = sorted(set(raw) ^ names)
        raise ConfigError(f"the saved config and this version's differ in fields: {', '.join(wrong)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    paths = {name: Path(values[name]) if values[name] else None for name in ("out", "compile_cache")}
    return Config(**{**values, **paths})


FREE_ON_RESUME = {"out", "show_every", "track", "compile_cache"}
"""Fields that a resumed run may change: they change no number."""


def differences(saved: Config, given: Config) -> list[str]:
    """One line for each field that differs and may not."""
    lines = []
    for field in dataclasses.fields(Config):
        was, now = getattr(saved, field.name), getattr(given, field.name)
        if was != now and field.name not in FREE_ON_RESUME:
            lines.append(f"{_flag(field.name)}: the run has {was!r}, given {now!r}")
    return lines
