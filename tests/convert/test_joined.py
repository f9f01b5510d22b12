"""Several sources are read as one."""

import json
import shutil

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import buffer_writer
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.joined import join
from mmreplay.convert.select import Selection
from mmreplay.convert.transfer import transfer
from mmreplay.errors import FormatError, SchemaError, SourceError, StaleError
from mmreplay.testing.disks import QuickDisk, using
from tests.convert import condition_twin as twin
from tests.convert.test_where import NUMBER, random_ring, rows_of
from tests.slices import count

START, TERMINATED, TRUNCATED, FINAL, BREAK, CUT = 1, 2, 4, 8, 16, 32
END = TERMINATED | TRUNCATED


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


def without_orphans(rows):
    """Rows without the final rows whose step is gone."""
    first = 0
    while first < len(rows) and rows[first][2] & FINAL:
        first += 1
    return rows[first:]


def joined(sources, autoreset, selected=None):
    """(source, number, flags) of each row of one environment, as the law says.

    Args:
        sources: Rows of this environment in each source, by `rows_of`.
        autoreset: Of all of them.
        selected: (source, number) of the rows that are selected; all by default.
    """
    found = []
    for source, rows in enumerate(sources):
        gap = True
        for at, (number, _, flags) in enumerate(rows):
            if selected is not None and (source, number) not in selected:
                gap = True
                continue
            follows = rows[at + 1] if at + 1 < len(rows) else None
            left_out = (
                follows is not None
                and selected is not None
                and (source, follows[0]) not in selected
            )
            if left_out and follows[2] & CUT and not flags & FINAL:
                flags |= TRUNCATED
            if gap and found:
                before = found[-1][2]
                over = before & FINAL or (autoreset != "next_step" and before & END)
                flags &= ~CUT
                if not (flags & (START | BREAK) == START and over):
                    flags |= START | BREAK
            gap = False
            found.append((source, number, flags))
    return found


def make(tmp_path, rng, num_envs, autoreset):
    """Some random rings of one kind, and their rows by environment."""
    paths, rows = [], []
    for number in range(rng.randint(2, 4)):
        path = tmp_path / f"s{number}"
        options = {"num_envs": num_envs, "autoreset": autoreset}
        with random_ring(path, rng, first=1000 * number, **options) as buffer:
            rows.append([without_orphans(each) for each in rows_of(buffer)])
        paths.append(path)
    return paths, rows


def read(path):
    """(number, flags) of each row, by environment."""
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
        flags = buffer.view.flags(rows.env_ids, rows.positions).tolist()
        found = [[] for _ in range(buffer.num_envs)]
        for env, number, flag in zip(
            rows.env_ids.tolist(), rows[NUMBER].tolist(), flags, strict=True
        ):
            found[env].append((number, flag))
    return found


@pytest.mark.parametrize("envs", ["append", "stack"])
@pytest.mark.sliced(1)
def test_random_rings_are_joined_as_the_twin_joins_them(tmp_path, envs):
    for turn in range(count(100, 2)):
        rng = twin.make(turn)
        folder = tmp_path / str(turn)
        folder.mkdir()
        autoreset = rng.choice(["same_step", "disabled"])
        paths, rows = make(folder, rng, rng.randint(1, 3), autoreset)
        if envs == "append":
            by_env = [[source[env] for source in rows] for env in range(len(rows[0]))]
        else:
            by_env = [[env] for source in rows for env in source]
        wanted = [
            [(number, flags) for _, number, flags in joined(sources, autoreset)]
            for sources in by_env
        ]
        report = mr.load(paths, folder / "all", envs=envs)
        assert read(folder / "all") == wanted
        assert report.rows == sum(map(len, wanted))
        assert not mr.verify_buffer(folder / "all").findings
        text, tree = twin.random_condition(rng)
        episodes = [
            (source, numbers, facts)
            for source, each in enumerate(rows)
            for env, one in enumerate(each)
            for numbers, facts in twin.episodes_of(one, env)
        ]
        for number, (source, _, facts) in enumerate(episodes):
            facts |= {"number": number, "source": source}
        try:
            selected = {
                (source, number)
                for source, numbers, facts in episodes
                if twin.value(tree, facts)
                for number in numbers
            }
        except twin.BeyondInt64:
            selected = set()
        if not selected:
            with pytest.raises(SchemaError, match=r"no episode is selected|larger than int64"):
                mr.load(paths, folder / "some", envs=envs, where=text)
            continue
        mr.load(paths, folder / "some", envs=envs, where=text)
        offsets = np.cumsum([0, *(len(each) for each in rows)])
        wanted = []
        for env, sources in enumerate(by_env):
            if envs == "append":
                made = joined(sources, autoreset, selected)
            else:
                source = int(np.searchsorted(offsets, env, "right")) - 1
                made = joined(sources, autoreset, {(0, n) for s, n in selected if s == source})
            wanted.append([(number, flags) for _, number, flags in made])
        assert read(folder / "some") == wanted, text
        assert not mr.verify_buffer(folder / "some").findings


SCHEMA = {
    "observation": mr.Field((2,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}


def ring(path, first=0, steps=6, num_envs=1, user=None, **fields):
    """A closed ring whose observations count from `first`; an episode has 3 steps."""
    schema = mr.Schema({**SCHEMA, **fields})
    with mr.ReplayBuffer.create(
        path, schema, 20, num_envs, autoreset="same_step", user_metadata=user
    ) as buffer:
        for step in range(first, first + steps):
            values = {"observation": [[step, 0]] * num_envs, "reward": [1.0] * num_envs}
            values["terminated"] = [step % 3 == 2] * num_envs
            values |= {name: [field.numpy.type(0)] * num_envs for name, field in fields.items()}
            buffer.add(values)
    return path


def steps_in(path):
    with mr.ReplayBuffer.open(path) as buffer:
        return buffer.gather_all()["observation"][:, 0].tolist()


def test_files_and_rings_are_joined_in_their_order(tmp_path):
    ring(tmp_path / "a")
    ring(tmp_path / "b", 6)
    mr.export(tmp_path / "b", tmp_path / "b.npz")
    ring(tmp_path / "c", 12)
    mr.export(tmp_path / "c", tmp_path / "c.parquet")
    report = mr.load([tmp_path / "a", tmp_path / "b.npz", tmp_path / "c.parquet"], tmp_path / "all")
    assert (report.rows, report.episodes) == (18, 6)
    assert steps_in(tmp_path / "all") == [*range(18)]
    with mr.ReplayBuffer.open(tmp_path / "all") as buffer:
        assert buffer.metadata.ring.capacity == 18
        assert buffer.metadata.uuid.hex() != ""


def test_numbers_go_over_all_sources(tmp_path):
    paths = [ring(tmp_path / name, first) for name, first in (("a", 0), ("b", 6), ("c", 12))]
    mr.load(paths, tmp_path / "x", episodes=[1, 2, 5])
    assert steps_in(tmp_path / "x") == [3, 4, 5, 6, 7, 8, 15, 16, 17]
    mr.load(paths, tmp_path / "y", rows=slice(5, 8))
    assert steps_in(tmp_path / "y") == [5, 6, 7]
    mr.load(paths, tmp_path / "z", where="source == 1 and number == 3")
    assert steps_in(tmp_path / "z") == [9, 10, 11]
    fields = ["observation", "terminated"]
    mr.load(paths, tmp_path / "w", where="return > 2", fields=fields)
    with mr.ReplayBuffer.open(tmp_path / "w") as buffer:
        assert list(buffer.schema.paths) == fields


def test_the_longest_values_of_all_sources_fit(tmp_path):
    for number, length in enumerate((4, 9)):
        schema = mr.Schema({"note": mr.Field.text(max_bytes=length)})
        with mr.ReplayBuffer.create(tmp_path / str(number), schema, 4, heap_bytes=4096) as buffer:
            buffer.add(note="x" * length)
    mr.load([tmp_path / "0", tmp_path / "1"], tmp_path / "all")
    with mr.ReplayBuffer.open(tmp_path / "all") as buffer:
        assert buffer.schema["note"].max_length == 9
        assert buffer.gather_all()["note"].text() == ["x" * 4, "x" * 9]


def test_user_metadata_that_differ_are_doubted(tmp_path):
    paths = [
        ring(tmp_path / "a", user={"robot": "so100", "fps": 30}),
        ring(tmp_path / "b", user={"robot": "aloha", "fps": 30}),
    ]
    report = mr.load(paths, tmp_path / "x")
    assert report.doubts == (
        "user metadata 'robot' differs between sources: the first one's was taken",
    )
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        assert buffer.metadata.user["robot"] == "so100"


def test_frames_a_second_that_differ_are_named(tmp_path):
    paths = [
        ring(tmp_path / "a", user={"lerobot": {"fps": 10}}),
        ring(tmp_path / "b", user={"lerobot": {"fps": 10, "robot_type": "aloha"}}),
        ring(tmp_path / "c", user={"fps": 30}),
        ring(tmp_path / "d", user={"lerobot": {"fps": 20}, "fps": 15}),
    ]
    same = "user metadata 'lerobot' differs between sources: the first one's was taken"
    advice = "to LeRobot, pass fps= (-o fps=) if the first one is wrong"
    assert mr.load(paths[:2], tmp_path / "x").doubts == (same,)
    assert mr.load(paths, tmp_path / "y").doubts == (
        "user metadata 'fps' differs between sources: the first one's was taken. "
        f"fps is 30 in {paths[2]} and 15 in {paths[3]}: {advice}",
        f"{same}. fps is 10 in {paths[0]} and 20 in {paths[3]}: {advice}",
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"extra": mr.Field((), "int8")}, r"b has a field 'extra', and .*a has not. Leave it out"),
        ({"reward": mr.Field((), "float64")}, r"field 'reward' is float32\[\] in .*a, and float64"),
        ({"num_envs": 2}, r"a has 1 environments, and .*b has 2. Pass envs='stack'"),
    ],
)
def test_sources_that_do_not_fit_are_refused_by_name(tmp_path, other, message):
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", **other)]
    with pytest.raises(SchemaError, match=message):
        mr.load(paths, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_fields_that_differ_may_be_left_out(tmp_path):
    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6, extra=mr.Field((), "int8"))]
    for number, both in enumerate((paths, paths[::-1])):
        mr.load(both, tmp_path / f"x{number}", fields=["observation", "terminated"])
        assert sorted(steps_in(tmp_path / f"x{number}")) == [*range(12)]


def test_another_meaning_of_ends_is_refused(tmp_path):
    for name, autoreset in (("a", "same_step"), ("b", "next_step")):
        mr.ReplayBuffer.create(
            tmp_path / name, mr.Schema(SCHEMA), 9, 2, autoreset=autoreset
        ).close()
    with pytest.raises(
        SchemaError, match=r"autoreset is 'same_step' in .*a, and 'next_step' in .*b"
    ):
        mr.load([tmp_path / "a", tmp_path / "b"], tmp_path / "x")


def test_another_role_is_refused(tmp_path):
    for name, role in (("a", "x"), ("b", "y")):
        fields = {"x": mr.Field((), "float32"), "y": mr.Field((), "float32")}
        schema = mr.Schema(fields, {"reward": role})
        mr.ReplayBuffer.create(tmp_path / name, schema, 9).close()
    with pytest.raises(SchemaError, match=r"the reward is 'x' in .*a, and 'y' in .*b"):
        mr.load([tmp_path / "a", tmp_path / "b"], tmp_path / "x")


def test_rows_twice_are_refused_unless_others_are_selected(tmp_path):
    ring(tmp_path / "a")
    mr.export(tmp_path / "a", tmp_path / "a.npz", episodes=slice(1, 2))
    both = [tmp_path / "a", tmp_path / "a.npz"]
    with pytest.raises(SchemaError, match=r"both have the row at position 3 of environment 0"):
        mr.load(both, tmp_path / "x")
    mr.load(both, tmp_path / "x", skip=[1])
    assert steps_in(tmp_path / "x") == [0, 1, 2, 3, 4, 5]


def test_rows_twice_in_episodes_that_differ_are_a_doubt_of_unique(tmp_path):
    """As of two files of a ring, the first of which was written within an episode."""
    both = [tmp_path / "one.npz", tmp_path / "two.npz"]
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(SCHEMA), 20) as buffer:
        for step in range(6):
            if step == 5:
                mr.export(buffer, both[0])
            buffer.add(observation=[step, 0], reward=1.0, terminated=step % 3 == 2)
        mr.export(buffer, both[1])
    report = mr.load(both, tmp_path / "x", unique=True)
    assert steps_in(tmp_path / "x") == [0, 1, 2, 3, 4, 3, 4, 5]
    said = "both have the row at position 3 of environment 0 of one buffer, in episodes that are"
    (doubt,) = report.doubts
    assert f"{said} not equal: both stay" in doubt
    with pytest.raises(SourceError, match=f"{said} not equal"):
        mr.load(both, tmp_path / "y", unique=True, strict=True)
    assert not mr.load(both, tmp_path / "z", unique=True, skip=[1]).doubts


AGENTS = mr.Schema(
    {
        "number": mr.Field((), "int64"),
        "terminated": mr.Field((2,), "bool"),
        "truncated": mr.Field((2,), "bool"),
    }
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fields": ["number"]},
        {"fields": ["number", "truncated"]},
        {"drop": ["terminated"]},
        {"drop": ["truncated"]},
        {"rename": {"terminated": "over"}},
    ],
)
def test_an_episode_of_agents_is_truncated_where_the_last_one_ends(tmp_path, options):
    """Agent 0 is truncated at step 1, and agent 1 goes on; then the episode is cut."""
    with mr.ReplayBuffer.create(tmp_path / "a", AGENTS, 20, autoreset="disabled") as buffer:
        for n in range(6):
            buffer.add(number=n, terminated=[False, n == 5], truncated=[n >= 1, False])
        for n in range(6, 9):
            buffer.add(number=n, terminated=[False, False], truncated=[n >= 7, False])
        buffer.end_episodes()
        buffer.add(number=9, terminated=[False, False], truncated=[False, False])
    for rows, ended in ((4, False), (6, True), (8, False), (9, True), (10, False)):
        target = tmp_path / f"x{rows}"
        mr.load(tmp_path / "a", target, rows=slice(0, rows), **options)
        with mr.ReplayBuffer.open(target) as buffer:
            flags = buffer.view.flags(np.zeros(rows, int), np.arange(rows))
            assert bool(flags[-1] & END) is ended, rows
    # Two parts, one behind the other: the first is broken off where it did not end.
    mr.load(tmp_path / "a", tmp_path / "head", rows=slice(0, 4), **options)
    mr.load(tmp_path / "a", tmp_path / "tail", rows=slice(4, 6), **options)
    mr.load([tmp_path / "head", tmp_path / "tail"], tmp_path / "both")
    with mr.ReplayBuffer.open(tmp_path / "both") as buffer:
        flags = buffer.view.flags(np.zeros(6, int), np.arange(6))
        assert flags[3] & END == 0
        assert flags[4] & BREAK
        assert not mr.verify_buffer(tmp_path / "both").findings


def test_lists_that_make_no_sense_are_refused(tmp_path):
    ring(tmp_path / "a")
    with pytest.raises(SchemaError, match="source must name at least one file or folder"):
        mr.load([], tmp_path / "x")
    with pytest.raises(FormatError, match="nowhere"):
        mr.load([tmp_path / "a", tmp_path / "nowhere"], tmp_path / "x")
    with pytest.raises(FormatError, match="inside"):
        mr.load([ring(tmp_path / "b"), tmp_path / "a"], tmp_path / "a" / "x")


def test_live_rings_are_read_up_to_the_rows_that_they_had(tmp_path, monkeypatch):
    from mmreplay.convert import joined as module

    ring(tmp_path / "b", 6)
    schema = mr.Schema(SCHEMA)
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 20, autoreset="same_step") as writer:

        def add(step):
            writer.add(observation=[step, 0], reward=1.0, terminated=step % 3 == 2)

        for step in range(4):
            add(step)
        choose = module.choose

        def late(*arguments):
            add(4)
            return choose(*arguments)

        monkeypatch.setattr(module, "choose", late)
        report = mr.load([tmp_path / "a", tmp_path / "b"], tmp_path / "x")
    assert report.rows == 10
    assert steps_in(tmp_path / "x") == [0, 1, 2, 3, *range(6, 12)]
    with mr.ReplayBuffer.open(tmp_path / "x") as buffer:
        # The episode that goes on is broken off.
        assert mr.episode_table(buffer).broken.tolist() == [False, True, False, False]


@pytest.mark.parametrize("kind", ["ring", "file"])
def test_a_source_that_is_replaced_between_two_looks_is_refused(tmp_path, monkeypatch, kind):
    from mmreplay.convert import joined as module

    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6)]
    if kind == "file":
        mr.export(paths[0], tmp_path / "a.npz")
        paths[0] = tmp_path / "a.npz"
    choose = module.choose

    def late(*arguments):
        if kind == "ring":
            shutil.rmtree(paths[0])
            ring(paths[0], 900)
        else:
            mr.export(ring(tmp_path / "c", 900), paths[0], overwrite=True)
        return choose(*arguments)

    monkeypatch.setattr(module, "choose", late)
    with pytest.raises(StaleError, match=r"a.* was changed or replaced since it was first looked"):
        mr.load(paths, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_is_found_as_rows_are_read_is_said_of_each_source(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for name in "ab":
        table = pa.table({"x": [1.0, None, 3.0], "terminated": [False, False, True]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    alone = mr.load(paths[0], tmp_path / "one")
    assert "missing values of column 'x' became NaN" in alone.notes
    both = mr.load(paths, tmp_path / "two")
    assert {f"{path}: {each}" for path in paths for each in alone.notes} <= set(both.notes)


def test_a_doubt_that_comes_as_rows_are_read_is_refused_by_strict(tmp_path):
    class Doubtful(BufferReader):
        def blocks(self, rows_per_block=None):
            yield from super().blocks(rows_per_block)
            self.report.doubt("these rows are odd")

    def opener(path):
        return lambda: Doubtful(mr.ReplayBuffer.open(path), owned=True)

    paths = [ring(tmp_path / "a"), ring(tmp_path / "b", 6)]
    openers = [(path, opener(path)) for path in paths]

    def write(description):
        return buffer_writer.open_writer(tmp_path / "x", description, overwrite=False)

    with join(openers, Selection())[""].reader as reader:
        report = transfer(reader, write)
    assert report.doubts == tuple(f"{path}: these rows are odd" for path in paths)
    with (
        join(openers, Selection())[""].reader as reader,
        pytest.raises(SourceError, match=r"b: these rows are odd|a: these rows are odd"),
    ):
        transfer(
            reader,
            lambda about: buffer_writer.open_writer(tmp_path / "y", about, overwrite=False),
            strict=True,
        )
    assert not (tmp_path / "y").exists()


def test_one_source_is_open_at_a_time(tmp_path, monkeypatch):
    paths = [ring(tmp_path / str(n), 3 * n, 3) for n in range(12)]
    opened, most = [], 0
    open_reader, close = mr.ReplayBuffer.open, mr.ReplayBuffer.close

    def watched(path, *arguments, **options):
        nonlocal most
        buffer = open_reader(path, *arguments, **options)
        opened.append(buffer)
        most = max(most, sum(not each.closed for each in opened))
        return buffer

    monkeypatch.setattr(mr.ReplayBuffer, "open", watched)
    mr.load(paths, tmp_path / "x")
    monkeypatch.undo()
    assert steps_in(tmp_path / "x") == [*range(36)]
    assert len(opened) >= 24
    assert most == 1
    assert close


# The command line.


def test_the_command_line_joins_likewise(cli, tmp_path):
    paths = [ring(tmp_path / name, first) for name, first in (("a", 0), ("b", 6), ("c", 12))]
    assert cli(*paths, tmp_path / "x")[0] == 0
    assert steps_in(tmp_path / "x") == [*range(18)]
    assert cli(*paths, tmp_path / "y", "--envs", "stack", "--where", "source > 0")[0] == 0
    with mr.ReplayBuffer.open(tmp_path / "y") as buffer:
        assert buffer.span.lengths.tolist() == [0, 6, 6]
    code, out, _ = cli(*paths, tmp_path / "z", "-n")
    assert code == 0
    assert all(f"{path} (buffer)" in out for path in paths)
    plan = json.loads(cli(*paths, tmp_path / "z", "-n", "--json", "--episodes", "1,5")[1])
    assert plan["rows"] == 6
    assert plan["sources"] == [str(path) for path in paths]
    assert not (tmp_path / "z").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["a", "b", "x", "--envs", "beside"], 2, "--envs must be one of append, stack"),
        (["a", "nowhere", "x"], 3, "nowhere"),
        (["a", "a", "x"], 3, "both have the row at position 0 of environment 0"),
        (["a"], 2, "Missing argument"),
    ],
)
def test_mistakes_with_several_sources_are_one_line(
    cli, tmp_path, monkeypatch, words, code, message
):
    monkeypatch.chdir(tmp_path)
    ring(tmp_path / "a")
    ring(tmp_path / "b", 6)
    got, _, err = cli(*words)
    assert (got, err.count("\n")) == (code, 1)
    assert message in err
    assert not (tmp_path / "x").exists()
