"""The errors are one tree, and each is what callers catch already."""

import errno
import pickle

import pytest

from mmreplay import errors

TREE = {
    "SchemaError": ("ReplayError", ValueError),
    "FormatError": ("ReplayError", ValueError),
    "CorruptError": ("FormatError", ValueError),
    "VersionError": ("FormatError", ValueError),
    "LockedError": ("ReplayError", OSError),
    "ForkedError": ("ReplayError", RuntimeError),
    "FullError": ("ReplayError", OSError),
    "FailedError": ("ReplayError", OSError),
    "EmptyError": ("ReplayError", LookupError),
    "StarvedError": ("ReplayError", TimeoutError),
    "RemovedError": ("FailedError", OSError),
    "StaleError": ("ReplayError", IndexError),
    "SourceError": ("ReplayError", ValueError),
}
SYSTEM = ["LockedError", "FullError", "FailedError"]


@pytest.mark.parametrize("name", TREE)
def test_each_error_stands_where_the_tree_says(name):
    parent, builtin = TREE[name]
    kind = getattr(errors, name)
    assert issubclass(kind, getattr(errors, parent))
    assert issubclass(kind, builtin)


def test_the_drawn_tree_names_every_error():
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, errors.ReplayError)
        and not name.startswith("_")
    }
    assert public == {"ReplayError", *TREE}
    assert all(name in (errors.__doc__ or "") for name in public)


@pytest.mark.parametrize("name", TREE)
def test_the_text_is_the_message(name):
    assert str(getattr(errors, name)("disk full: free some")) == "disk full: free some"


@pytest.mark.parametrize("name", SYSTEM)
def test_system_errors_carry_errno_and_keep_it_through_pickle(name):
    error = getattr(errors, name)("no room", errno_=errno.ENOSPC)
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert each.errno == errno.ENOSPC
        assert str(each) == "no room"
    assert getattr(errors, name)("no room").errno is None
