"""The recipes at the head of the page on converting do what they say."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.testing.disks import QuickDisk, using

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
SCHEMA = mr.Schema(
    {
        "observation": {
            "state": mr.Field((3,), "float32"),
            "wrist": mr.Field((16, 16, 3), "uint8"),
        },
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "success": mr.Field((), "bool"),
        "terminated": mr.Field((), "bool"),
    }
)


def record(path, seed, episodes):
    """Episodes of 4 to 9 steps of which about every second one succeeds."""
    rng = np.random.default_rng(seed)
    with mr.ReplayBuffer.create(path, SCHEMA, 200, autoreset="same_step") as buffer:
        for _ in range(episodes):
            length, succeeds = int(rng.integers(4, 10)), bool(rng.random() < 0.5)
            for step in range(length):
                last = step == length - 1
                buffer.add(
                    observation={
                        "state": rng.random(3, np.float32),
                        "wrist": rng.integers(0, 256, (16, 16, 3), np.uint8),
                    },
                    action=step,
                    reward=rng.random(dtype=np.float32),
                    success=last and succeeds,
                    terminated=last,
                )


def recipes():
    """What stands below each sentence of the page's first section, in order."""
    section = PAGE.read_text().partition("## Recipes\n")[2].partition("\n## ")[0]
    found = re.split(r"^([A-Z][^`\n]*(?:`[^`\n]*`[^`\n]*)*):$", section, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.fixture
def there(tmp_path, monkeypatch, capsys):
    """Four actors, and runs/all merged of three by the first recipe."""
    monkeypatch.chdir(tmp_path)
    with using(QuickDisk()):
        for seed in range(4):
            record(f"actors/{seed}", seed, 10)
        type_out(recipes()["Merge what several actors recorded, closed or still writing"], capsys)
        yield capsys
    sys.modules.pop("mine", None)


def type_out(recipe, capsys):
    """Type what a recipe shows; what the commands printed."""
    for block in re.findall(r"^```python\n# (mine\.py)\n(.*?)^```", recipe, re.M | re.S):
        Path(block[0]).write_text(block[1])
    for line in re.findall(r"^\$ (.*)$", recipe, re.M):
        words = shlex.split(line)
        assert words[0] == "mmreplay"
        assert run(words[1:]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def table(path):
    with mr.ReplayBuffer.open(path) as buffer:
        assert not mr.verify_buffer(path).findings
        return mr.episode_table(buffer), buffer.gather_all(), buffer.schema


def test_the_page_begins_with_recipes():
    assert len(recipes()) >= 10
    assert PAGE.read_text().index("## Recipes") < 400


def test_actors_are_merged(there):
    merged, rows, _ = table("runs/all")
    each = [table(f"actors/{seed}")[1]["action"] for seed in range(3)]
    assert rows["action"].tolist() == np.concatenate(each).tolist()
    assert len(merged) == 30


def test_the_best_tenth_is_left(there):
    type_out(recipes()["Keep the best tenth of the episodes, by return"], there)
    returns = np.sort(table("runs/all")[0].returns)
    assert np.sort(table("runs/best")[0].returns).tolist() == returns[-3:].tolist()


def test_failures_are_dropped(there):
    (title,) = [each for each in recipes() if each.startswith("Drop the failures")]
    out = type_out(recipes()[title], there)
    _, before, _ = table("runs/all")
    good, after, _ = table("runs/good")
    assert f"where leaves {len(good)}" in out
    assert len(good) == before["success"].sum() == after["success"].sum()
    assert 0 < len(good) < 30


def test_a_validation_set_is_split_off(there):
    (title,) = [each for each in recipes() if each.startswith("Split off a validation set")]
    type_out(recipes()[title], there)
    sizes = [len(table(f"sets/{name}")[0]) for name in ("train", "val")]
    assert sizes == [27, 3]
    assert sorted(each.name for each in Path("tables").iterdir()) == [
        "train.parquet",
        "val.parquet",
    ]


def test_rewards_are_relabelled(there):
    type_out(recipes()["Relabel rewards, by a function in `mine.py`"], there)
    _, rows, _ = table("runs/sparse")
    assert rows["reward"].tolist() == rows["success"].astype(float).tolist()


def test_every_third_frame_stays(there):
    type_out(recipes()["Keep every third frame"], there)
    before, after = table("runs/all")[0], table("runs/slow")[0]
    assert after.lengths.tolist() == (-(-before.lengths // 3)).tolist()
    np.testing.assert_allclose(after.returns, before.returns, rtol=1e-6)


def test_a_camera_is_dropped(there):
    type_out(recipes()["Drop a camera"], there)
    _, rows, schema = table("runs/narrow")
    assert "observation/wrist" not in schema.paths
    assert (rows["observation/state"] == table("runs/all")[1]["observation/state"]).all()


def to_lerobot(there):
    pytest.importorskip("av", reason="PyAV is not installed")
    type_out(recipes()["To LeRobot"], there)


def test_lerobot_sets_are_made_merged_filtered_and_split(there):
    to_lerobot(there)
    (title,) = [each for each in recipes() if each.startswith("Merge, filter and split LeRobot")]
    type_out(recipes()[title], there)
    sizes = []
    for name in ("train", "val"):
        mr.load(f"both/{name}", f"runs/{name}", video="decode")
        sizes.append(table(f"runs/{name}")[0].lengths)
    lengths = [table("runs/all")[0].lengths, table("actors/3")[0].lengths]
    long = np.concatenate(lengths)
    long = long[long >= 5]
    assert np.sort(np.concatenate(sizes)).tolist() == np.sort(long).tolist()
    assert abs(len(sizes[1]) - len(long) / 10) <= 1


def test_lerobot_becomes_parquet(there):
    to_lerobot(there)
    type_out(recipes()["From LeRobot to parquet"], there)
    mr.load("arm.parquet", "runs/back")
    _, rows, _ = table("runs/back")
    before = table("runs/all")[1]
    assert (rows["observation/state"] == before["observation/state"]).all()
    assert rows["success"].tolist() == before["success"].tolist()
    apart = rows["observation/wrist"].astype(int) - before["observation/wrist"]
    # Random pixels are what a video holds worst; gray is where nothing was decoded.
    assert np.abs(apart.mean()) < 10
    assert rows["observation/wrist"].std() > 20
