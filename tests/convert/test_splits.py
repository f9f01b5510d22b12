"""A data set is split into several targets, equal episodes are left out."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import buffer_writer
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.episode_facts import EpisodeFacts
from mmreplay.errors import FormatError, LockedError, SchemaError
from mmreplay.testing.disks import QuickDisk, using
from tests.convert import condition_twin as twin
from tests.convert.curated import AUTORESETS, record
from tests.convert.test_joined import ring, steps_in
from tests.convert.test_where import NUMBER, episodes_of, random_ring
from tests.slices import count

SHARES = {"train": 0.7, "val": 0.3}


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


def numbers_in(path):
    with mr.ReplayBuffer.open(path) as buffer:
        assert not mr.verify_buffer(path).findings
        return buffer.gather_all()[NUMBER].tolist()


def contents(folder):
    """Bytes of all files below a folder by their paths."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Splits.


def test_splits_of_a_ring_are_those_of_mr_split(tmp_path):
    for turn in range(count(60, 4)):
        source = tmp_path / f"ring{turn}"
        with random_ring(source, twin.make(turn)) as buffer:
            if len(mr.episode_table(buffer)) < 4:
                continue
            parts = mr.split(buffer, [*SHARES.values()], seed=turn)
            rows = buffer.gather_all()
            at = list(zip(rows.env_ids.tolist(), rows.positions.tolist(), strict=True))
            number_at = dict(zip(at, rows[NUMBER].tolist(), strict=True))
        report = mr.load(source, tmp_path / f"sets{turn}", splits=SHARES, seed=turn)
        assert report.rows == len(at)
        for name, part in zip(SHARES, parts, strict=True):
            wanted = [
                number_at[env_id, position]
                for env_id, begin, end in zip(
                    part.env_ids.tolist(), part.begins.tolist(), part.ends.tolist(), strict=True
                )
                for position in range(begin, end)
            ]
            assert numbers_in(tmp_path / f"sets{turn}" / name) == wanted


def test_splits_of_several_sources_that_are_merged_again_are_the_same_episodes(tmp_path):
    for turn in range(count(60, 2)):
        rng = twin.make(500 + turn)
        folder = tmp_path / str(turn)
        folder.mkdir()
        paths, episodes = [], []
        kind = {"num_envs": 2, "autoreset": rng.choice(["same_step", "disabled"])}
        live = []
        for number in range(3):
            buffer = random_ring(folder / f"s{number}", rng, first=1000 * number, **kind)
            paths.append(folder / f"s{number}")
            episodes += [numbers for numbers, _ in episodes_of(buffer)]
            # One writer goes on living.
            if number == 1:
                buffer.commit()
                live.append(buffer)
            else:
                buffer.close()
        if len(episodes) >= 4:
            mr.load(paths, folder / "sets", splits=SHARES, seed=turn)
            sets = [folder / "sets" / name for name in SHARES]
            both = [numbers_in(each) for each in sets]
            assert sorted(both[0] + both[1]) == sorted(n for each in episodes for n in each)
            for each in episodes:
                assert set(each) <= set(both[0]) or set(each) <= set(both[1])
            report = mr.load([*sets, *paths], folder / "all", unique=True)
            assert sorted(numbers_in(folder / "all")) == sorted(both[0] + both[1])
            assert report.episodes == len(episodes)
        for buffer in live:
            buffer.close()


def test_splits_are_files_of_the_format_that_is_named(cli, tmp_path):
    ring(tmp_path / "a", steps=18)
    words = (tmp_path / "a", tmp_path / "sets", "--split", "train=0.9,val=0.1", "--seed", "4")
    assert cli(*words, "--to", "parquet")[0] == 0
    assert sorted(each.name for each in (tmp_path / "sets").iterdir()) == [
        "train.parquet",
        "val.parquet",
    ]
    mr.export(
        tmp_path / "a",
        tmp_path / "again",
        format="parquet",
        splits={"train": 0.9, "val": 0.1},
        seed=4,
    )
    assert mr.load(tmp_path / "again" / "val.parquet", tmp_path / "v").episodes == 1
    for name in ("train", "val"):
        mr.load(tmp_path / "sets" / f"{name}.parquet", tmp_path / name)
    assert sorted(steps_in(tmp_path / "train") + steps_in(tmp_path / "val")) == [*range(18)]
    words = (words[0], tmp_path / "other", *words[2:])
    plan = json.loads(cli(*words, "-n", "--json", "--to", "npz")[1])
    assert plan["splits"] == {"train": 15, "val": 3}


def test_a_plan_of_splits_says_each_step_once(cli, tmp_path):
    ring(tmp_path / "a", steps=18)
    words = ("--split", "train=0.5,val=0.5", "--drop", "reward", "-n")
    _, out, _ = cli(tmp_path / "a", tmp_path / "x", *words)
    assert out.count("drop: reward") == 1
    plan = json.loads(cli(tmp_path / "a", tmp_path / "x", *words, "--json")[1])
    assert plan["steps"] == ["the source has 6 episodes", "splits: train 3, val 3", "drop: reward"]


def test_progress_goes_over_all_splits(tmp_path):
    ring(tmp_path / "a", steps=18)
    seen = []
    mr.load(tmp_path / "a", tmp_path / "x", splits=SHARES, progress=lambda *now: seen.append(now))
    assert seen[-1] == (18, 18)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({}, "splits must be shares by name"),
        ([0.9, 0.1], "splits must be shares by name"),
        ({"a/b": 1.0}, "names of splits must be 1 to 64 letters.* got 'a/b'"),
        ({".x": 1.0}, "begin with a letter or digit, got '.x'"),
        ({3: 1.0}, "names of splits must be .* got 3"),
        (
            {"a": 0.5, "tmp-mmreplay-new-x": 0.5},
            "names of splits must not begin with 'tmp-mmreplay-', got 'tmp-mmreplay-new-x'",
        ),
        ({"a": 0.5, "b": 0.4}, r"must be above 0 and 1 together, got \[0.5, 0.4\]"),
        ({"a": 1.5, "b": -0.5}, "must be above 0 and 1 together"),
        ({"a": float("nan")}, "must be above 0 and 1 together"),
        ({"a": "0.5", "b": 0.5}, "must be above 0 and 1 together"),
        ({"a": 0.99, "b": 0.01}, "each of splits must have an episode.* a 2, b 0"),
    ],
)
def test_splits_that_make_no_sense_are_refused(tmp_path, splits, message):
    ring(tmp_path / "a")
    with pytest.raises(SchemaError, match=message):
        mr.load(tmp_path / "a", tmp_path / "x", splits=splits)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def test_splits_exclude_rows_and_a_suffix(tmp_path):
    ring(tmp_path / "a")
    with pytest.raises(SchemaError, match="splits and rows exclude each other"):
        mr.load(tmp_path / "a", tmp_path / "x", splits=SHARES, rows=slice(0, 3))
    for target in ("x.npz", "x.csv.gz"):
        with pytest.raises(FormatError, match=rf"{target} must be the name of a folder, as splits"):
            mr.load(tmp_path / "a", tmp_path / target, splits=SHARES)
        with pytest.raises(FormatError, match=r"Leave out its suffix, and pass format='csv'"):
            mr.export(tmp_path / "a", tmp_path / target, splits=SHARES, format="csv")


def test_only_a_folder_of_these_splits_is_replaced(tmp_path):
    source, target = ring(tmp_path / "a", steps=18), tmp_path / "x"
    mr.load(source, target, splits=SHARES)
    with pytest.raises(FormatError, match="x already exists"):
        mr.load(source, target, splits=SHARES)
    mr.load(source, target, splits=SHARES, seed=1, overwrite=True)
    refused = pytest.raises(
        FormatError, match=r"x must hold train, val and nothing else to be replaced"
    )
    (target / "notes.txt").write_text("mine")
    with refused:
        mr.load(source, target, splits=SHARES, overwrite=True)
    (target / "notes.txt").unlink()
    with pytest.raises(FormatError, match="x must hold test, train and nothing else"):
        mr.load(source, target, splits={"train": 0.5, "test": 0.5}, overwrite=True)
    with (
        mr.ReplayBuffer.open(target / "val", "r+"),
        pytest.raises(LockedError, match="val is open"),
    ):
        mr.load(source, target, splits=SHARES, overwrite=True)
    before = contents(target)
    mr.load(source, tmp_path / "ring")
    with pytest.raises(FormatError, match="ring must hold train, val and nothing else"):
        mr.load(source, tmp_path / "ring", splits=SHARES, overwrite=True)
    assert contents(target) == before


@pytest.mark.parametrize("format", ["buffer", "lerobot", "parquet"])
@pytest.mark.parametrize("name", ["train", "val"])
def test_a_split_with_other_files_is_not_replaced(tmp_path, format, name):
    source, target = ring(tmp_path / "a", steps=18), tmp_path / "x"

    def write(**options):
        if format == "buffer":
            return mr.load(source, target, splits=SHARES, **options)
        more = {"lerobot": {"fps": 10}, "parquet": {"file_nbytes": 1 << 16}}[format]
        return mr.export(source, target, splits=SHARES, format=format, **more, **options)

    write()
    write(overwrite=True, seed=1)
    split = target / (f"{name}.parquet" if format == "parquet" else name)
    (split / "thesis.txt").write_text("mine")
    before = contents(target)
    with pytest.raises(FormatError, match=rf"x/{split.name} is a folder that holds no buffer or"):
        write(overwrite=True)
    assert contents(target) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "x"]


def test_folders_and_files_of_the_user_with_names_of_splits_are_not_replaced(cli, tmp_path):
    source, target = ring(tmp_path / "a", steps=18), tmp_path / "x"
    (target / "train").mkdir(parents=True)
    (target / "train" / "thesis.txt").write_text("mine")
    (target / "val").mkdir()
    with pytest.raises(FormatError, match="x/train is a folder that holds no buffer or other"):
        mr.load(source, target, splits=SHARES, overwrite=True)
    words = (source, target, "--split", "train=0.7,val=0.3", "--overwrite")
    assert "target        is refused, unless an earlier run made" in cli(*words, "-n")[1]
    (target / "train" / "thesis.txt").unlink()
    (target / "val").rmdir()
    (target / "val").write_text("mine")
    with pytest.raises(FormatError, match="x/val is a file or a link, which a folder does not"):
        mr.load(source, target, splits=SHARES, overwrite=True)
    assert contents(target) == {"val": b"mine"}
    (target / "val").unlink()
    (target / "val").mkdir()
    assert "target        is replaced" in cli(*words, "-n")[1]
    mr.load(source, target, splits=SHARES, overwrite=True)
    assert sorted(steps_in(target / "train") + steps_in(target / "val")) == [*range(18)]


def test_a_split_that_fails_leaves_nothing(tmp_path, monkeypatch):
    ring(tmp_path / "a", steps=18)
    opened, write = [], buffer_writer.BufferWriter.write

    def fails(self, block):
        opened.append(self)
        if len(set(map(id, opened))) == 2:
            raise OSError("the second one fails")
        write(self, block)

    monkeypatch.setattr(buffer_writer.BufferWriter, "write", fails)
    with pytest.raises(OSError, match="the second one fails"):
        mr.load(tmp_path / "a", tmp_path / "x", splits=SHARES)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--split", "train"],
            "--split must be names with shares, such as train=0.9,val=0.1, got 'train'",
        ),
        (["--split", "train=most"], "--split must be names with shares, such as train=0.9,val=0.1"),
        (["--split", "a=0.5,a=0.5"], "--split must give 'a' once, got it twice"),
        (["--split", "a=0.5,b=0.5", "--save-selection", "f"], "exclude each other"),
    ],
)
def test_a_split_that_is_mistyped_is_one_line(cli, tmp_path, words, message):
    ring(tmp_path / "a")
    code, _, err = cli(tmp_path / "a", tmp_path / "x", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "x").exists()


# Equal episodes.


def filled(path, episodes, *, num_envs=1, autoreset="same_step", engine="memmap"):
    """A ring of episodes: lists of (observation, note), and how each ends."""
    schema = mr.Schema(
        {
            "observation": mr.Field((2,), "float32"),
            "reward": mr.Field((), "float64"),
            "note": mr.Field.text(max_bytes=20),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(
        path, schema, 200, num_envs, autoreset=autoreset, engine=engine, heap_bytes=65536
    ) as buffer:
        for steps, end in episodes:
            for n, (value, note) in enumerate(steps):
                last = n == len(steps) - 1
                buffer.add(
                    {
                        "observation": np.full((num_envs, 2), value, np.float32),
                        "reward": [value] * num_envs,
                        "note": [note] * num_envs,
                        "terminated": [last and end == "terminated"] * num_envs,
                        "truncated": [last and end == "truncated"] * num_envs,
                    }
                )
    return path


ONE = ([(1.0, "go"), (0.0, ""), (3.0, "é")], "terminated")


@pytest.mark.parametrize(
    ("other", "left"),
    [
        (ONE, 1),
        (([(1.0, "go"), (0.0, ""), (3.0, "é")], "truncated"), 2),
        (([(1.0, "go"), (-0.0, ""), (3.0, "é")], "terminated"), 2),
        (([(1.0, "g"), (0.0, "o"), (3.0, "é")], "terminated"), 2),
        (([(1.0, "go"), (0.0, "")], "terminated"), 2),
        (([(1.0, "go"), (0.0, ""), (3.0, "é"), (3.0, "")], "terminated"), 2),
    ],
)
def test_episodes_are_equal_in_all_bytes_or_not(tmp_path, other, left):
    filled(tmp_path / "a", [ONE, other])
    assert mr.load(tmp_path / "a", tmp_path / "x", unique=True).episodes == left


def test_equal_episodes_are_found_in_any_source(cli, tmp_path):
    apart = ([(9.0, "x")], "truncated")
    filled(tmp_path / "a", [ONE, apart])
    filled(tmp_path / "b", [apart, apart, ONE], num_envs=3)
    filled(tmp_path / "c", [ONE], engine="zarr")
    mr.export(tmp_path / "b", tmp_path / "b.parquet")
    mr.export(tmp_path / "b", tmp_path / "b.csv")
    sources = [tmp_path / each for each in ("a", "b", "c", "b.parquet", "b.csv")]
    report = mr.load(sources, tmp_path / "x", unique=True, envs="stack")
    assert report.episodes == 2
    code, out, _ = cli(*sources, tmp_path / "y", "--unique", "--envs", "stack", "-n")
    assert code == 0
    assert "the 5 sources have 30 episodes" in out
    assert "unique leaves 2 (2, 0, 0, 0, 0)" in out
    assert f"{tmp_path / 'a'} (buffer): 4 of 4 rows, 2 of 2 episodes" in out


def test_the_first_one_that_is_chosen_stays(tmp_path):
    filled(tmp_path / "a", [ONE, ONE, ONE])
    with mr.ReplayBuffer.open(tmp_path / "a"):
        pass
    mr.load(tmp_path / "a", tmp_path / "x", unique=True, skip=[0])
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        assert buffer.span.first.tolist() == [3]


class InBlocks(BufferReader):
    """Reads few rows at a time."""

    size = 1

    def blocks(self, rows_per_block=None):
        return super().blocks(self.size)

    def marks(self):
        return super().blocks(self.size)


@pytest.mark.filterwarnings("ignore:.*end_episodes of environments")
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.sliced(1)
def test_digests_do_not_depend_on_blocks(tmp_path, autoreset):
    for seed in range(count(4, 2)):
        record(tmp_path / str(seed), autoreset, seed)
        found = []
        for size in (1, 2, 7, 1000):
            reader = InBlocks(mr.ReplayBuffer.open(tmp_path / str(seed)), owned=True)
            reader.size = size
            with reader:
                found.append(EpisodeFacts(reader, digests=True).digests.tolist())
        assert found[0] == found[1] == found[2] == found[3]
        assert len(set(found[0])) > 3


@pytest.mark.filterwarnings("ignore:.*end_episodes of environments")
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.sliced(1)
def test_what_a_seam_rewrites_does_not_count(tmp_path, autoreset):
    # Final rows, episodes that were broken off, and steps that a resume truncated.
    for seed in range(count(12, 2)):
        source = record(tmp_path / str(seed), autoreset, seed)
        with mr.ReplayBuffer.open(source, "r+", on_resume="truncate") as buffer:
            episodes = len(mr.episode_table(buffer))
        sets = tmp_path / f"sets{seed}"
        mr.load(source, sets, splits={"a": 0.5, "b": 0.5}, seed=seed)
        report = mr.load([sets / "b", sets / "a", source], tmp_path / f"x{seed}", unique=True)
        with (
            mr.ReplayBuffer.open(source) as one,
            mr.ReplayBuffer.open(tmp_path / f"x{seed}") as two,
        ):
            assert len(one) == len(two)
        assert report.episodes == episodes


def test_a_final_observation_counts(tmp_path):
    schema = mr.Schema({"observation": mr.Field((), "float32"), "truncated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 20, autoreset="same_step") as buffer:
        for final in (5.0, 5.0, 6.0):
            buffer.add(observation=1.0, truncated=True, final_observation=final)
        buffer.add(observation=1.0, truncated=True)
    assert mr.load(tmp_path / "a", tmp_path / "x", unique=True).episodes == 3


def test_rows_of_one_buffer_twice_are_refused_unless_equal_ones_are_left_out(tmp_path):
    ring(tmp_path / "a", steps=12)
    mr.export(tmp_path / "a", tmp_path / "some.npz", episodes=slice(2, 4))
    both = [tmp_path / "a", tmp_path / "some.npz"]
    with pytest.raises(SchemaError, match="both have the row at position 6 of environment 0"):
        mr.load(both, tmp_path / "x")
    mr.load(both, tmp_path / "x", unique=True)
    assert steps_in(tmp_path / "x") == [*range(12)]


def test_rows_that_moved_or_changed_are_of_no_buffer(tmp_path):
    ring(tmp_path / "a", steps=12)
    mr.export(tmp_path / "a", tmp_path / "odd.npz", episodes=[1, 3])
    mr.export(tmp_path / "a", tmp_path / "cast.npz", cast={"reward": "float64"})
    mr.load([tmp_path / "a", tmp_path / "odd.npz"], tmp_path / "x")
    assert len(steps_in(tmp_path / "x")) == 18
    mr.load(
        [tmp_path / "a", tmp_path / "cast.npz"],
        tmp_path / "y",
        fields=["observation", "terminated"],
    )
    assert len(steps_in(tmp_path / "y")) == 24


def test_a_source_without_rows_has_no_equal_ones(tmp_path):
    ring(tmp_path / "none", steps=0)
    ring(tmp_path / "a", steps=9)
    for paths in ([tmp_path / "none", tmp_path / "a"], [tmp_path / "a", tmp_path / "none"]):
        mr.load(paths, tmp_path / "x", unique=True, overwrite=True)
        assert steps_in(tmp_path / "x") == [*range(9)]
    assert mr.load(tmp_path / "none", tmp_path / "y", unique=True).rows == 0
    assert mr.load(tmp_path / "none", tmp_path / "z", frame_skip=2, map=dict).rows == 0
    with pytest.raises(SchemaError, match="and of 0 there would be: train 0, val 0"):
        mr.load(tmp_path / "none", tmp_path / "sets", splits=SHARES)


def test_unique_is_true_or_false(tmp_path):
    ring(tmp_path / "a")
    with pytest.raises(SchemaError, match="unique must be one of True, False, got 'yes'"):
        mr.load(tmp_path / "a", tmp_path / "x", unique="yes")
