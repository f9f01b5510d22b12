"""Recorded results under tests/frozen/data: read, compared, and added to.

``python -m tests.frozen.record_behaviour`` runs the cases of `states_cases`,
`draws_cases` and `bytes_cases`, and adds the entries that the files lack. It refuses to
change an entry that is there: a recorded entry says what released code did, and stays,
but for laws that the changelog announces (README.md).

To freeze something new, add a case to one of those modules, run the command, and
commit the changed file in tests/frozen/data. The cases use public names only, so that
they outlive any move inside the package.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"


class ChangedError(Exception):
    """A recorded entry would change."""


def load(name):
    """Entries of a recorded file, by case; none where it was never recorded."""
    path = DATA / name
    return json.loads(path.read_text()) if path.exists() else {}


def add(name, entries):
    """Add entries to a recorded file; return the names of those that are new.

    Raises:
        ChangedError: An entry is there, and differs.
    """
    known = load(name)
    entries = json.loads(json.dumps(entries))
    changed = [case for case in entries if known.get(case, entries[case]) != entries[case]]
    if changed:
        raise ChangedError(
            f"{name}: {changed} would change, expected them as they were recorded; a "
            "recorded entry stays, so correct the code, or add a case of another name"
        )
    new = sorted(set(entries) - set(known))
    if new:
        text = "".join(
            f"{',' if place else ''}\n{json.dumps(case)}: {json.dumps(entry)}"
            for place, (case, entry) in enumerate(sorted((known | entries).items()))
        )
        (DATA / name).write_text("{" + text + "\n}\n")
    return new


def packed(value):
    """A state or result as JSON that `unpacked` turns back, arrays and tensors too."""
    if isinstance(value, Mapping):
        return {"map": {key: packed(item) for key, item in value.items()}}
    if isinstance(value, list):
        return [packed(item) for item in value]
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        return {"tensor": packed(value.numpy())}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return {
            "dtype": data.dtype.str,
            "shape": list(value.shape),
            "base64": base64.b64encode(data.tobytes()).decode(),
        }
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    # Anything else is no value of a state: a numpy scalar would lose its type.
    assert type(value) in (str, int, float, bool, type(None)), type(value)
    return value


def unpacked(value):
    """What `packed` was given."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "map" in value:
        return {key: unpacked(item) for key, item in value["map"].items()}
    if "tensor" in value:
        import torch

        return torch.from_numpy(unpacked(value["tensor"]))
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    data = base64.b64decode(value["base64"])
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"]).copy()


def digest(data):
    """Digest of bytes, or of an array's bytes in C order, as text."""
    if not isinstance(data, bytes):
        data = np.ascontiguousarray(data).tobytes()
    return hashlib.sha256(data).hexdigest()[:32]


def described(array):
    """dtype, shape and digest of an array or tensor."""
    found = np.asarray(array)
    return [found.dtype.str, list(found.shape), digest(found)]
