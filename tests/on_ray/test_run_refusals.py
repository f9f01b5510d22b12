"""Bad input of a run: each a named error that says the way out."""

import os
import subprocess
import sys

import pytest

import mmreplay as mr

WITHOUT_RAY = "import sys; sys.modules['ray'] = None; "
OLD_RAY = (
    "import sys, types; old = types.ModuleType('ray'); old.__version__ = '{}'; "
    "sys.modules['ray'] = old; "
)


def python(code, *before, **more):
    """Run a program in a fresh interpreter, which must say what is wrong."""
    return subprocess.run(
        [*before, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **more},
        check=False,
    )


def test_without_ray_the_import_says_what_to_install():
    done = python(WITHOUT_RAY + "import mmreplay as mr; mr.ray.status('run')")
    assert "needs Ray, which is not installed" in done.stderr
    assert "pip install 'mmreplay[ray]'" in done.stderr


@pytest.mark.parametrize("command", ["status", "stop"])
@pytest.mark.sliced(1)
def test_without_ray_the_commands_say_what_to_install(command):
    done = python(WITHOUT_RAY + f"from mmreplay.cli import main; main(['ray', '{command}', 'r'])")
    assert done.returncode == 1
    assert done.stderr == (
        "mmreplay: mmreplay.ray needs Ray, which is not installed. Run: pip install "
        "'mmreplay[ray]'\n"
    )


@pytest.mark.parametrize("version", ["2.9.3", "2.55.0", "2.61.0", "3.0.0", "2"])
@pytest.mark.sliced(1)
def test_another_version_of_ray_is_refused(version):
    done = python(
        OLD_RAY.format(version) + "from mmreplay.cli import main; main(['ray', 'status', 'r'])"
    )
    assert done.returncode == 1
    assert f"mmreplay.ray needs Ray 2.55.1 to 2.60, got {version}." in done.stderr


@pytest.mark.parametrize("version", ["2.55.1", "2.56.0", "2.60.0", "2.60.7", "2.60.0rc1"])
def test_versions_of_ray_within_the_range_are_imported(version):
    done = python(OLD_RAY.format(version) + "import mmreplay.ray")
    assert (done.returncode, done.stderr) == (0, "")


def test_without_ray_the_attribute_is_missing_and_the_import_says_why():
    done = python(
        WITHOUT_RAY + "import mmreplay as mr; print(hasattr(mr, 'ray')); "
        "print(getattr(mr, 'ray', None)); from mmreplay import ray"
    )
    assert done.stdout == "False\nNone\n"
    assert "ModuleNotFoundError: mmreplay.ray needs Ray, which is not" in done.stderr


def test_without_ray_mmreplay_is_imported_as_ever():
    assert python(WITHOUT_RAY + "import mmreplay").returncode == 0


def test_a_process_without_a_cluster_is_asked_to_connect():
    pytest.importorskip("ray")
    done = python(
        "import mmreplay as mr\n"
        "for call in (mr.ray.status, mr.ray.stop):\n"
        "    try: call('run')\n"
        "    except mr.SchemaError as error: print(error)\n"
        "schema = mr.Schema({'x': mr.Field((), 'int8')})\n"
        "try: mr.ray.writer('run', schema, 10, root='/nowhere')\n"
        "except mr.SchemaError as error: print(error)\n"
    )
    message = "this process is not connected to a Ray cluster. Call ray.init() first, "
    assert [line[: len(message)] for line in done.stdout.splitlines()] == [message] * 3


def test_the_commands_refuse_a_machine_without_a_cluster(tmp_path):
    pytest.importorskip("ray")
    done = python(
        "from mmreplay.cli import main; main(['ray', 'status', 'r'])",
        # Ray looks for clusters among the processes of the machine.
        *("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"),
        RAY_TMPDIR=str(tmp_path),
    )
    assert done.returncode == 3
    assert "mmreplay: there is no Ray cluster at 'auto'" in done.stderr


def test_an_unknown_run_is_refused_with_those_that_exist(run_name, tmp_path):
    from tests.on_ray.rows import SCHEMA

    mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path).close()
    for call in (mr.ray.status, mr.ray.stop):
        with pytest.raises(mr.SchemaError, match=f"no run 'other'. There are .*'{run_name}'"):
            call("other")


@pytest.mark.parametrize("name", ["", "a/b", "-a", "x" * 64, 7, ".", "a b", "é"])
def test_names_are_names_of_folders_and_actors(cluster, tmp_path, name):
    from tests.on_ray.rows import SCHEMA

    with pytest.raises(mr.SchemaError, match="run must be a name of letters"):
        mr.ray.writer(name, SCHEMA, 100, root=tmp_path)
    for argument in ("name", "key"):
        with pytest.raises(mr.SchemaError, match=f"{argument} must be a name"):
            mr.ray.writer("run", SCHEMA, 100, root=tmp_path, **{argument: name})
    with pytest.raises(mr.SchemaError, match="run must be a name of letters"):
        mr.ray.status(name)


def test_another_key_than_the_label_of_the_node_is_refused(cluster, tmp_path):
    from tests.on_ray.rows import SCHEMA

    with pytest.raises(mr.SchemaError, match="key must be 'head', the label"):
        mr.ray.writer("run", SCHEMA, 100, root=tmp_path, key="other")


REFUSED = [
    ({"capacity": 0}, mr.SchemaError, "capacity must be an integer in"),
    ({"num_envs": 2}, mr.SchemaError, "autoreset must say what the 2 environments"),
    ({"num_envs": 0}, mr.SchemaError, "num_envs must be an integer in"),
    ({"commit_every": -1}, mr.SchemaError, "commit_every must be"),
    ({"sampler": 3}, mr.SchemaError, "sampler must be a sampler"),
    ({"transforms": [mr.NStep(3, gamma=0.9)]}, mr.SchemaError, "reward"),
    ({"engine": "memory"}, mr.SchemaError, "engine must be one of .*on disk"),
    ({"level": 5}, mr.SchemaError, "level=5 needs engine='zarr'"),
    ({"user_metadata": 5}, mr.SchemaError, "user_metadata must be a dict"),
    ({"nonsense": 5}, TypeError, "unexpected keyword argument 'nonsense'"),
]


@pytest.mark.parametrize(("arguments", "error", "match"), REFUSED)
def test_a_writer_that_is_refused_begins_no_run(run_name, tmp_path, arguments, error, match):
    from mmreplay.ray import cluster
    from tests.on_ray.rows import SCHEMA

    given = {"capacity": 100, "root": tmp_path / "root", **arguments}
    with pytest.raises(error, match=match):
        mr.ray.writer(run_name, SCHEMA, **given)
    with pytest.raises(error, match=match):
        mr.ray.thin_ring(run_name, SCHEMA, **{"num_envs": 1, **given})
    with pytest.raises(mr.SchemaError, match="idle_s must be"):
        mr.ray.thin_ring(run_name, SCHEMA, 100, root=tmp_path, idle_s=0)
    (tmp_path / "file").touch()
    for make in (mr.ray.writer, mr.ray.thin_ring):
        with pytest.raises(mr.SchemaError, match=r"root must be a folder, but .*file"):
            make(run_name, SCHEMA, 100, root=tmp_path / "file" / "below")
    assert not cluster.run_exists(run_name)
    assert not (tmp_path / "root").exists()


def test_a_writer_that_does_not_fit_its_ring_begins_no_run(run_name, tmp_path):
    from mmreplay.ray import cluster
    from tests.on_ray.rows import SCHEMA

    more = {"root": tmp_path, "num_envs": 2}
    mr.ray.writer(run_name, SCHEMA, 100, autoreset="disabled", **more).close()
    mr.ray.stop(run_name)
    for name in (None, "ring-000"):
        with pytest.raises(mr.SchemaError, match=r"capacity must be 100, as of .*99"):
            mr.ray.writer(run_name, SCHEMA, 99, name=name, **more)
    assert not cluster.run_exists(run_name)
    # Whatever it does at the end of an episode is known of the ring.
    mr.ray.writer(run_name, SCHEMA, 100, **more).close()


def test_a_run_has_one_schema_and_nothing_is_made_of_another(run_name, tmp_path):
    from tests.on_ray.rows import SCHEMA

    mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path).close()
    other = mr.Schema({**SCHEMA.fields, "number": mr.Field((), "int32")})
    with pytest.raises(
        mr.SchemaError, match=rf"the run '{run_name}' has another schema: field 'number' is .*int32"
    ):
        mr.ray.writer(run_name, other, 100, root=tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(mr.SchemaError, match="schema must be a Schema, got dict"):
        mr.ray.writer(run_name, {"x": 1}, 100, root=tmp_path)


def test_a_node_has_one_root_in_a_run(run_name, tmp_path):
    from tests.on_ray.rows import SCHEMA

    mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path / "a").close()
    with pytest.raises(mr.SchemaError, match=rf"root must be '{tmp_path}/a' on the node 'head'"):
        mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path / "b")
    with pytest.raises(mr.SchemaError, match=rf"root must be '{tmp_path}/a' on"):
        mr.ray.thin_ring(run_name, SCHEMA, 100, root=tmp_path / "b", num_envs=1)
    # What was made for them is gone.
    assert not any((tmp_path / "b" / run_name).iterdir())


def test_a_ring_of_a_refused_writer_stays_where_another_one_opened_it(
    run_name, tmp_path, monkeypatch
):
    from mmreplay.ray import ring_writer, thin
    from tests.on_ray.rows import SCHEMA, block

    mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path / "a").close()
    remove = ring_writer.remove_refused
    rows, paths = block(0, 0, 10), []

    def late(path, uuid, locked_s=0.0):
        paths.append(path)
        with mr.ReplayBuffer.open(path, "r+") as other:
            remove(path, uuid)
            other.extend(rows)
        # It wrote and is gone: its rows stay, too.
        remove(path, uuid)

    root = tmp_path / "b"
    for module, make in ((ring_writer, mr.ray.writer), (thin, mr.ray.thin_ring)):
        monkeypatch.setattr(module, "remove_refused", late)
        with pytest.raises(mr.SchemaError, match="root must be"):
            make(run_name, SCHEMA, 100, root=root, num_envs=1)
        with mr.ReplayBuffer.open(paths[-1]) as ring:
            assert len(ring) == 10
    assert [path.name for path in paths] == ["ring-000", "thin"]


def test_a_ring_is_opened_again_only_as_it_was_made(run_name, tmp_path):
    from tests.on_ray.rows import SCHEMA

    mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path, name="w").close()
    with pytest.raises(mr.SchemaError, match=r"capacity must be 100, as of .*got 99"):
        mr.ray.writer(run_name, SCHEMA, 99, root=tmp_path, name="w")
    with pytest.raises(mr.SchemaError, match=r"num_envs must be 1, as of .*got 2"):
        mr.ray.writer(run_name, SCHEMA, 100, num_envs=2, root=tmp_path, name="w")
    with pytest.raises(mr.SchemaError, match="on_resume must be"):
        mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path, on_resume="go")


def test_a_ring_has_one_writer(run_name, tmp_path):
    from tests.on_ray.rows import SCHEMA

    with (
        mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path, name="w"),
        pytest.raises(mr.LockedError, match="already open for writing"),
    ):
        mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path, name="w")


def test_a_folder_that_another_node_serves_is_refused(run_name, tmp_path, monkeypatch):
    from mmreplay.ray import ring_writer
    from tests.on_ray.actors import ask, writing
    from tests.on_ray.rows import SCHEMA

    monkeypatch.setattr(ring_writer, "LOCKED_S", 0.0)
    # An actor without a handle ends, and its ring would be free.
    writer = writing("n0", run_name, str(tmp_path))
    assert ask(writer, "add", 10) == 10
    with pytest.raises(
        mr.LockedError, match=r"is served by pid .* Give each node a root of its own"
    ):
        mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path)
    # Its ring is closed, and its node says why it serves nothing.
    (status,) = (each for each in mr.ray.status(run_name).shards if each.key == "head")
    assert "is served by pid" in status.error
    mr.ReplayBuffer.open(tmp_path / run_name / "ring-001", "r+").close()


def test_a_network_file_system_is_refused(run_name, tmp_path, monkeypatch):
    from mmreplay.disk import lock
    from tests.on_ray.rows import SCHEMA

    monkeypatch.setattr(lock, "file_system", lambda _: "nfs4")
    with pytest.raises(mr.FailedError, match=r"on a network file system \(nfs4\)"):
        mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path)


def test_calls_of_a_stopped_run_say_so(run_name, tmp_path):
    from tests.on_ray.actors import registry, shard
    from tests.on_ray.rows import SCHEMA

    writer = mr.ray.writer(run_name, SCHEMA, 100, root=tmp_path)
    remotes = shard(run_name, "head"), registry(run_name)
    for remote, method in zip(remotes, ("info", "members"), strict=True):
        remote.call(method)
    mr.ray.stop(run_name)
    for remote, method in zip(remotes, ("info", "members"), strict=True):
        with pytest.raises(mr.FailedError, match=f"the run '{run_name}' was stopped"):
            remote.call(method)
    # The ring is an ordinary buffer, which its writer may go on with.
    writer.add(number=0, writer=0, crc=0, terminated=False, truncated=False)
    writer.close()


def test_another_version_of_mmreplay_is_refused():
    pytest.importorskip("ray")
    from mmreplay.ray.registry import Registry
    from tests.on_ray.rows import SCHEMA

    with pytest.raises(mr.FailedError, match=r"has mmreplay 9.9.9, but the run 'run'"):
        Registry("run").check("9.9.9", SCHEMA.to_json(), dict(SCHEMA.roles))
