"""What a chat is worth half way: continuations sampled from every prefix, for the rule that pays turns by them.

A continuation is an episode whose first turns are given; it runs in the same batched sampler as everything else.
"""

from collections.abc import Sequence

import numpy as np

from rl.credit import team_reward
from rl.reread import NOTHING, Measured, Reading, again, fresh_tokens, shape_of
from rollout.distribution import Sampling
from rollout.play import play_graded
from rollout.policy import Policy
from tasks.grading import Grader


def continue_from(
    policy: Policy, grader: Grader, readings_X: Sequence[Reading], draws: int, part: int, sampling: Sampling
) -> list[Measured]:
    """Per cell `before_EU` [E, U]: mean team reward of `draws` continuations from just before each turn's round.

    NaN before the first round, which nothing stands before. `part` keeps the draws of different measurements apart.
    """
    plans_X, places_X = [], []
    for reading in readings_X:
        rounds = reading.task.rounds
        plans, places = [], []
        for e, episode in enumerate(reading.episodes):
            for k, r in enumerate(rounds[1:]):
                given = {u.turn: u for u in episode.utterances if reading.task.turns[u.turn].round < r}
                for draw in range(draws):
                    number = 1 + (part * len(rounds) + k) * draws + draw
                    plans.append(again(episode.plan, reading.task, number, given))
                    places.append((e, r))
        plans_X.append(plans)
        places_X.append(places)
    out = []
    for reading, places, played in zip(
        readings_X, places_X, play_graded(policy, grader, plans_X, sampling), strict=True
    ):
        if not reading.episodes:
            out.append(NOTHING)
            continue
        reward_N = team_reward(shape_of(reading.task, played).answers_GU)
        before_EU = np.full((len(reading.episodes), len(reading.task.turns)), np.nan)
        for e in range(len(reading.episodes)):
            for u, turn in enumerate(reading.task.turns):
                of_turn = [reward for reward, place in zip(reward_N, places, strict=True) if place == (e, turn.round)]
                if of_turn:
                    before_EU[e, u] = np.mean(of_turn)
        out.append(Measured(before_EU=before_EU, tokens=fresh_tokens(played)))
    return out
