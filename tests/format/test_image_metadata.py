"""Images in metadata.json: the feature `image`, and what a field of it must say."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError, ReplayError, VersionError
from mmreplay.format import metadata as metadata_file
from mmreplay.testing.disks import QuickDisk, using
from tests.format import independent_reader
from tests.format.support import metadata_of, schema_of
from tests.format.test_heap import json_of, parsed
from tests.schema.image_files import camera, jpeg, png

IMAGES = {
    "top": mr.Field.image((4, 6, 3), "jpeg", 85, "422", max_bytes=800),
    "depth": mr.Field.image((4, 6, 1), "png", max_bytes=200),
}


def image_metadata():
    return metadata_of(schema=schema_of(**IMAGES), heap_nbytes=8192)


def test_metadata_names_images_exactly_where_a_field_is_of_them():
    value = json_of(image_metadata())
    assert value["version"] == [1, 1]
    assert value["features"]["incompat"] == ["heap", "image"]
    entries = {field["name"]: field for field in value["schema"]}
    assert entries["top"]["image"] == {
        "shape": [4, 6, 3],
        "codec": "jpeg",
        "quality": 85,
        "subsampling": "422",
    }
    assert entries["depth"]["image"] == {
        "shape": [4, 6, 1],
        "codec": "png",
        "quality": None,
        "subsampling": None,
    }
    for name, entry in entries.items():
        assert ("image" in entry) == (name in IMAGES)
    assert parsed(value) == image_metadata()
    bytes_alone = metadata_of(schema=schema_of(x=mr.Field.bytes(9)), heap_nbytes=8192)
    assert json_of(bytes_alone)["features"]["incompat"] == ["heap"]


def with_entry(value, **changes):
    """The same, of which the field `top` says other things."""
    fields = [dict(field) for field in value["schema"]]
    (entry,) = (field for field in fields if field["name"] == "top")
    entry.update(changes)
    return value | {"schema": fields}


def features(*names):
    return {"features": {"compat": [], "ro_compat": [], "incompat": list(names)}}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            lambda v: v | {"features": v["features"] | {"incompat": ["heap"]}},
            FormatError,
            "is damaged: it must have the feature 'image' exactly where a field is of images",
        ),
        (
            lambda v: v | {"schema": v["schema"][:-2]},
            FormatError,
            "the feature '(heap|image)' exactly where",
        ),
        (lambda v: with_entry(v, image=None), ReplayError, "an object of shape, codec, quality"),
        (lambda v: with_entry(v, kind="bytes"), ReplayError, "exactly"),
        (lambda v: with_entry(v, kind="film"), ReplayError, "exactly"),
        (
            lambda v: with_entry(v, image={"shape": [4, 6, 3], "codec": "jpeg"}),
            ReplayError,
            "an object of shape, codec, quality and subsampling",
        ),
    ],
)
def test_metadata_with_an_impossible_image_is_refused(change, error, match):
    value = json_of(image_metadata())
    with pytest.raises(error, match=match):
        parsed(change(value))


def test_the_feature_without_a_field_of_images_is_refused():
    value = json_of(metadata_of(schema=schema_of(x=mr.Field.bytes(9)), heap_nbytes=8192))
    value["features"]["incompat"] = ["heap", "image"]
    with pytest.raises(FormatError, match="the feature 'image' exactly where a field is of images"):
        parsed(value)


def test_a_version_that_knows_no_images_says_which_feature_it_lacks(monkeypatch):
    value = json_of(image_metadata())
    monkeypatch.setattr(metadata_file, "INCOMPAT", metadata_file.INCOMPAT - {"image"})
    with pytest.raises(VersionError, match="'image'"):
        parsed(value)


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_a_reader_written_from_the_page_alone_reads_the_files(tmp_path, engine):
    schema = mr.Schema.from_flat(IMAGES | {"number": mr.Field((), "int64")})
    with (
        using(QuickDisk()),
        mr.ReplayBuffer.create(
            tmp_path / "ring", schema, 20, engine=engine, heap_bytes=16_384, commit_every=None
        ) as buffer,
    ):
        files = {"top": [], "depth": []}
        for number in range(70):
            files["top"].append(jpeg(camera((4, 6, 3), number), 30))
            files["depth"].append(png(camera((4, 6, 1), number)))
            buffer.add({name: made[-1] for name, made in files.items()} | {"number": number})
    found = independent_reader.read(tmp_path / "ring")
    ((_, columns),) = found["envs"]
    first, stop = int(found["first"][0]), int(found["stop"][0])
    assert stop == 70
    assert stop - first == 20
    assert np.array_equal(columns["number"], np.arange(first, stop))
    for name, made in files.items():
        assert columns[name] == made[first:stop]
