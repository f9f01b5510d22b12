"""A process that may open few files more."""

import os
import resource
from contextlib import contextmanager


@contextmanager
def few_descriptors(spare):
    """Let the process open so many files beside those that it has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(spare + 1)]
    for each in free:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
