"""The page on disk has the same answers, and a selection takes rows away."""

import base64
import json
import re

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert.ranges import RowRanges, read_ranges
from mmreplay.page.api import Page
from mmreplay.page.saved import key_of, save_page
from mmreplay.page.wire import unpack
from tests.page.conftest import healthy_steps, make_buffer, schema, squeezed


def answers_of(folder):
    """What the scripts of a saved page hand over, by key."""
    found = {}
    for file in sorted(folder.glob("data-*.js")):
        for line in file.read_text().splitlines():
            match = re.fullmatch(r"mmr\.saved\((.*)\);", line)
            key, media_type, data = json.loads(f"[{match[1]}]")
            assert key not in found
            found[key] = (media_type, base64.b64decode(data))
    return found


def test_saved_answers_are_the_servers(path, tmp_path):
    page = Page([path], sampler="UniformSampler")
    report = save_page(page, tmp_path / "page")
    answers = answers_of(tmp_path / "page")
    assert report.episodes > 4
    settings = json.loads(answers["settings"][1])
    table = json.loads(answers["/api/b/0/episodes"][1])
    assert len(table["rows"]) == report.episodes
    served = 0
    for key, (_, body) in answers.items():
        address, _, query = key.partition("?")
        if "/b/" not in key or address.endswith("/episodes"):
            continue
        if address.endswith("/overview"):
            assert json.loads(body)["steps"] == 600
            continue
        assert page.answer(address, query).body == body, key
        served += 1
    assert served > 20
    with mr.ReplayBuffer.open(path) as buffer:
        for env_id, begin, length, *_ in table["rows"]:
            key, _ = key_of(
                "/api/b/0/frames",
                field="observation/pixels",
                env=env_id,
                first=begin,
                count=settings["frames"],
                side=settings["side"],
            )
            head, body = unpack(answers[key][1])
            pixels = buffer.get_field(
                "observation/pixels", env_id, np.arange(begin, begin + head["shape"][0])
            )
            assert head["shape"][0] > length
            assert body == pixels.tobytes()
    page.close()


def test_histograms_of_a_saved_page_are_of_all_returns(path, tmp_path, rng, monkeypatch):
    # So few are read within a request: the others are read by a thread.
    monkeypatch.setattr("mmreplay.page.episodes.AT_ONCE_STEPS", 10)
    monkeypatch.setattr("mmreplay.page.episodes.SLICE_STEPS", 50)
    monkeypatch.setattr("mmreplay.page.episodes.EpisodeColumns.newest", _newest)
    other = make_buffer(tmp_path / "other", rng)
    page = Page([path, other])
    save_page(page, tmp_path / "page")
    page.close()
    answers = answers_of(tmp_path / "page")
    table = json.loads(answers["/api/b/0/episodes"][1])
    assert sum(table["histograms"]["return"]["counts"]) == 20
    assert sum(table["histograms"]["length"]["counts"]) == 20
    compared = json.loads(answers["/api/b/0/compare?c=1"][1])
    assert compared["done"] == 1
    assert [sum(counts) for counts in compared["histograms"][0]["counts"]] == [20, 20]


def _newest(columns, count):
    return np.arange(len(columns))[-3:]


def test_a_saved_page_holds_no_text_that_ends_a_script(tmp_path, rng):
    name = "<img src=x onerror=alert(1)><script>"
    fields = {"observation": mr.Field((2,), "float32"), name: mr.Field((), "float32")}
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 100) as buffer:
        buffer.extend({"observation": rng.random((50, 2), "f4"), name: np.ones(50)})
    page = Page([tmp_path / "a"])
    save_page(page, tmp_path / "page")
    for file in (tmp_path / "page").glob("data-*.js"):
        assert "<" not in file.read_text()
    keys = " ".join(answers_of(tmp_path / "page"))
    assert "field=%3Cimg" in keys
    page.close()


def test_a_folder_that_exists_is_refused(path, tmp_path):
    page = Page([path])
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "mine").write_text("x")
    with pytest.raises(mr.FormatError, match=r"already exists\. Choose another folder\.$"):
        save_page(page, tmp_path / "page")
    assert [p.name for p in tmp_path.glob("tmp-*")] == []
    page.close()


def test_a_folder_inside_a_buffer_is_refused(path, tmp_path):
    page = Page([path])
    inside = path / "deeper" / "page"
    with pytest.raises(mr.FormatError, match=r"is inside the buffer .*\. Choose another folder\.$"):
        save_page(page, inside)
    assert not inside.parent.exists()
    page.close()


def select(path, rows, uuid=""):
    path.write_text(json.dumps(RowRanges.of(rows, uuid).to_json()))
    return path


def test_selected_episodes_are_saved(path, tmp_path):
    file = select(tmp_path / "some.json", [(1, 35, 40), (0, 94, 100), (0, 9000, 9001)])
    page = Page([path])
    report = save_page(page, tmp_path / "page", file)
    assert report.episodes == 2
    assert len(report.notes) == 1
    rows = json.loads(answers_of(tmp_path / "page")["/api/b/0/episodes"][1])["rows"]
    with mr.ReplayBuffer.open(path) as buffer:
        begins = [
            int(buffer.episodes.locate(env_id, np.array([at]))[0][0])
            for env_id, at in ((0, 94), (1, 35))
        ]
    assert [row[:2] for row in rows] == [[0, begins[0]], [1, begins[1]]]
    page.close()


def test_a_selection_is_of_the_buffer_that_it_names(cli, path, tmp_path, rng):
    other = make_buffer(tmp_path / "other", rng, count=90)
    with mr.ReplayBuffer.open(other) as buffer:
        uuid = buffer.metadata.uuid.hex()
    file = select(tmp_path / "some.json", [(1, 35, 40)], uuid)
    page = Page([path, other])
    save_page(page, tmp_path / "page", file)
    page.close()
    answers = answers_of(tmp_path / "page")
    rows = json.loads(answers["/api/b/1/episodes"][1])["rows"]
    assert [row[:2] for row in rows] == [[1, 31]]
    # Of the first buffer the newest ones are saved, as without a selection.
    assert len(json.loads(answers["/api/b/0/episodes"][1])["rows"]) > 1
    code, out, err = cli("view", path, "--save", tmp_path / "no", "--select", file)
    assert (code, out) == (3, "")
    assert f"select is of the buffer {uuid}, and the page shows " in err
    assert "Pass the path of the buffer that it was saved from." in err
    assert not (tmp_path / "no").exists()


def test_rows_that_cannot_be_saved_are_named(path, tmp_path):
    rows = [(0, 5, 9), (0, 9000, 9001), (7, 0, 5)]
    file = select(tmp_path / "some.json", rows)
    page = Page([path])
    report = save_page(page, tmp_path / "page", file)
    page.close()
    assert report.notes == [
        "positions 9,000 to 9,001 of environment 0 are not written yet",
        "there is no environment 7 in the buffer",
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((7, 0, 50), "They are of environment 7, and it has 2. Pass the buffer that"),
        ((1, 9000, 9050), "They are not written yet. Select older rows."),
    ],
)
def test_convert_says_why_it_has_none_of_the_rows(cli, path, tmp_path, rows, words):
    file = select(tmp_path / "none.json", [rows])
    code, _, err = cli("convert", path, tmp_path / "other", "--select", file)
    assert code == 3
    assert "the source has none of them" in err
    assert words in " ".join(err.split())


def test_ranges_are_joined_and_sorted():
    ranges = RowRanges.of([(1, 5, 9), (0, 3, 4), (1, 9, 12), (1, 2, 6), (1, 20, 30)])
    assert ranges.env_ids.tolist() == [0, 1, 1]
    assert ranges.first.tolist() == [3, 2, 20]
    assert ranges.stop.tolist() == [4, 12, 30]
    assert ranges.rows == 21


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"format": "x"},
        {"rows": []},
        {"rows": "x"},
        {"rows": [[0, 1]]},
        {"rows": [[0, 2, 2]]},
        {"rows": [[-1, 2, 3]]},
        {"rows": [[0, 1.5, 2]]},
        {"rows": [[0, True, 2]]},
        {"rows": [[0, 1, 1 << 63]]},
        {"rows": [None]},
        {"version": 2, "rows": [[0, 1, 2]]},
    ],
)
def test_files_that_are_no_selection(tmp_path, value):
    base = {"format": "mmreplay selection", "version": 1}
    (tmp_path / "x.json").write_text(json.dumps(base | value if value else {}))
    with pytest.raises(mr.FormatError):
        read_ranges(tmp_path / "x.json")


@pytest.fixture
def cli(capsys):
    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_convert_takes_the_selected_rows(cli, path, stored, tmp_path):
    rows = [(0, 0, 31), (0, 62, 80), (1, 40, 50), (1, 100, 110)]
    file = select(tmp_path / "some.json", rows, stored.metadata.uuid.hex())
    code, _out, err = cli("convert", path, tmp_path / "new", "--select", file)
    assert (code, err) == (0, "")
    with mr.ReplayBuffer.open(tmp_path / "new") as new:
        assert new.span.first.tolist() == [0, 40]
        assert new.span.stop.tolist() == [49, 60]
        for env_id, pieces in ((0, [(0, 31), (62, 80)]), (1, [(40, 50), (100, 110)])):
            old = np.concatenate([np.arange(*piece) for piece in pieces])
            span = new.span
            here = np.arange(span.first[env_id], span.stop[env_id])
            for name in stored.schema.paths:
                np.testing.assert_array_equal(
                    new.get_field(name, env_id, here), stored.get_field(name, env_id, old)
                )
        # The step before the gap ended no episode: what follows is another one.
        assert new.flags(1, [50])[0] & 17 == 17
        table = mr.episode_table(new)
        assert table.broken.tolist().count(True) == 1
    assert cli("verify", tmp_path / "new")[0] == 0


@pytest.mark.parametrize("target", ["x.npz", "x.parquet", "x.csv", "new"])
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
def test_any_selection_is_a_legal_buffer(cli, tmp_path, rng, target, autoreset):
    steps = healthy_steps(rng, 200, 2, 20)
    path = tmp_path / "a"
    final = {} if autoreset == "next_step" else steps["observation"]
    options = {"final_observation": final} if final else {}
    with mr.ReplayBuffer.create(path, schema(), 150, 2, autoreset=autoreset) as buffer:
        buffer.extend(steps, **options)
        span = buffer.span
    rows = []
    for _ in range(12):
        env_id = int(rng.integers(2))
        first = int(rng.integers(span.first[env_id], span.stop[env_id] - 1))
        rows.append((env_id, first, first + int(rng.integers(1, 25))))
    file = select(tmp_path / "some.json", rows)
    code, _out, err = cli("convert", path, tmp_path / target, "--select", file)
    assert (code, err) == (0, ""), err
    if target != "new":
        code, _out, err = cli("convert", tmp_path / target, tmp_path / "new")
        assert (code, err) == (0, ""), err
    assert cli("verify", tmp_path / "new")[0] == 0


def test_what_was_overwritten_is_reported(cli, tmp_path, rng):
    path = make_buffer(tmp_path / "a", rng, count=400, num_envs=1, capacity=100)
    with mr.ReplayBuffer.open(path) as buffer:
        stop = int(buffer.span.stop[0])
    file = select(tmp_path / "some.json", [(0, 0, 50), (0, stop - 20, stop + 5)])
    code, out, err = cli("convert", path, tmp_path / "new", "--select", file)
    assert code == 0
    assert "55 of 75 selected rows are not in the source" in out
    with mr.ReplayBuffer.open(tmp_path / "new") as new:
        assert int(new.span.lengths.sum()) == 20
    file = select(tmp_path / "none.json", [(0, 0, 50)])
    code, out, err = cli("convert", path, tmp_path / "other", "--select", file)
    assert code == 3
    assert "the source has none of them" in err


def test_a_selection_of_another_buffer_is_doubted(cli, path, tmp_path):
    file = select(tmp_path / "some.json", [(0, 0, 31)], "ff" * 16)
    code, out, _ = cli("convert", path, tmp_path / "new", "--select", file)
    assert code == 0
    assert "doubt: the selection is of the buffer ffff" in out
    code, _, _err = cli("convert", path, tmp_path / "two", "--select", file, "--strict")
    assert code != 0
    file = select(tmp_path / "none.json", [(0, 90_000, 90_031)], "ff" * 16)
    code, _, err = cli("convert", path, tmp_path / "three", "--select", file)
    assert code == 3
    assert "which has none of its rows. Pass the buffer that the selection was" in err


def test_a_selection_that_does_not_exist_is_refused(cli, path, tmp_path):
    missing = tmp_path / "nofile.json"
    code, _, err = cli("convert", path, tmp_path / "new", "--select", missing)
    assert code == 3
    assert "nofile.json does not exist. Check the path." in err


def test_select_and_numbers_do_not_mix(cli, path, tmp_path):
    file = select(tmp_path / "some.json", [(0, 0, 31)])
    code, _, err = cli("convert", path, tmp_path / "new", "--select", file, "--rows", "0:5")
    assert code == 3
    assert "by position or by number" in err


def test_the_command_saves(cli, path, tmp_path):
    code, out, err = cli("view", path, "--save", tmp_path / "page")
    assert (code, err) == (0, "")
    answers = answers_of(tmp_path / "page")
    saved = sum("/episode?" in key for key in answers)
    assert f"index.html: {saved} of 20 episodes, " in out
    assert "4 newest whole episodes, the best, the worst" in out
    assert "--select" in out


def test_the_command_finds_the_buffer_inside_a_folder(cli, path):
    code, _out, err = cli("view", path.parent, "--no-open")
    assert code != 0
    assert f"Did you mean {path}?" in err


def test_the_command_refuses_bad_arguments(cli, path, tmp_path):
    for arguments, code, words in (
        (["nowhere"], 3, "does not exist"),
        ([path, "--select", "x"], 2, "--select needs --save"),
        ([path, "--image", "x"], 2, "--image must be FIELD=AXES"),
        ([path, "--image", "x=HWC"], 3, "no buffer has a field 'x'"),
        ([path, "--image", "observation=HWC"], 3, "mean 'observation/pixels'?"),
        ([path, "--image", "observation/joints=HWC"], 3, "must have 2 to 4 axes"),
        ([path, "--image", "observation/pixels=HW"], 3, "must have 3 letters"),
        ([path, "--image", "observation/pixels=HWX"], 3, "must be made of H, W"),
        ([path, "--image", "observation/pixels=CHW"], 3, "1 or 3 channels"),
        ([path, "--sampler", "x()"], 3, "must be a sampler"),
        ([path, "--port", "99999"], 2, "port"),
        ([path, "--host", "192.0.2.1"], 1, "Cannot listen"),
        ([], 2, "PATH"),
    ):
        found, _out, err = cli("view", *arguments, *(["--no-open"] * bool(arguments)))
        assert found == code, (arguments, err)
        assert words in err, (arguments, err)


def test_without_the_extra_the_command_says_what_to_install(cli, path, monkeypatch):
    import sys

    for name in [*sys.modules]:
        if name.partition(".")[0] in ("starlette", "uvicorn"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mmreplay.page.app", raising=False)
    import mmreplay.page

    monkeypatch.delattr(mmreplay.page, "app", raising=False)
    code, _out, err = cli("view", path, "--no-open")
    assert code == 1
    assert err == (
        "mmreplay: The page needs Starlette and uvicorn. Run: pip install 'mmreplay[web]'\n"
    )


def fail(*_, **__):
    raise TypeError("no such operation")


def test_a_screen_that_is_missing_is_noted_and_the_command_fails(
    cli, path, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("mmreplay.page.api.make_overview", fail)
    code, out, err = cli("view", path, "--save", tmp_path / "page")
    assert (code, err) == (1, "")
    note = "note: robot: overview is missing. The server failed: TypeError."
    assert note in out.splitlines()
    assert "no such operation" in caplog.text
    # What there is was saved all the same.
    answers = answers_of(tmp_path / "page")
    assert "/api/b/0/overview" not in answers
    assert any(key.startswith("/api/b/0/episode?") for key in answers)


def test_of_many_answers_of_a_screen_that_are_missing_one_reason_is_noted(
    path, tmp_path, monkeypatch
):
    monkeypatch.setattr("mmreplay.page.api.read_curve", fail)
    page = Page([path])
    report = save_page(page, tmp_path / "page")
    page.close()
    assert report.missing > report.episodes
    assert [note for note in report.notes if "missing" in note] == [
        "robot: curve is missing. The server failed: TypeError."
    ]


def test_a_check_that_fails_is_noted_and_the_page_is_whole(cli, path, tmp_path, monkeypatch):
    monkeypatch.setattr("mmreplay.page.overview.find_reset_rows_of", fail)
    code, out, err = cli("view", path, "--save", tmp_path / "page")
    assert (code, err) == (0, "")
    assert (
        "note: robot: Reset rows could not be computed. The check failed: TypeError."
    ) in out.splitlines()
    assert "/api/b/0/overview" in answers_of(tmp_path / "page")


@pytest.mark.parametrize("length", [31, 32, 33, 64, 256])
@pytest.mark.parametrize("final", [True, False])
def test_nothing_is_missing_where_the_newest_episode_has_no_row_after_its_end(
    tmp_path, rng, length, final
):
    """Blocks of rows that the page asks for would begin behind the newest row."""
    steps = squeezed(healthy_steps(rng, 2 * length, 1, length))
    observation = steps["observation"] if final else None
    with mr.ReplayBuffer.create(tmp_path / "robot", schema(), 1000) as buffer:
        buffer.extend(steps, final_observation=observation)
    page = Page([tmp_path / "robot"], sampler="UniformSampler")
    report = save_page(page, tmp_path / "page")
    page.close()
    assert (report.missing, report.notes, report.episodes) == (0, [], 2)
