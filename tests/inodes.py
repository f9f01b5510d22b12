"""Inode numbers, and a `stat` that tells another one."""

import os
from contextlib import ExitStack, contextmanager
from unittest import mock


def number_of(path):
    return os.stat(path).st_ino


@contextmanager
def numbered(path, number):
    """Have `stat` say that a file has another inode number."""
    here = number_of(path)

    def telling(real):
        def stat(*arguments, **options):
            status = real(*arguments, **options)
            if status.st_ino != here:
                return status
            told = mock.Mock(wraps=status)
            for name in ("st_dev", "st_mode", "st_size", "st_blocks", "st_nlink"):
                setattr(told, name, getattr(status, name))
            told.st_ino = number
            return told

        return stat

    with ExitStack() as stack:
        for name in ("stat", "fstat"):
            patch = mock.patch.object(os, name, telling(getattr(os, name)))
            stack.enter_context(patch)
        yield
