"""A failure is found, shrunk and shown as a script; what passes costs no output."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

from tests.combinations import run
from tests.combinations.cases import DIMENSIONS, draw_cases
from tools import combinations

PLAINEST = {name: values[0] for name, values in DIMENSIONS.items()}


@pytest.fixture
def faulty(monkeypatch):
    """A consumer that fails where two values meet, after some steps."""

    def look(built, rng):
        case = built.case
        meet = case.num_envs == 3 and case.autoreset == "next_step"
        assert not (meet and case.steps > 2), "they meet"

    monkeypatch.setitem(run.CONSUMERS, "faulty", look)


def failing():
    return next(
        case for case in draw_cases(200, 3) if case.num_envs == 3 and case.autoreset == "next_step"
    )


@pytest.mark.slow
def test_a_failure_shrinks_to_what_it_needs(faulty):
    failure = run.shrunk(run.run_case(failing(), ["faulty"]))
    values = {name: getattr(failure.case, name) for name in DIMENSIONS}
    assert values == PLAINEST | {"num_envs": 3, "autoreset": "next_step"}
    assert failure.case.steps == 3


def test_its_script_shows_it_again(faulty, capsys):
    failure = run.run_case(failing(), ["faulty"])
    exec(failure.script(), {})
    assert "AssertionError: they meet" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_prints_a_failure_once_and_says_so(faulty, capsys):
    words = ["--cases", "30", "--seed", "3", "--consumer", "faulty"]
    assert combinations.main(words) == 1
    out = capsys.readouterr().out
    assert out.startswith("30 cases of seed 3 in ")
    assert out.count("Traceback") == 1
    assert "x faulty: AssertionError: they meet" in out


def test_the_command_says_that_nothing_failed(capsys):
    assert combinations.main(["--cases", "2", "--consumer", "gather_all"]) == 0
    out = capsys.readouterr().out
    assert ": 0 failed; " in out
    assert "possible pairs in 3 cases or more" in out


def test_a_difference_is_seen_by_what_reads_rows():
    case = next(iter(draw_cases(1, 5)))

    def differs(built, rng):
        built.twin.row(built.twin.steps()[0]).values["reward"] += 1
        run.CONSUMERS["gather_all"](built, rng)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.CONSUMERS, "differs", differs)
        failure = run.run_case(case, ["differs"])
    assert failure.consumer == "differs"
    assert "reward" in failure.text
