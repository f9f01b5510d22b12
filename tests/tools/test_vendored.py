"""A changed, missing or unknown file among those that others wrote is found."""

import shutil
import tarfile

import pytest

from tools import vendored


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(vendored.FOLDER, tmp_path / "vendor")


def test_vendored_files_are_as_they_came(capsys):
    assert vendored.differences() == []
    assert vendored.main([]) == 0
    assert capsys.readouterr().out == "3 files are as they came\n"


def test_one_changed_byte_is_found(folder):
    data = bytearray((folder / "uPlot.iife.min.js").read_bytes())
    data[1000] ^= 1
    (folder / "uPlot.iife.min.js").write_bytes(data)
    assert vendored.differences(folder) == ["uPlot.iife.min.js differs from its checksum"]


def test_missing_and_unknown_files_are_found(folder):
    (folder / "LICENSE.txt").unlink()
    (folder / "extra.js").write_text("x")
    assert vendored.differences(folder) == ["extra.js is not listed", "LICENSE.txt is missing"]


def test_a_list_without_version_or_checksums_is_refused(folder):
    sums = folder / vendored.SUMS
    text = sums.read_text()
    for damaged in (text.split("\n", 1)[1], text.replace("19c8", "xxxx")):
        sums.write_text(damaged)
        with pytest.raises(ValueError, match="must"):
            vendored.differences(folder)


def test_files_are_compared_with_the_npm_package(folder, tmp_path, capsys):
    package = tmp_path / "uplot.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for name in ("uPlot.iife.min.js", "uPlot.min.css"):
            archive.add(folder / name, f"package/dist/{name}")
        archive.add(folder / "LICENSE.txt", "package/LICENSE")
    assert vendored.differences_of_package(package) == []
    assert vendored.main(["--package", str(package)]) == 0
    with tarfile.open(package, "w:gz") as archive:
        archive.add(folder / "uPlot.min.css", "package/dist/uPlot.min.css")
    assert vendored.main(["--package", str(package)]) == 1
    assert "uPlot.iife.min.js is not that of uplot.tgz" in capsys.readouterr().out
