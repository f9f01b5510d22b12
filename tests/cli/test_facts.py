"""What info, head, plan and stats say is what is there."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli import show
from mmreplay.disk.files import Disk


def test_info_tells_the_ring_its_contents_and_its_episodes(facts, path):
    found = facts("info", path)
    assert found["path"] == str(path)
    assert (found["capacity"], found["num_envs"], found["engine"]) == (100, 2, "memmap")
    assert (found["steps"], found["rows"], found["final_rows"]) == (90, 90, 0)
    assert (found["heads"], found["tails"], found["sizes"]) == ([45, 45], [0, 0], [45, 45])
    assert found["episodes"] == {"count": 10, "running": 2, "headless": 0}
    assert found["newest_returns"]["mean"] == 10
    assert found["newest_lengths"] == {"count": 8, "mean": 10, "std": 0, "min": 10, "max": 10}
    assert [field["name"] for field in found["schema"]][:2] == [
        "observation/pixels",
        "observation/speed",
    ]
    assert found["roles"]["observation"] == "observation"
    assert found["recovery"]["how"] == "clean"
    assert found["writer"] is None
    assert found["commit"]["heads"] == [45, 45]
    assert found["commit"]["time_ns"] > 1e18


def test_info_counts_steps_that_can_never_be_drawn(facts, path):
    # Two episodes of each environment end truncated, with no final row.
    assert facts("info", path)["never_drawn_steps"] == 4


def test_info_agrees_with_a_count_by_hand(facts, tmp_path, rng):
    """Final rows, a break, and a running end, against the rule itself."""
    schema = mr.Schema(
        {
            "observation": mr.Field((), "int64"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    for autoreset in ("next_step", "disabled"):
        where = tmp_path / autoreset
        for resume in range(3):
            if resume == 0:
                buffer = mr.ReplayBuffer.create(where, schema, 50, 3, autoreset=autoreset)
            else:
                buffer = mr.ReplayBuffer.open(where, "r+")
            with buffer:
                lead = (23 + resume, 3)
                buffer.extend(
                    observation=np.zeros(lead, np.int64),
                    terminated=rng.random(lead) < 0.2,
                    truncated=rng.random(lead) < 0.2,
                )
        with mr.ReplayBuffer.open(where) as buffer:
            rows = buffer.gather_all()
            waits = rows.positions == buffer.heads[rows.env_ids] - 1
            if autoreset == "disabled":
                # No row follows that is of the same episode.
                waits &= ~(rows["terminated"] | rows["truncated"])
            legal = []
            for env_id, position in zip(rows.env_ids, rows.positions, strict=True):
                try:
                    buffer.take([env_id], [position])
                    legal.append(True)
                except mr.errors.StaleError:
                    legal.append(False)
            never = ~np.array(legal) & ~rows["final"] & ~waits
        assert facts("info", where)["never_drawn_steps"] == never.sum() > 0


def test_info_tells_bytes_apparent_and_allocated(facts, path):
    found = facts("info", path)["disk"]
    files = [file for file in path.rglob("*") if file.is_file()]
    assert found["apparent"] == sum(file.stat().st_size for file in files)
    assert found["allocated"] == sum(file.stat().st_blocks * 512 for file in files)


def test_info_names_the_writer_that_is_at_work(facts, path):
    with mr.ReplayBuffer.open(path, "r+", commit_every=None):
        found = facts("info", path)
        assert found["writer"]["pid"] > 0
        assert found["recovery"]["how"] == "live"


def test_info_reads_as_text(cli, path):
    code, out, _ = cli("info", path)
    assert code == 0
    for told in (
        "100 rows x 2 envs",
        "90 steps",
        "4 steps (no next",
        "observation/pixels",
        "closed in order",
        "10, of them 2 unfinished",
    ):
        assert told in out


def test_rows_dropped_by_an_opening_are_reported_every_time(cli, facts, tmp_path):
    folder, copy = tmp_path / "a", tmp_path / "b"
    schema = mr.Schema({"x": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(folder, schema, 100, commit_every=None) as buffer:
        buffer.extend(x=np.zeros(30))
        buffer.commit()
        buffer.extend(x=np.zeros(20))
        shutil.copytree(folder, copy)
    cut = "rows above the last commit are discarded: 20 known rows, and 0 overwritten"
    assert cut in " ".join(cli("info", copy)[1].split())
    mr.ReplayBuffer.open(copy, "r+").close()
    told = "closed in order; an earlier opening discarded 20 rows"
    assert told in " ".join(cli("info", copy)[1].split())
    assert facts("info", copy)["recovery"]["last_cut_rows"] == 20
    assert "had to cut" not in cli("info", folder)[1]


def test_what_gives_up_rows_is_no_commit(cli, facts, tmp_path):
    """Its record repeats the heads of the last one, which a power cut would leave."""
    schema = mr.Schema({"x": mr.Field((), "float32")})
    given = {"commit_every": None}
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 100, **given) as buffer:
        created = facts("info", tmp_path / "b")["commit"]["time_ns"]
        buffer.extend(x=np.zeros(buffer.slots * 3))
        told = " ".join(cli("info", tmp_path / "b")[1].split())
        assert f"last commit none yet, {buffer.slots * 3:,} rows published sin" in told
        buffer.commit()
        told = facts("info", tmp_path / "b")["commit"]
        assert told["time_ns"] > created
        assert told["exact"]
        assert "ago) or before" not in cli("info", tmp_path / "b")[1]
        buffer.extend(x=np.zeros(buffer.slots * 3))
        again = facts("info", tmp_path / "b")["commit"]
        assert (again["heads"], again["exact"]) == (told["heads"], False)
        assert "ago) or before, " in " ".join(cli("info", tmp_path / "b")[1].split())


def test_info_of_an_empty_buffer_and_one_without_rewards(facts, cli, tmp_path):
    schema = mr.Schema({"observation": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 10) as buffer:
        assert facts("info", tmp_path / "b")["episodes"]["count"] == 0
        buffer.extend(observation=np.arange(5))
        assert facts("info", tmp_path / "b")["newest_returns"] is None
        assert cli("info", tmp_path / "b")[0] == 0


def test_info_lists_the_first_of_many_environments(cli, tmp_path):
    schema = mr.Schema({"observation": mr.Field((), "int64")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 10, 50, autoreset="disabled").close()
    assert "... and 34 more" in cli("info", tmp_path / "b")[1]


@pytest.mark.parametrize("command", ["info", "verify", "stats", "head"])
@pytest.mark.sliced(2)
def test_looking_loads_neither_torch_nor_zarr_nor_pyarrow(path, command):
    code = (
        "import sys\n"
        "from mmreplay.cli.run import run\n"
        f"assert run([{command!r}, {str(path)!r}]) == 0\n"
        "heavy = {'torch', 'zarr', 'pyarrow', 'numcodecs', 'gymnasium', 'matplotlib'}\n"
        "print('loaded:', sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_head_shows_the_oldest_rows(facts, path):
    found = facts("head", path, "-n", 3, "--env", 1)
    assert found["env"] == 1
    assert [row["position"] for row in found["rows"]] == [0, 1, 2]
    assert [row["mark"] for row in found["rows"]] == ["start", "", ""]
    with mr.ReplayBuffer.open(path) as buffer:
        pixels = buffer.get_field("observation/pixels", 1, 2)
        action = buffer.get_field("action", 1, 2)
    last = found["rows"][2]
    assert last["action"] == action.tolist()
    assert last["observation/pixels"] == {
        "dtype": "uint8",
        "shape": [8, 8],
        "min": pixels.min(),
        "max": pixels.max(),
        "mean": pixels.mean(),
    }


def test_head_shows_the_newest_rows(facts, path):
    rows = facts("head", path, "-n", "7", "--newest")["rows"]
    assert [row["position"] for row in rows] == list(range(38, 45))
    assert [row["mark"] for row in rows] == ["", "", "start", "", "", "", ""]
    assert rows[1]["truncated"] is True


def test_head_marks_final_rows(facts, tmp_path):
    schema = mr.Schema(
        {"observation": mr.Field((), "bfloat16"), "terminated": mr.Field((), "bool")}
    )
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 10) as buffer:
        buffer.add(observation=0.5, terminated=True, final_observation=2.0)
    rows = facts("head", tmp_path / "b")["rows"]
    assert [(row["mark"], row["observation"]) for row in rows] == [
        ("start", 0.5),
        ("final row", 2.0),
    ]


def test_head_reads_as_text_lying_and_standing(cli, path, monkeypatch):
    _, out, _ = cli("head", path)
    assert "mean" in out
    monkeypatch.setattr(show, "PIPED_WIDTH", 60)
    code, out, _ = cli("head", path, "-n", 2)
    assert code == 0
    assert "observation/pixels" in out


def test_plan_of_fields_agrees_with_what_create_makes(facts, tmp_path):
    found = facts(
        "plan",
        "--field",
        "observation/pixels:uint8:84x84",
        "--field",
        "x:float32",
        "--capacity",
        "1e4",
        "--num-envs",
        "3",
    )
    schema = mr.Schema.from_flat(
        {"observation/pixels": mr.Field((84, 84), "uint8"), "x": mr.Field((), "float32")}
    )
    mr.ReplayBuffer.create(tmp_path / "b", schema, 10_000, 3, autoreset="disabled").close()
    data = (tmp_path / "b" / "data-000001").iterdir()
    assert found["nbytes"] == sum(file.stat().st_size for file in data)
    assert found["fits"] is True
    assert found["free_nbytes"] > found["nbytes"]


def test_plan_takes_the_fields_of_a_buffer(facts, path):
    found = facts("plan", path, "--capacity", "1_000")
    assert (found["ring"]["capacity"], found["ring"]["num_envs"]) == (1000, 2)
    assert len(found["fields"]) == 6
    with mr.ReplayBuffer.open(path) as buffer:
        assert facts("plan", path)["ring"]["capacity"] == buffer.capacity


def test_plan_takes_the_spaces_of_an_environment(facts):
    pytest.importorskip("gymnasium")
    found = facts("plan", "CartPole-v1", "--capacity", "1e3")
    assert [f["kind"] for f in found["fields"]][:2] == ["float32[4]", "int64"]


def test_plan_says_what_the_disk_lacks(cli):
    code, out, _ = cli("plan", "--field", "x:float64:1000", "--capacity", "1e14")
    assert code == 0
    assert "lacks" in out
    assert "PiB" in out


def test_plan_allocates_nothing(cli, tmp_path):
    cli("plan", "--field", "x:float64", "--capacity", "1e6", "--at", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_stats_tells_fields_and_episodes(facts, cli, path):
    found = facts("stats", path)
    assert found["rows"] - found["rows_left_out"] == found["legal_starts"]
    assert found["steps"] == 90
    assert found["fields"]["reward"]["mean"] == 1
    assert found["fields"]["observation/pixels"]["count"] == 90 * 64
    assert found["returns"]["mean"] == 10
    assert sum(found["episodes"]["running"]) == 2
    assert len(found["episodes"]["lengths"]) == 10
    assert "whole episodes" in cli("stats", path)[1]


def test_stats_leaves_out_what_a_writer_broke_off(facts, cli, path):
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        fields = buffer.schema.fields.items()
        buffer.add({name: np.zeros((2, *f.shape), f.numpy) for name, f in fields})
    found = facts("stats", path)
    assert found["returns"]["mean"] == 10
    assert sum(found["episodes"]["broken"]) == sum(found["episodes"]["running"]) == 2
    told = " ".join(cli("stats", path)[1].split())
    assert "12, of them 2 unfinished, 2 interrupted and 0 without their first" in told


def test_stats_of_an_empty_buffer_are_no_numbers(facts, tmp_path):
    schema = mr.Schema({"observation": mr.Field((), "int64")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 10).close()
    found = facts("stats", tmp_path / "b")
    assert found["fields"]["observation"]["mean"] is None
    assert found["returns"] is None


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.50 KiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 70, "3,072.00 EiB"),
    ],
)
def test_sizes_have_units(nbytes, text):
    assert show.format_size(nbytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (1234567, "1,234,567"),
        (3.0, "3"),
        (1 / 3, "0.3333"),
        (12345.6, "1.235e+04"),
        (1e-9, "1e-09"),
        (1700000016.03, "1,700,000,016.03"),
        (-1700000016.03, "-1,700,000,016.03"),
    ],
)
def test_numbers_have_separators_and_four_digits_and_time_stamps_all(value, text):
    assert show.number(value) == text


def test_an_unknown_time_is_printed_as_never():
    assert show.format_time(0) == "never"
    assert show.format_time(10**18) == "2001-09-09 01:46:40 UTC"


def test_a_file_system_that_keeps_less_is_named(cli, facts, tmp_path, monkeypatch):
    schema = mr.Schema({"x": mr.Field((), "float32")})
    mr.ReplayBuffer.create(tmp_path / "a", schema, 100).close()
    told = "loses rows since the last commit: the file system does not say when"
    assert facts("info", tmp_path / "a")["commit"]["survives_kill"]
    assert told not in " ".join(cli("info", tmp_path / "a")[1].split())
    monkeypatch.setattr(Disk, "birth", lambda self, fd: None)
    assert not facts("info", tmp_path / "a")["commit"]["survives_kill"]
    assert told in " ".join(cli("info", tmp_path / "a")[1].split())


@pytest.mark.filterwarnings("always::mmreplay.DurabilityWarning")
def test_a_command_that_creates_a_buffer_there_says_so_in_one_line(cli, tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.setattr(Disk, "birth", lambda self, fd: None)
    code, _, told = cli("record", "CartPole-v1", tmp_path / "b", "--steps", "20")
    assert code == 0
    assert told.count("its file system does not say when a file was created") == 1
    assert "Warning" not in told


@pytest.mark.slow
@pytest.mark.parametrize("rewards", [[np.inf, -np.inf, 1.0], [1e308] * 3, [np.nan] * 3])
@pytest.mark.sliced(1)
def test_numbers_that_are_not_finite_or_overflow_are_printed(tmp_path, rewards):
    schema = mr.Schema({"reward": mr.Field((), "float64"), "terminated": mr.Field((), "bool")})
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema, 10) as buffer:
        for reward in rewards:
            buffer.add(reward=reward, terminated=True)
        buffer.extend(reward=[1e308] * 3, terminated=[False, False, True])
    for command in ("head", "info", "stats"):
        done = subprocess.run(
            [sys.executable, "-m", "mmreplay", command, str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert ("inf" in done.stdout) == (command != "head" or np.isinf(rewards).any())
