"""A request from outside to stop: SIGTERM or SIGUSR1, as batch systems send them before they kill.

A handler may run between any two bytecodes, so it does as little as can be: it notes the request, and the program looks
at its next step boundary (`reason`), where all ranks can stop together.  Only before the first step, within a stage of
loading (`loading`, `stage`), it raises, because a stage may outlast the grace time and there is nothing yet that could
be saved; what a stage raises all ranks agree on at its end.  A second signal finds the request noted and changes
nothing.

Rejected: asking MPI from the handler to tell the others (not safe there), and acting on the first signal in the middle
of a step (the others would wait in an exchange for ever).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bgmpi.errors import StoppedError

#: What batch systems send: --signal=USR1@300 of Slurm, and SIGTERM before a time limit, a preemption, a scancel.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether somebody asked this process to stop.

    reason: the signal's name, empty while nobody has.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._loading = self._raises = False

    def ask(self, number: int, _: FrameType | None = None) -> None:
        """Note a signal; raise StoppedError within a stage of loading."""
        again, self.reason = self.reason, signal.Signals(number).name
        if self._raises and not again:
            raise self._stopped()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let stages within the block stop at once."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Within `loading`, raise StoppedError as soon as a request comes, or came, until the block is left."""
        if not self._loading:
            yield
            return
        self._raises = True
        try:
            if self.reason:
                raise self._stopped()
            yield
        finally:
            self._raises = False
        if self.reason:  # raised where C code called Python, an exception is lost
            raise self._stopped()

    def _stopped(self) -> StoppedError:
        return StoppedError(f"{self.reason} came before the first step: nothing was computed; run again to go on")


@contextmanager
def stop_on_signals(*, ends: bool = False) -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGUSR1 into a StopRequest until the block is left; outside of the main thread, where Python
    allows no handlers, nothing is caught.

    ends: the process ends with the block; both are ignored from then on, so that a late one does not take the place of
    the exit code.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.ask) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends else handler if handler is not None else signal.SIG_DFL)
