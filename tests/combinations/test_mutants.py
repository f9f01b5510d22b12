"""The cases see: each fault that is put into the package is noticed by its case."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

from tests.combinations import mutants
from tests.combinations.mutants import MUTANTS, recorded
from tests.combinations.run import run_case
from tools import combinations


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


def test_the_table_says_what_notices_a_fault_and_what_survives(monkeypatch, capsys):
    noticed = MUTANTS[0]
    harmless = replace(noticed, name="harmless", patches=())
    monkeypatch.setattr(mutants, "MUTANTS", (noticed, harmless))
    assert combinations.main(["--mutants", "--cases", "2"]) == 1
    _, first, second = capsys.readouterr().out.splitlines()
    seed, number = divmod(noticed.case.seed, 1_000_000)
    words = [noticed.consumer, str(seed), str(number), noticed.fault]
    assert first.removeprefix(noticed.name).split() == " ".join(words).split()
    assert "survives" in second
    monkeypatch.setattr(mutants, "MUTANTS", (noticed,))
    assert combinations.main(["--mutants", "--cases", "0"]) == 0
