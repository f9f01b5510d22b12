"""Names of before work for one version, and warn with the name to use instead."""

import pickle

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import moved
from mmreplay.errors import SchemaError
from mmreplay.samplers.base import BufferIdentity

FIELDS = {"mark": mr.Field((), "float32", mutable=True)}


@pytest.fixture
def buffer():
    made = mr.ReplayBuffer.create(None, mr.Schema(FIELDS), 8, engine="memory")
    for _ in range(4):
        made.add(mark=0.0)
    return made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Compacted", "CompactReport"),
        ("Cut", "DroppedRows"),
        ("Memory", "MemoryUsage"),
        ("Recorded", "RecordReport"),
        ("Repaired", "RepairReport"),
    ],
)
def test_a_class_has_its_old_name_too(old, new):
    with pytest.warns(DeprecationWarning, match=rf"^mmreplay\.{old} is now {new}\."):
        assert getattr(mr, old) is getattr(mr, new)
    assert old not in mr.__all__
    assert new in mr.__all__


def test_cut_calls_end_episodes(buffer):
    with pytest.warns(DeprecationWarning, match="cut is now end_episodes"):
        buffer.cut([0])


def test_set_calls_write_field(buffer):
    with pytest.warns(DeprecationWarning, match="set is now write_field") as warned:
        buffer.set("mark", 0, np.arange(2), [5.0, 6.0])
    assert warned[0].filename == __file__
    assert buffer.gather_all()["mark"].tolist() == [5.0, 6.0, 0.0, 0.0]


def test_user_is_user_metadata():
    schema = mr.Schema(FIELDS)
    with pytest.warns(DeprecationWarning, match=r"create\(user_metadata=\)") as warned:
        old = mr.ReplayBuffer.create(None, schema, 8, engine="memory", user={"a": 1})
    assert warned[0].filename == __file__
    new = mr.ReplayBuffer.create(
        None, schema, 8, engine="memory", user_metadata={"a": 1}
    )
    assert old.metadata.user == new.metadata.user == {"a": 1}


@pytest.mark.parametrize(
    ("old", "new"), [("go_on", "proceed"), ("raise", "raise"), ("proceed", "proceed")]
)
def test_then_is_on_timeout(old, new):
    with pytest.warns(
        DeprecationWarning, match=r"RateLimiter\(on_timeout=\)"
    ) as warned:
        limiter = mr.RateLimiter(1.0, 5, 10.0, then=old)
    assert warned[0].filename == __file__
    assert limiter.on_timeout == new
    assert limiter == mr.RateLimiter(1.0, 5, 10.0, on_timeout=new)


def test_go_on_is_proceed_by_position_and_by_its_old_name():
    with pytest.warns(DeprecationWarning, match="on_timeout='proceed'"):
        limiter = mr.RateLimiter(1.0, 5, 10.0, None, 10.0, "go_on")
    assert limiter.on_timeout == "proceed"
    with pytest.warns(DeprecationWarning, match="then is now on_timeout"):
        assert limiter.then == "go_on"


def test_no_other_words_come_after_a_wait():
    with pytest.raises(SchemaError, match="on_timeout must be one of 'raise', 'procee"):
        mr.RateLimiter(1.0, 5, 10.0, on_timeout="wait")


def test_a_limiter_of_an_earlier_version_comes_back():
    limiter = mr.RateLimiter(1.0, 5, 10.0, on_timeout="proceed")
    old = limiter.__getstate__()
    again = object.__new__(mr.RateLimiter)
    again.__setstate__(["go_on" if value == "proceed" else value for value in old])
    assert again == limiter == pickle.loads(pickle.dumps(limiter))


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("mmreplay.collect", "Recorded", mr.RecordReport),
        ("mmreplay.repairing", "Cut", mr.DroppedRows),
        ("mmreplay.repairing", "Repaired", mr.RepairReport),
        ("mmreplay.samplers.base", "Home", BufferIdentity),
    ],
)
def test_a_class_is_imported_from_a_module_by_its_old_name(module, old, new):
    imported = {}
    with pytest.warns(
        DeprecationWarning, match=rf"^{module}\.{old} is now [\w.]*{new.__name__}\."
    ) as warned:
        exec(f"from {module} import {old}", imported)
    assert imported[old] is new
    assert {each.filename for each in warned} == {"<string>"}


def test_a_module_serves_old_names_and_no_others():
    look_up = moved.renamed("mmreplay.repairing", {"Cut": "DroppedRows"})
    with pytest.warns(DeprecationWarning, match=r"repairing\.Cut is now DroppedRows"):
        assert look_up("Cut") is mr.DroppedRows
    with pytest.raises(AttributeError, match="has no attribute 'Gone'"):
        look_up("Gone")
