"""Grades answers with Math-Verify in worker processes, so that a hostile answer costs only itself.

The last closed `\\boxed{}` is the answer; without one Math-Verify reads the text's end. Its own time-out is
an alarm that works on the main thread only and is off: pebble kills a slow worker, and each limits its memory.
What Math-Verify 0.9.0 reads wrong is rewritten first (tasks.misread). Text and gold in, 1.0 or 0.0 out: no rewards.
"""

import logging
import os
import re
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, suppress
from multiprocessing import context, spawn
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tasks.misread import PLAIN, bare_number, hedged, is_list, normalise

TEXT_CHARS = 2000  # longest answer read: of an unboxed text its end; a longer box scores 0
CACHE_SIZE = 100_000  # remembered grades: more than one call asks for, or those begun ahead would be graded twice
ATTEMPTS = 5  # times the workers may break down over one batch

_BOX_TOKEN = re.compile(r"(?P<box>\\+boxed\s{0,9}\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_INTEGER = re.compile(r"\\?\$?(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+))(?:\.0+)?")


def last_box(text: str) -> str | None:
    """The content of the last closed `\\boxed{...}` (of nested ones the outer); None when none is closed."""
    # One pass over the text: this runs in the caller's process, where nobody stops a hostile answer.
    opened: list[int | None] = []  # where each open brace's content starts; None: not a box's brace
    content = None
    for token in _BOX_TOKEN.finditer(text):
        if token["box"]:
            opened.append(token.end())
        elif token["open"]:
            opened.append(None)
        elif token["close"] and opened:
            start = opened.pop()
            content = content if start is None else text[start : token.start()]
    return content


def _integer(text: str) -> int | None:
    """The value of a plain integer of at most 30 characters (`1,200`, `\\$12`, `12.00`), else None."""
    match = _INTEGER.fullmatch(text.strip()) if len(text) <= 30 else None
    return int(match[1].replace(",", "")) if match else None


def check_gold(gold: str) -> bool:
    """Whether the grader can read `gold`; in this process, with no time limit (else `Grader.check_golds`)."""
    return _integer(gold) is not None or _readable_gold(gold)


def _readable_gold(gold: str) -> bool:
    """Whether Math-Verify reads `gold` as an expression that equals itself."""
    from math_verify import parse, verify

    try:
        parsed = parse(f"\\boxed{{{normalise(gold).rstrip('.')}}}", parsing_timeout=None)
        return any(not isinstance(p, str) for p in parsed) and verify(parsed, parsed, timeout_seconds=None)
    except Exception:
        return False


def _judge(answer: str, boxed: bool, gold: str) -> tuple[float, str | None]:
    """(grade, failure or None). `answer`: a box's content, or the end of an unboxed text."""
    from math_verify import parse, verify

    try:
        gold, answer = normalise(gold).rstrip("."), normalise(answer)
        if boxed:
            answer = answer.replace("\\boxed", "")  # a box within the box
            answer = bare_number(answer) if PLAIN.fullmatch(gold) else answer.rstrip(".")
        if not is_list(gold) and (is_list(answer) if boxed else hedged(answer)):
            return 0.0, None
        wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        found = parse(f"\\boxed{{{answer}}}" if boxed else answer, parsing_timeout=None)
        right = verify(wanted, found, timeout_seconds=None)
        readable = not boxed or any(not isinstance(f, str) for f in found)
        return float(right), None if right or readable else "unreadable"
    except MemoryError:
        return 0.0, "memory"
    except Exception:
        return 0.0, "unreadable"


def _start_worker(memory_bytes: int) -> None:
    """Runs first in each worker: limits its memory, and lets it die at once when told to."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # pebble's handler is Python code, which doesn't run during one long operation on a huge integer; pebble
    # would wait three seconds for it, holding the lock that every worker needs.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("math_verify", "latex2sympy2_extended"):  # it warns about the time-out we switched off
        logging.getLogger(name).setLevel(logging.CRITICAL)
    import math_verify  # noqa: F401


class _Worker(context.ForkServerProcess):
    """A process that doesn't import the program's main module: rl.train would bring JAX into each worker."""

    _starting = threading.Lock()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        thread = threading.get_ident()

        def without_main(name: str) -> dict[str, Any]:
            ours = threading.get_ident() == thread  # what another thread starts is none of our business
            return {k: v for k, v in original(name).items() if not (ours and k.startswith("init_main"))}

        with _Worker._starting:
            original = spawn.get_preparation_data
            spawn.get_preparation_data = without_main
            try:
                return context.ForkServerProcess._Popen(process_obj)
            finally:
                spawn.get_preparation_data = original


class _WorkerContext(context.ForkServerContext):
    """Forks workers from a small server that has imported Math-Verify, never from a process with threads."""

    Process = _Worker


_CONTEXT = _WorkerContext()


class Grader(AbstractContextManager):
    """Grades (text, gold) pairs in worker processes; safe to call from any thread.

    `time_limit_s`: wall time of one answer. `memory_bytes`: address space of a worker. `failures` counts what
    scored 0 unread: "timeout", "memory", "crash", "unreadable" (a box Math-Verify makes nothing of). Grades are
    remembered by (answer, gold), since boxed answers repeat.
    """

    def __init__(self, workers: int | None = None, time_limit_s: float = 5.0, memory_bytes: int = 2 << 30):
        self.workers = workers or min(16, len(os.sched_getaffinity(0)))
        self.time_limit_s, self.memory_bytes = time_limit_s, memory_bytes
        self.failures: Counter[str] = Counter()
        self._grades: dict[tuple[str, bool, str], float] = {}
        self._pool: ProcessPool | None = None
        self._closed = 0
        self._lock = threading.RLock()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers. The grader can be used again: it starts new ones."""
        with self._lock:
            self._closed += 1
            if self._pool is not None:
                self._pool.stop()
                self._pool.join()
                self._pool = None

    def warm(self) -> None:
        """Start the workers in the background, so that importing sympy overlaps with other start-up."""
        args = (_readable_gold, [("1/2",)] * self.workers)
        threading.Thread(target=self._run, args=args, daemon=True).start()

    def ahead(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Begin to grade these in the background: `grade` will know them, or wait for what is under way.

        Changes no grade and raises nothing; what goes wrong is met again, and raised, by `grade`.
        """
        closed = self._closed

        def work() -> None:
            # Closed meanwhile: nobody wants them any more, and new workers would outlive their grader.
            with self._lock, suppress(RuntimeError):
                if self._closed == closed:
                    self.grade(pairs)

        if pairs:
            threading.Thread(target=work, daemon=True).start()

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """1.0 or 0.0 for each (answer text, gold)."""
        boxes = [last_box(text) for text, _ in pairs]
        keys = [
            (text[-TEXT_CHARS:], False, gold) if box is None else (box.strip(), True, gold)
            for (text, gold), box in zip(pairs, boxes)
        ]
        with self._lock:
            known = {key: self._grades[key] if key in self._grades else self._at_once(*key) for key in keys}
            asked = [key for key, grade in known.items() if grade is None]
            for key, result in zip(asked, self._run(_judge, asked)):
                known[key], failure = (0.0, result) if isinstance(result, str) else result
                self.failures.update([failure] if failure else [])
            self._grades |= known
            for oldest in list(self._grades)[:-CACHE_SIZE]:
                del self._grades[oldest]
        return [known[key] for key in keys]

    def check_golds(self, golds: Sequence[str]) -> list[bool]:
        """Whether each gold can be read, as `check_gold`, under the workers' limits."""
        odd = list({gold: None for gold in golds if _integer(gold) is None})
        verdicts = dict(zip(odd, self._run(_readable_gold, [(gold,) for gold in odd])))
        return [verdicts.get(gold, True) is True for gold in golds]

    def _at_once(self, answer: str, boxed: bool, gold: str) -> float | None:
        """The grade where no mathematics is needed: an empty or endless box, or two plain integers."""
        if not answer.strip() or len(answer) > TEXT_CHARS:
            return 0.0
        numbers = (_integer(answer), _integer(gold)) if boxed else (None, None)
        return None if None in numbers else float(numbers[0] == numbers[1])

    def _run(self, function: Callable[..., Any], jobs: Sequence[tuple]) -> list[Any]:
        """`function(*job)` for each job in a worker; "timeout" or "crash" for what never came back."""
        results: dict[int, Any] = {}
        crashes: Counter[int] = Counter()
        with self._lock:
            for _ in range(ATTEMPTS):
                left = {job: args for job, args in enumerate(jobs) if job not in results}
                if left and not self._attempt(function, left, results, crashes):
                    self.close()  # the pool broke; the next attempt starts another
        if len(results) < len(jobs):
            raise RuntimeError(f"the grader's workers broke down {ATTEMPTS} times over {len(jobs)} answers")
        return [results[job] for job in range(len(jobs))]

    def _attempt(self, function: Callable, jobs: dict, results: dict, crashes: Counter) -> bool:
        """Put into `results` what can be settled; False when the pool is broken."""
        if self._pool is None:
            _CONTEXT.set_forkserver_preload(["math_verify"])
            self._pool = ProcessPool(self.workers, 0, _start_worker, (self.memory_bytes,), _CONTEXT)
        futures, broken = {}, False
        try:
            for job, args in jobs.items():
                futures[job] = self._pool.schedule(function, args, timeout=self.time_limit_s)
        except RuntimeError:
            broken = True
        for job, future in futures.items():
            if broken and not future.done():
                continue
            try:
                # Answers are taken in order, so this one is running or next in line: it can't need longer.
                results[job] = future.result(timeout=2 * self.time_limit_s + 30)
            except ProcessExpired:
                crashes[job] += 1
                if crashes[job] > 1:  # once may be another's doing (the system ran out of memory): try again
                    results[job] = "crash"
            except TimeoutError:
                broken = broken or not future.done()
                if future.done():
                    results[job] = "timeout"
            except MemoryError:
                results[job] = "memory"
            except (RuntimeError, CancelledError):
                broken = True
        return not broken
