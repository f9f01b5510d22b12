"""How much memory there is, of the machine or of the group that has a limit."""

import pytest

from mmreplay.storage import memory_usage


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("max", "7", None), ("1000", "400", 600), ("400", "1000", 0), ("what", "1", None)],
)
def test_a_groups_limit_counts(tmp_path, monkeypatch, limit, used, left):
    places = tmp_path / "limit", tmp_path / "used"
    for place, text in zip(places, (limit, used), strict=True):
        place.write_text(text + "\n")
    monkeypatch.setattr(memory_usage, "LIMITS", ((str(places[0]), str(places[1])),))
    found = memory_usage.available_nbytes()
    if left is None:
        assert 1 << 20 < found <= memory_usage.whole_nbytes()
    else:
        assert found == left
        assert memory_usage.whole_nbytes() == int(limit)
