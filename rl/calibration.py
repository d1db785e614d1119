"""What a built-in model can do and how often it does it, measured on held-out stories: rl.warmstart's closing lines.

Grades with a pattern match, which is enough for scripts. Left out: intervals; rl.train's evaluations have them.
"""

import itertools
import random
import re
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from eval.talk import asks, sends_own, uses_partner
from model.lora import LoraConfig, init_lora
from model.qwen2 import Qwen2
from model.tokenizer import ChatTokenizer
from rollout.distribution import Sampling
from rollout.episode import Episode, EpisodePlan, RowId
from rollout.play import longest_prompt, play
from rollout.policy import Policy, Request, bucket_ladder
from tasks.base import Task
from tasks.habits import ANSWER_TOKENS, EASY, Setting
from tasks.scripts import Row, forced_row, told
from tasks.stories import Story, story_stream

EVALUATION, TRAINING = Sampling(temperature=0.9, top_p=0.95), Sampling(temperature=0.9)
"""As rl.config's defaults have it."""
GREEDY = Sampling(1e-3)
GROUP = 4
"""Chats of a story that share a baseline in training."""
ROWS = 128
"""Rows that the sampler takes at a time."""
COUNT = 512
"""Held-out stories."""


def heldout_stories(count: int, setting: Setting) -> list[Story]:
    stream = story_stream(random.Random("calibration"), heldout=True, least_facts=setting.least_facts)
    return list(itertools.islice(stream, count))


def make_policy(model: Qwen2, tokenizer: ChatTokenizer, setting: Setting = EASY) -> Policy:
    """The model with an adapter that changes nothing."""
    graph, params = nnx.split(model)
    lora = jax.tree.map(lambda x: x[None], init_lora(jax.random.key(0), model.config, LoraConfig(1, 1.0)))
    problems = [story.problem for story in heldout_stories(COUNT, setting)]
    tasks = [task for arms in setting.tasks.values() for task in arms.values()]
    longest = max(longest_prompt(tokenizer.encode_chat, task, problem) for task in tasks for problem in problems)
    # The answer's beginning may be given on top of a prompt.
    buckets = bucket_ladder(longest + ANSWER_TOKENS)[1:]
    return Policy(model.config, graph, params, lora, 0.0, tokenizer, buckets, (ROWS,))


def is_right(story: Story, text: str) -> bool:
    boxes = re.findall(r"\\boxed\{(\d+)\}", text)
    return bool(boxes) and boxes[-1] == story.problem.answer


def chats(policy: Policy, task: Task, held: list[Story], sampling: Sampling, group: int = 1) -> list[list[Episode]]:
    """`group` episodes a story, graded."""
    plans = [
        EpisodePlan(task, replace(story.problem, id=str(index)), episode, 0, 0, (0.0,) * len(task.agents))
        for index, story in enumerate(held)
        for episode in range(group)
    ]
    played = iter(play(policy, [plans], sampling)[0])
    return [[_graded(story, next(played)) for _ in range(group)] for story in held]


def _graded(story: Story, episode: Episode) -> Episode:
    return episode.graded({u: float(is_right(story, episode.utterances[u].text)) for u in episode.plan.task.graded})


def answers(policy: Policy, rows: list[Row], starts: list[str], sampling: Sampling) -> list[str]:
    """A reply a row, made to start with its text of `starts`."""
    requests = []
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        prompt = policy.tokenizer.encode_chat(row.task.render(row.story.problem, row.turn, row.heard))
        prompt = prompt + policy.tokenizer.encode_text(start)
        requests.append(Request(str(index), prompt, ANSWER_TOKENS, 0.0, RowId(0, 0, index, 0, row.turn)))
    replies = policy.sample([requests], sampling)[0]
    return [start + policy.tokenizer.decode(reply.tokens) for start, reply in zip(starts, replies)]


def calibrate(model: Qwen2, tokenizer: ChatTokenizer, setting: Setting = EASY, count: int = COUNT) -> dict[str, float]:
    """Shares on `count` held-out stories, one chat each; groups are of a quarter of the stories, `GROUP` chats each."""
    held, policy, out = heldout_stories(count, setting), make_policy(model, tokenizer, setting), {}
    for name, arms in setting.tasks.items():
        for arm, task in arms.items():
            said = [group[0] for group in chats(policy, task, held, EVALUATION)]
            out[f"{name}: pass@1, {arm}"] = np.mean([e.correct for e in said])
            for metric in (sends_own, asks, uses_partner):
                out[f"{name}: {metric.__name__}, {arm}"] = np.mean([v for e in said for v in metric(e)])
            if arm == "channel_on":
                out[f"{name}: answers that were told all facts"] = np.mean(
                    [fully_told(story, e, u) for story, e in zip(held, said) for u in task.graded]
                )
        groups = chats(policy, arms["channel_on"], held[: count // GROUP], TRAINING, GROUP)
        rewards_PG = np.array([[np.mean(e.correct) for e in group] for group in groups])
        out[f"{name}: mean reward in groups of {GROUP}, top_p 1"] = rewards_PG.mean()
        out[f"{name}: flat groups"] = np.mean(rewards_PG.min(1) == rewards_PG.max(1))
        out |= _skill(policy, setting, name, held)
    return {name: float(value) for name, value in out.items()}


def fully_told(story: Story, episode: Episode, turn: int) -> bool:
    """Did the others' messages tell an answering copy every fact that it lacks?"""
    task = episode.plan.task
    heard = {v: episode.utterances[v].text for v in task.turns[turn].reads}
    return len(told(task, story, turn, heard)) + len(task.facts_of(story.problem, task.turns[turn].agent)) == len(
        story.numbers
    )


def _skill(policy: Policy, setting: Setting, name: str, held: list[Story]) -> dict[str, float]:
    """With every fact told: how often it uses them by itself, and how often that is then right."""
    rows, out = [forced_row(story, random.Random(index), setting, name) for index, story in enumerate(held)], {}
    free = answers(policy, rows, [""] * len(rows), TRAINING)
    uses = np.array([reply.startswith(row.given) for reply, row in zip(free, rows)])
    agents = np.array([row.task.turns[row.turn].agent for row in rows])
    for agent in sorted(set(agents)):
        out[f"{name}: {rows[0].task.agents[agent]} uses all facts when told"] = uses[agents == agent].mean()
    for words, sampling in (("greedy", GREEDY), ("top_p 0.95", EVALUATION), ("top_p 1", TRAINING)):
        replies = answers(policy, rows, [row.given for row in rows], sampling)
        right = [is_right(story, reply) for story, reply in zip(held, replies)]
        out[f"{name}: right when it uses them, {words}"] = np.mean(right)
    return out
