"""What do image fields cost: draws, adds, imports, and LeRobot beside them?

Draws of 256 frames of 96x96 and 480x640, camera-like and rendered, from a ring of JPEG
files beside LMDB and Lance with the same files, the same decoder and as many threads,
and beside rings of arrays, compressed or not. Random batches of 64 steps of two cameras
beside LeRobotDataset of the same frames, as video and as images, where LeRobot is
installed. `add` of a camera's files beside the same bytes in a field of bytes, and of
arrays beside a camera of 30 Hz. An import with ``--cast`` beside decoding alone, in one
thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import mmreplay as mr
from mmreplay.schema.images import ImageEncoding, in_threads
from tools.bench.bench_curate import lerobot_datasets
from tools.bench.turns import OURS, Side, medians_us, race, rounded, run_benchmark

BATCH = 256
SHAPES = {"96x96": (96, 96, 3), "480x640": (480, 640, 3)}
CAMERAS = ("top", "wrist")
FPS = 30
QUALITIES = {"90:420": (90, "420"), "95:444": (95, "444")}
PEERS = {"lmdb": "lmdb", "lance": "lance"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Frames of each store, by shape.
        turns: Of each race.
        calls: Draws of a turn of frames of 96x96; a sixteenth of the larger ones.
        episodes: Of 50 steps, of the sets with two cameras.
    """

    rows: Mapping[str, int]
    turns: int = 7
    calls: int = 16
    episodes: int = 20


FULL = Sizes({"96x96": 4096, "480x640": 1024})
QUICK = Sizes({"96x96": 300, "480x640": 260}, turns=2, calls=1, episodes=2)


def frame(number: int, shape: tuple[int, int, int], kind: str) -> np.ndarray[Any, Any]:
    """A frame that moves: of a camera with noise, or rendered in few colors."""
    height, width, _ = shape
    rows, columns = np.mgrid[:height, :width]
    wave = np.sin((rows + 3 * number) / 17) + np.cos((columns - 2 * number) / 23)
    colors = np.stack([wave, np.roll(wave, 9, 0), -wave], -1)
    if kind == "rendered":
        return (np.round(colors) * 50 + 128).astype(np.uint8)
    noise = np.random.default_rng(number).normal(0, 6, shape)
    return (128 + 50 * colors + noise).clip(0, 255).astype(np.uint8)


def ring(
    path: Path, field: mr.Field, rows: int, value: Callable[[int], Any], heap: int, engine: Any
) -> Any:
    """A full ring of the values of each row; `heap` is their bytes where they vary."""
    options: dict[str, Any] = {"heap_bytes": 2 * heap + (8 << 20)} if field.varies else {}
    buffer = mr.ReplayBuffer.create(
        path,
        mr.Schema({"image": field}),
        rows,
        engine=engine,
        commit_every=None,
        sampler=mr.ShuffledSampler(),
        **options,
    )
    for first in range(0, rows, 64):
        some = [value(n) for n in range(first, min(first + 64, rows))]
        buffer.extend(image=some if field.varies else np.stack(some))
    buffer.commit()
    return buffer


class Lmdb:
    """LMDB: a file a value."""

    def __init__(self, folder: Path, files: Sequence[bytes]) -> None:
        folder.mkdir()
        size = 2 * len(files) * (max(map(len, files)) + 8192)
        self._env = import_module("lmdb").open(str(folder), map_size=size, readahead=False)
        with self._env.begin(write=True) as transaction:
            for number, file in enumerate(files):
                transaction.put(number.to_bytes(4, "big"), file)

    def take(self, numbers: Sequence[int]) -> list[bytes]:
        """Files by their numbers."""
        with self._env.begin() as transaction:
            return [transaction.get(number.to_bytes(4, "big")) for number in numbers]


class Lance:
    """Lance: a column of binary."""

    def __init__(self, folder: Path, files: Sequence[bytes]) -> None:
        pa, lance = import_module("pyarrow"), import_module("lance")
        column = pa.array(files, pa.binary())
        self._set = lance.write_dataset(pa.table({"image": column}), str(folder))

    def take(self, numbers: Sequence[int]) -> list[bytes]:
        """Files by their numbers."""
        table = self._set.take(list(numbers), columns=["image"])
        return [value.as_buffer() for value in table.column("image")]


STORES = {"lmdb": Lmdb, "lance": Lance}


def taker(store: Any, encoding: ImageEncoding, rows: int) -> Side:
    """Draws from another store, decoded as ours are."""
    rng = np.random.default_rng(0)

    def draw() -> object:
        out = np.empty((BATCH, *encoding.shape), np.uint8)
        # No frame twice, as our sampler draws.
        files = store.take(rng.permutation(rows)[:BATCH].tolist())

        def decode(number: int) -> None:
            encoding.decode(files[number], out[number])

        in_threads(decode, range(BATCH), out.nbytes)
        return out

    return draw


def draws(folder: Path, sizes: Sizes, peers: Sequence[str]) -> dict[str, dict[str, object]]:
    """Batches of 256 frames, of each size and kind."""
    found: dict[str, dict[str, object]] = {name: {} for name in SHAPES}
    for name, shape in SHAPES.items():
        for kind in ("camera", "rendered"):
            rows, place = sizes.rows[name], folder / f"{name}-{kind}"
            place.mkdir()
            field = mr.Field.image(shape, quality=90)
            encoding = field.encoding
            assert encoding is not None
            frames = [frame(number, shape, kind) for number in range(64)]

            def moved(number: int, frames: Sequence[Any] = frames) -> Any:
                # No two rows are equal, which a store may keep once.
                return np.roll(frames[number % 64], number // 64, axis=1)

            files = [encoding.encode(moved(number)) for number in range(rows)]
            heap = sum(len(file) + 8 for file in files)
            arrays = mr.Field(shape, "uint8")
            with ExitStack() as stack:
                rings = {
                    OURS: ring(place / OURS, field, rows, files.__getitem__, heap, "memmap"),
                    "raw": ring(place / "raw", arrays, rows, moved, 0, "memmap"),
                    "zarr": ring(place / "zarr", arrays, rows, moved, 0, "zarr"),
                }
                for buffer in rings.values():
                    stack.callback(buffer.close)
                sides: dict[str, Side] = {
                    side: partial(buffer.sample, BATCH) for side, buffer in rings.items()
                }
                for peer in peers:
                    sides[peer] = taker(STORES[peer](place / peer, files), encoding, rows)
                calls = sizes.calls if name == "96x96" else max(1, sizes.calls // 16)
                times = race(sides, sizes.turns, calls)
                del sides
            found[name][kind] = {
                "time_over": {
                    side: rounded(float(np.median(times[OURS] / times[side])))
                    for side in times
                    if side != OURS
                },
                "median_us": medians_us(times),
                "bytes_over_raw": {
                    side: rounded(disk_nbytes(place / side) / (rows * encoding.nbytes))
                    for side in times
                },
            }
            shutil.rmtree(place)
    return found


def disk_nbytes(folder: Path) -> int:
    """Bytes that files take on disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def adds(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Adds of a camera's files, of the same bytes, and of arrays."""
    shape = SHAPES["480x640"]
    field = mr.Field.image(shape, quality=90)
    encoding = field.encoding
    assert encoding is not None
    frames = [frame(number, shape, "camera") for number in range(32)]
    files = [encoding.encode(each_frame) for each_frame in frames]
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        for name, declared, values in (
            ("files", field, files),
            ("bytes", mr.Field.bytes(encoding.max_nbytes), files),
            ("arrays", field, frames),
        ):
            buffer = mr.ReplayBuffer.create(
                folder / name,
                mr.Schema({"image": declared}),
                512,
                heap_bytes="128 MiB",
                commit_every=None,
            )
            stack.callback(buffer.close)
            sides[name] = adder(buffer, values)
        times = race(sides, sizes.turns, 4 * sizes.calls)
    return {
        "files_over_bytes": rounded(float(np.median(times["files"] / times["bytes"]))),
        "share_of_a_30_hz_camera": rounded(float(np.median(times["arrays"])) * FPS),
        "median_us": medians_us(times),
    }


def adder(buffer: Any, values: Sequence[Any]) -> Side:
    """Adds one value after another, over and over."""
    number = 0

    def add() -> None:
        nonlocal number
        number += 1
        buffer.add(image=values[number % len(values)])

    return add


def make_sets(folder: Path, sizes: Sizes, shape: tuple[int, int, int]) -> int:
    """A ring of two cameras as a set of videos and as one of images; its rows."""
    steps = 50
    images = {name: mr.Field(shape, "uint8") for name in CAMERAS}
    schema = mr.Schema(
        {
            "observation": {"images": images, "state": mr.Field((7,), "float32")},
            "action": mr.Field((7,), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    rows = sizes.episodes * steps
    with mr.ReplayBuffer.create(folder / "raw", schema, rows, commit_every=None) as buffer:
        for number in range(rows):
            observation = {
                "images": {
                    name: frame(number + 1000 * at, shape, "camera")
                    for at, name in enumerate(CAMERAS)
                },
                "state": np.zeros(7, np.float32),
            }
            ended = number % steps == steps - 1
            buffer.add(observation=observation, action=np.zeros(7), terminated=ended)
    options: dict[str, Any] = {"format": "lerobot", "fps": FPS, "task": "move"}
    # The options of lerobot's own recorder.
    mr.export(folder / "raw", folder / "videos", codec="av1", crf=30, **options)
    mr.export(folder / "raw", folder / "images", video=False, **options)
    return rows


def lerobot(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Random batches of 64 steps and two cameras, beside LeRobot's loader."""
    rows = make_sets(folder, sizes, SHAPES["480x640"])
    nbytes: dict[str, int] = {}
    speeds: dict[str, dict[str, float]] = {}
    sides: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for name, (quality, subsampling) in QUALITIES.items():
            cast = f"jpeg:{quality}:{subsampling}"
            casts = {f"observation/images/{camera}": cast for camera in CAMERAS}
            path = folder / f"jpeg-{quality}"
            mr.load(folder / "videos", path, cast=casts)
            buffer = mr.ReplayBuffer.open(path, transforms=[mr.WithoutNext()])
            stack.callback(buffer.close)
            sides[f"jpeg {name}"] = partial(buffer.sample, 64)
            nbytes[f"jpeg {name}"] = disk_nbytes(path)
        for name in ("videos", "images", "raw"):
            nbytes[name] = disk_nbytes(folder / name)
        if find_spec("lerobot") is not None:
            for name in ("videos", "images"):
                sides[f"lerobot {name}"] = loader(folder / name, rows)
        times = race(sides, min(3, sizes.turns), 1)
    shutil.rmtree(folder / "raw")
    for name in QUALITIES:
        for other in ("videos", "images"):
            if f"lerobot {other}" in times:
                ratio = times[f"lerobot {other}"] / times[f"jpeg {name}"]
                speeds.setdefault(name, {})[other] = rounded(float(np.median(ratio)))
    return {"speedup": speeds, "nbytes": nbytes, "median_us": medians_us(times)}


def loader(root: Path, rows: int) -> Callable[[], object]:
    """Random items of LeRobot's dataset, put together by torch without workers."""
    torch: Any = import_module("torch")
    home = lerobot_datasets()
    home.decode_video_frames = partial(decoded, torch, import_module("av"))
    dataset = home.LeRobotDataset("me/set", root=root)
    rng = np.random.default_rng(0)

    def batch() -> object:
        items = [dataset[int(number)] for number in rng.integers(rows, size=64)]
        return torch.utils.data.default_collate(items)

    return batch


def decoded(torch: Any, av: Any, path: Any, seconds: Any, tolerance: float, backend: Any) -> Any:
    """Frames of a video as LeRobot's decoder gives them.

    That one asks torchvision for a reader that newer versions do not have. Like it,
    this opens the file, goes to the key frame before the first time, and decodes.
    """
    frames: list[Any] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        container.seek(int(min(seconds) / stream.time_base), stream=stream)
        for packet in container.decode(stream):
            frames.append(packet)
            if packet.time >= max(seconds) - tolerance:
                break
        shown = [
            torch.from_numpy(
                min(frames, key=lambda one: abs(one.time - second)).to_ndarray(format="rgb24")
            )
            for second in seconds
        ]
    return torch.stack(shown).permute(0, 3, 1, 2).float() / 255


def imports(folder: Path, sizes: Sizes) -> dict[str, object]:
    """An import that encodes, beside decoding the same videos alone."""
    make_sets(folder, sizes, SHAPES["480x640"])
    casts = {f"observation/images/{name}": "jpeg" for name in CAMERAS}

    def load() -> None:
        mr.load(folder / "videos", folder / "ring", cast=casts, overwrite=True)

    def decode() -> None:
        av = import_module("av")
        for path in sorted((folder / "videos" / "videos").rglob("*.mp4")):
            with av.open(str(path)) as container:
                container.streams.video[0].codec_context.thread_count = 1
                for packet in container.decode(video=0):
                    packet.to_ndarray(format="rgb24")

    times = race({"import": load, "decode": decode}, min(3, sizes.turns))
    for name in ("raw", "ring"):
        shutil.rmtree(folder / name)
    speed = rounded(float(np.median(times["decode"] / times["import"])))
    return {"speed_over_decoding": speed, "median_us": medians_us(times)}


def measure(folder: Path, sizes: Sizes) -> dict[str, object]:
    """All figures."""
    peers = [name for name, module in PEERS.items() if find_spec(module) is not None]
    found: dict[str, object] = {}
    questions: dict[str, Callable[[Path, Sizes], Mapping[str, object]]] = {
        "draw": partial(draws, peers=peers),
        "add": adds,
        "lerobot": lerobot,
        "import": imports,
    }
    for name, question in questions.items():
        (folder / name).mkdir()
        found[name] = question(folder / name, sizes)
        shutil.rmtree(folder / name)
    return found


def main() -> None:
    """Measure and print."""
    run_benchmark(
        __doc__, lambda folder, options: measure(folder, QUICK if options.quick else FULL)
    )


if __name__ == "__main__":
    main()
