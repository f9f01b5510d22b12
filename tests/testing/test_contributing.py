"""The examples of CONTRIBUTING and of the page on extending do what they say."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.schema import dtypes, field
from mmreplay.testing import FORMAT_RULES, check_format, check_sampler, with_one_nan
from mmreplay.testing.samplers import make_buffer
from tests.testing.conftest import JSONL, TEXT

ROOT = Path(__file__).parents[2]
QUICK = [rule for rule in FORMAT_RULES if rule != "memory_is_bounded"]


def test_the_sampler_keeps_the_contract_and_draws_ends_twice_as_often(imported, tmp_path):
    kind = imported("terminal").TerminalSampler
    check_sampler(kind, tmp_path)
    with make_buffer(tmp_path / "b", ["....t..." * 3], 40) as buffer:
        counts = np.bincount(kind(0).draw(buffer.view, 26_000).positions)
    # 20 steps of a share of 1 and 3 of 2; five deviations of 1,000 and 2,000 draws.
    np.testing.assert_allclose(counts[[4, 12, 20]], 2000, atol=224)
    np.testing.assert_allclose(np.delete(counts, [4, 12, 20]), 1000, atol=158)


@pytest.mark.parametrize("rule", QUICK)
def test_the_format_keeps_the_contract(imported, tmp_path, rule):
    imported("jsonl")
    check_format(JSONL, tmp_path, rules=[rule], stored_as=with_one_nan)


def test_the_dtype_is_held_by_engines_and_files(tmp_path, monkeypatch):
    (line,) = re.findall(r'^"complex64": "(.*)",$', TEXT, re.M)
    monkeypatch.setitem(dtypes._STORED, "complex64", line)
    monkeypatch.setattr(field, "DTYPES", tuple(dtypes._STORED))
    values = (np.arange(6) * (1 + 2j)).astype("complex64").reshape(3, 2)
    schema = mr.Schema({"signal": mr.Field((2,), "complex64")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 8) as buffer:
        buffer.extend(signal=values)
    mr.export(tmp_path / "b", tmp_path / "b.npz")
    mr.load(tmp_path / "b.npz", tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        np.testing.assert_array_equal(buffer.gather_all()["signal"], values)


def test_the_transform_clips_before_rewards_are_summed(imported, tmp_path):
    clip = imported("clip").Clip(0.0, 0.25)
    make_buffer(tmp_path / "b", ["........"], 40).close()
    transforms = [clip, mr.NStep(2, gamma=1.0)]
    with mr.ReplayBuffer.open(tmp_path / "b", transforms=transforms) as buffer:
        assert buffer.sample(9)["reward"].tolist() == [0.5] * 9


@pytest.mark.slow
def test_the_sampler_of_the_page_on_extending_keeps_the_contract(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "example_extending.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("example_extending").test_the_sampler(tmp_path)
