"""What do conditions, merges, LeRobot exports, appends and held rows cost?

Ratios, taken turn by turn: `where` on a field over `mr.field_moments` of it, and on the
length alone; a merge of 20 rings over their single conversions; a LeRobot export beside
`save_episode` of LeRobot's own recorder on the same frames, codec and options (where it
is installed); from set to set without encoding beside encoding again; an append at
1,000 episodes over one at 10; `add` while rows are held beside `add` alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.condition import parse
from mmreplay.convert.episode_facts import EpisodeFacts
from tools.bench.turns import Times, medians_us, race, rounded, run_benchmark

EPISODE = 100
"""Steps of an episode."""
FPS, SIDE = 10, 256
SCALARS = {"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")}
IMAGES = {"top": mr.Field((SIDE, SIDE, 3), "uint8"), "wrist": mr.Field((SIDE, SIDE, 3), "uint8")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        where: Steps that conditions look at.
        ring: Steps of each of `rings` rings that are merged.
        rings: Rings.
        frames: Episodes of a set with two cameras; an eighth of them are recorded.
        appends: Episodes at which an append is timed.
        adds: Steps of a burst.
        turns: Times that each side runs.
    """

    where: int = 10_000_000
    ring: int = 200_000
    rings: int = 20
    frames: int = 40
    appends: tuple[int, int] = (10, 1000)
    adds: int = 20_000
    turns: int = 7


FULL = Sizes()
QUICK = Sizes(20_000, 1000, 3, 2, (3, 12), 500, 2)


def over(times: Times, one: str, other: str) -> float:
    """How many times as long as the other side one takes: the median of turns."""
    return rounded(float(np.median(times[one] / times[other])))


def fill(path: Path, steps: int, schema: mr.Schema, seed: int = 0) -> None:
    """Make a ring of one environment, full of episodes of `EPISODE` steps."""
    rng = np.random.default_rng(seed)
    rewards = rng.standard_normal((steps, 1), np.float32)
    ends = (np.arange(1, steps + 1) % EPISODE == 0)[:, None]
    with mr.ReplayBuffer.create(path, schema, steps, commit_every=None) as buffer:
        for first in range(0, steps, 1 << 16):
            rows = slice(first, first + (1 << 16))
            buffer.extend(reward=rewards[rows], terminated=ends[rows])


def conditions(folder: Path, sizes: Sizes) -> dict[str, object]:
    """One pass over a field, by a condition and by its moments."""
    ring = folder / "ring"
    fill(ring, sizes.where, mr.Schema(SCALARS))

    def selected(text: str) -> Callable[[], object]:
        def look() -> object:
            with mr.ReplayBuffer.open(ring) as buffer:
                reader = BufferReader(buffer)
                condition = parse(text, buffer.schema.fields, "reward")
                return EpisodeFacts(reader, condition).selected()

        return look

    def moments() -> object:
        with mr.ReplayBuffer.open(ring) as buffer:
            return mr.field_moments(buffer, ("reward",))

    sides = {
        "where_field": selected("mean(reward) > 0"),
        "where_length": selected("length >= 50"),
        "field_moments": moments,
    }
    times = race(sides, sizes.turns)
    shutil.rmtree(ring)
    return {
        "field_over_moments": over(times, "where_field", "field_moments"),
        "length_over_moments": over(times, "where_length", "field_moments"),
        "median_us": medians_us(times),
    }


def merges(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Rings to one, and each to one of its own."""
    sources: list[Any] = [folder / f"source{number}" for number in range(sizes.rings)]
    for number, source in enumerate(sources):
        fill(source, sizes.ring, mr.Schema(SCALARS), number)

    def one_by_one() -> None:
        for source in sources:
            mr.load(source, folder / "single", overwrite=True)

    sides = {
        "merged": lambda: mr.load(sources, folder / "merged", overwrite=True),
        "single": one_by_one,
    }
    times = race(sides, sizes.turns)
    for each in folder.iterdir():
        shutil.rmtree(each)
    return {"merged_over_single": over(times, "merged", "single"), "median_us": medians_us(times)}


def frames_of(episode: int) -> Mapping[str, np.ndarray]:
    """Images of an episode that move, by camera, uint8 ``[T, H, W, 3]``."""
    time = np.arange(EPISODE)[:, None, None, None]
    rows, columns = np.mgrid[:SIDE, :SIDE][..., None]
    colors = np.arange(3) * 40
    found = {}
    for camera, name in enumerate(IMAGES):
        wave = np.sin((rows + time) / 9 + camera) + np.cos((columns - time) / 7 + episode)
        found[name] = (128 + 40 * wave + colors % 60).clip(0, 255).astype(np.uint8)
    return found


def filmed(path: Path, episodes: int) -> None:
    """Make a ring with two cameras."""
    schema = mr.Schema({"observation": {"images": IMAGES}, **SCALARS})
    with mr.ReplayBuffer.create(path, schema, episodes * EPISODE, commit_every=None) as buffer:
        ends = (np.arange(EPISODE) == EPISODE - 1)[:, None]
        for episode in range(episodes):
            images = {name: each[:, None] for name, each in frames_of(episode).items()}
            buffer.extend(
                observation={"images": images},
                reward=np.ones((EPISODE, 1), np.float32),
                terminated=ends,
            )


def exports(folder: Path, sizes: Sizes) -> dict[str, object]:
    """A ring to a set, a set to a set, and LeRobot's own recorder."""
    ring, few = folder / "ring", max(1, sizes.frames // 8)
    filmed(ring, few)
    options: dict[str, Any] = {"format": "lerobot", "fps": FPS, "overwrite": True}
    recorded: dict[str, Callable[[], object]] = {
        "export": lambda: mr.export(ring, folder / "few", crf=30, **options)
    }
    if find_spec("lerobot") is not None:
        recorded["save_episode"] = recorder(folder / "lerobot", few)
    saved = race(recorded, min(3, sizes.turns), warm=0)
    shutil.rmtree(ring)
    filmed(ring, sizes.frames)
    mr.export(ring, folder / "set", **options)
    shutil.rmtree(ring)

    def converted(*words: str) -> Callable[[], object]:
        names = [str(folder / name) for name in ("set", "other")]
        command = ["convert", *names, "--to", "lerobot", "--overwrite", *words]

        def convert() -> None:
            # What it prints is no figure.
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                code = run(command)
            assert code == 0, command

        return convert

    # Other options than those of the set: its frames are decoded, and encoded anew.
    sides = {"copied": converted(), "encoded_again": converted("-o", "to.crf=22")}
    times = race(sides, min(3, sizes.turns), warm=0)
    found: dict[str, object] = {
        "encoded_again_over_copied": over(times, "encoded_again", "copied"),
        "median_us": medians_us(times) | medians_us(saved),
    }
    if "save_episode" in saved:
        found["save_episode_over_export"] = over(saved, "save_episode", "export")
    return found


def lerobot_datasets() -> Any:
    """LeRobot's module of datasets, beside a torch for CPUs and without a network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch: Any = import_module("torch")
    if torch.version.cuda is None:
        # torchvision from PyPI names operators of a torch for CUDA.
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return import_module("lerobot.datasets.lerobot_dataset")


def recorder(root: Path, episodes: int) -> Callable[[], object]:
    """LeRobot's recorder of the same frames, by H.264 of the same options."""
    datasets = lerobot_datasets()
    value: Any = import_module("datasets.features.features").Value
    encode = value.encode_example
    # Newer versions of numpy make no number of an array of one.
    value.encode_example = lambda self, number: encode(
        self, number.item() if getattr(number, "size", 0) == 1 else number
    )
    dataset = datasets.LeRobotDataset
    image = {"dtype": "video", "shape": (SIDE, SIDE, 3), "names": ["height", "width", "channels"]}
    features: dict[str, object] = {f"observation.images.{name}": image for name in IMAGES}
    features["next.reward"] = {"dtype": "float32", "shape": (1,), "names": None}

    def save() -> None:
        shutil.rmtree(root, ignore_errors=True)
        made = dataset.create("me/set", FPS, features, root=root, vcodec="h264")
        for episode in range(episodes):
            images = frames_of(episode)
            for step in range(EPISODE):
                frame = {f"observation.images.{name}": each[step] for name, each in images.items()}
                made.add_frame({**frame, "next.reward": np.ones(1, np.float32), "task": ""})
            made.save_episode()
        made.finalize()

    return save


def appends(folder: Path, sizes: Sizes) -> dict[str, object]:
    """An append of one episode to a small set, and to a large one."""
    schema = mr.Schema({"observation": {"state": mr.Field((6,), "float32")}, **SCALARS})
    few, many = sizes.appends
    seconds: dict[str, list[float]] = {}
    with mr.ReplayBuffer.create(folder / "ring", schema, 50_000, commit_every=None) as buffer:
        options: dict[str, Any] = {"format": "lerobot", "fps": FPS}
        with mr.AutoExport(buffer, folder / "set", **options) as exporter:
            for episode in range(many + sizes.turns):
                for step in range(10):
                    buffer.add(
                        observation={"state": np.full(6, step, np.float32)},
                        reward=1.0,
                        terminated=step == 9,
                    )
                if episode < few or few + sizes.turns <= episode < many:
                    # Many at a time would be one unit: a set of appends is wanted.
                    exporter.flush()
                    continue
                begun = perf_counter()
                exporter.flush()
                key = "few" if episode < many else "many"
                seconds.setdefault(key, []).append(perf_counter() - begun)
    for each in folder.iterdir():
        shutil.rmtree(each)
    medians = {key: float(np.median(each)) for key, each in seconds.items()}
    return {
        "many_over_few": rounded(medians["many"] / medians["few"]),
        "median_us": {key: rounded(1e6 * each) for key, each in medians.items()},
    }


def holding(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Adds of a full ring, with a callback that lets all rows go and without one."""
    schema = mr.Schema({"observation": mr.Field((17,), "float32"), **SCALARS})
    rings = {
        name: mr.ReplayBuffer.create(folder / name, schema, 10_000) for name in ("held", "free")
    }
    observation = np.zeros(17, np.float32)
    rings["held"].hold_rows(lambda heads, tails, needed, target: target)

    def adds(ring: mr.ReplayBuffer) -> Callable[[], object]:
        return lambda: ring.add(observation=observation, reward=1.0, terminated=False)

    sides = {name: adds(ring) for name, ring in rings.items()}
    times = race(sides, 4 * sizes.turns, sizes.adds)
    for ring in rings.values():
        ring.close()
    return {"free_over_held": over(times, "free", "held"), "median_us": medians_us(times)}


QUESTIONS = {
    "where": conditions,
    "merge": merges,
    "lerobot": exports,
    "append": appends,
    "held": holding,
}


def measure(folder: Path, sizes: Sizes) -> dict[str, object]:
    """All figures."""
    found: dict[str, object] = {}
    for name, question in QUESTIONS.items():
        (folder / name).mkdir()
        found[name] = question(folder / name, sizes)
    return found


def main() -> None:
    """Measure and print."""
    run_benchmark(
        __doc__, lambda folder, options: measure(folder, QUICK if options.quick else FULL)
    )


if __name__ == "__main__":
    main()
