"""Two things at once, whatever becomes of either."""

import _thread

import pytest

from mmreplay.process import beside


@pytest.mark.parametrize("threads", [True, False])
def test_both_are_done_and_what_fails_is_raised(monkeypatch, threads):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    def fail():
        raise KeyError("this")

    if not threads:
        monkeypatch.setattr(_thread, "start_new_thread", refuse)
    done = []
    beside(lambda: done.append(1), lambda: done.append(2))
    assert sorted(done) == [1, 2]
    for one, other in ((fail, list), (list, fail)):
        with pytest.raises(KeyError, match="this"):
            beside(one, other)
