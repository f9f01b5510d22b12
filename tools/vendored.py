"""Compares the files that others wrote with the checksums that they came with.

``mmreplay/page/static/vendor`` holds uPlot as its npm package has it. SHA256SUMS.txt
there names version and licence in its first line, and each file with its checksum.

    python -m tools.vendored                          # the files, by the checksums
    npm pack uplot@1.6.32
    python -m tools.vendored --package uplot-1.6.32.tgz   # and by the package itself
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tarfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "mmreplay" / "page" / "static" / "vendor"
SUMS = "SHA256SUMS.txt"
LINE = re.compile(r"([0-9a-f]{64})  (\S+)")


def listed(folder: Path) -> dict[str, str]:
    """Return the checksum of each file that is listed, by its name.

    Raises:
        ValueError: The list cannot be read.
    """
    head, *lines = (folder / SUMS).read_text("ascii").splitlines()
    if not re.match(r"# \S+ \d+\.\d+\.\d+, \S+ licence", head):
        raise ValueError(f"{SUMS}: the first line must name version and licence")
    found = {}
    for line in lines:
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{SUMS}: {line!r} must be a checksum and a name")
        found[match[2]] = match[1]
    return found


def differences(folder: Path = FOLDER) -> list[str]:
    """Return a sentence for each file that is not as it is listed."""
    sums = listed(folder)
    present = {file.name for file in folder.iterdir()} - {SUMS}
    found = [f"{name} is not listed" for name in sorted(present - sums.keys())]
    for name, digest in sums.items():
        if name not in present:
            found.append(f"{name} is missing")
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            found.append(f"{name} differs from its checksum")
    return found


def differences_of_package(package: Path, folder: Path = FOLDER) -> list[str]:
    """Return a sentence for each listed file that an npm package does not have."""
    with tarfile.open(package) as archive:
        digests = {}
        for member in archive.getmembers():
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                name = Path(member.name).name
                name = "LICENSE.txt" if name == "LICENSE" else name
                digests[name] = hashlib.sha256(stream.read()).hexdigest()
    return [
        f"{name} is not that of {package.name}"
        for name, digest in listed(folder).items()
        if digests.get(name) != digest
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print what differs; return 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, help="the npm package, a .tgz")
    package = parser.parse_args(arguments).package
    found = differences()
    if package is not None:
        found += differences_of_package(package)
    for sentence in found:
        print(sentence)
    if not found:
        print(f"{len(listed(FOLDER))} files are as they came")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
