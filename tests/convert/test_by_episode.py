"""Several steps become one, and functions change episodes, as twins say."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.by_episode import EachNth, MappedReader, joined_blocks
from mmreplay.errors import SchemaError, SourceError
from mmreplay.testing.disks import QuickDisk, using
from tests.convert.curated import AUTORESETS, FINAL, START, record, rows_of
from tests.slices import count

pytestmark = pytest.mark.filterwarnings("ignore:.*end_episodes of environments")
END = 6
FIELDS = {
    "observation": mr.Field((2,), "float32"),
    "action": mr.Field((), "int64"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


class InBlocks(BufferReader):
    """Reads few rows at a time, of all environments in turns."""

    size = 3

    def blocks(self, rows_per_block=None):
        rows = list(super().blocks(1))
        first = self.describe().first
        rows.sort(key=lambda row: int(row.positions[0] - first[row.env_ids[0]]))
        for at in range(0, len(rows), self.size):
            yield joined_blocks(rows[at : at + self.size])

    def marks(self):
        return self.blocks()


def fewer(rows, size, reward):
    """The rows that are left, in plain Python."""
    made, step, env = [], 0, None
    for row in rows:
        if row["flags"] & START or row["env"] != env:
            step, env = 0, row["env"]
        if row["flags"] & FINAL or step % size == 0:
            made.append([row])
        else:
            made[-1].append(row)
        step += 1
    result = []
    for group in made:
        first, last = group[0], group[-1]
        rewards = [row["step"][1] for row in group]
        value = {"sum": sum(rewards), "first": rewards[0], "last": rewards[-1]}[reward]
        action, _, _, _, note = first["step"]
        result.append(
            (
                first["env"],
                first["flags"] | (last["flags"] & END),
                first["observation"],
                (action, value, last["step"][2], last["step"][3], note),
            )
        )
    return result


def as_listed(path):
    assert not mr.verify_buffer(path).findings
    return [(row["env"], row["flags"], row["observation"], row["step"]) for row in rows_of(path)]


@pytest.mark.parametrize("reward", ["sum", "first", "last"])
@pytest.mark.parametrize("autoreset", AUTORESETS)
def test_steps_become_fewer_as_the_twin_says(tmp_path, autoreset, reward):
    for seed in range(count(20, 2)):
        source = record(tmp_path / f"ring{seed}", autoreset, seed)
        size = 2 + seed % 4
        report = mr.load(source, tmp_path / f"x{seed}", frame_skip=size, skip_reward=reward)
        wanted = fewer(rows_of(source), size, reward)
        assert as_listed(tmp_path / f"x{seed}") == wanted
        assert report.rows == len(wanted)
        with (
            mr.ReplayBuffer.open(source) as one,
            mr.ReplayBuffer.open(tmp_path / f"x{seed}") as two,
        ):
            assert two.span.first.tolist() == one.span.first.tolist()


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.sliced(1)
def test_blocks_of_any_size_give_the_same_steps(tmp_path, rows):
    source = record(tmp_path / "ring", "same_step", 3)
    found = []
    for kind, size in ((InBlocks, rows), (BufferReader, None)):
        reader = kind(mr.ReplayBuffer.open(source), owned=True)
        reader.size = size
        with EachNth(reader, 3) as fewer_steps:
            blocks = [
                (block.env_ids, block.positions, block.flags, block.columns["reward"])
                for block in fewer_steps.blocks(rows)
            ]
            assert all(len(each[0]) <= rows for each in blocks)
            made = [np.concatenate(each) for each in zip(*blocks, strict=True)]
            marks = [each.flags for each in fewer_steps.marks()]
            assert np.concatenate(marks).tolist() == made[2].tolist()
            order = np.lexsort((made[1], made[0]))
            found.append([each[order].tolist() for each in made])
    assert found[0] == found[1]


def ring(path, rewards, dtype="float32", **options):
    fields = {**FIELDS, "reward": mr.Field((), dtype)}
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 50, **options) as buffer:
        for n, reward in enumerate(rewards):
            buffer.add(observation=[n, n], action=n, reward=reward, terminated=False)
    return path


def test_what_becomes_of_actions_frames_and_priorities_is_said(cli, tmp_path):
    ring(tmp_path / "a", [1.0] * 7, user_metadata={"fps": 30, "robot": "arm"})
    report = mr.load(tmp_path / "a", tmp_path / "x", frame_skip=3)
    assert report.doubts == ("frame_skip=3 leaves out the actions of all but the first of 3 steps",)
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        assert buffer.metadata.user["fps"] == 10
        assert type(buffer.metadata.user["fps"]) is int
        assert buffer.gather_all()["action"].tolist() == [0, 3, 6]
        assert buffer.gather_all()["reward"].tolist() == [3.0, 3.0, 1.0]
    mr.load(tmp_path / "a", tmp_path / "y", frame_skip=4)
    with mr.ReplayBuffer.open(tmp_path / "y") as buffer:
        assert buffer.metadata.user["fps"] == 7.5
    code, out, _ = cli(tmp_path / "a", tmp_path / "z", "--frame-skip", 3, "-n")
    assert code == 0
    assert "frame_skip leaves 3 rows" in out
    with pytest.raises(SourceError, match=r"leaves out the actions .* strict allows no guess"):
        mr.load(tmp_path / "a", tmp_path / "z", frame_skip=3, strict=True)


@pytest.mark.parametrize(
    ("dtype", "rewards", "sums"),
    [
        ("int8", [100, 27, 1], [127, 1]),
        ("int64", [2**62, 2**62 - 1, 0], [2**63 - 1, 0]),
        ("uint8", [200, 55, 0], [255, 0]),
        ("bool", [True, False, True], [True, True]),
        ("float16", [0.5, 0.25, 1], [0.75, 1]),
        ("bfloat16", [1.5, 2.25, 1], [3.75, 1]),
    ],
)
def test_rewards_of_any_dtype_are_summed(tmp_path, dtype, rewards, sums):
    ring(tmp_path / "a", rewards, dtype)
    mr.load(tmp_path / "a", tmp_path / "x", frame_skip=2)
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        found = buffer.gather_all()["reward"]
        if dtype == "bfloat16":
            found = (np.asarray(found).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert found.tolist() == sums


@pytest.mark.parametrize(("reward", "of"), [("sum", sum), ("last", lambda rewards: rewards[-1])])
def test_each_reward_of_several_is_summed(tmp_path, reward, of):
    fields = {
        "observation": mr.Field((), "float32"),
        "reward": {"goal": mr.Field((), "float32"), "agents": mr.Field((2,), "int16")},
    }
    rewards = [(n / 2, [n, 10 * n]) for n in range(7)]
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 20) as buffer:
        for n, (goal, agents) in enumerate(rewards):
            buffer.add(observation=n, reward={"goal": goal, "agents": agents})
    mr.load(tmp_path / "a", tmp_path / "x", frame_skip=3, skip_reward=reward)
    groups = [rewards[0:3], rewards[3:6], rewards[6:]]
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        rows = buffer.gather_all()
    assert rows["observation"].tolist() == [0, 3, 6]
    assert rows["reward/goal"].tolist() == [of([goal for goal, _ in each]) for each in groups]
    agents = [[of([a[k] for _, a in each]) for k in (0, 1)] for each in groups]
    assert rows["reward/agents"].tolist() == agents


@pytest.mark.parametrize(
    ("dtype", "rewards", "got"),
    [("int8", [100, 28], "128"), ("uint64", [2**63, 2**63], str(2**64)), ("bool", [1, 1], "2")],
)
def test_a_sum_that_the_dtype_does_not_hold_is_refused(tmp_path, dtype, rewards, got):
    ring(tmp_path / "a", np.array(rewards, dtype), dtype)
    message = rf"a sum of field 'reward' is {got}, which {dtype} does not hold"
    with pytest.raises(SourceError, match=message):
        mr.load(tmp_path / "a", tmp_path / "x", frame_skip=2)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"frame_skip": 1},
            r"frame_skip must be an integer in \[2, 2147483648\], got 1. Pass such",
        ),
        ({"frame_skip": 10**20}, r"integer in \[2, 2147483648\], got 100000000000000000000"),
        ({"frame_skip": 2.5}, "frame_skip must be an integer"),
        ({"frame_skip": 2, "skip_reward": "mean"}, "skip_reward must be one of"),
        ({"skip_reward": "last"}, "skip_reward needs frame_skip, got 'last' alone"),
        ({"map": "mine:change"}, "map must be a function of an episode's columns"),
    ],
)
def test_changes_that_make_no_sense_are_refused(tmp_path, options, message):
    ring(tmp_path / "a", [1.0] * 4)
    with pytest.raises(SchemaError, match=message):
        mr.load(tmp_path / "a", tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_little_waits_in_memory(tmp_path, monkeypatch):
    from mmreplay.convert import by_episode

    # Episodes of many environments do not wait until all of these were read.
    with mr.ReplayBuffer.create(
        tmp_path / "a", mr.Schema(FIELDS), 50, 40, autoreset="same_step"
    ) as buffer:
        for n in range(20):
            zeros = np.zeros(40, np.int64)
            buffer.add(
                observation=np.full((40, 2), n), action=zeros, reward=zeros, terminated=zeros > 0
            )
        with BufferReader(buffer) as reader:
            most = 0
            for rows, firsts in by_episode.groups(reader.blocks(7), reader.describe().stop):
                assert len(firsts) == 1
                most = max(most, len(rows))
    assert most == 20


# Functions.


def relabel(columns):
    """Rewards by what was left to do, and a column of it."""
    left = np.arange(len(columns["reward"]))[::-1]
    return {"reward": -left * 0.5, "left": left, "note": [f"{n} left" for n in left]}


relabel.schema = {"left": mr.Field((), "int32")}


def relabelled(rows):
    """The rows after `relabel`, in plain Python."""
    episodes, env = [], None
    for row in rows:
        if row["flags"] & START or row["env"] != env:
            episodes.append([])
            env = row["env"]
        episodes[-1].append(row)
    result = []
    for episode in episodes:
        steps = sum(not row["flags"] & FINAL for row in episode)
        for n, row in enumerate(episode):
            step, left = row["step"], 0
            if not row["flags"] & FINAL:
                left = steps - 1 - n
                step = (step[0], -left * 0.5, *step[2:4], f"{left} left")
            result.append(
                (row["env"], row["position"], row["flags"], row["observation"], step, left)
            )
    return result


@pytest.mark.parametrize("rows", [1, 4, None])
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.sliced(2)
def test_a_function_changes_episodes_as_the_twin_says(tmp_path, autoreset, rows, monkeypatch):
    for seed in range(count(12, 2)):
        source = record(tmp_path / f"ring{seed}", autoreset, seed)
        reader = InBlocks(mr.ReplayBuffer.open(source), owned=True)
        reader.size = rows or 10_000
        found = []
        with MappedReader(reader, relabel) as mapped:
            for block in mapped.blocks(rows):
                texts = block.columns["note"].text()
                found += [
                    (
                        int(block.env_ids[n]),
                        int(block.positions[n]),
                        int(block.flags[n]),
                        tuple(block.columns["observation"][n].tolist()),
                        (
                            int(block.columns["action"][n]),
                            float(block.columns["reward"][n]),
                            bool(block.columns["terminated"][n]),
                            bool(block.columns["truncated"][n]),
                            texts[n],
                        ),
                        int(block.columns["left"][n]),
                    )
                    for n in range(len(block))
                ]
        assert sorted(found) == sorted(relabelled(rows_of(source)))
        mr.load(source, tmp_path / f"x{seed}", map=relabel)
        assert not mr.verify_buffer(tmp_path / f"x{seed}").findings
        after = [row["step"] for row in rows_of(tmp_path / f"x{seed}")]
        assert after == [row[4] for row in sorted(found)]


def test_a_function_may_write_into_its_columns(tmp_path):
    ring(tmp_path / "a", [1.0, 2.0])

    def double(columns):
        columns["reward"] *= 2
        return {}

    mr.load(tmp_path / "a", tmp_path / "x", map=double)
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        assert buffer.gather_all()["reward"].tolist() == [2.0, 4.0]
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        assert buffer.gather_all()["reward"].tolist() == [1.0, 2.0]


def test_changed_observations_without_their_final_ones_are_a_doubt(tmp_path):
    source = record(tmp_path / "ring", "same_step", 1)

    def scale(columns):
        return {"observation": columns["observation"] * 2}

    doubt = "was not called with final observations, which stay as they are"
    (found,) = mr.load(source, tmp_path / "x", map=scale).doubts
    assert found.endswith(doubt)
    assert not mr.load(source, tmp_path / "y", map=relabel).doubts


def test_changed_texts_without_their_final_ones_are_a_doubt(tmp_path):
    schema = mr.Schema(
        {"observation": {"text": mr.Field.text(max_bytes=20)}, "terminated": mr.Field((), "bool")}
    )
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 20, heap_bytes=4096) as buffer:
        for n in range(3):
            final = {"final_observation": {"text": "end"}} if n == 2 else {}
            buffer.add(observation={"text": f"n{n}"}, terminated=n == 2, **final)

    def louder(columns):
        return {"observation/text": [each.upper() for each in columns["observation/text"]]}

    (found,) = mr.load(tmp_path / "a", tmp_path / "x", map=louder).doubts
    assert found.endswith("was not called with final observations, which stay as they are")
    assert not mr.load(tmp_path / "a", tmp_path / "y", map=lambda columns: columns).doubts


def test_rows_are_mapped_after_frames_are_left_out_and_before_casts(tmp_path):
    ring(tmp_path / "a", [1.0] * 6)
    seen = []

    def look(columns):
        seen.append((columns["reward"].dtype, columns["reward"].tolist()))
        return {}

    mr.load(
        tmp_path / "a",
        tmp_path / "x",
        frame_skip=2,
        map=look,
        cast={"reward": "float64"},
        rename={"reward": "score"},
    )
    assert seen == [(np.float32, [2.0, 2.0, 2.0])]


def undeclared(columns):
    return {"other": columns["reward"]}


def raises(columns):
    raise KeyError("mine")


def forgets(columns):
    return {}


forgets.schema = {"left": mr.Field((), "int32")}


def doubles(columns):
    return {}


doubles.schema = {"reward": mr.Field((), "int32")}


def writes_an_end(columns):
    columns["truncated"][1] = True
    return {}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            undeclared,
            r"episode at position 0 of environment 0 returned field 'other', which nothing",
        ),
        (
            raises,
            r"map .*:raises: the episode at position 0 of environment 0 raised KeyError: 'mine'",
        ),
        (forgets, r"did not return field 'left', which its schema declares"),
        (lambda columns: [1], r"must return columns by path, got \[1\]"),
        (lambda columns: {"reward": [1.0]}, r"field 'reward' must be float32\[4\], got"),
        (lambda columns: {"action": [0.5] * 4}, r"field 'action' must be int64\[4\], got float64"),
    ],
)
def test_a_function_that_is_wrong_is_named_with_its_episode(tmp_path, function, message):
    ring(tmp_path / "a", [1.0] * 4)
    with pytest.raises(SourceError, match=message):
        mr.load(tmp_path / "a", tmp_path / "x", map=function)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("function", "field"),
    [
        (lambda columns: {"terminated": np.zeros(4, bool)}, "terminated"),
        (lambda columns: {"truncated": [True] * 4}, "truncated"),
        (writes_an_end, "truncated"),
        (lambda columns: {**columns, "reward": [2.0] * 4}, None),
    ],
)
def test_a_function_does_not_change_where_episodes_end(tmp_path, function, field):
    schema = mr.Schema({**FIELDS, "truncated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 50) as buffer:
        for n in range(4):
            ends = {"terminated": n == 3, "truncated": False}
            buffer.add(observation=[n, n], action=n, reward=1.0, **ends)
    if field is None:
        mr.load(tmp_path / "a", tmp_path / "x", map=function)
        with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
            rows = buffer.gather_all()
            assert rows["reward"].tolist() == [2.0] * 4
            assert rows["terminated"].tolist() == [False, False, False, True]
        return
    message = rf"environment 0 must not change '{field}', as flags say where episodes end. Leave"
    for name, convert in (("x", mr.load), ("x.npz", mr.export), ("x.csv", mr.export)):
        with pytest.raises(SourceError, match=message):
            convert(tmp_path / "a", tmp_path / name, map=function)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_an_episode_of_several_sources_is_named_with_its_own(tmp_path):
    paths = [ring(tmp_path / name, [1.0] * 4) for name in "abc"]

    def third(columns):
        third.calls += 1
        return {} if third.calls < 3 else {"other": []}

    for envs, env_id, position in (("append", 0, 8), ("stack", 2, 0)):
        third.calls = 0
        message = rf"position {position} of environment {env_id}, of .*/c, returned field 'other'"
        with pytest.raises(SourceError, match=message):
            mr.load(paths, tmp_path / "x", map=third, envs=envs)


def test_a_field_that_is_there_is_not_declared_again(tmp_path):
    ring(tmp_path / "a", [1.0] * 4)
    with pytest.raises(SchemaError, match="schema declares field 'reward', which the source has"):
        mr.load(tmp_path / "a", tmp_path / "x", map=doubles)


def test_columns_that_a_function_adds_are_made_some_episodes_at_a_time(tmp_path, monkeypatch):
    schema = mr.Schema({"number": mr.Field((), "int32"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 4000) as buffer:
        numbers = np.arange(4000)
        buffer.extend(number=numbers, terminated=numbers % 4 == 3)
    made = []
    mapped = MappedReader._mapped

    def noted(self, rows, firsts):
        block = mapped(self, rows, firsts)
        made.append(block.columns["pixels"].nbytes)
        return block

    monkeypatch.setattr(MappedReader, "_mapped", noted)

    def draw(columns):
        number = columns["number"].astype(np.uint8)
        return {"pixels": np.broadcast_to(number[:, None, None, None], (len(number), 64, 64, 3))}

    draw.schema = {"pixels": mr.Field((64, 64, 3), "uint8")}
    mr.load(tmp_path / "a", tmp_path / "x", map=draw, cast={"pixels": "png"})
    # As many rows as are encoded at a time, 32 MiB.
    assert sum(made) == 4000 * 64 * 64 * 3
    assert max(made) < 40 << 20
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        rows = buffer.gather_all()
        assert rows["number"].tolist() == list(range(4000))
        assert rows["pixels"][:, 5, 5, 1].tolist() == [n % 256 for n in range(4000)]


def test_a_function_adds_no_end(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 20) as buffer:
        for n in range(4):
            buffer.add(reward=n, terminated=n == 3)

    def ends(columns):
        return {"truncated": columns["reward"] > 1}

    ends.schema = {"truncated": mr.Field((), "bool")}
    message = "ends: field 'truncated' would play the role truncated, and the source does not"
    with pytest.raises(SchemaError, match=message):
        mr.load(tmp_path / "a", tmp_path / "x", map=ends)
    assert not (tmp_path / "x").exists()


def test_an_episode_that_is_too_large_is_refused(tmp_path, monkeypatch):
    from mmreplay.convert import by_episode

    ring(tmp_path / "a", [1.0] * 40)
    monkeypatch.setattr(by_episode, "MAX_EPISODE_NBYTES", 500)
    with (
        MappedReader(InBlocks(mr.ReplayBuffer.open(tmp_path / "a"), owned=True), raises) as reader,
        pytest.raises(SourceError, match=r"position 0 of environment 0 takes more than 500 B"),
    ):
        list(reader.blocks())


def test_the_command_line_names_a_function(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ring(tmp_path / "a", [1.0, 2.0])
    (tmp_path / "mine_of_test.py").write_text(
        "def double(columns):\n    return {'reward': columns['reward'] * 2}\nnumber = 3\n"
    )
    assert cli("a", "x", "--map", "mine_of_test:double")[0] == 0
    with mr.ReplayBuffer.open("x") as buffer:
        assert buffer.gather_all()["reward"].tolist() == [2.0, 4.0]
        made_by = buffer.metadata.user["mmreplay_provenance"]["map"]
    assert (made_by["module"], made_by["name"]) == ("mine_of_test", "double")
    assert len(made_by["blake2b"]) == 32
    for name, message in (
        ("mine_of_test", "--map must be MODULE:NAME"),
        ("mine_of_test:nothing", "has no attribute 'nothing'"),
        ("nowhere_at_all:x", "No module named 'nowhere_at_all'"),
        ("mine_of_test:number", "--map 'mine_of_test:number' is not callable"),
    ):
        code, _, err = cli("a", "y", "--map", name)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
