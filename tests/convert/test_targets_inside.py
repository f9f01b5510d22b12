"""No target lies in the folder of the source that is read, links resolved."""

import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert.auto_export import AutoExport
from mmreplay.errors import FormatError
from tests.convert.support import same, seven_and_eight

MESSAGE = "{target} is inside the buffer {source}. Choose"


@pytest.fixture
def source(tmp_path):
    seven_and_eight(tmp_path / "a").close()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    return tmp_path / "a"


def listed(folder):
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["a/x.npz", "a/new/x.npz", "a/data-000001/x.csv"])
@pytest.mark.parametrize("linked", ["neither", "source", "target"])
def test_a_file_inside_is_refused(source, tmp_path, name, linked):
    before = listed(tmp_path)
    origin = tmp_path / "link" if linked == "source" else source
    target = tmp_path / (name.replace("a", "link", 1) if linked == "target" else name)
    message = MESSAGE.format(target=target, source=origin)
    with pytest.raises(FormatError, match=message):
        mr.export(origin, target)
    with mr.ReplayBuffer.open(origin) as buffer, pytest.raises(FormatError, match=message):
        mr.export(buffer, target)
    assert listed(tmp_path) == before


def test_a_buffer_inside_and_files_of_a_full_ring_are_refused(source, tmp_path):
    before = listed(source)
    with pytest.raises(FormatError, match="is inside the buffer"):
        mr.load(source, tmp_path / "link" / "new")
    with mr.ReplayBuffer.open(source, "r+") as buffer:
        for folder in (source, tmp_path / "link" / "exports"):
            with pytest.raises(FormatError, match=r"is (inside )?the buffer"):
                AutoExport(buffer, folder)
    assert listed(source) == before


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--overwrite",)])
def test_the_command_refuses_it(source, capsys, options):
    before = listed(source)
    assert run(["convert", str(source), f"{source}/x.parquet", *options]) == 3
    assert "x.parquet is inside the buffer" in capsys.readouterr().err
    assert listed(source) == before


@pytest.mark.parametrize("several", [False, True])
def test_a_target_inside_a_source_of_another_format_is_refused(source, tmp_path, capsys, several):
    folder = tmp_path / "parquet"
    mr.export(source, folder, file_nbytes=3000, format="parquet")
    (tmp_path / "other").symlink_to(folder)
    before, first = listed(folder), [source] if several else []
    message = r"other/new is inside the source .*/parquet\. Choose a path outside the source\."
    with pytest.raises(FormatError, match=message):
        mr.load([*first, folder], tmp_path / "other" / "new")
    for options in ((), ("--dry-run",), ("--overwrite",), ("--to", "lerobot", "-o", "fps=9")):
        assert run(["convert", *map(str, first), str(folder), f"{folder}/new", *options]) == 3
        assert "parquet/new is inside the source" in capsys.readouterr().err
    assert listed(folder) == before
    mr.load(folder, tmp_path / "parquet-ring")


def test_a_link_in_the_folder_is_inside_wherever_it_leads(source, tmp_path):
    (source / "x.npz").symlink_to(tmp_path / "outside.npz")
    with pytest.raises(FormatError, match="is inside the buffer"):
        mr.export(source, source / "x.npz", overwrite=True)


def test_a_sibling_and_the_source_itself_are_not_inside(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    mr.export(source, tmp_path / "ab" / "a.npz")
    mr.load(source, tmp_path / "b")
    mr.load(source, source, overwrite=True)
    with mr.ReplayBuffer.open(source) as one, mr.ReplayBuffer.open(tmp_path / "b") as other:
        same(one, other)
