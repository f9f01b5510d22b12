"""How much memory there is, of the machine or of the group that has a limit."""

import pytest

from mmreplay.storage import memory_usage

FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes")
SECOND = ("memory.max", "memory.current")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Make groups: folder, names of its two files, limit and bytes taken of each."""
    monkeypatch.setattr(memory_usage, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory_usage, "MEMBER", tmp_path / "member")

    def make(member, *groups):
        (tmp_path / "member").write_text(member)
        for folder, names, *texts in groups:
            place = tmp_path / "cgroup" / folder
            place.mkdir(parents=True, exist_ok=True)
            for name, text in zip(names, texts, strict=True):
                (place / name).write_text(text + "\n")

    return make


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("max", "7", None), ("1000", "400", 600), ("400", "1000", 0), ("what", "1", None)],
)
@pytest.mark.parametrize("folder", ["", "a.slice", "a.slice/b.scope"])
def test_a_groups_limit_counts(groups, folder, limit, used, left):
    groups("0::/a.slice/b.scope\n", (folder, SECOND, limit, used))
    found = memory_usage.available_nbytes()
    if left is None:
        assert 1 << 20 < found <= memory_usage.whole_nbytes()
    else:
        assert found == left
        assert memory_usage.whole_nbytes() == int(limit)


@pytest.mark.parametrize("folder", ["memory", "memory/jobs", "memory/jobs/7"])
def test_a_limit_of_the_first_kind_of_groups_counts(groups, folder):
    member = "9:cpu,cpuacct:/\n8:hugetlb,memory:/jobs/7\n0::/\n"
    groups(member, (folder, FIRST, "9000", "1000"))
    assert memory_usage.available_nbytes() == 8000


def test_the_smallest_limit_above_a_process_counts(groups):
    groups(
        "0::/a/b\n",
        ("a", SECOND, "900", "100"),
        ("a/b", SECOND, "max", "5"),
        ("a/c", SECOND, "10", "10"),  # of other processes
    )
    assert memory_usage.available_nbytes() == 800


@pytest.mark.parametrize("member", ["", "what", "0::", "0::a:b", "0::/../..\n"])
def test_a_member_file_that_cannot_be_read_leaves_the_root(groups, member):
    groups(member, ("", SECOND, "900", "100"))
    assert memory_usage.available_nbytes() == 800
