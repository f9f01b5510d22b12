"""Episodes that are selected by conditions, numbers, chance and returns."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.ragged import Ragged
from mmreplay.testing.disks import QuickDisk, using
from tests.convert import condition_twin as twin
from tests.convert.test_conditions import FIELDS, column
from tests.slices import count

NUMBER = "row_number"
SCHEMA = mr.Schema.from_flat(
    {**FIELDS, "truncated": mr.Field((), "bool"), NUMBER: mr.Field((), "int64")}
)


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


def nested(columns):
    result = {}
    for path, values in columns.items():
        *tops, last = path.split("/")
        branch = result
        for top in tops:
            branch = branch.setdefault(top, {})
        branch[last] = values
    return result


def random_ring(path, rng, *, num_envs=None, autoreset=None, first=0):
    """A ring with whatever happens to one; each row has a number of its own."""
    num_envs, written = num_envs or rng.randint(1, 3), first
    buffer = mr.ReplayBuffer.create(
        path,
        SCHEMA,
        rng.randint(8, 40),
        num_envs,
        heap_bytes=16_384,
        autoreset=autoreset or rng.choice(["same_step", "disabled"]),
        commit_every=None,
    )
    for _ in range(rng.randint(2, 6)):
        what = rng.random()
        if what < 0.1:
            buffer.clear([rng.randrange(num_envs)])
        elif what < 0.3:
            buffer.close()
            resume = rng.choice(["break", "truncate"])
            buffer = mr.ReplayBuffer.open(path, "r+", on_resume=resume, commit_every=None)
        steps = rng.randint(1, 12)
        rows = [
            [{p: twin.random_value(rng, p) for p in FIELDS} for _ in range(num_envs)]
            for _ in range(steps)
        ]
        for step in rows:
            columns = {}
            for path_, field in FIELDS.items():
                made = column(path_, [values[path_] for values in step])
                if field.kind == "text":
                    columns[path_] = [values[path_][0] for values in step]
                elif field.dtype == "bfloat16":
                    columns[path_] = (made.astype(np.uint32) << 16).view(np.float32)
                else:
                    columns[path_] = made
            columns["terminated"] = [rng.random() < 0.2 for _ in range(num_envs)]
            columns["truncated"] = [rng.random() < 0.1 for _ in range(num_envs)]
            columns[NUMBER] = np.arange(written, written + num_envs)
            written += num_envs
            buffer.add(nested(columns))
    return buffer


def rows_of(buffer):
    """(number, values by path, flags) of each row, by environment."""
    rows = buffer.gather_all()
    flags = buffer.view.flags(rows.env_ids, rows.positions).tolist()
    values = {}
    for path in FIELDS:
        taken = rows[path]
        if isinstance(taken, Ragged):
            values[path] = [[text] for text in taken.text()]
        elif FIELDS[path].dtype == "bfloat16":
            wide = (np.asarray(taken).astype(np.uint32) << 16).view(np.float32)
            values[path] = wide.reshape(len(flags), -1).tolist()
        else:
            values[path] = np.asarray(taken).reshape(len(flags), -1).tolist()
    found = [[] for _ in range(buffer.num_envs)]
    for at, env in enumerate(rows.env_ids.tolist()):
        row = {path: each[at] for path, each in values.items()}
        found[env].append((int(rows[NUMBER][at]), row, flags[at]))
    return found


def episodes_of(buffer):
    """(numbers of rows, facts) of each episode, numbered over all environments."""
    found = [
        each for env, rows in enumerate(rows_of(buffer)) for each in twin.episodes_of(rows, env)
    ]
    for number, (_, facts) in enumerate(found):
        facts["number"] = number
    return found


def numbers_in(path):
    with mr.ReplayBuffer.open(path) as buffer:
        return buffer.gather_all()[NUMBER].tolist()


def test_a_ring_gives_the_episodes_that_the_twin_selects(tmp_path):
    pairs, both = 0, 0
    wanted_pairs = count(1000, 30)
    while pairs < wanted_pairs:
        rng = twin.make(1000 + pairs)
        source = tmp_path / f"source{pairs}"
        with random_ring(source, rng) as buffer:
            episodes = episodes_of(buffer)
        for _ in range(5):
            text, tree = twin.random_condition(rng)
            pairs += 1
            target = tmp_path / f"target{pairs}"
            try:
                values = [twin.value(tree, facts) for _, facts in episodes]
            except twin.BeyondInt64:
                with pytest.raises(SchemaError, match="becomes larger than int64"):
                    mr.load(source, target, where=text)
                continue
            rows = [
                row
                for value, (numbers, _) in zip(values, episodes, strict=True)
                if value
                for row in numbers
            ]
            if not rows:
                with pytest.raises(SchemaError, match="no episode is selected: the source has"):
                    mr.load(source, target, where=text)
                assert not target.exists()
                continue
            report = mr.load(source, target, where=text)
            assert numbers_in(target) == rows, text
            assert report.episodes == sum(value is True for value in values)
            assert not mr.verify_buffer(target).findings
            both += 0 < report.episodes < len(episodes)
    assert both > 0.3 * pairs


@pytest.fixture
def ring(tmp_path):
    """Two environments of eight episodes each: episode k has k % 8 + 1 steps."""
    schema = mr.Schema(
        {
            "observation": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 40, 2, autoreset="same_step") as buffer:
        number = 0
        for length in range(1, 9):
            for step in range(length):
                buffer.add(
                    observation=[number, 100 + number],
                    reward=[1.0, 2.0],
                    terminated=[step == length - 1] * 2,
                )
                number += 1
    return tmp_path / "ring"


FIRST = np.cumsum([0, *range(1, 8)])


def episodes_in(path):
    """Numbers of the ring's episodes that a target holds, by their first steps."""
    with mr.ReplayBuffer.open(path) as buffer:
        assert not mr.verify_buffer(path).findings
        firsts = [
            int(buffer.get_field("observation", each.env_ids[n], each.begin[n]))
            for each in [mr.episode_table(buffer)]
            for n in range(len(each))
        ]
    places = {int(first): n for n, first in enumerate([*FIRST, *(100 + FIRST)])}
    return [places[first] for first in firsts]


@pytest.mark.parametrize(
    ("choice", "episodes"),
    [
        ({"episodes": [1, 3, 9]}, [1, 3, 9]),
        ({"episodes": np.array([15])}, [15]),
        ({"episodes": {"number": [9, 1, 3, 1]}}, [1, 3, 9]),
        ({"episodes": slice(2, 4)}, [2, 3]),
        ({"skip": slice(1, None)}, [0]),
        ({"skip": [*range(14)]}, [14, 15]),
        ({"where": "length == 3"}, [2, 10]),
        ({"where": "return > 8 and env == 1"}, [12, 13, 14, 15]),
        ({"where": "number % 5 == 0", "skip": [0]}, [5, 10, 15]),
        ({"episodes": slice(0, 8), "top": 2}, [6, 7]),
        ({"top": 0.25}, [12, 13, 14, 15]),
        ({"top": 100}, [*range(16)]),
        ({"env_ids": [1], "episodes": [0]}, [8]),
        ({"env_ids": [1], "where": "length > 6"}, [14, 15]),
        ({"where": "length > 6", "fields": ["observation", "terminated"]}, [6, 7, 14, 15]),
        ({"top": 1, "fields": ["observation", "terminated"]}, [15]),
        ({"where": "max(observation) < 3"}, [0, 1]),
    ],
)
def test_what_is_selected_is_what_is_written(ring, tmp_path, choice, episodes):
    mr.load(ring, tmp_path / "one", **choice)
    assert episodes_in(tmp_path / "one") == episodes
    with mr.ReplayBuffer.open(ring) as buffer:
        mr.export(buffer, tmp_path / "part.npz", **choice)
    mr.load(tmp_path / "part.npz", tmp_path / "two")
    assert episodes_in(tmp_path / "two") == episodes
    mr.export(ring, tmp_path / "all.parquet")
    mr.load(tmp_path / "all.parquet", tmp_path / "three", **choice)
    assert episodes_in(tmp_path / "three") == episodes


def test_rows_are_counted_among_the_episodes_that_are_left(ring, tmp_path):
    mr.load(ring, tmp_path / "a", episodes=[1, 9], rows=slice(1, 3))
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        assert buffer.gather_all()["observation"].tolist() == [2, 101]


def test_a_fraction_is_the_same_for_a_seed_and_another_for_another(ring, tmp_path):
    chosen = {}
    for number, seed in enumerate([0, 0, 1]):
        mr.load(ring, tmp_path / str(number), fraction=0.25, seed=seed)
        chosen[number] = episodes_in(tmp_path / str(number))
    assert len(chosen[0]) == 4
    assert chosen[0] == chosen[1] != chosen[2]
    mr.load(ring, tmp_path / "small", fraction=0.001)
    assert len(episodes_in(tmp_path / "small")) == 1


def test_a_fraction_is_what_a_split_gives_first(ring, tmp_path):
    mr.load(ring, tmp_path / "a", fraction=0.25, seed=3)
    with mr.ReplayBuffer.open(ring) as buffer:
        part, _ = mr.split(buffer, [0.25, 0.75], seed=3)
        table = mr.episode_table(buffer)
    mine = set(zip(part.env_ids.tolist(), part.begins.tolist(), strict=True))
    steps = {
        (int(env), position)
        for env, begin, end in zip(part.env_ids, part.begins, part.ends, strict=True)
        for position in range(begin, end)
    }
    assert mine
    starts = list(zip(table.env_ids.tolist(), table.begin.tolist(), strict=True))
    assert episodes_in(tmp_path / "a") == [n for n, start in enumerate(starts) if start in steps]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"episodes": [3, 1]}, "episodes must rise, as rows stay in the order .* got 1 after 3"),
        ({"episodes": [1, 1]}, "episodes must rise"),
        ({"skip": [-1]}, "skip names episode -1, and the source has 16"),
        ({"episodes": [16]}, "episodes names episode 16, and the source has 16"),
        ({"episodes": ["a"]}, "episodes must be a slice, a list of integers or a table"),
        ({"episodes": [[1], [2, 3]]}, "episodes must be a slice, a list of integers or a table"),
        ({"episodes": [1], "skip": [2]}, "episodes and skip exclude each other. Pass one"),
        ({"where": "length > 3", "rows": slice(3)}, "where and rows exclude each other"),
        ({"fraction": 0.1, "top": 3}, "fraction and top exclude each other"),
        ({"fraction": 0}, "fraction must be above 0 and at most 1, got 0"),
        ({"fraction": float("nan")}, "fraction must be above 0 and at most 1, got nan"),
        ({"fraction": "a"}, "fraction must be above 0 and at most 1, got 'a'"),
        ({"fraction": 0.5, "seed": -1}, "seed must be"),
        ({"top": 0}, "top must be a share below 1 or a number of episodes, got 0"),
        ({"top": 1.5}, "top must be a share below 1 or a number of episodes, got 1.5"),
        ({"where": "length > 99"}, "the source has 16 episodes, where leaves 0. Select at least"),
        ({"where": "x > 3"}, "where: 'x' is unknown"),
        (
            {"skip": slice(None), "where": "length > 3"},
            "the source has 16 episodes, skip leaves 0, where leaves 0",
        ),
    ],
)
def test_what_selects_nothing_or_contradicts_itself_is_refused(ring, tmp_path, choice, message):
    with pytest.raises(SchemaError, match=message):
        mr.load(ring, tmp_path / "a", **choice)
    with pytest.raises(SchemaError, match=message):
        mr.export(ring, tmp_path / "a.npz", **choice)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring"]


def test_the_best_need_a_return(ring, tmp_path):
    mr.export(ring, tmp_path / "a.npz", fields=["observation", "terminated"])
    with pytest.raises(SchemaError, match="top needs returns, and no field of one number has the"):
        mr.load(tmp_path / "a.npz", tmp_path / "b", top=3)


def test_the_best_need_a_reward_of_one_number(tmp_path):
    schema = mr.Schema({"reward": mr.Field((2,), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 9) as buffer:
        buffer.add(reward=[1, 2])
    with pytest.raises(SchemaError, match="no field of one number has the role of the reward"):
        mr.load(tmp_path / "a", tmp_path / "b", top=1)


def test_tables_of_episodes_select_by_their_numbers(ring, tmp_path):
    pa = pytest.importorskip("pyarrow")
    with mr.ReplayBuffer.open(ring) as buffer:
        table = mr.episode_table(buffer)
    assert table.number.tolist() == [*range(16)]
    best = table.pick(table.returns > 11)
    assert best.number.tolist() == [13, 14, 15]
    arrow = pa.table({"number": [15, 13, 14], "other": [1, 2, 3]})
    tables = {"own": best, "dict": best.to_dict(), "arrow": arrow}
    for name, each in tables.items():
        mr.load(ring, tmp_path / name, episodes=each)
        assert episodes_in(tmp_path / name) == [13, 14, 15]


@pytest.mark.parametrize("nothing", [[], {"number": []}, np.zeros(0, np.int64)])
def test_an_empty_list_selects_nothing_and_skips_nothing(ring, tmp_path, nothing):
    with pytest.raises(SchemaError, match="no episode is selected: the source has 16 episodes"):
        mr.load(ring, tmp_path / "a", episodes=nothing)
    mr.load(ring, tmp_path / "b", skip=nothing)
    assert episodes_in(tmp_path / "b") == [*range(16)]


def truncated_ring(path, end):
    """Episodes of 3 steps; the first is ended by its next row alone."""
    schema = mr.Schema(
        {
            "observation": mr.Field((), "int64"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(path, schema, 20) as buffer:
        for step in range(9):
            if step == 3:
                end(buffer)
            buffer.add(observation=step, terminated=step % 3 == 2 and step > 3, truncated=False)
    return path


@pytest.mark.parametrize("fields", [None, ["observation"], ["observation", "truncated"]])
@pytest.mark.parametrize(
    "choice", [{"episodes": [0, 2]}, {"where": "number != 1"}, {"episodes": slice(0, 1)}]
)
@pytest.mark.parametrize("kind", ["ring", "npz"])
def test_a_step_that_its_next_row_truncates_stays_so(tmp_path, fields, choice, kind):
    source = truncated_ring(tmp_path / "a", lambda buffer: buffer.end_episodes())
    if kind == "npz":
        mr.export(source, tmp_path / "a.npz")
        source = tmp_path / "a.npz"
    mr.load(source, tmp_path / "b", **choice, fields=fields)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        rows = buffer.gather_all()
        flags = buffer.view.flags(rows.env_ids, rows.positions)
    assert flags[2] & 4
    assert (flags[3:] & 4 == 0).all()


def test_episodes_that_a_writer_overwrites_between_two_passes_are_left_out(tmp_path, monkeypatch):
    from mmreplay.convert import select as module

    schema = mr.Schema({"x": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 12) as writer:

        def add(step):
            writer.add(x=step, terminated=step % 3 == 2)

        for step in range(12):
            add(step)
        choose = module.choose

        def late(*arguments):
            for step in range(12, 16):
                add(step)
            return choose(*arguments)

        monkeypatch.setattr(module, "choose", late)
        report = mr.export(tmp_path / "a", tmp_path / "b.npz", where="length > 1")
    assert report.rows == 6
    assert "2 selected episodes were left out, as the writer overwrote rows of them" in report.notes
    mr.load(tmp_path / "b.npz", tmp_path / "c")
    with mr.ReplayBuffer.open(tmp_path / "c") as buffer:
        assert buffer.gather_all()["x"].tolist() == [*range(6, 12)]


def test_a_file_with_moved_rows_does_not_name_their_buffer(ring, tmp_path):
    for number, (episodes, named) in enumerate([([2, 3], True), ([2, 4], False)]):
        path = tmp_path / f"{number}.npz"
        mr.export(ring, path, episodes=episodes)
        with np.load(path) as file:
            description = json.loads(file["mmreplay.json"].tobytes())
        assert bool(description["uuid"]) == named


def test_episodes_that_nothing_is_known_of_are_counted(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 20) as buffer:
        for reward in (1.0, np.nan, 3.0, 0.0):
            buffer.add(reward=reward, terminated=True)
        buffer.add(reward=9.0, terminated=False)
    report = mr.load(tmp_path / "a", tmp_path / "b", where="not return < 2")
    assert report.episodes == 2
    assert any("1 episodes were left out, as NaN does not say" in note for note in report.notes)
    report = mr.load(tmp_path / "a", tmp_path / "c", top=2)
    assert report.episodes == 2
    assert any("2 episodes were left out of top: they lack" in note for note in report.notes)
    with mr.ReplayBuffer.open(tmp_path / "c") as buffer:
        assert buffer.gather_all()["reward"].tolist() == [1.0, 3.0]


def test_a_condition_on_lengths_reads_no_field(ring, tmp_path, monkeypatch):
    from mmreplay.convert.buffer_reader import BufferReader

    read = []
    block = BufferReader._block

    def watched(self, env_id, first, stop, paths, **options):
        read.append(tuple(paths))
        return block(self, env_id, first, stop, paths, **options)

    monkeypatch.setattr(BufferReader, "_block", watched)
    with pytest.raises(SchemaError):
        mr.load(ring, tmp_path / "a", where="length > 99 and env == 0")
    assert set(read) == {()}
    read.clear()
    with pytest.raises(SchemaError):
        mr.load(ring, tmp_path / "a", where="return > 99")
    assert set(read) == {("reward",)}


# The command line.


@pytest.mark.parametrize(
    ("words", "episodes"),
    [
        (["--episodes", "1,3,9:12"], [1, 3, 9, 10, 11]),
        (["--episodes", "2:4"], [2, 3]),
        (["--skip", "1:"], [0]),
        (["--skip", "0:13,15"], [13, 14]),
        (["--where", "return > 8 and env == 1"], [12, 13, 14, 15]),
        (["--top", "1"], [15]),
        (["--top", "0.25", "--env", "1"], [14, 15]),
        (["--fraction", "1"], [*range(16)]),
    ],
)
def test_the_command_line_selects_likewise(cli, ring, tmp_path, words, episodes):
    assert cli(ring, tmp_path / "a", *words)[0] == 0
    assert episodes_in(tmp_path / "a") == episodes


@pytest.mark.parametrize(
    "text", ["1\n3\n9\n", "1\r\n3\r\n9", "\ufeff1, 3\n9\n", " 1 3  9 ", "1,3,9,\n"]
)
def test_numbers_come_from_a_file(cli, ring, tmp_path, text):
    (tmp_path / "good.txt").write_text(text, newline="")
    assert cli(ring, tmp_path / "a", "--episodes", f"@{tmp_path / 'good.txt'}")[0] == 0
    assert episodes_in(tmp_path / "a") == [1, 3, 9]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--episodes", "1,a"], 2, "--episodes must hold numbers and ranges, such as 3,7,20:40"),
        (["--episodes", "1,-3"], 2, "got '-3'"),
        (["--episodes", "0:60000000,3"], 2, "--episodes must name at most 50,000,000 episodes"),
        (["--episodes", "3,1"], 3, "episodes must rise"),
        (["--episodes", "4:1,2"], 2, "--episodes must name ranges that rise, got 4:1"),
        (["--top", "inf"], 3, "top must be a share below 1 or a number of episodes, got inf"),
        (["--episodes", "@nowhere.txt"], 3, "nowhere.txt does not exist. Check the path after @"),
        (["--episodes", "@empty.txt"], 3, "empty.txt must hold numbers and ranges"),
        (["--episodes", "@words.txt"], 3, "got 'one'. Write one number in a line."),
        (["--where", "lenght > 3"], 3, "where: 'lenght' is unknown. Did you mean length?"),
        (["--where", "length > 3", "--rows", "0:3"], 3, "where and rows exclude each other"),
        (["--top", "x"], 2, "Invalid value for '--top': must be a number such as 0.1, got 'x'"),
        (["--top", "10%"], 2, "'--top': must be a number, got '10%'. Pass 0.1."),
        (["--fraction", "2.5 %"], 2, "'--fraction': must be a number, got '2.5 %'. Pass 0.025."),
        (
            ["--episodes", "0-20"],
            2,
            "must be A:B such as 0:100, a list such as 3,7,20:40, or @FILE with numbers, got '0-20",
        ),
        (["--skip", "x"], 2, "--skip must be A:B such as 0:100, a list such as 3,7,20:40, or @"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    cli, ring, tmp_path, monkeypatch, words, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "words.txt").write_text("one\n")
    got, _, err = cli(ring, tmp_path / "a", *words)
    assert (got, err.count("\n")) == (code, 1)
    assert message in err
    assert not (tmp_path / "a").exists()


def test_a_dry_run_counts_what_is_selected(cli, ring, tmp_path):
    words = ["-n", "--json", "--where", "length > 6"]
    plan = json.loads(cli(ring, tmp_path / "a.npz", *words)[1])
    assert plan["rows"] == 2 * (7 + 8)
    assert plan["steps"] == ["the source has 16 episodes", "where leaves 4"]
    assert "where leaves 4" in cli(ring, tmp_path / "a.npz", "-n", "--where", "length > 6")[1]
