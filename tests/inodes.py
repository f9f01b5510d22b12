"""Inode numbers, and a `stat` that tells another one."""

import os
from unittest import mock


def number_of(path):
    return os.stat(path).st_ino


def numbered(path, number):
    """Have `stat` say that a file has another inode number."""
    real, here = os.fstat, number_of(path)

    def fstat(fd):
        status = real(fd)
        if status.st_ino != here:
            return status
        told = mock.Mock(wraps=status)
        for name in ("st_dev", "st_mode", "st_size", "st_blocks", "st_nlink"):
            setattr(told, name, getattr(status, name))
        told.st_ino = number
        return told

    return mock.patch.object(os, "fstat", fstat)
