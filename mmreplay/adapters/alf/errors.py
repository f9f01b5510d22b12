"""Errors that code written for alf catches, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mmreplay.errors import EmptyError, ReplayError, SchemaError, StaleError


class RefusedError(ReplayError, AssertionError):
    """A call that alf asserts against."""


class UnfitError(SchemaError, RuntimeError):
    """Data that does not fit the spec, for which torch raises a RuntimeError."""


class MissingError(ReplayError, LookupError):
    """The nest has no child of that name."""


class UnknownError(ReplayError, IndexError):
    """There is no such environment."""


@contextmanager
def refusing() -> Iterator[None]:
    """Raise what alf asserts as `RefusedError`, and what torch finds as UnfitError."""
    try:
        yield
    except (EmptyError, StaleError) as error:
        raise RefusedError(str(error)) from error
    except SchemaError as error:
        if isinstance(error, UnfitError):
            raise
        raise UnfitError(str(error)) from error
