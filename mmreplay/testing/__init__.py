"""Checks that samplers, transforms, formats and stores of others keep the contracts.

Each function makes real buffers in a folder and raises `ContractError`, an
`AssertionError`, with the rule that was broken, the values and what to do. Call them
from your own tests::

    def test_my_sampler(tmp_path):
        mmreplay.testing.check_sampler(MySampler, tmp_path)

or rule by rule, as in ``@pytest.mark.parametrize("rule", SAMPLER_RULES)`` with
``check_sampler(MySampler, tmp_path, rules=[rule])``. Neither pytest nor hypothesis is
needed. mmreplay's own samplers, transforms, formats and engines are held to the same
rules.
"""

from mmreplay.testing.formats import FORMAT_RULES as FORMAT_RULES
from mmreplay.testing.formats import check_format as check_format
from mmreplay.testing.formats import with_one_nan as with_one_nan
from mmreplay.testing.rules import ContractError as ContractError
from mmreplay.testing.samplers import SAMPLER_RULES as SAMPLER_RULES
from mmreplay.testing.samplers import check_sampler as check_sampler
from mmreplay.testing.stores import STORE_RULES as STORE_RULES
from mmreplay.testing.stores import check_store as check_store
from mmreplay.testing.transforms import TRANSFORM_RULES as TRANSFORM_RULES
from mmreplay.testing.transforms import check_transform as check_transform
