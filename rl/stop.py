"""SIGTERM and Ctrl-C: finish what is under way, save, exit 0. A second signal ends the process at once."""

import signal
from types import FrameType


class Stopped(Exception):
    """The run was asked to stop and has saved; the message says how to continue."""


class StopRequest:
    """Context manager; `asked` is True once SIGTERM or SIGINT came."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "StopRequest":
        self._before = [signal.signal(number, self._ask) for number in self.SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True

    def check(self, message: str) -> None:
        """Raise Stopped with `message` if a stop was asked for."""
        if self.asked:
            raise Stopped(message)
