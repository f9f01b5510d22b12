"""LeRobot datasets with videos whose frames say which row they belong to."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.convert.transfer import transfer
from mmreplay.datasets.lerobot_layout import lay_out
from mmreplay.datasets.lerobot_video import find_codec
from mmreplay.datasets.lerobot_writer import LerobotWriter, Sizes
from tests.convert.foreign.test_lerobot import frames, write

TOP, WRIST = "observation.images.top", "observation.images.wrist"
FPS = 10
SURPLUS = 0xFFFF
"""The code of a frame that belongs to no row."""


def stamp(code, size=64):
    """A square frame that holds 16 bits through any lossy codec."""
    bits = np.array([code >> bit & 1 for bit in range(16)], np.uint8).reshape(4, 4)
    gray = np.kron(bits, np.ones((size // 4, size // 4), np.uint8)) * 170 + 40
    return np.stack([gray, gray, 255 - gray], -1)


def codes_of(images):
    """The codes of frames ``[N, H, W, 3]``, or of one."""
    images = np.asarray(images, np.float32)[..., 0]
    size = images.shape[-1] // 4
    blocks = images.reshape(*images.shape[:-2], 4, size, 4, size).mean((-3, -1))
    bits = (blocks > 125).reshape(*images.shape[:-2], 16)
    return (bits << np.arange(16)).sum(-1)


def code(episode, frame, camera=0):
    return episode << 8 | frame << 1 | camera


def film(path, codes, codec="mpeg4", size=64, **options):
    """Pack frames of some codes; frame k is shown at k / FPS seconds."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        stream.options = {name: str(value) for name, value in options.items()}
        for each in codes:
            frame = av.VideoFrame.from_ndarray(stamp(each, size), format="rgb24")
            for packet in stream.encode(frame):
                video.mux(packet)
        for packet in stream.encode():
            video.mux(packet)


def make(folder, lengths, cameras, *, video=film, data=None, info=None):
    """Write a set of v3.

    Args:
        folder: The set.
        lengths: Frames of each episode.
        cameras: By name, for each video file by chunk and number what is in it: the
            number of an episode, or ``-n`` for n frames of none.
        video: Packs a file.
        data: Columns in place of those that `frames` makes.
        info: Keys of info.json.
    """
    rng = np.random.default_rng(0)
    data = frames(rng, lengths) if data is None else data
    shape = {"dtype": "video", "shape": [64, 64, 3]}
    features = dict.fromkeys(cameras, shape)
    write(folder, data, files=1, features=features, **(info or {}))
    table = {
        "episode_index": list(range(len(lengths))),
        "length": list(lengths),
        "dataset_from_index": np.cumsum([0, *lengths[:-1]]),
    }
    for number, (name, files) in enumerate(cameras.items()):
        places = {}
        for (chunk, file), content in files.items():
            codes = []
            for each in content:
                if each < 0:
                    codes += [SURPLUS] * -each
                    continue
                places[each] = chunk, file, len(codes) / FPS
                codes += [code(each, n, number) for n in range(lengths[each])]
            path = folder / "videos" / name / f"chunk-{chunk:03d}"
            video(path / f"file-{file:03d}.mp4", codes)
        for end, values in zip(
            ("chunk_index", "file_index", "from_timestamp"),
            zip(*[places[e] for e in range(len(lengths))], strict=True),
            strict=True,
        ):
            table[f"videos/{name}/{end}"] = list(values)
    meta(folder, table)
    return folder


def meta(folder, table):
    """Write meta/episodes."""
    path = folder / "meta" / "episodes" / "chunk-000"
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path / "file-000.parquet")


def change_meta(folder, **columns):
    """Change columns of meta/episodes; None removes one."""
    path = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path).to_pydict() | columns
    meta(folder, {name: each for name, each in table.items() if each is not None})


def change_info(folder, **keys):
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def wanted(lengths, camera=0):
    """The code of each row."""
    return [code(e, n, camera) for e, many in enumerate(lengths) for n in range(many)]


TASKS = ("push the T", "épingle")


def ring(path, lengths, *, video=True, size=64, capacity=None):
    """A ring of two environments, by turns one episode each; frames say what they are.

    Of three episodes one terminates, one is truncated, and one is cut off by
    `end_episodes`; the last of that kind has no end.

    Args:
        path: Of the ring.
        lengths: Steps of each episode.
        video: With two cameras.
        size: Sides of their images.
        capacity: Of the ring.

    Returns:
        The steps of each environment, one after another, as dicts.
    """
    fields = {"state": mr.Field((3,), "float32")}
    if video:
        fields["images"] = {name: mr.Field((size, size, 3), "uint8") for name in ("top", "wrist")}
    schema = mr.Schema(
        {
            "observation": fields,
            "action": mr.Field((2,), "float32"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
            "task": mr.Field.text(64),
        }
    )
    rng = np.random.default_rng(1)
    steps = {0: [], 1: []}
    with mr.ReplayBuffer.create(
        path, schema, capacity or sum(lengths), num_envs=2, heap_bytes="1 MiB", autoreset="disabled"
    ) as buffer:
        for episode, length in enumerate(lengths):
            env_id, last = episode % 2, episode >= len(lengths) - 2
            for n in range(length):
                over = n == length - 1
                step = {
                    "observation": {"state": rng.normal(size=3).astype("f4")},
                    "action": rng.normal(size=2).astype("f4"),
                    "reward": np.float32(rng.normal()),
                    "terminated": over and episode % 3 == 0,
                    "truncated": over and episode % 3 == 1,
                    "task": TASKS[episode % 2],
                }
                if video:
                    step["observation"]["images"] = {
                        name: stamp(code(episode, n, camera), size)
                        for camera, name in enumerate(("top", "wrist"))
                    }
                buffer.add(**_batched(step), env_ids=[env_id])
                step["truncated"] |= over and episode % 3 == 2 and not last
                steps[env_id].append({**step, "episode": episode, "frame": n})
            if episode % 3 == 2 and not last:
                buffer.end_episodes([env_id])
    return steps[0] + steps[1]


def _batched(step):
    if isinstance(step, dict):
        return {name: _batched(value) for name, value in step.items()}
    return [step] if isinstance(step, str) else np.asarray(step)[None]


def export(source, target, *, sizes=None, **options):
    """Write a set in files of some sizes; the report."""
    with registry.open_reader(registry.source_format(source), source) as reader:

        def open_writer(description):
            layout = lay_out(description, **{"fps": FPS, **options})
            codec = find_codec() if layout.cameras else None
            return LerobotWriter(
                target, description, layout, codec, overwrite=False, sizes=sizes or Sizes()
            )

        return transfer(reader, open_writer)
