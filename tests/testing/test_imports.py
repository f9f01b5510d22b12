"""`mmreplay.testing` needs nothing that a user has not installed."""

from tests.test_imports import HEAVY, modules_after


def test_importing_the_contracts_loads_no_test_framework_and_nothing_heavy():
    loaded = modules_after("import mmreplay.testing")
    assert not {"pytest", "hypothesis", *HEAVY} & loaded
