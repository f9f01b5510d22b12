"""Record what the code does today where nothing is recorded yet.

    python -m tests.frozen.record_behaviour

adds the missing entries of tests/frozen/data and refuses to change one that is there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.frozen import bytes_cases, disk_cases, draws_cases, old_files, states_cases
from tests.frozen.frozen_files import DATA, add

FILES = {
    "states.json": states_cases.recordings,
    "draws.json": draws_cases.recordings,
    "bytes.json": bytes_cases.recordings,
    "disk_calls.json": disk_cases.counted,
    "old.json": old_files.recordings,
}


def main():
    """Record all files."""
    DATA.mkdir(exist_ok=True)
    print(f"old: made {old_files.make_missing()}")
    for name, recordings in FILES.items():
        with tempfile.TemporaryDirectory() as scratch:
            new = add(name, recordings(Path(scratch)))
        print(f"{name}: {len(new)} new entries")


if __name__ == "__main__":
    main()
