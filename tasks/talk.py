"""talk_to_solve: two copies, half of the facts each, two messages each, and the last ones are graded (SPEC 2.3).

The chat is A, B, A, B. `channel_on` and `channel_off` differ only in `reads`: a turn that is not read appears in
the transcript as "(no message)". Two prompt styles: `full` for instruction-tuned models, `short` for the built-in
tiny model, whose time goes with the prompt's length. The published prompts are not public; these are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.base import Message, Problem, Task, Turn

NO_MESSAGE = "(no message)"
ARMS = ("channel_on", "channel_off")


@dataclass(frozen=True)
class ChatPrompt:
    """The words around facts, question and transcript. `{me}` and `{other}` are the agents' names."""

    system: str
    user: str
    message: str
    answer: str


FULL = ChatPrompt(
    system=(
        "You are {me}. You and {other} solve one math problem together. Each of you holds only some of its facts, "
        "and neither can solve it alone."
    ),
    user="Your facts:\n{facts}\n\nQuestion: {question}\n\nConversation so far:\n{chat}\n\n{instruction}",
    message="Write one short message to {other}. Do not solve the problem yet.",
    answer=(
        "This is your last message. Use your facts and what {other} told you, work step by step, and put the final "
        "answer in \\boxed{{}}."
    ),
)
SHORT = ChatPrompt(
    system="You are {me}. You and {other} each know half of the facts.",
    user="{facts}\n{question}\nChat: {chat}\n{instruction}",
    message="Write to {other}.",
    answer="Solve and box it.",
)
PROMPTS = {"full": FULL, "short": SHORT}


def messages(
    prompt: ChatPrompt, me: str, other: str, facts: Sequence[str], question: str, chat: Sequence[str], answering: bool
) -> list[Message]:
    """One turn's prompt: who is speaking, its facts, the question, the lines so far, and what to write."""
    instruction = prompt.answer if answering else prompt.message
    user = prompt.user.format(
        facts="\n".join(facts),
        question=question,
        chat="\n".join(chat) or "(nothing yet)",
        instruction=instruction.format(me=me, other=other),
    )
    return [
        {"role": "system", "content": prompt.system.format(me=me, other=other)},
        {"role": "user", "content": user},
    ]


def talk_task(arm: str, message_tokens: int = 160, answer_tokens: int = 384, prompt: ChatPrompt = FULL) -> Task:
    """The four-turn chat of one arm; caps in tokens, the end-of-turn token included."""
    if arm not in ARMS:
        raise ValueError(f"unknown arm {arm!r} of talk_to_solve; the arms are {', '.join(ARMS)}")
    names = ("A", "B")
    turns = []
    for index in range(4):
        agent, last = index % 2, index >= 2
        reads = tuple(v for v in range(index) if arm == "channel_on" or v % 2 == agent)
        turns.append(Turn(agent, index, answer_tokens if last else message_tokens, reads, graded=last))

    def render(problem: Problem, index: int, heard: Mapping[int, str]) -> list[Message]:
        turn = turns[index]
        me, other = names[turn.agent], names[1 - turn.agent]
        chat = [f"{names[v % 2]}: {heard.get(v, NO_MESSAGE)}" for v in range(index)]
        return messages(prompt, me, other, problem.facts_of(turn.agent, 2), problem.question, chat, turn.graded)

    return Task("talk_to_solve", arm, names, tuple(turns), render, parts=2)
