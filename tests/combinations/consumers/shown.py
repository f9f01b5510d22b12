"""What people look at: the command line's JSON, and the page's answers."""

import contextlib
import io
import json

import numpy as np

from mmreplay.cli.run import run
from mmreplay.page.api import Page
from mmreplay.page.wire import unpack
from tests.combinations.build import IN_HEAP, VARYING
from tests.combinations.compare import assert_refusal
from tests.combinations.expected import as_numbers


def command(*words):
    """Exit code of a command, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    return code, out.getvalue(), err.getvalue()


def path_of(built):
    """The folder of a case; that of a copy where the case is in memory."""
    return str(built.open().path)


def info(built, rng):
    """``mmreplay info --json`` counts rows, steps, starts and episodes."""
    twin = built.twin
    code, out, err = command("info", path_of(built), "--json")
    assert (code, err) == (0, ""), err
    facts = json.loads(out)
    steps, alive, episodes = twin.steps(), twin.alive(), twin.episodes()
    expected = {
        "rows": len(alive),
        "steps": len(steps),
        "final_rows": len(alive) - len(steps),
        "legal_starts": len(twin.legal()),
        "legal_starts_without_next": len(twin.legal(without_next=True)),
        "heads": [len(env.rows) for env in twin.envs],
        "tails": [env.first for env in twin.envs],
        "num_envs": len(twin.envs),
        "capacity": twin.capacity,
    }
    assert {name: facts[name] for name in expected} == expected
    assert facts["episodes"] == {
        "count": len(episodes),
        "running": sum(map(twin.running, episodes)),
        "headless": sum(map(twin.headless, episodes)),
    }
    assert facts["autoreset"] == built.case.autoreset
    if built.case.history == "compacted" and set(IN_HEAP) & set(built.fields.values()):
        # Shards of values that vary are of one environment each.
        assert facts["layout"] == "env_major"
    else:
        assert facts["layout"] == built.case.layout


def head(built, rng):
    """``mmreplay head --json`` shows the values of an environment's rows."""
    twin, path = built.twin, path_of(built)
    env_id = int(rng.integers(len(twin.envs)))
    newest = ["--newest"] if rng.integers(2) else []
    words = ["head", path, "--env", str(env_id), "--rows", "4", "--json", *newest]
    code, out, err = command(*words)
    indices = [index for index in twin.alive() if index[0] == env_id]
    if not indices:
        assert code != 0
        assert "holds no rows" in err
        return
    assert (code, err) == (0, ""), err
    indices = indices[-4:] if newest else indices[:4]
    rows = json.loads(out)["rows"]
    assert [row["position"] for row in rows] == [position for _, position in indices]
    for row, index in zip(rows, indices, strict=True):
        start = twin.begins(index) and not twin.row(index).final
        mark = "final row" if twin.row(index).final else "start" if start else ""
        assert row["mark"] == mark, index
        for name, value in twin.stored(index).items():
            assert_shown(name, row[name], value, built.fields.get(name))


def assert_shown(name, actual, value, kind):
    """A value as JSON: itself, or its range and mean where it is long."""
    if kind == "text":
        assert actual == value, name
        return
    if kind == "bytes":
        assert actual == {"bytes": len(value)}, name
        return
    numbers = np.asarray(value)
    if kind == "bfloat16":
        numbers = as_numbers(value)
    if numbers.size <= 4:
        assert actual == numbers.tolist(), name
        return
    assert (actual["min"], actual["max"]) == (numbers.min(), numbers.max()), name
    assert abs(actual["mean"] - numbers.astype(np.float64).mean()) < 1e-9, name


def page(built, rng):
    """The page's overview, episodes, one episode and draws."""
    twin, path = built.twin, built.open().path
    shown = Page([path])
    try:
        check_overview(twin, ask(shown, "overview"))
        check_episodes(built, shown, rng)
        check_draws(twin, shown, path, rng)
    finally:
        shown.close()


def ask(shown, name, query="", status=200):
    """The JSON of an answer."""
    answer = shown.answer(f"/api/b/0/{name}", query)
    assert answer.status == status, (name, answer.status, answer.body[:300])
    return json.loads(answer.body)


def kind_of(twin, steps):
    """How an episode ended, in the page's words, and whether it may go on."""
    last = twin.row(steps[-1])
    if twin.running(steps):
        return "running"
    if last.terminated and last.truncated:
        return "both"
    if last.terminated:
        return "terminated"
    return "truncated" if last.truncated or not twin.broken(steps) else "broken off"


def words_of(kind):
    """What the page may call it: without a writer no episode is running."""
    return ("running", "unfinished") if kind == "running" else (kind,)


def check_overview(twin, actual):
    steps, episodes = twin.steps(), twin.episodes()
    assert actual["steps"] == len(steps)
    assert actual["rows"] == len(twin.alive())
    assert actual["starts"] == len(twin.legal())
    assert actual["episodes"] == {
        "count": len(episodes),
        "missing_start": sum(map(twin.headless, episodes)),
    }
    ends = dict.fromkeys(("terminated", "truncated", "both", "broken off", "running"), 0)
    for each in episodes:
        ends[kind_of(twin, each)] += 1
    assert actual["ends"] == ends
    failed = [check for check in actual["checks"] if "could not" in json.dumps(check)]
    assert failed == []


def check_episodes(built, shown, rng):
    twin = built.twin
    episodes = twin.episodes()
    table = ask(shown, "episodes", "sort=begin&desc=0&limit=500")
    while table["done"] < 1:
        table = ask(shown, "episodes", "sort=begin&desc=0&limit=500")
    assert table["total"] == table["all"] == len(episodes)
    rows = {(row[0], row[1]): row for row in table["rows"]}
    for steps in episodes:
        row = rows[steps[0]]
        kind = kind_of(twin, steps)
        assert row[2] == len(steps)
        assert row[4] in words_of(kind)
        assert row[5] == twin.headless(steps)
        # Of an episode without its beginning it is what is left of the return.
        assert row[3] is not None
        assert abs(row[3] - twin.total(steps)) < 1e-4
    if not episodes:
        return
    steps = episodes[int(rng.integers(len(episodes)))]
    env_id, position = steps[int(rng.integers(len(steps)))]
    actual = ask(shown, "episode", f"env={env_id}&at={position}")
    assert (actual["begin"], actual["end"]) == (steps[0][1], steps[-1][1] + 1)
    assert actual["missing_start"] == twin.headless(steps)
    assert actual["kind"] in words_of(kind_of(twin, steps))
    assert abs(actual["return"] - twin.total(steps)) < 1e-6
    assert actual["rewards"]["values"] == [
        float(twin.row(index).values["reward"]) for index in steps
    ]
    check_values(built, shown, steps)
    for path, kind in built.fields.items():
        check_curve(built, shown, path, kind, steps)
    gone = twin.envs[env_id].first - 1
    if gone >= 0:
        ask(shown, "episode", f"env={env_id}&at={gone}", status=410)


def check_values(built, shown, steps):
    """Small fields of neighbouring rows: their first numbers, or a text of each."""
    (env_id, first), count = steps[0], len(steps)
    actual = ask(shown, "values", f"env={env_id}&first={first}&count={count}")
    assert actual["first"] == first
    stored = [built.twin.stored(index) for index in steps]
    for path in ("reward", "uid", "group", "terminated", *built.fields):
        kind = built.fields.get(path)
        if kind == "large":
            assert path not in actual["values"]
            continue
        for shown_value, values in zip(actual["values"][path], stored, strict=True):
            value = values[path]
            if kind in VARYING:
                assert shown_value.startswith(beginning_of(kind, value)), (path, value)
            else:
                wanted = as_numbers(value).ravel()[:8].tolist()
                assert shown_value == wanted, (path, shown_value, wanted)


def beginning_of(kind, value):
    """What the page shows of a value of any length, as far as it is asked about."""
    if kind == "text":
        return value
    if kind == "bytes":
        return value.hex(" ")
    numbers = ", ".join(str(each) for each in value.tolist()[:2])
    return f"{len(value)} item{'' if len(value) == 1 else 's'}: [{numbers}"


def check_curve(built, shown, path, kind, steps):
    """Lowest, highest and mean of each step of an episode, of the first component."""
    env_id, first = steps[0]
    query = f"env={env_id}&first={first}&stop={steps[-1][1] + 1}&field={path}"
    answer = shown.answer("/api/b/0/curve", query)
    assert answer.status == 200, (path, answer.body[:300])
    facts, body = unpack(answer.body)
    assert (facts["first"], facts["stop"]) == (first, steps[-1][1] + 1)
    curves = np.frombuffer(body, "<f4").reshape(3, facts["components"], -1)
    values = [built.twin.stored(index)[path] for index in steps]
    if kind in VARYING:
        expected = [len(v.encode() if isinstance(v, str) else v) for v in values]
    else:
        expected = [as_numbers(value).ravel()[0] for value in values]
    for curve in curves:
        assert curve[0].tolist() == np.float32(expected).tolist(), path


TEXTS = (
    "UniformSampler()",
    "PrioritizedSampler(alpha=0.6)",
    "ShuffledSampler()",
    "StratifiedSampler()",
    "SequenceSampler(2, boundary='pad')",
    "EpisodeSampler()",
)


def check_draws(twin, shown, path, rng):
    text = TEXTS[int(rng.integers(len(TEXTS)))]
    if text.startswith("Sequence"):
        allowed = set(twin.windows(2, "pad"))
    elif text.startswith("Episode"):
        allowed = {indices[0] for indices, _ in twin.whole_episodes()}
    else:
        allowed = set(twin.legal())
    query = f"sampler={text.replace(' ', '%20')}&seed=3"
    if not allowed:
        assert_refusal(ask(shown, "draws", query, status=409)["error"])
        return
    actual = ask(shown, "draws", query)
    indices = list(zip(actual["env_ids"], actual["positions"], strict=True))
    assert set(indices) <= allowed, set(indices) - allowed
    assert actual["legal_starts"] == len(twin.legal())
    if text.startswith("Prioritized") and (path / "samplers").exists():
        # Another consumer gave steps priorities.
        return
    # An epoch has each once; of 256 draws the chance to miss one is below 1 %.
    if text.startswith("Shuffled"):
        assert len(indices) == len(allowed)
    assert len(set(indices)) >= 0.8 * len(allowed)
    if not text.startswith("Stratified"):
        expected = 1 / len(allowed)
        np.testing.assert_allclose(actual["probabilities"], expected, rtol=1e-6)
    assert set(actual["weights"]) == {1.0}
    ends = [len(env.rows) for env in twin.envs]
    assert actual["ages"] == [ends[e] - 1 - p for e, p in indices]


CONSUMERS = {"info": info, "head": head, "page": page}
