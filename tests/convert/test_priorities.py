"""Stored priorities go along, and a sampler of their name draws with them."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import SchemaError
from mmreplay.samplers.priority_file import COLUMN, STATE
from tests.convert.support import EVERY, bits, nested, steps

SUFFIXES = [".npz", ".pt", ".safetensors", ".csv", ".parquet"]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture
def source(tmp_path):
    """A ring that has wrapped, drawn from with priorities, and written on since."""
    buffer = mr.ReplayBuffer.create(
        tmp_path / "source",
        EVERY,
        24,
        2,
        commit_every=None,
        sampler=mr.PrioritizedSampler(seed=0, name="mine"),
        autoreset="disabled",
    )
    rng = np.random.default_rng(3)
    with buffer:
        for count in (20, 15, 4):
            given = steps(EVERY, (count, 2), rng)
            buffer.extend(nested(given))
            if count != 4:
                for _ in range(5):
                    batch = buffer.sample(16)
                    buffer.update_priorities(batch, rng.random(16) * 7)
        yield buffer


def learned(buffer, name="mine"):
    """Priorities by place, as a sampler of that name tells them after a look."""
    sampler = mr.PrioritizedSampler(seed=0, name=name)
    buffer.sampler = sampler
    batch = buffer.sample(4096)
    found = {}
    mass = batch.probabilities
    for env_id, position, each in zip(
        batch.env_ids.tolist(), batch.positions.tolist(), mass.tolist(), strict=True
    ):
        found[env_id, position] = each
    return found


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_sampler_draws_from_the_loaded_buffer_as_from_the_source(source, tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    # csv has no text for bfloat16.
    fields = ["observation", "terminated", "truncated", "single/float32"]
    mr.export(source, path, priorities="mine", fields=fields)
    mr.load(path, tmp_path / "target")
    assert not mr.verify_buffer(tmp_path / "target").findings
    source.close()
    with (
        mr.ReplayBuffer.open(tmp_path / "source") as one,
        mr.ReplayBuffer.open(tmp_path / "target") as other,
    ):
        want, got = learned(one), learned(other)
        assert len(set(want.values())) > 10
        assert got == want


def test_the_column_stands_in_the_file_and_is_below_0_where_nothing_is_known(source, tmp_path):
    mr.export(source, tmp_path / "a.npz", priorities="mine")
    with np.load(tmp_path / "a.npz") as found:
        column, positions = found["_priority"], found["_position"]
    assert column.dtype == np.float32
    # The last four rows of each environment were never looked at.
    fresh = positions >= 35
    assert (column[fresh] == -1).all()
    assert (column[~fresh] >= 0).all()


def test_they_get_another_name_where_one_is_given(source, tmp_path):
    mr.export(source, tmp_path / "a.npz", priorities="mine")
    mr.load(tmp_path / "a.npz", tmp_path / "b", priorities="other")
    assert (tmp_path / "b" / "samplers" / "other" / COLUMN).exists()
    assert not (tmp_path / "b" / "samplers" / "mine").exists()


def test_a_smaller_capacity_and_a_selection_keep_the_priorities_of_their_rows(source, tmp_path):
    mr.export(source, tmp_path / "a.npz", priorities="mine", rows=slice(0, 24))
    mr.load(tmp_path / "a.npz", tmp_path / "b", capacity=6)
    with np.load(tmp_path / "a.npz") as found:
        want = found["_priority"][-6:]
    with mr.ReplayBuffer.open(tmp_path / "b") as part:
        mr.export(part, tmp_path / "b.npz", priorities="mine")
    with np.load(tmp_path / "b.npz") as found:
        np.testing.assert_array_equal(found["_priority"], want)


def test_a_file_goes_to_another_format_with_them(source, tmp_path):
    from mmreplay.cli.run import run

    source.commit()
    options = ["--priorities", "mine"]
    chain = [source.path, tmp_path / "a.pt", tmp_path / "b.npz"]
    assert run(["convert", str(chain[0]), str(chain[1]), *options]) == 0
    assert run(["convert", str(chain[1]), str(chain[2])]) == 0
    back = [str(chain[2]), str(tmp_path / "back"), "--priorities", "other"]
    assert run(["convert", *back]) == 0
    assert (tmp_path / "back" / "samplers" / "other" / STATE).exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("theirs", r"priorities must be one of \['mine'\] in"),
        ("../mine", "name must be 1 to 64 letters.*got '../mine'"),
    ],
)
def test_an_unknown_column_is_refused(source, tmp_path, name, message):
    with pytest.raises(SchemaError, match=message):
        mr.export(source, tmp_path / "a.npz", priorities=name)


def test_a_buffer_without_priorities_has_none_to_give(tmp_path):
    schema = mr.Schema({"a": mr.Field((), "int8")})
    memory = mr.ReplayBuffer.create(None, schema, 4, engine="memory")
    with pytest.raises(
        SchemaError, match=r"drew from a buffer on disk, got 'x' of a buffer in RAM\."
    ):
        mr.export(memory, tmp_path / "a.npz", priorities="x")
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 4) as buffer:
        buffer.add(a=1)
        with pytest.raises(SchemaError, match=r"which stores none\. Leave it out\."):
            mr.export(buffer, tmp_path / "a.npz", priorities="x")
        mr.export(buffer, tmp_path / "a.npz")
    with pytest.raises(SchemaError, match="for a source without priorities"):
        mr.load(tmp_path / "a.npz", tmp_path / "c", priorities="x")


def test_a_column_of_another_boot_that_was_not_closed_is_not_trusted(source, tmp_path):
    import shutil

    source.commit()
    shutil.copytree(source.path, tmp_path / "copy")
    report = mr.export(tmp_path / "copy", tmp_path / "a.npz", priorities="mine")
    assert any("so they are not used: rows have" in note for note in report.notes)
    with np.load(tmp_path / "a.npz") as found:
        assert (found["_priority"] == -1).all()


def test_a_column_of_a_ring_that_was_resized_since_is_read(source, tmp_path):
    mr.export(source, tmp_path / "a.npz", priorities="mine")
    source.resize(40)
    mr.export(source, tmp_path / "b.npz", priorities="mine")
    with np.load(tmp_path / "a.npz") as one, np.load(tmp_path / "b.npz") as other:
        np.testing.assert_array_equal(one["_priority"], other["_priority"])


def test_numbers_that_are_no_priorities_count_as_new_rows(source, tmp_path):
    mr.export(source, tmp_path / "a.npz", priorities="mine")
    with np.load(tmp_path / "a.npz") as found:
        arrays = dict(found)
    raw = bits(mr.Field((), "float32"), (48,), np.random.default_rng(0))
    arrays["_priority"] = raw.copy()
    arrays["_priority"][:3] = [np.nan, np.inf, -np.inf]
    np.savez(tmp_path / "b.npz", **arrays)
    mr.load(tmp_path / "b.npz", tmp_path / "b")
    with mr.ReplayBuffer.open(
        tmp_path / "b", sampler=mr.PrioritizedSampler(seed=0, name="mine")
    ) as buffer:
        assert np.isfinite(buffer.sample(64).weights).all()


def test_priorities_that_stay_behind_are_noted(source, tmp_path):
    report = mr.export(source, tmp_path / "a.npz")
    assert [note for note in report.notes if "priorities 'mine' were not copied" in note]
    report = mr.export(source, tmp_path / "b.npz", priorities="mine")
    assert not [note for note in report.notes if "were not copied" in note]
