"""Ctrl-C at a chosen moment: the interpreter's own points of interruption, counted.

CPython looks at signals where a function begins, after a call and where a loop turns.
Each such place in the package, in the order a call runs through them, is one moment.
"""

import dis
import sys
from pathlib import Path

import mmreplay

PACKAGE = str(Path(mmreplay.__file__).parent)
CHECKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


CODES = {dis.opmap[name] for name in CHECKS if name in dis.opmap}


class Striker:
    """Raises KeyboardInterrupt at one moment of a call.

    Args:
        moment: How many moments pass before.
        within: Files of the package, as paths in it; all of them by default.

    Attributes:
        moments: Moments passed so far.
        where: File and line of the one that was struck, or None.
    """

    def __init__(self, point, within=None):
        self.points = 0
        self.where = None
        self._point = point
        self._files = within and {f"{PACKAGE}/{name}" for name in within}
        # A file that was moved would be struck nowhere, and every test would pass.
        missing = [path for path in self._files or () if not Path(path).is_file()]
        assert not missing, f"there is no {missing} to strike"
        self._before = {}

    def _enter(self, frame, event, _):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return None
        if self._files is not None and name not in self._files:
            return None
        if _finalizing(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._look

    def _look(self, frame, event, _):
        if event == "return":
            self._before.pop(frame, None)
        if event != "opcode":
            return self._look
        code = frame.f_code.co_code
        before = self._before.get(frame)
        self._before[frame] = frame.f_lasti
        if before is not None and code[before] in CODES:
            self.points += 1
            if self.points > self._point:
                line = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
                self.where = line
                self._before.clear()
                raise KeyboardInterrupt
        return self._look

    def call(self, work):
        """Make the call; True if it was struck."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def _finalizing(frame):
    """Whether an object is being given up, where nobody is told of what is raised."""
    while frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return frame.f_code.co_filename.endswith("/weakref.py")
