"""A kind of field that is one class is right in all that reads, shows or converts it.

`Days` are dates, stored as whole days since 1970 in fields of exact int64 scalars. No
byte of a file says so: metadata.json has int64, as for every such field, and a process
that does not know of `Days` reads numbers.
"""

import json
from contextlib import contextmanager
from datetime import date, timedelta

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.page.api import Page
from mmreplay.page.wire import unpack
from mmreplay.schema.kinds import KINDS, Fixed
from tests.combinations.consumers.shown import ask, command

FIRST = date(1999, 12, 30)
ROWS, LENGTH = 24, 6


class Days(Fixed):
    """Dates, as days since 1970."""

    as_text = True

    def claims(self, field):
        return field.dtype == "int64" and field.exact and field.shape == ()

    def name(self, field):
        return "date"

    def convert(self, field, value, path, lead):
        given = np.asarray(value)
        if given.dtype.kind in "OM":
            try:
                given = given.astype("datetime64[D]").astype(np.int64)
            except (ValueError, TypeError):
                raise SchemaError(f"field {path!r} must be dates, got {value}.") from None
        return super().convert(field, given, path, lead)

    def summary(self, field, value):
        return str(np.datetime64(int(value), "D"))

    show = summary

    def label(self, field, number):
        return self.summary(field, number)


class Cents(Fixed):
    """Amounts of money, as whole hundredths: not the numbers that are stored."""

    def claims(self, field):
        return field.dtype == "int64" and field.exact

    def name(self, field):
        return "money"

    def convert(self, field, value, path, lead):
        given = np.asarray(value)
        if given.dtype.kind == "f":
            given = np.rint(given * 100).astype(np.int64)
        return super().convert(field, given, path, lead)

    def numbers(self, field, column):
        return np.asarray(column) / 100

    def integers(self, field):
        return False


@contextmanager
def known(kind):
    KINDS.insert(0, kind)
    yield kind
    KINDS.remove(kind)


@pytest.fixture
def days():
    with known(Days()) as kind:
        yield kind


@pytest.fixture
def cents():
    with known(Cents()) as kind:
        yield kind


def schema(**fields):
    """Made anew: a field keeps the kind that it had when it was first asked."""
    day = mr.Field((), "int64", exact=True)
    return mr.Schema(
        {
            "observation": {"day": day, "count": mr.Field((), "int64")},
            "action": mr.Field((2,), "float32"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
            **fields,
        }
    )


DATES = [FIRST + timedelta(days=number * number) for number in range(ROWS)]
NUMBERS = [(day - date(1970, 1, 1)).days for day in DATES]
TEXTS = [day.isoformat() for day in DATES]


def step(number, day):
    return {
        "observation": {"day": day, "count": number},
        "action": [number, 1],
        "reward": 1.0,
        "terminated": number % LENGTH == LENGTH - 1,
        "truncated": False,
    }


def make(path, **options):
    """A closed buffer: dates one by one, all at once, and as the numbers they are."""
    with mr.ReplayBuffer.create(path, schema(), 64, commit_every=None, **options) as buffer:
        for number in range(8):
            buffer.add(step(number, DATES[number]))
        some = range(8, 16)
        buffer.extend(
            {
                "observation": {"day": np.array(DATES[8:16], "datetime64[D]"), "count": [*some]},
                "action": [[n, 1] for n in some],
                "reward": np.ones(8),
                "terminated": [n % LENGTH == LENGTH - 1 for n in some],
                "truncated": np.zeros(8, bool),
            }
        )
        for number in range(16, ROWS):
            buffer.add(step(number, NUMBERS[number]))
    return path


@pytest.fixture
def path(tmp_path, days):
    return make(tmp_path / "dated")


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_dates_are_stored_as_numbers_and_files_do_not_name_them(tmp_path, days, engine):
    path = make(tmp_path / "dated", engine=engine)
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.schema["observation/day"].rules is days
        assert buffer.schema["observation/day"].description == "date[]"
        assert ("observation/day", "date", "scalar") in [r[:3] for r in buffer.schema.table()[1]]
        found = buffer.get_field("observation/day", 0, np.arange(ROWS))
        assert (found.dtype, found.tolist()) == (np.int64, NUMBERS)
    assert mr.verify_buffer(path).ok
    entries = json.loads((path / "metadata.json").read_bytes())["schema"]
    assert next(e for e in entries if e["name"] == "observation/day") == {
        "name": "observation/day",
        "dtype": "int64",
        "shape": [],
        "exact": True,
        "mutable": False,
    }


def test_what_is_no_date_is_refused(path):
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        with pytest.raises(SchemaError, match="'observation/day' must be dates, got yesterday"):
            buffer.add(step(0, np.array("yesterday", object)))
        with pytest.raises(SchemaError, match="'observation/day' must be int64"):
            buffer.add(step(0, 0.5))


def test_commands_show_dates(path):
    code, out, _ = command("head", str(path), "--rows", "9", "--json")
    assert code == 0
    assert [row["observation/day"] for row in json.loads(out)["rows"]] == TEXTS[:9]
    assert [row["observation/count"] for row in json.loads(out)["rows"]] == [*range(9)]
    assert TEXTS[1] in command("head", str(path))[1]
    assert " date " in command("info", str(path))[1]
    [line] = [each for each in command("stats", str(path))[1].splitlines() if "/day" in each]
    assert line.split()[1:3] == [TEXTS[0], TEXTS[-1]]
    assert command("verify", str(path))[0] == 0


def test_plots_and_statistics_count_days(path, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "plot.png"
    assert command("plot", str(path), "--output", str(target))[0] == 0
    assert target.stat().st_size > 0
    with mr.ReplayBuffer.open(path) as buffer:
        found = mr.field_moments(buffer)["observation/day"]
    assert (found.min, found.max, found.count) == (NUMBERS[0], NUMBERS[-1], ROWS)
    assert found.mean == pytest.approx(np.mean(NUMBERS))


def test_the_page_shows_dates_and_draws_days(path):
    page = Page([path])
    try:
        values = ask(page, "values", f"env=0&first=0&count={ROWS}")["values"]
        assert values["observation/day"] == TEXTS
        assert values["observation/count"] == [[number] for number in range(ROWS)]
        overview = ask(page, "overview")
        [field] = [each for each in overview["fields"] if each["path"] == "observation/day"]
        assert (field["dtype"], field["varies"], field["image"]) == ("date", False, None)
        assert (field["low"], field["high"]) == (NUMBERS[0], NUMBERS[-1])
        assert (field["low_text"], field["high_text"], field["integer"]) == (
            TEXTS[0],
            TEXTS[-1],
            True,
        )
        assert not [check for check in overview["checks"] if check["level"] == "bad"]
        answer = page.answer("/api/b/0/curve", f"env=0&first=0&stop={ROWS}&field=observation/day")
        facts, body = unpack(answer.body)
        curve = np.frombuffer(body, "<f4").reshape(3, 1, -1)[2, 0]
        offset = int(facts.get("offsets", ["0"])[0])
        assert (curve + offset).tolist() == NUMBERS
        assert facts["integer"] is True
    finally:
        page.close()


@pytest.mark.parametrize(
    "name", ["rows.parquet", "rows.csv", "rows.npz", "rows.pt", "rows.safetensors"]
)
def test_dates_come_back_from_files_of_each_format(path, tmp_path, days, name):
    if name.endswith((".parquet", ".csv")):
        pytest.importorskip("pyarrow")
    if name.endswith(".safetensors"):
        pytest.importorskip("safetensors")
    mr.export(path, tmp_path / name)
    mr.load(tmp_path / name, tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as again:
        assert again.schema["observation/day"].rules is days
        assert again.get_field("observation/day", 0, np.arange(ROWS)).tolist() == NUMBERS
    assert mr.verify_buffer(tmp_path / "again").ok
    out = command("head", str(tmp_path / "again"), "--rows", str(ROWS), "--json")[1]
    assert [row["observation/day"] for row in json.loads(out)["rows"]] == TEXTS


def test_batches_of_one_buffer_and_of_several_hold_days(path, tmp_path):
    other = make(tmp_path / "other", engine="zarr")
    with mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(0)) as buffer:
        assert_days(buffer.sample(32))
        assert_days(buffer.sample(8).torch())
        with mr.ReplayLoader(buffer, 16) as loader:
            assert_days(next(iter(loader)))
    with mr.concat([path, other], seed=0) as both:
        batch = both.sample(32)
        assert_days(batch)
        assert_days(mr.Batch.join([batch, batch]).select(np.array([40, 1])))
    dataset = mr.ReplayDataset(path)
    assert dataset[3]["observation"]["day"] == NUMBERS[3]


def assert_days(batch):
    found = batch["observation/day"]
    assert found.dtype in (np.int64, torch.int64)
    for number, day in zip(batch["observation/count"].tolist(), found.tolist(), strict=True):
        assert day == NUMBERS[number]


def test_transforms_compute_with_days(path):
    transforms = [
        mr.FrameStack(2, "observation/day"),
        mr.Cast("float64", paths="observation/count"),
    ]
    with mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(0), transforms=transforms) as buffer:
        batch = buffer.sample(32)
        for number, stack in zip(batch["observation/count"], batch["observation/day"], strict=True):
            number = int(number)
            before = max(number - 1, number - number % LENGTH)
            assert stack.tolist() == [NUMBERS[before], NUMBERS[number]]
    with mr.ReplayBuffer.open(
        path,
        sampler=mr.UniformSampler(0),
        transforms=[mr.Normalize({"observation/day": NUMBERS[0]}, {"observation/day": 2.0})],
    ) as buffer:
        batch = buffer.sample(32)
        for number, value in zip(batch["observation/count"], batch["observation/day"], strict=True):
            assert value == pytest.approx((NUMBERS[number] - NUMBERS[0]) / 2)


@pytest.fixture
def paid(tmp_path, cents):
    """Rewards of 0.5, 1.5 and so on, beside observations of quarters."""
    money = mr.Field((), "int64", exact=True)
    made = schema(observation=mr.Field((2,), "int64", exact=True), reward=money)
    with mr.ReplayBuffer.create(tmp_path / "paid", made, 64) as buffer:
        for number in range(ROWS):
            amounts = {"observation": np.array([number / 4, number]), "reward": number + 0.5}
            buffer.add(step(number, None) | amounts)
    return tmp_path / "paid"


def test_numbers_that_are_not_those_stored_are_counted_and_shown(paid):
    first = json.loads(command("head", str(paid), "--json")[1])["rows"][1]
    assert (first["observation"], first["reward"]) == ([0.25, 1.0], 1.5)
    with mr.ReplayBuffer.open(paid) as buffer:
        assert buffer.get_field("reward", 0, [3]).tolist() == [350]
        assert mr.field_moments(buffer)["reward"].max == ROWS - 0.5
        assert mr.episode_table(buffer).returns[:2].tolist() == [18.0, 54.0]
    page = Page([paid])
    try:
        assert ask(page, "values", "env=0&first=1&count=1")["values"]["reward"] == [[1.5]]
        overview = ask(page, "overview")
        assert overview["returns"]["y"][:2] == [18.0, 54.0]
        facts, body = unpack(
            page.answer("/api/b/0/curve", "env=0&first=0&stop=3&field=reward").body
        )
        assert np.frombuffer(body, "<f4").reshape(3, 1, -1)[2, 0].tolist() == [0.5, 1.5, 2.5]
        assert facts["integer"] is False
    finally:
        page.close()


@pytest.mark.parametrize(
    ("transform", "name", "expected"),
    [
        (mr.NStep(2, gamma=1.0), "reward", 2.5 + 3.5),
        (mr.DiscountedReturn(1.0), "discounted_return", 2.5 + 3.5 + 4.5 + 5.5),
        (
            mr.Normalize({"observation": [0.0, 1.0]}, {"observation": [1.0, 2.0]}),
            "observation",
            [0.5, 0.5],
        ),
        (mr.Cast("float32", scale=2.0), "observation", [1.0, 4.0]),
        (mr.Delta("observation"), "delta", [0.25, 1.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_transforms_compute_with_numbers_that_are_not_those_stored(paid, transform, name, expected):
    with mr.ReplayBuffer.open(paid, transforms=[transform]) as buffer:
        assert buffer.take([0], [2])[name].tolist() == [expected]
