"""Calls in forked children."""

import os


def in_child(call):
    """What a call returns in a forked child, or raises there, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as pipe:
        return pipe.read().decode()
