"""The cases see: each fault that is put into the package is noticed by its case."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

from tests.combinations.mutants import MUTANTS, recorded
from tests.combinations.run import run_case


def test_each_mutant_has_a_case():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert set(recorded()) == set(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed_by_its_case(mutant):
    case, names = mutant.case, [mutant.consumer]
    failure = run_case(case, names)
    assert failure is None, failure.text
    with mutant.alive():
        failure = run_case(case, names)
    assert failure is not None, mutant.fault
