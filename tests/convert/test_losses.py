"""What D4RL, Minari, velora's and skrl's layouts cannot hold is refused or told."""

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.errors import SchemaError, SourceError

FIELDS = {
    "observation": mr.Field((1,), "float32"),
    "action": mr.Field((1,), "float32"),
    "reward": mr.Field((), "float32"),
}
ENDS = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}
NEXT = {"next_observation": mr.Field((1,), "float32")}
FOREIGN = {"d4rl": "a.hdf5", "minari": "a-v0"}
TARGETS = {
    "d4rl": ("a.hdf5", {}),
    "minari": ("a-v0", {"format": "minari"}),
    "skrl": ("a.npz", {"layout": "skrl"}),
    "skrl csv": ("a.csv", {"layout": "skrl"}),
    "velora": ("v", {"format": "safetensors", "layout": "velora"}),
}


def create(path, fields, num_envs=1, roles=None, **options):
    schema = mr.Schema.from_flat(fields, roles)
    options.setdefault("autoreset", "disabled")
    return mr.ReplayBuffer.create(path, schema, 40, num_envs, **options)


def record(buffer, seen, **more):
    """One environment's steps: what was seen before each, and further columns."""
    count = len(seen)
    given = {
        "observation": np.float32(seen).reshape(count, 1, 1),
        "action": np.zeros((count, 1, 1), np.float32),
        "reward": np.arange(count, dtype=np.float32)[:, None],
    }
    for name, values in more.items():
        field = buffer.schema[name]
        given[name] = np.asarray(values, field.numpy).reshape(count, 1, *field.shape)
    buffer.extend(given)
    return buffer


def ends(*, count, terminated=(), truncated=()):
    found = {"terminated": np.zeros(count, bool), "truncated": np.zeros(count, bool)}
    found["terminated"][list(terminated)] = True
    found["truncated"][list(truncated)] = True
    return found


def episodes(path):
    """Observations and truncations of every episode of a Minari dataset."""
    with h5py.File(path / "data" / "main_data.hdf5") as file:
        return [
            (group["observations"][()].ravel().tolist(), group["truncations"][-1])
            for group in (file[f"episode_{number}"] for number in range(len(file)))
        ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("x", "info/x"), "fields 'x' and 'info/x' have the same name"),
        (("x", "info/x/y"), "fields 'x' and 'info/x/y':"),
    ],
)
@pytest.mark.parametrize("format", FOREIGN)
def test_two_fields_are_not_one_dataset(tmp_path, format, names, message):
    more = {name: mr.Field((), "float32") for name in names}
    with create(tmp_path / "b", FIELDS | ENDS | more) as buffer:
        steps = {name: np.arange(6) for name in names}
        record(buffer, range(6), **ends(count=6, terminated=[5]), **steps)
        with pytest.raises(SchemaError, match=message):
            mr.export(buffer, tmp_path / FOREIGN[format], format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("rows", [None, 1, 2])
def test_minaris_episodes_end_where_the_stored_next_is_not_the_row_behind(
    tmp_path, rows, monkeypatch
):
    if rows:
        monkeypatch.setattr("mmreplay.convert.buffer_reader.default_rows", lambda _: rows)
    with create(tmp_path / "b", FIELDS | ENDS | NEXT) as buffer:
        seen, after = [0, 1, 10, 5, 6], [1, 2, 11, 6, 7]
        record(buffer, seen, next_observation=after, **ends(count=5, terminated=[4]))
        options = {"format": "minari", "strict": True}
        report = mr.export(buffer, tmp_path / "a-v0", **options)
    assert episodes(tmp_path / "a-v0") == [([0, 1, 2], True), ([10, 11], True), ([5, 6, 7], False)]
    assert "2 episodes were truncated where the stored next" in report.notes[0]
    assert not any("cut off" in note for note in report.notes)
    report = mr.load(tmp_path / "a-v0", tmp_path / "c", strict=True)
    assert report.rows == 5 + 3


@pytest.mark.parametrize("format", FOREIGN)
@pytest.mark.parametrize(
    ("truncated", "terminated", "doubted"), [([2], [5], True), ([], [], True), ([], [2, 5], False)]
)
def test_what_followed_a_step_is_not_made_up_in_silence(
    tmp_path, format, truncated, terminated, doubted
):
    target = tmp_path / FOREIGN[format]
    with create(tmp_path / "b", FIELDS | ENDS) as buffer:
        told = ends(count=6, terminated=terminated, truncated=truncated)
        record(buffer, range(6), **told)
        if doubted:
            with pytest.raises(SourceError, match=r"next .*or the newest"):
                mr.export(buffer, target, format=format, strict=True)
            assert not target.exists()
        # A termination's own observation stands in, as when the library draws it.
        report = mr.export(buffer, target, format=format, strict=not doubted)
        assert bool(report.doubts) == doubted
        assert any("terminat" in note for note in report.notes) == bool(terminated)


@pytest.mark.parametrize("format", FOREIGN)
def test_final_observations_leave_nothing_to_doubt(tmp_path, format):
    with create(tmp_path / "b", FIELDS | ENDS) as buffer:
        for number in range(6):
            step = {"observation": [number], "action": [0], "reward": 0.0}
            step |= {"terminated": False, "truncated": number % 3 == 2}
            buffer.add(step, final_observation=np.float32([number + 1]))
        target = tmp_path / FOREIGN[format]
        report = mr.export(buffer, target, format=format, strict=True)
    assert report.notes == report.doubts == ()


@pytest.mark.parametrize("target", TARGETS)
def test_priorities_without_a_column_are_a_doubt(tmp_path, target):
    name, options = TARGETS[target]
    path = tmp_path / "b"
    with create(path, FIELDS | ENDS | NEXT) as buffer:
        after = np.arange(1, 7)
        record(buffer, range(6), next_observation=after, **ends(count=6))
    sampler = mr.PrioritizedSampler(name="p")
    with mr.ReplayBuffer.open(path, "r+", sampler=sampler) as buffer:
        buffer.update_priorities(buffer.sample(4), np.ones(4))
        mr.export(buffer, tmp_path / "plain" / name, strict=True, **options)
        options = options | {"priorities": "p"}
        with pytest.raises(SourceError, match="priorities 'p' were left out: "):
            mr.export(buffer, tmp_path / name, strict=True, **options)
        report = mr.export(buffer, tmp_path / name, **options)
    assert "cannot store them" in report.doubts[0]


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"velora"}))
def test_no_steps_are_refused_where_nobody_reads_them(tmp_path, target):
    name, options = TARGETS[target]
    with create(tmp_path / "b", FIELDS | ENDS) as buffer:
        with pytest.raises(SchemaError, match=r"got no steps to write, but"):
            mr.export(buffer, tmp_path / name, **options)
        found = registry.named({"a.npz": "npz", "a.csv": "csv"}.get(name, target))
        options = {name: each for name, each in options.items() if name != "format"}
        with registry.open_reader(registry.named("buffer"), tmp_path / "b") as reader:
            about = reader.describe()
        with pytest.raises(SchemaError, match=r"got no steps to write, but"):
            registry.planned(found, about, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


DONES = [0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("field", [mr.Field((1,), "float32"), mr.Field((), "bool")])
def test_ends_without_a_role_are_recognized_by_their_name(
    tmp_path, monkeypatch, field, stored, rows
):
    if rows:
        monkeypatch.setattr("mmreplay.convert.buffer_reader.default_rows", lambda _: rows)
    fields = FIELDS | {"dones": field} | (NEXT if stored else {})
    with create(tmp_path / "b", fields) as buffer:
        more = {"next_observation": np.arange(1, 9)} if stored else {}
        record(buffer, range(8), dones=DONES, **more)
        reports = {
            target: mr.export(buffer, tmp_path / name, **options)
            for target, (name, options) in TARGETS.items()
            if "skrl" not in target
        }
    # The newest step is left out: its next observation is unknown.
    known = 8 if stored else 7
    pair = load_file(tmp_path / "v" / "buffer_state.safetensors")
    assert pair["dones"].ravel()[:known].tolist() == DONES[:known]
    nexts = np.arange(1.0, known + 1) - (0 if stored else np.array(DONES[:known]))
    assert pair["next_states"].ravel()[:known].tolist() == nexts.tolist()
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert file["terminals"][()].tolist() == [bool(each) for each in DONES]
        assert file["timeouts"][()].tolist() == [False] * 7 + [True]
        assert file["next_observations"][2] == (3 if stored else 2)
    assert [last for _, last in episodes(tmp_path / "a-v0")] == [False, False, True]
    for target, report in reports.items():
        assert any("values of field 'dones' were taken as ends" in note for note in report.notes), (
            target
        )
        mixed = any("'dones' may mix" in doubt for doubt in report.doubts)
        assert mixed == (target != "velora")


@pytest.mark.parametrize("rows", [None, 1, 5])
@pytest.mark.parametrize("stored", [False, True])
def test_ends_by_name_are_written_as_those_of_a_role(tmp_path, rng, monkeypatch, stored, rows):
    if rows:
        monkeypatch.setattr("mmreplay.convert.buffer_reader.default_rows", lambda _: rows)
    steps = {
        "observation": rng.random((30, 3, 1), np.float32),
        "action": rng.random((30, 3, 1), np.float32),
        "reward": rng.random((30, 3), np.float32),
        "done": rng.random((30, 3)) < 0.2,
    }
    if stored:
        steps["next_observation"] = rng.random((30, 3, 1), np.float32)
    fields = FIELDS | {"done": mr.Field((), "bool")} | (NEXT if stored else {})
    pairs, flat = [], []
    for name, roles in (("told", {"terminated": "done"}), ("named", None)):
        # The ring has wrapped, so that its oldest episodes have no beginning.
        schema = mr.Schema.from_flat(fields, roles)
        with mr.ReplayBuffer.create(tmp_path / name, schema, 20, 3, autoreset="disabled") as buffer:
            buffer.extend(steps)
            for target in ("velora", "d4rl"):
                file, options = TARGETS[target]
                mr.export(buffer, tmp_path / f"{name}-{file}", **options)
        pairs.append(load_file(tmp_path / f"{name}-v" / "buffer_state.safetensors"))
        with h5py.File(tmp_path / f"{name}-a.hdf5") as file:
            names = ("observations", "next_observations", "terminals", "timeouts")
            flat.append({each: file[each][()] for each in names})
    for one, other in (pairs, flat):
        for each in one:
            np.testing.assert_array_equal(one[each], other[each], err_msg=each)


@pytest.mark.parametrize("target", ["velora", "d4rl", "minari"])
def test_an_end_by_name_without_a_value_is_refused(tmp_path, target):
    name, options = TARGETS[target]
    with create(tmp_path / "b", FIELDS | {"done": mr.Field((), "float32")}) as buffer:
        record(buffer, range(4), done=[0, 0, np.nan, 1])
        with pytest.raises(
            SourceError, match=r"field 'done' .* must be 0 or 1 in every row, got .* in row 2"
        ):
            mr.export(buffer, tmp_path / name, **options)
    assert not (tmp_path / name).exists()


def test_a_truncation_that_done_says_too_is_one(tmp_path):
    fields = FIELDS | {"done": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}
    with create(tmp_path / "b", fields | NEXT) as buffer:
        flags = {"done": [0, 1, 0, 1], "truncated": [0, 0, 0, 1]}
        record(buffer, range(4), next_observation=range(1, 5), **flags)
        mr.export(buffer, tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert file["terminals"][()].tolist() == [False, True, False, False]
        assert file["timeouts"][()].tolist() == [False, False, False, True]


def test_skrls_csv_holds_what_is_stored_whatever_it_is_called(tmp_path):
    fields = {
        "observation": mr.Field((2,), "float32"),
        "done": mr.Field((), "uint8"),
        "truncated": mr.Field((), "bool"),
        "mmreplay_": mr.Field((), "int64"),
    }
    with create(tmp_path / "b", fields, 2) as buffer:
        number = np.arange(6)[:, None] + np.zeros((1, 2), int)
        buffer.extend(
            {
                "observation": np.zeros((6, 2, 2), np.float32),
                "done": (number % 3).astype(np.uint8),
                "truncated": number == 4,
                "mmreplay_": number,
            }
        )
        mr.export(buffer, tmp_path / "a.csv", layout="skrl")
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[0] == "done.0,mmreplay_.0,observation.0,observation.1,truncated.0"
    assert [line.split(",")[0] for line in lines[1:]] == list("001122001122")
    assert [line.split(",")[1] for line in lines[1:]] == list("001122334455")
    assert [n for n, line in enumerate(lines) if line.endswith("True")] == [9, 10]


@pytest.mark.parametrize("name", ["terminal", "done"])
@pytest.mark.parametrize("count", [4, 9])
def test_an_ended_episode_after_a_named_end_truncates_nothing(tmp_path, name, count):
    fields = FIELDS | {name: mr.Field((), "bool")}
    with create(tmp_path / "b", fields, roles=None) as buffer:
        for at in range(count):
            record(buffer, [at], **{name: [at == 2]})
            if at in (2, 5):
                buffer.end_episodes()
    mr.export(tmp_path / "b", tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert np.flatnonzero(file["terminals"][()]).tolist() == [2]
        ends = [3] if count == 4 else [5, 8]
        assert np.flatnonzero(file["timeouts"][()]).tolist() == ends
    mr.export(tmp_path / "b", tmp_path / "a-v0", format="minari")
    assert [truncated for _, truncated in episodes(tmp_path / "a-v0")] == (
        [False, True] if count == 4 else [False, True, True]
    )
    if count == 9:
        one = tmp_path / "one.hdf5"
        mr.export(tmp_path / "b", one, episodes=slice(0, 1))
        with h5py.File(one) as file:
            assert file["terminals"][()].tolist() == [False, False, True]
            assert not file["timeouts"][()].any()
