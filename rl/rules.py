"""The credit rules there are, by name. To add one: write the function, and add a line here."""

from rl.board_credit import (
    board_rule,
    discounted_board,
    evidence_gain,
    leave_one_out,
    nothing,
    own_plus_readers,
    readers_mean,
    rescue,
    shapley,
)
from rl.chat_credit import discounted_chat, prefix_value, raft, reinforce_ada
from rl.credit import Credit, CreditRule, Draw, Group, Needs, grpo

TWIN = "reinforce_ada"
"""The rule whose number of chats `grpo_equal_compute` copies."""


def discounted_team(group: Group) -> Credit:
    """MAPoRL's rule, over the turns of a board or over the chats of a problem."""
    return discounted_board(group) if group.notes_U.any() else discounted_chat(group)


CREDITS: dict[str, CreditRule] = {
    "grpo": CreditRule(grpo, boards=False),
    "reinforce_ada": CreditRule(reinforce_ada, boards=False, draw=Draw.REPLAY),
    "raft": CreditRule(raft, boards=False),
    "mixed_partners": CreditRule(grpo, boards=False, mixed=True),
    "ada_mixed": CreditRule(reinforce_ada, boards=False, draw=Draw.REPLAY, mixed=True),
    "grpo_equal_compute": CreditRule(grpo, boards=False, draw=Draw.AS_REPLAYED),
    "prefix_value": CreditRule(prefix_value, boards=False, needs=Needs.PREFIXES),
    "readers_only": CreditRule(board_rule(nothing, centred=False), boards=True, varies=False),
    "readers_mean": CreditRule(board_rule(readers_mean, centred=True), boards=True),
    "own_plus_readers": CreditRule(board_rule(own_plus_readers, centred=True), boards=True),
    "leave_one_out": CreditRule(board_rule(leave_one_out, centred=False), True, Needs.WITHOUT_ONE),
    "evidence_gain": CreditRule(board_rule(evidence_gain, centred=False), True, Needs.EVIDENCE),
    "rescue": CreditRule(board_rule(rescue, centred=False), boards=True),
    "shapley": CreditRule(board_rule(shapley, centred=True), True, Needs.SUBSETS),
    "discounted_team": CreditRule(discounted_team, boards=None),
}
