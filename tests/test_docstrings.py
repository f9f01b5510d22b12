"""What is public says what its arguments are."""

import inspect

import pytest

import mmreplay as mr


def functions():
    """Public functions, and methods of public classes, that take something."""
    for name in mr.__all__:
        try:
            thing = getattr(mr, name)
        except ModuleNotFoundError:
            continue  # what needs torch, where there is none
        members = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
        for member, value in members:
            function = getattr(value, "__func__", value)
            if member.startswith("_") or not inspect.isfunction(function):
                continue
            if set(inspect.signature(function).parameters) - {"self", "cls"}:
                yield f"{name}.{member}".rstrip("."), function


FUNCTIONS = dict(functions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_its_arguments_are(name):
    told = inspect.getdoc(FUNCTIONS[name])
    # A method of a protocol's says where the protocol tells.
    assert "Args:" in told or "see `" in told.lower()
