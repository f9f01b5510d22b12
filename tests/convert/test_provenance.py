"""Targets say where their rows come from, and no path of it."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert.provenance import MAX_LISTED
from mmreplay.convert.registry import formats
from mmreplay.testing.disks import QuickDisk, using
from tests.convert.test_joined import ring

KEY = "mmreplay_provenance"


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


def user_of(path):
    with mr.ReplayBuffer.open(path) as buffer:
        return buffer.metadata.user


def test_a_plain_conversion_keeps_the_user_metadata(tmp_path):
    ring(tmp_path / "a", user={"robot": "arm"})
    mr.load(tmp_path / "a", tmp_path / "x")
    mr.export(tmp_path / "a", tmp_path / "x.npz")
    mr.load(tmp_path / "x.npz", tmp_path / "y")
    assert user_of(tmp_path / "x") == user_of(tmp_path / "y") == {"robot": "arm"}


@pytest.mark.parametrize(
    "options",
    [
        {"where": "length > 2"},
        {"episodes": slice(0, 1)},
        {"rows": slice(0, 3)},
        {"fields": ["observation"]},
        {"env_ids": [0]},
        {"cast": {"reward": "float64"}},
        {"rename": {"reward": "score"}},
        {"drop": ["reward"]},
        {"frame_skip": 2},
        {"unique": True},
    ],
)
def test_whatever_selects_or_changes_is_said(tmp_path, options):
    ring(tmp_path / "a", user={"robot": "arm"})
    mr.load(tmp_path / "a", tmp_path / "x", **options)
    user = user_of(tmp_path / "x")
    assert user["robot"] == "arm"
    (option,) = options
    names = {"env_ids": "env"}
    assert f"--{names.get(option, option).replace('_', '-')}" in user[KEY]["command"]
    assert user[KEY]["version"] == mr.__version__


def test_sources_are_named_and_counted(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    ring(folder / "a")
    ring(folder / "b", 6)
    mr.export(folder / "b", folder / "b.npz")
    with mr.ReplayBuffer.open(folder / "a") as buffer:
        uuid = buffer.metadata.uuid.hex()
    mr.load(
        [folder / "a", folder / "b.npz"],
        folder / "x",
        where="number != 2",
        splits={"train": 0.67, "val": 0.33},
        seed=7,
    )
    said = [user_of(folder / "x" / name)[KEY] for name in ("train", "val")]
    assert (
        said[0]["command"]
        == said[1]["command"]
        == (
            "mmreplay convert a b.npz x --where 'number != 2' --seed 7 "
            "--split train=0.67,val=0.33 --envs append"
        )
    )
    assert said[0]["seed"] == 7
    for n, (name, kind) in enumerate((("a", "buffer"), ("b.npz", "npz"))):
        both = [each["sources"][n] for each in said]
        assert {(each["name"], each["format"]) for each in both} == {(name, kind)}
        assert {each["rows"] for each in both} == {6}
        assert {each["episodes"] for each in both} == {2}
    assert said[0]["sources"][0]["uuid"] == uuid
    every = [each for one in said for each in one["sources"]]
    assert sum(each["read_episodes"] for each in every) == 3
    assert sum(each["read_rows"] for each in every) == 9
    assert str(tmp_path) not in json.dumps(said)


def test_episodes_are_not_counted_where_rows_are_sliced(tmp_path):
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6)]
    for sources, options in ((paths[0], {"episodes": slice(0, 2)}), (paths, {})):
        mr.load(sources, tmp_path / "x", rows=slice(0, 2), overwrite=True, **options)
        said = user_of(tmp_path / "x")[KEY]["sources"]
        assert [each["read_rows"] for each in said] == [2, 0][: len(said)]
        assert not any("read_episodes" in each for each in said)


@pytest.mark.slow
def test_many_sources_and_numbers_are_counted_only(tmp_path):
    paths = [ring(tmp_path / f"s{n}", 3 * n, 3) for n in range(MAX_LISTED + 2)]
    mr.load(paths, tmp_path / "x", episodes=[*range(MAX_LISTED + 1)])
    said = user_of(tmp_path / "x")[KEY]
    assert len(said["sources"]) == MAX_LISTED
    assert said["further_sources"] == 2
    assert f"--episodes '({MAX_LISTED + 1} numbers)'" in said["command"]


def change(columns):
    return {"reward": columns["reward"] + 1}


def test_a_function_is_named_with_the_digest_of_its_file(tmp_path):
    ring(tmp_path / "a")
    mr.load(tmp_path / "a", tmp_path / "x", map=change)
    source = Path(__file__).read_bytes()
    assert user_of(tmp_path / "x")[KEY]["map"] == {
        "module": __name__,
        "name": "change",
        "blake2b": hashlib.blake2b(source, digest_size=16).hexdigest(),
    }
    names = {}
    exec("def change(columns):\n    return {}\n", names)
    mr.load(tmp_path / "a", tmp_path / "y", map=names["change"])
    assert "blake2b" not in user_of(tmp_path / "y")[KEY]["map"]


@pytest.mark.parametrize("kind", ["npz", "pt", "csv", "parquet", "safetensors"])
def test_a_rerun_gives_equal_bytes(tmp_path, kind):
    if kind == "pt":
        pytest.importorskip("torch")
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6)]
    made = []
    for turn in "xy":
        folder = tmp_path / turn
        folder.mkdir()
        suffix = formats()[kind].suffixes[0]
        mr.export(paths, folder / f"all{suffix}", unique=True, fraction=0.6, seed=3, map=change)
        made.append((folder / f"all{suffix}").read_bytes())
    assert made[0] == made[1]


def test_a_rerun_gives_a_ring_of_equal_rows(tmp_path):
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6)]
    users, files = [], []
    for turn in "xy":
        (tmp_path / turn).mkdir()
        target = tmp_path / turn / "all"
        mr.load(paths, target, where="length > 1", frame_skip=2)
        users.append(user_of(target))
        files.append(
            {
                str(path.relative_to(target)): path.read_bytes()
                for path in sorted(target.rglob("*"))
                if path.is_file() and path.name not in ("metadata.json", "COMMIT", "LOCK")
            }
        )
    assert users[0] == users[1]
    assert files[0] == files[1]


def test_a_table_and_an_open_buffer_are_said(tmp_path):
    ring(tmp_path / "a", num_envs=2)
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        table = mr.episode_table(buffer).to_dict()
        mr.export(buffer, tmp_path / "x.npz", episodes=table, env_ids=np.array([1, 0]))
    mr.load(tmp_path / "x.npz", tmp_path / "x")
    assert user_of(tmp_path / "x")[KEY]["command"] == (
        "mmreplay convert a x.npz --env 1 --env 0 --episodes 0,1,2,3"
    )


def test_info_says_it(tmp_path, capsys):
    ring(tmp_path / "a")
    ring(tmp_path / "b", 6)
    assert (
        run(["convert", *(str(tmp_path / n) for n in ("a", "b", "x")), "--where", "source > 0"])
        == 0
    )
    capsys.readouterr()
    assert run(["info", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert "mmreplay convert a b x --where 'source > 0' --envs append" in out
    assert "a (buffer): 0 of 6 rows, 0 of 2 episodes" in out
    assert "b (buffer): 6 of 6 rows, 2 of 2 episodes" in out
    assert run(["info", str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["user"][KEY]["sources"][1]["name"] == "b"


def test_info_says_what_it_can_of_metadata_that_somebody_wrote(tmp_path, capsys):
    for n, value in enumerate(([], {"command": 3, "sources": [{"name": 4}, 5]}, {"sources": "x"})):
        ring(tmp_path / f"a{n}", user={KEY: value})
        assert run(["info", str(tmp_path / f"a{n}")]) == 0
    assert capsys.readouterr().err == ""


def test_a_merge_has_the_engine_of_its_first_source(cli, tmp_path):
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6)]
    mr.load(paths[0], tmp_path / "z", engine="zarr")
    mr.load([tmp_path / "z", paths[1]], tmp_path / "x")
    assert cli(tmp_path / "z", paths[1], tmp_path / "y")[0] == 0
    assert cli(tmp_path / "z", paths[1], tmp_path / "given", "--engine", "memmap")[0] == 0
    mr.load([paths[1], tmp_path / "z"], tmp_path / "other")
    mr.load(tmp_path / "z", tmp_path / "one")
    engines = {}
    for name in ("x", "y", "given", "other", "one"):
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            engines[name] = buffer.metadata.engine
    assert engines == {
        "x": "zarr",
        "y": "zarr",
        "given": "memmap",
        "other": "memmap",
        "one": "memmap",
    }


# Selections of rows.


def test_a_selection_is_saved_and_read_again(cli, tmp_path):
    ring(tmp_path / "a", steps=18)
    saved = tmp_path / "good.json"
    words = (tmp_path / "a", tmp_path / "x.npz", "--where", "number in [1, 2, 5]")
    assert cli(*words, "--save-selection", saved, "-n")[0] == 0
    assert not saved.exists()
    assert cli(*words, "--save-selection", saved)[0] == 0
    value = json.loads(saved.read_text())
    assert value["rows"] == [[0, 3, 9], [0, 15, 18]]
    assert cli(tmp_path / "a", tmp_path / "y", "--select", saved)[0] == 0
    assert cli(tmp_path / "x.npz", tmp_path / "x")[0] == 0
    with mr.ReplayBuffer.open(tmp_path / "x") as one, mr.ReplayBuffer.open(tmp_path / "y") as two:
        assert (one.gather_all()["observation"] == two.gather_all()["observation"]).all()
    assert "(9 rows)" in user_of(tmp_path / "y")[KEY]["command"]
    code, _, err = cli(*words, "--save-selection", saved, "--overwrite", "--drop", "reward")
    assert code == 0, err


def test_selections_that_cannot_be_saved_are_refused(cli, tmp_path, monkeypatch):
    from mmreplay.convert import ranges

    paths = [ring(tmp_path / "a", steps=18), ring(tmp_path / "b", 18)]
    np.savez(tmp_path / "theirs.npz", observation=np.zeros((4, 2), np.float32))
    saved = tmp_path / "good.json"
    target = tmp_path / "x"

    def refused(code, message, *words):
        got, _, err = cli(*words, target, "--save-selection", saved)
        assert (got, err.count("\n")) == (code, 1)
        assert message in err
        assert not target.exists()

    refused(2, "--save-selection is of the rows of one SRC, got 2", *paths)
    refused(3, "this one names no buffer", tmp_path / "theirs.npz")
    monkeypatch.setattr(ranges, "MAX_RANGES", 2)
    refused(3, "a selection holds at most 2 ranges of rows", paths[0], "--episodes", "0,2,4")
    saved.write_text("mine")
    refused(3, "good.json already exists. Choose another file for --save-selection", paths[0])
    assert saved.read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("x", "x is DST, "),
        ("x/sel.json", "sel.json is inside DST, "),
        ("a/sel.json", "sel.json is inside SRC, "),
        ("link/sel.json", "sel.json is inside SRC, "),
        ("b.npz", "b.npz is SRC, "),
        (".", "holds SRC, "),
        ("none/sel.json", "must be a file in a folder that exists, got "),
        ("other", "must be a file in a folder that exists, got "),
    ],
)
@pytest.mark.parametrize("more", [[], ["-n"]])
def test_a_selection_is_not_saved_into_a_source_or_target(cli, tmp_path, file, message, more):
    ring(tmp_path / "a", steps=18)
    mr.export(tmp_path / "a", tmp_path / "b.npz")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "other").mkdir()
    before = sorted(tmp_path.rglob("*"))
    source = tmp_path / ("b.npz" if file == "b.npz" else "a")
    data = (tmp_path / "b.npz").read_bytes()
    words = (source, tmp_path / "x", "--save-selection", tmp_path / file, "--overwrite", *more)
    code, _, err = cli(*words)
    assert (code, err.count("\n")) == (3, 1)
    assert "--save-selection" in err
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "b.npz").read_bytes() == data


# Bars.


def test_bars_are_shown_while_episodes_are_looked_at(cli, tmp_path, monkeypatch):
    from mmreplay.recording import recorder

    shown = []

    class Meter(recorder.Meter):
        def __init__(self, total, row_nbytes, show, *, what, unit):
            super().__init__(total, row_nbytes, True, what=what, unit=unit)
            shown.append((what, total))

        def update(self, done, rows, values_nbytes=0):
            super().update(done, rows, values_nbytes)
            shown[-1] = (*shown[-1][:2], done)

    monkeypatch.setattr(recorder, "Meter", Meter)
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6, 12)]
    assert cli(*paths, tmp_path / "x", "--where", "return > 1")[0] == 0
    assert shown == [("selecting", 6, 6), ("selecting", 12, 12), ("converting", 18, 18)]
