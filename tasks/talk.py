"""talk_to_solve: two copies, half of the facts each, two messages each, and the last ones are graded (SPEC 2.3).

The chat is A, B, A, B. `channel_on` and `channel_off` differ only in `reads`: a turn that is not read appears in
the transcript as "(no message)". `three_task` is the same among three copies, a third of the facts each: A, B, C, A, B,
C. Two prompt styles: `full` for instruction-tuned models, `short` for the built-in tiny models, whose time goes with
the prompt's length. The published prompts are not public; these are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.base import Message, Problem, Task, Turn

NO_MESSAGE = "(no message)"
ARMS = ("channel_on", "channel_off")


@dataclass(frozen=True)
class ChatPrompt:
    """The words around facts, question and transcript. `{me}` and `{other}` are the names of the agent and of the
    others, `{share}` is each one's share of the facts, `{none}` says that one alone is not enough for two or three."""

    system: str
    user: str
    message: str
    answer: str


FULL = ChatPrompt(
    system=(
        "You are {me}. You and {other} solve one math problem together. Each of you holds only some of its facts, "
        "and {none} can solve it alone."
    ),
    user="Your facts:\n{facts}\n\nQuestion: {question}\n\nConversation so far:\n{chat}\n\n{instruction}",
    message="Write one short message to {other}. Do not solve the problem yet.",
    answer=(
        "This is your last message. Use your facts and what {other} told you, work step by step, and put the final "
        "answer in \\boxed{{}}."
    ),
)
SHORT = ChatPrompt(
    system="You are {me}. You and {other} each know {share} of the facts.",
    user="{facts}\n{question}\nChat: {chat}\n{instruction}",
    message="Write to {other}.",
    answer="Solve and box it.",
)
PROMPTS = {"full": FULL, "short": SHORT}
SHARES = {2: "half", 3: "a third"}
NONE = {2: "neither", 3: "none of you"}
"""By the number of copies."""


def messages(
    prompt: ChatPrompt,
    names: Sequence[str],
    agent: int,
    facts: Sequence[str],
    question: str,
    chat: Sequence[str],
    answering: bool,
) -> list[Message]:
    """One turn's prompt: who is speaking, its facts, the question, the lines so far, and what to write."""
    words = {"me": names[agent], "other": " and ".join(name for name in names if name != names[agent])}
    instruction = prompt.answer if answering else prompt.message
    user = prompt.user.format(
        facts="\n".join(facts),
        question=question,
        chat="\n".join(chat) or "(nothing yet)",
        instruction=instruction.format(**words),
    )
    system = prompt.system.format(**words, share=SHARES[len(names)], none=NONE[len(names)])
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def talk_task(arm: str, message_tokens: int = 160, answer_tokens: int = 384, prompt: ChatPrompt = FULL) -> Task:
    """The four-turn chat of one arm; caps in tokens, the end-of-turn token included."""
    return _chat("talk_to_solve", ("A", "B"), arm, message_tokens, answer_tokens, prompt)


def three_task(arm: str, message_tokens: int = 160, answer_tokens: int = 384, prompt: ChatPrompt = FULL) -> Task:
    """talk_three: three copies, a third of the facts each, one message each and then one answer each."""
    return _chat("talk_three", ("A", "B", "C"), arm, message_tokens, answer_tokens, prompt)


def _chat(
    name: str, names: tuple[str, ...], arm: str, message_tokens: int, answer_tokens: int, prompt: ChatPrompt
) -> Task:
    check_arm(name, arm)
    agents = len(names)
    turns = []
    for index in range(2 * agents):
        agent, last = index % agents, index >= agents
        reads = tuple(v for v in range(index) if arm == "channel_on" or v % agents == agent)
        turns.append(Turn(agent, index, answer_tokens if last else message_tokens, reads, graded=last))

    def render(problem: Problem, index: int, heard: Mapping[int, str]) -> list[Message]:
        turn = turns[index]
        chat = [f"{names[v % agents]}: {heard.get(v, NO_MESSAGE)}" for v in range(index)]
        facts = problem.facts_of(turn.agent, agents)
        return messages(prompt, names, turn.agent, facts, problem.question, chat, turn.graded)

    return Task(name, arm, names, tuple(turns), render, parts=agents)


def check_arm(task: str, arm: str) -> None:
    if arm not in ARMS:
        raise ValueError(f"unknown arm {arm!r} of {task}; the arms are {', '.join(ARMS)}")
