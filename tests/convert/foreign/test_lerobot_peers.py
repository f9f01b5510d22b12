"""LeRobot's videos, as PyAV packs them; its own frames are the oracle."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import CorruptError
from tests.convert.foreign.test_lerobot import LENGTHS, frames, write

pytestmark = [pytest.mark.peer]
av = pytest.importorskip("av", reason="PyAV is not installed")
CAMERA = "observation.images.top"
FEATURES = {CAMERA: {"dtype": "video", "shape": [48, 64, 3]}}


def film(path, count, first):
    """Pack frames that differ, and return what they are when they are unpacked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(first, first + count):
            image = np.full((48, 64, 3), 20 * number % 256, np.uint8)
            image[:, : 4 * number] = 255 - image[:, : 4 * number]
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            for packet in stream.encode(frame):
                video.mux(packet)
        for packet in stream.encode():
            video.mux(packet)
    with av.open(str(path)) as video:
        return [each.to_ndarray(format="rgb24") for each in video.decode(video=0)]


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_of_all_files_follow_each_other(tmp_path, rng, version):
    folder = write(tmp_path / "set", frames(rng), version, features=FEATURES)
    videos, wanted = folder / "videos", []
    if version == "v2.1":
        for number, length in enumerate(LENGTHS):
            path = videos / "chunk-000" / CAMERA / f"episode_{number:06d}.mp4"
            wanted += film(path, length, len(wanted))
    else:
        for number, length in enumerate((5, 6)):
            path = videos / CAMERA / "chunk-000" / f"file-{number:03d}.mp4"
            wanted += film(path, length, len(wanted))
    assert len(wanted) == sum(LENGTHS)
    report = mr.load(folder, tmp_path / "buffer", video="decode")
    assert any("unpacked from video: it is lossy" in note for note in report.notes)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        found = buffer.gather_all()["observation/images/top"]
    np.testing.assert_array_equal(found, np.stack(wanted))


def test_a_truncated_video_is_named(tmp_path, rng):
    folder = write(tmp_path / "set", frames(rng), features=FEATURES)
    path = folder / "videos" / CAMERA / "chunk-000" / "file-000.mp4"
    film(path, 7, 0)
    with pytest.raises(
        CorruptError, match=r"must have 11 frames, got 7 in 1 files up to"
    ):
        mr.load(folder, tmp_path / "buffer", video="decode")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CorruptError, match=r"file-000\.mp4 cannot be"):
        mr.load(folder, tmp_path / "buffer", video="decode")
    assert not (tmp_path / "buffer").exists()
