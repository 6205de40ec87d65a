"""Families that read images, on every kind of placement: equal to transformers in log-probs, gradients and greedy
answers, bitwise as the directory after loading, and a picture of several samples is prefilled once."""

from __future__ import annotations

import pytest

from rldsl.models.families import describe
from tests.backend_torch.shards import layout_of as at
from tests.images.checks import check, expected
from tests.images.models import MAKERS, make
from tests.images.pictures import data_of, make_rows
from tests.samples import thorough_unless
from tests.world import run_world

LIMIT = 1e-5
LAYOUTS = [at(), at(tp=2), at(pp=2), at(dp=2), at(dp=2, zero=1), at(dp=2, zero=3), at(pp=2, vpp=2)]


@pytest.mark.thorough
@pytest.mark.parametrize("family", thorough_unless(lambda family: family in ("gemma3", "qwen2_vl"), MAKERS))
def test_every_degree_that_is_offered(tmp_path, family):
    make(tmp_path / "m", family)
    data = data_of(make_rows(tmp_path), tmp_path / "m")
    right, found = expected(data), describe(str(tmp_path / "m"), "causal_lm")
    assert not found.tp_problem and not found.pp_problem
    # layers that read images are with the vision tower
    layouts = [x for x in LAYOUTS if found.layers // (x.pp * x.vpp) > found.layers_with_images]
    for layout, what, error in sum(run_world(2, check, data, layouts, right), []):
        exact = what in ("load", "greedy", "shared")
        assert error == 0 if exact else error < LIMIT, f"{family}: {what} under {layout} differs by {error}"
