"""The credit rules there are, by name. To add one: write the function, and add a line here."""

from rl.board_credit import (
    board_rule,
    discounted_team,
    evidence_gain,
    leave_one_out,
    nothing,
    own_plus_readers,
    readers_mean,
    rescue,
    shapley,
)
from rl.credit import CreditRule, Needs, grpo

CREDITS: dict[str, CreditRule] = {
    "grpo": CreditRule(grpo, boards=False),
    "readers_only": CreditRule(board_rule(nothing, centred=False), boards=True, varies=False),
    "readers_mean": CreditRule(board_rule(readers_mean, centred=True), boards=True),
    "own_plus_readers": CreditRule(board_rule(own_plus_readers, centred=True), boards=True),
    "leave_one_out": CreditRule(board_rule(leave_one_out, centred=False), True, Needs.WITHOUT_ONE),
    "evidence_gain": CreditRule(board_rule(evidence_gain, centred=False), True, Needs.EVIDENCE),
    "rescue": CreditRule(board_rule(rescue, centred=False), boards=True),
    "shapley": CreditRule(board_rule(shapley, centred=True), True, Needs.SUBSETS),
    "discounted_team": CreditRule(discounted_team, boards=True),
}
