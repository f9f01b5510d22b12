"""The bar of what takes long: what goes on, how far it is, and how fast."""

import sys

from mmreplay.recording.recorder import Meter


def test_a_bar_says_what_goes_on_and_how_fast(capsys):
    with Meter(10, 4, True, what="converting", unit="rows") as meter:
        meter.update(7, 7)
        meter.update(10, 3)
    err = capsys.readouterr().err
    assert "converting" in err
    assert "10/10" in err
    assert "rows/s" in err
    assert (meter.done, meter.nbytes) == (10, 40)


def test_nothing_is_shown_where_nobody_looks(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with Meter(10, 4, None) as meter:
        meter.update(10, 12)
    assert capsys.readouterr() == ("", "")
    assert meter.nbytes == 48
