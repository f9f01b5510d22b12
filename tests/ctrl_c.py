"""Ctrl-C in the middle of a call: often, or once and surely."""

import os
import signal
import threading


class CtrlC:
    """Ctrl-C every other millisecond, felt inside `during` and nowhere else.

    One that strikes a test between two of its lines would end pytest.
    """

    def __init__(self, number):
        """Make one that comes so often once it is entered."""
        self.strikes = 0
        self._handled = threading.Semaphore(0)
        self._inside = False
        self._thread = threading.Thread(target=self._come, args=(number,))

    def __enter__(self):
        """Begin."""
        self._before = signal.signal(signal.SIGINT, self._strike)
        self._thread.start()
        return self

    def __exit__(self, *_):
        """Wait for the last one."""
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def comes(self):
        """Whether there is more to come."""
        return self._thread.is_alive()

    def during(self, call):
        """What a call returns, unless it is struck."""
        self._inside = True
        try:
            return call()
        finally:
            self._inside = False

    def _come(self, number):
        for _ in range(number):
            threading.Event().wait(0.002)
            os.kill(os.getpid(), signal.SIGINT)
            # Two that come before the first is handled count as one.
            self._handled.acquire(timeout=20)

    def _strike(self, *_):
        self._handled.release()
        if self._inside:
            self._inside = False
            self.strikes += 1
            raise KeyboardInterrupt


class OneCtrlC:
    """Ctrl-C that another thread presses, and the main thread feels once.

    One that comes as the main thread begins a wait without an end is noted only once
    that wait is over. So it is pressed until it is felt.
    """

    def __init__(self):
        """Make one that has not been pressed."""
        self.felt = threading.Event()
        self._pressing = threading.Lock()

    def __enter__(self):
        """Begin."""
        self._before = signal.signal(signal.SIGINT, self._strike)
        return self

    def __exit__(self, *_):
        """Let no press come later."""
        with self._pressing:
            signal.signal(signal.SIGINT, self._before)

    def press(self):
        """Press until it is felt."""
        with self._pressing:
            for _ in range(400):
                os.kill(os.getpid(), signal.SIGINT)
                if self.felt.wait(0.05):
                    return
        raise AssertionError("no Ctrl-C was felt within 20 s")

    def _strike(self, *_):
        if not self.felt.is_set():
            self.felt.set()
            raise KeyboardInterrupt
