"""Image layouts are recognized, or stated, and frames are numpy's pixels."""

import warnings

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.frames import ImageLayout, one_frame, read_frames, recognize, stated, to_pixels


@pytest.mark.parametrize(
    ("shape", "axes", "channels", "stack"),
    [
        ((210, 160, 3), "HWC", 3, 1),
        ((84, 84, 1), "HWC", 1, 1),
        ((84, 84, 4), "HWN", 1, 4),
        ((3, 64, 64), "CHW", 3, 1),
        ((1, 64, 48), "CHW", 1, 1),
        ((4, 84, 84), "NHW", 1, 4),
        ((84, 84), "HW", 1, 1),
        ((16, 16), "HW", 1, 1),
        ((4, 64, 64, 3), "NHWC", 3, 4),
        ((4, 3, 64, 64), "NCHW", 3, 4),
        ((64, 64, 3, 4), "HWCN", 3, 4),
        ((480, 640, 3), "HWC", 3, 1),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_shapes_of_images_are_recognized(shape, axes, channels, stack, dtype):
    layout = recognize(mr.Field(shape, dtype))
    assert (layout.axes, layout.channels, layout.stack) == (axes, channels, stack)
    height, width = (shape[axes.index(name)] for name in "HW")
    assert (layout.height, layout.width) == (height, width)


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (100,),
        (15, 84),
        (84, 84, 17),
        (8, 8, 3),
        (2, 2, 2, 2, 2),
        (64, 64, 64),
        (17, 84, 84),
        (4, 5, 64, 64),
    ],
)
def test_other_shapes_are_numbers(shape):
    assert recognize(mr.Field(shape, "float32")) is None


@pytest.mark.parametrize(
    ("axes", "shape", "words"),
    [
        ("HW", (20, 20, 3), "must have 3 letters"),
        ("CWH", (84, 84), "shape .84, 84.: H and W. Pass --image observation=HW"),
        ("HWC", (4,), "must have 2 to 4 axes to be an image, got the shape .4."),
        ("HWX", (20, 20, 3), "must be made of H, W, C and N"),
        ("HHW", (20, 20, 3), "each once"),
        ("HC", (20, 3), "must be made of H, W, C and N"),
        ("CHW", (20, 20, 3), "1 or 3 channels"),
    ],
)
def test_a_stated_layout_that_does_not_fit(axes, shape, words):
    with pytest.raises(mr.SchemaError, match=words):
        stated("observation", mr.Field(shape, "uint8"), axes)


@pytest.mark.parametrize(
    "axes", ["HW", "WH", "HWC", "CHW", "WHC", "HWN", "NHW", "NHWC", "NCHW", "CWHN"]
)
def test_frames_have_rows_columns_and_channels_in_order(rng, axes):
    sizes = {"H": 5, "W": 7, "C": 3, "N": 4}
    rows = rng.integers(0, 256, (2, *(sizes[name] for name in axes)), np.uint8)
    layout = ImageLayout.of(axes, rows.shape[1:])
    for number in range(layout.stack):
        frames = one_frame(rows, layout, number)
        assert frames.shape == (2, 5, 7, 3 if "C" in axes else 1)
        for row in range(5):
            for column in range(7):
                at = {"H": row, "W": column, "N": number, "C": slice(None)}
                index = tuple(at[name] for name in axes)
                expected = rows[(slice(None), *index)].reshape(2, -1)
                np.testing.assert_array_equal(frames[:, row, column], expected)


def test_the_newest_frame_of_a_stack_is_shown(ask, tmp_path, rng):
    path = tmp_path / "stack"
    fields = {"observation": mr.Field((4, 20, 24), "uint8")}
    frames = rng.integers(0, 256, (30, 4, 20, 24), np.uint8)
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 50) as buffer:
        buffer.extend(observation=frames)
    client = ask(path)
    query = "field=observation&env=0&first=3&count=2"
    for more, number in (("", 3), ("&frame=0", 0), ("&frame=3", 3)):
        head, body = client.arrays("frames", query + more)
        assert head["shape"] == [2, 20, 24, 1]
        assert body == frames[3:5, number].tobytes()
    # Rows of other axes, as the user states them.
    client = ask(path, images={"observation": "NWH"})
    head, body = client.arrays("frames", query)
    assert head["shape"] == [2, 24, 20, 1]
    assert body == frames[3:5, 3].transpose(0, 2, 1).tobytes()
    client = ask(path, images={"observation": "none"})
    assert client.refused("frames", query)[0] == 400


def test_depth_has_a_colour_map_over_the_range_of_the_sample(ask, tmp_path, rng):
    path = tmp_path / "depth"
    fields = {"observation": mr.Field((20, 24), "float32")}
    depth = (rng.random((30, 20, 24)) * 5 - 1).astype(np.float32)
    depth[3, 2, 1], depth[3, 4, 5], depth[3, 0, 0] = np.nan, np.inf, -np.inf
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 50) as buffer:
        buffer.extend(observation=depth)
    head, body = ask(path).arrays("frames", "field=observation&env=0&first=3")
    finite = depth[np.isfinite(depth)]
    assert (head["low"], head["high"]) == (
        pytest.approx(float(finite.min())),
        pytest.approx(float(finite.max())),
    )
    pixels = np.frombuffer(body, np.uint8).reshape(20, 24, 3)
    for row, column in ((2, 1), (4, 5), (0, 0)):
        assert pixels[row, column].tolist() == [0, 0, 0]
    colours = to_pixels(
        np.linspace(0, 1, 256, dtype=np.float32).reshape(1, 1, 256, 1), (0.0, 1.0), colours=True
    )[0, 0]
    assert colours[0].tolist() == [0x44, 0x01, 0x54]
    assert colours[-1].tolist() == [0xFD, 0xE7, 0x25]
    shares = (depth[3] - head["low"]) / (head["high"] - head["low"])
    levels = np.rint(np.nan_to_num(shares, nan=0, posinf=0, neginf=0) * 255)
    expected = colours[levels.astype(int)]
    same = (pixels == expected).all(axis=2) | ~np.isfinite(depth[3])
    # A value between two levels may be rounded to either.
    assert same.mean() > 0.95


@pytest.mark.parametrize("codec", ["png", "jpeg"])
def test_fields_of_images_are_shown_as_arrays_are(ask, tmp_path, rng, codec):
    frames = rng.integers(0, 256, (30, 20, 24, 3), np.uint8)
    fields = {"observation": mr.Field.image((20, 24, 3), codec)}
    with mr.ReplayBuffer.create(tmp_path / "files", mr.Schema(fields), 50) as buffer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mr.LossWarning)
            buffer.extend(observation=frames)
        drawn = buffer.get_field("observation", 0, np.arange(3, 5))
        files = buffer.view.get_lengths(("observation",), 0, np.arange(30))["observation"]
    client = ask(tmp_path / "files")
    head, body = client.arrays("frames", "field=observation&env=0&first=3&count=2")
    assert head["shape"] == [2, 20, 24, 3]
    assert body == drawn.tobytes()
    assert codec == "jpeg" or body == frames[3:5].tobytes()
    # What a row takes is what is stored: a reference and a file.
    (field,) = client.json("overview")["fields"]
    assert field["nbytes"] == 20 * 24 * 3
    assert field["row_nbytes"] == fields["observation"].nbytes + round(files.mean())


def test_the_overview_of_images_stands_with_damaged_references_and_without_rows(ask, tmp_path, rng):
    path, field = tmp_path / "files", mr.Field.image((20, 24, 3), "png")
    schema = mr.Schema({"observation": field, "number": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(path, schema, 64, engine="zarr", heap_bytes="4 MiB") as buffer:
        (shown,) = ask(path).json("overview")["fields"][:1]
        # Nothing is known of the files yet.
        assert shown["row_nbytes"] == field.nbytes
        frames = rng.integers(0, 256, (60, 20, 24, 3), np.uint8)
        buffer.extend(observation=frames, number=np.arange(60))
    shards = [*path.glob("data-*/zarr/%references/observation/c.*")]
    assert len(shards) > 5
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:20])
    overview = ask(path).json("overview")
    images, number = overview["fields"]
    assert images["row_nbytes"] == field.nbytes
    assert (number["low"], number["high"]) == (0, 59)
    titles = [each["title"] for each in overview["checks"]]
    assert "Values of observation could not be computed" in titles


def test_colours_in_floats_are_their_own(ask, tmp_path, rng):
    for high, limits in ((1.0, (0.0, 1.0)), (255.0, None)):
        path = tmp_path / f"floats-{high}"
        fields = {"observation": mr.Field((20, 24, 3), "float32")}
        values = (rng.random((30, 20, 24, 3)) * high).astype(np.float32)
        with mr.ReplayBuffer.create(path, mr.Schema(fields), 50) as buffer:
            buffer.extend(observation=values)
        head, body = ask(path).arrays("frames", "field=observation&env=0&first=3")
        low, top = limits or (float(values.min()), float(values.max()))
        assert (head["low"], head["high"]) == (pytest.approx(low), pytest.approx(top))
        pixels = np.frombuffer(body, np.uint8).reshape(20, 24, 3).astype(float)
        np.testing.assert_allclose(pixels, (values[3] - low) / (top - low) * 255, atol=1)


def test_masks_are_black_and_white(tmp_path, rng):
    path = tmp_path / "mask"
    fields = {"observation": mr.Field((20, 24), "bool")}
    masks = rng.random((30, 20, 24)) < 0.5
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 50) as buffer:
        buffer.extend(observation=masks)
        layout = recognize(buffer.schema["observation"])
        ids, positions = np.zeros(5, np.int64), np.arange(5)
        pixels = read_frames(buffer, "observation", layout, ids, positions)
    np.testing.assert_array_equal(pixels[..., 0], masks[:5] * np.uint8(255))


def test_large_frames_are_strided_to_4_mib(tmp_path, rng):
    path = tmp_path / "large"
    fields = {"observation": mr.Field((2400, 3000, 3), "uint8")}
    frames = rng.integers(0, 256, (2, 2400, 3000, 3), np.uint8)
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 4) as buffer:
        buffer.extend(observation=frames)
        layout = recognize(buffer.schema["observation"])
        ids, positions = np.zeros(2, np.int64), np.arange(2)
        pixels = read_frames(buffer, "observation", layout, ids, positions)
        small = read_frames(buffer, "observation", layout, ids, positions, side=100)
    assert pixels.nbytes <= 4 << 20
    np.testing.assert_array_equal(pixels, frames[:1, ::3, ::3])
    np.testing.assert_array_equal(small, frames[:, ::30, ::30])
