"""Nothing that is read is executed; see test_lint.py for what the source may name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def audited(folder, *options):
    """What the hook saw in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.audited", str(folder), *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.rpartition("AUDIT")[2]
    return json.loads(told), done.stderr


@pytest.mark.slow
def test_opening_drawing_verifying_and_converting_execute_nothing(tmp_path):
    pytest.importorskip("h5py")
    found, refused = audited(tmp_path)
    assert found["executed"] == []
    assert found["outside"] == []
    # Every format of ours and of others was read, and a hook was there to see it.
    assert len(found["done"]) > 15
    assert found["count"] > 1000
    # Pickles, and nothing else, are refused.
    pickles = [name for name in found["done"] if name.endswith(".pkl")]
    lines = [line for line in refused.splitlines() if "sources" in line]
    assert len(lines) == 2 * len(pickles) > 0
    assert all("Pass allow_pickle=True" in line for line in lines)


@pytest.mark.slow
def test_what_is_forbidden_is_seen(tmp_path):
    pytest.importorskip("h5py")
    (tmp_path / "inner").mkdir()
    found, _ = audited(tmp_path / "inner", "--wrong")
    kinds = {line.partition(" ")[0] for line in found["executed"]}
    assert kinds == {"pickle.find_class", "exec"}
    assert [line.partition(" ")[2] for line in found["outside"]] == [
        str(tmp_path.resolve() / "outside")
    ]
