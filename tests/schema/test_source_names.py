"""Names of columns in a source, and the fields that they become."""

import itertools
import re

import numpy as np
import pytest

from mmreplay.errors import SourceError
from mmreplay.schema.notes import Notes
from mmreplay.schema.source_names import name_fields, own_names_of

WHERE = "data.hdf5"


def test_columns_of_several_fields_keep_their_paths():
    columns = {"obs/x": "observation/x", "actions": "action", "other": "other"}
    notes = Notes()
    assert name_fields(columns, WHERE, notes) == columns
    assert name_fields(columns, WHERE, notes, ["action"]) == columns
    assert notes == Notes()


@pytest.mark.parametrize("fields", [None, ["reward"], ["a", "b"], "a"])
def test_two_columns_of_one_field_are_refused_by_name(fields):
    columns = {"a": "reward", "x": "x", "b": "reward"}
    match = (
        r"^data\.hdf5: columns 'a' and 'b' both become field 'reward'\. Pass fields= "
        r"\(--fields\) with one of these names, beside the other fields to load\.$"
    )
    with pytest.raises(SourceError, match=match):
        name_fields(columns, WHERE, Notes(), fields)


def test_any_number_of_columns_of_one_field_is_refused():
    columns = dict.fromkeys("abc", "reward")
    with pytest.raises(SourceError, match="columns 'a', 'b' and 'c' both become"):
        name_fields(columns, WHERE, Notes())


def test_the_column_that_is_selected_by_its_name_becomes_the_field():
    columns = {"next.reward": "reward", "reward": "reward", "x": "x"}
    for chosen, other in itertools.permutations(["next.reward", "reward"]):
        notes = Notes()
        found = name_fields(columns, WHERE, notes, ["x", chosen])
        assert found == {chosen: "reward", "x": "x"}
        assert notes.notes == [
            f"column {other!r} was left out: field 'reward' is column {chosen!r}"
        ]


def test_of_columns_of_one_field_that_is_not_selected_the_usual_one_stays():
    columns = {"observation/x": "observation/x", "b": "observation/x", "c": "c"}
    found = name_fields(columns, WHERE, Notes(), ["c"])
    assert found == {"b": "observation/x", "c": "c"}
    with pytest.raises(SourceError, match="columns 'observation/x' and 'b' both"):
        name_fields(columns, WHERE, Notes(), ["c", "observation"])


def test_a_column_of_the_name_of_an_episode_end_is_refused():
    columns = {"terminated": "terminated", "x": "x"}
    ends = {"terminated": "next.done"}
    match = (
        r"columns 'terminated' and 'next\.done' both become field 'terminated'\. Pass "
        r"fields= \(--fields\) with 'next\.done' in place of 'terminated', beside"
    )
    for fields in (None, ["terminated"], ["terminated", "next.done"]):
        with pytest.raises(SourceError, match=match):
            name_fields(columns, WHERE, Notes(), fields, ends)
    notes = Notes()
    assert name_fields(columns, WHERE, notes, ["next.done"], ends) == {"x": "x"}
    assert notes.notes == [
        "column 'terminated' was left out: field 'terminated' is column 'next.done'"
    ]


@pytest.mark.parametrize(
    ("columns", "renamed"),
    [
        (["action", "action/x"], ["action", "action_x"]),
        (["action/x", "action"], ["action_x", "action"]),
        (["a", "a/b", "a/b/c"], ["a", "a_b", "a_b_c"]),
        (["a/b", "a/b/c/d", "a/c"], ["a/b", "a/b_c/d", "a/c"]),
        (["a", "ab/c", "a_b"], ["a", "ab/c", "a_b"]),
    ],
)
def test_a_column_inside_another_is_joined_to_it(columns, renamed):
    notes = Notes()
    found = name_fields({name: name for name in columns}, WHERE, notes)
    assert list(found.values()) == renamed
    changed = [name for name, path in found.items() if name != path]
    assert [note.split("'")[1] for note in notes.notes] == changed


@pytest.mark.parametrize(
    ("columns", "renamed"),
    [
        (["action", "action/x", "action_x"], ["action", "action_x_2", "action_x"]),
        (["action_x", "action/x", "action"], ["action_x", "action_x_2", "action"]),
        (["a", "a/b", "a_b", "a_b_2", "a_b_3/c"], ["a", "a_b_4", "a_b", "a_b_2", "a_b_3/c"]),
        # A branch moves as a whole.
        (["a", "a/b/c", "a/b/d", "a_b/c"], ["a", "a_b_2/c", "a_b_2/d", "a_b/c"]),
        (["a", "a_b", "a/b/c/d", "a/b/c"], ["a", "a_b", "a_b_2/c_d", "a_b_2/c"]),
        # Two names of one branch that moves may be joined to one.
        (["a", "a/b/c", "a/b/c/d", "a/b/c_d"], ["a", "a_b/c", "a_b/c_d_2", "a_b/c_d"]),
        (["a", "a/b/c", "a/b/c/d", "a/b/c_d/e"], ["a", "a_b/c", "a_b/c_d_2", "a_b/c_d/e"]),
        # Joined by chance, a name would be that of a role or of an episode's number.
        (["next", "next/observation"], ["next", "next_observation_2"]),
        (["episode", "episode/index"], ["episode", "episode_index_2"]),
    ],
)
def test_a_name_of_another_column_is_not_used_again(columns, renamed):
    found = name_fields({name: name for name in columns}, WHERE, Notes())
    assert list(found.values()) == renamed


@pytest.mark.parametrize("words", [["a", "b", "c", "a_b", "a_b_2"], ["b", "b_b"]])
@pytest.mark.parametrize("seed", range(20))
def test_no_column_is_lost_and_no_path_is_inside_another(seed, words):
    """Against the rule itself, on random trees of names."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        paths = ["/".join(rng.choice(words, rng.integers(1, 6))) for _ in range(rng.integers(1, 8))]
        columns = {f"column {n}": path for n, path in enumerate(paths)}
        if len(set(paths)) < len(paths):
            with pytest.raises(SourceError, match="both become field"):
                name_fields(columns, WHERE, Notes())
            continue
        found = name_fields(columns, WHERE, Notes())
        assert found.keys() == columns.keys()
        assert len(set(found.values())) == len(paths)
        for own, path in found.items():
            assert not any(path.startswith(f"{p}/") for p in found.values())
            joined = columns[own].replace("/", "_")
            assert re.sub(r"_\d+(?=/|_|$)", "", path).replace("/", "_") == re.sub(
                r"_\d+(?=_|$)", "", joined
            )
            inside = any(columns[own].startswith(f"{p}/") for p in paths)
            assert inside == (path != columns[own])


def test_names_of_ends_and_inner_names_lead_to_paths():
    found = own_names_of(
        {"dones": "done", "obs/0": "observation/0"},
        {"terminated": "dones", "truncated": "dones"},
        {"obs/_index_0": "obs/0", "other": "gone"},
    )
    assert found == {
        "dones": ("done", "terminated", "truncated"),
        "obs/0": ("observation/0",),
        "obs/_index_0": ("observation/0",),
    }
