"""Buffers under a small law, and how far one side comes alone."""

import itertools
import os

import pytest

import mmreplay as mr
from mmreplay.errors import StarvedError

SCHEMA = mr.Schema({"number": mr.Field((), "int64")})
PARAMETERS = {"samples_per_insert": 4.0, "min_size": 10, "error_buffer": 20.0}


def rate_limiter(**options):
    return mr.RateLimiter(**{**PARAMETERS, "patience": 0.05, **options})


def create(path, limiter, num_envs=1):
    return mr.ReplayBuffer.create(
        path, SCHEMA, 100, num_envs, limiter=limiter, commit_every=None, autoreset="disabled"
    )


def reader(path, limiter):
    return mr.ReplayBuffer.open(path, limiter=limiter)


def add(buffer, count=1):
    for _ in range(count):
        buffer.add(number=int(buffer.heads.sum()))


def until_starved(call, match="waited for"):
    """How often a call goes through until nobody helps."""
    calls = itertools.count()

    def go_on():
        while True:
            call()
            assert next(calls) < 10_000

    with pytest.raises(StarvedError, match=match):
        go_on()
    return next(calls)


def child(work):
    """Run in a process of its own until killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(3)
    return pid
