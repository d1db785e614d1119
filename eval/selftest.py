"""Does evaluation itself work on this machine: grading, statistics, checks and sampling, offline and in seconds."""

import time
from collections.abc import Callable

import jax
import numpy as np

from eval.checks import reward_hacks
from eval.stats import compare, pass_at_k, ratio_estimate
from eval.talk import numbers
from model import weights
from model.lora import LoraConfig, init_lora
from model.tokenizer import ChatTokenizer
from rollout.distribution import Sampling
from rollout.episode import RowId
from rollout.policy import Policy, Request
from rollout.setup import BUILTIN, stack
from tasks.grading import Grader

GRADES = (
    ("The answer is \\boxed{12}.", "12", 1),
    ("\\boxed{12} no, \\boxed{13}", "12", 0),
    ("\\boxed{\\frac{1}{2}}", "0.5", 1),
    ("\\boxed{1,200}", "1200", 1),
    ("5 or 6 or 7", "5", 0),
    ("I do not know.", "12", 0),
    ("\\boxed{9^{9^{9^{9}}}}", "12", 0),
)
"""(reply, gold, grade): a hostile one last, which must cost its own grade only."""


def grading() -> None:
    with Grader() as grader:
        got = grader.grade([(text, gold) for text, gold, _ in GRADES])
    wrong = [text for (text, _, grade), found in zip(GRADES, got, strict=True) if found != grade]
    assert not wrong, f"graded wrongly: {wrong}"


def statistics() -> None:
    estimate = ratio_estimate(np.array([0.0, 1.0]), np.array([1, 1]))
    assert estimate == (0.5, 0.0, 1.0, 2), estimate
    assert pass_at_k(4, 1, 2) == 0.5
    rng = np.random.default_rng(0)
    rate_P = rng.uniform(0.2, 0.6, 200)
    arms = [rng.binomial(4, np.clip(rate_P + gain, 0, 1), (3, 200)) / 4 for gain in (0.2, 0.0, 0.0)]
    assert compare(arms[0], arms[1]).verdict == "moved", "a planted gain of 0.2 was not seen"
    assert compare(arms[2], arms[1]).verdict == "flat", "two equal arms came out different"
    assert compare(arms[0][:1], arms[1][:1]).verdict == "unresolved", "a single seed was given a verdict"


def checking() -> None:
    assert numbers("1,200 and 12.0") == {"1200", "12"}
    rows = [(str(p), "long answer" if g else "short", float(g)) for p in range(40) for g in (0, 1, 0, 1)]
    assert reward_hacks(rows)["features"]["characters"]["verdict"] == "look", "a planted hack was not seen"


def sampling() -> None:
    config, graph, base = weights.load(BUILTIN, jax.numpy.float32)
    lora = stack([init_lora(jax.random.key(0), config, LoraConfig(1, 1.0))])
    tokenizer = ChatTokenizer.load(BUILTIN)
    policy = Policy(config, graph, base, lora, 1.0, tokenizer, (64,), (4,))
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Tom has 3 apples."}])
    requests = [Request(str(i), prompt, 8, 0.0, RowId(0, 0, i, 0, 0)) for i in range(4)]
    first, again = (policy.sample([requests], Sampling(0.9))[0] for _ in range(2))
    assert all((a.tokens == b.tokens).all() for a, b in zip(first, again, strict=True)), "a key gave two samples"
    assert len({tuple(reply.tokens) for reply in first}) > 1, "all rows drew the same"
    assert all(np.isfinite(reply.logp).all() and (reply.logp <= 0).all() for reply in first), "log-probs are off"


TESTS = {"grading": grading, "statistics": statistics, "checks": checking, "sampling": sampling}


def selftest(say: Callable[[str], None]) -> list[str]:
    """Run every test, say how it went, and return the names of those that failed."""
    failed = []
    for name, test in TESTS.items():
        started = time.perf_counter()
        try:
            test()
            verdict = "ok"
        except AssertionError as error:
            failed.append(name)
            verdict = f"FAILED: {error}"
        say(f"{name:12} {verdict}  ({time.perf_counter() - started:.1f} s)")
    return failed
