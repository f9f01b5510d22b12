"""Paths that begin with ~ lead to the home folder, wherever a path is taken."""

from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError
from tests.buffer.support import schema, step


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A home folder that holds a buffer; the working folder is another one."""
    folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(elsewhere)
    filled("~/ring").close()
    yield folder
    assert list(elsewhere.iterdir()) == []


def filled(path, **options):
    buffer = mr.ReplayBuffer.create(path, schema(), 50, **options)
    for number in range(30):
        buffer.add(step(number, "t" if number % 7 == 6 else ""))
    return buffer


def length(path, **options):
    with mr.ReplayBuffer.open(path, **options) as buffer:
        return len(buffer)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.sliced(1)
def test_buffers_are_made_opened_and_copied_there(user_folder, kind):
    with filled(kind("~/made")) as buffer:
        assert buffer.path == user_folder / "made"
        buffer.snapshot(kind("~/copy"))
    filled(kind("~/packed"), engine="zarr").close()
    mr.compact(kind("~/made"), kind("~/compact"))
    mr.repair(kind("~/made"), kind("~/mended"))
    for name in ("made", "copy", "packed", "compact", "mended"):
        assert (user_folder / name / "metadata.json").is_file()
        assert length(kind(f"~/{name}")) == 30
        assert mr.verify_buffer(kind(f"~/{name}")).ok
    assert length(kind("~/made"), mode="r+") == 30
    with mr.ReplayBuffer.open(kind("~/packed")) as buffer:
        group = buffer.zarr_path.relative_to(user_folder)
    assert length(mr.ZarrSource(f"~/{group}")) == length(kind(f"~/{group}")) == 30


@pytest.mark.parametrize("kind", [str, Path])
def test_files_are_exported_and_loaded_there(user_folder, kind):
    for suffix in ("npz", "csv", "pt", "parquet", "safetensors"):
        mr.export(kind("~/ring"), kind(f"~/file.{suffix}"))
        assert (user_folder / f"file.{suffix}").is_file()
        mr.load(kind(f"~/file.{suffix}"), kind(f"~/of-{suffix}"))
        assert length(kind(f"~/of-{suffix}")) == 30
    with filled(None, engine="memory") as buffer:
        mr.export(buffer, kind("~/ram.npz"))
        with mr.AutoExport(buffer, kind("~/exports")):
            pass
    assert (user_folder / "ram.npz").is_file()


@pytest.mark.parametrize("kind", [str, Path])
def test_datasets_streams_and_several_buffers_are_opened_there(user_folder, kind):
    assert len(mr.ReplayDataset(kind("~/ring"))) == 29
    stream = mr.ReplayStream(kind("~/ring"), mr.UniformSampler(0), batch_size=4)
    assert len(next(iter(stream))) == 4
    with mr.concat([kind("~/ring"), kind("~/ring")]) as both:
        assert len(both) == 60


def test_environments_are_recorded_there(user_folder):
    pytest.importorskip("gymnasium")
    found = mr.record("CartPole-v1", "~/cart", steps=20, progress=False)
    assert found.path == user_folder / "cart"
    assert length("~/cart") == 20


def test_adapters_keep_their_rings_and_files_there(user_folder):
    import torch

    from mmreplay.adapters import velora

    buffer = velora.ReplayBuffer(20, 2, 1, 3, path="~/velora")
    for number in range(5):
        one = torch.full((1,), float(number))
        buffer.add(one.expand(2), one, number, one.expand(2), False, one.expand(3))
    buffer.save("~/saved")
    metadata = buffer.metadata()
    buffer.close()
    assert (user_folder / "velora" / "metadata.json").is_file()
    assert (user_folder / "saved" / "buffer_state.safetensors").is_file()
    again = velora.ReplayBuffer.load("~/saved/buffer_state", metadata, path=Path("~/again"))
    assert len(again) == 5
    again.close()
    assert (user_folder / "again" / "metadata.json").is_file()


@pytest.mark.parametrize("text", ["~nobody-of-this-name/ring", "~nobody-of-this-name"])
def test_an_unknown_user_folder_is_reported(user_folder, text):
    told = (
        rf"'{text}': no home folder is known for '~nobody-of-this-name'.*"
        "or the absolute path of a folder with such a name"
    )
    for call in (
        lambda: mr.ReplayBuffer.open(text),
        lambda: mr.ReplayBuffer.create(text, schema(), 10),
        lambda: mr.export("~/ring", text),
        lambda: mr.verify_buffer(text),
    ):
        with pytest.raises(FormatError, match=told):
            call()
    # Not "./~name": a pathlib.Path drops the "./".
    mr.ReplayBuffer.create(user_folder / text, schema(), 10).close()


class Large:
    """Something that nobody wants to see printed."""

    def __repr__(self):
        return "x" * 10_000


@pytest.mark.parametrize(
    "value", [Large(), {"a": Large()}, 5, b"ring", np.zeros(3), [Large()]], ids=type
)
def test_what_is_no_path_is_named_by_its_type(user_folder, value):
    way_out = "Pass one path"
    if isinstance(value, bytes):
        way_out = "Decode bytes with os.fsdecode"
    elif isinstance(value, list):
        way_out = "Pass its one item"
    told = f"must be a str or pathlib.Path, got {type(value).__name__}. {way_out}."
    for call in (
        lambda: mr.ReplayBuffer.open(value),
        lambda: mr.ReplayBuffer.open(value, "r+"),
        lambda: mr.ReplayBuffer.create(value, schema(), 10),
        lambda: mr.ReplayDataset(value),
        lambda: mr.concat([value]),
        # A list is one of sources.
        lambda: mr.load([value] if isinstance(value, list) else value, "~/target"),
        lambda: mr.load("~/ring", value),
        lambda: mr.export("~/ring", value),
        lambda: mr.export([value] if isinstance(value, list) else value, "~/file.npz"),
        lambda: mr.verify_buffer(value),
        lambda: mr.compact(value, "~/target"),
        lambda: mr.repair(value),
    ):
        with pytest.raises(FormatError, match=told) as raised:
            call()
        assert len(str(raised.value)) < 200
