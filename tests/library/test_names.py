"""What people look for by its name: the page of algorithms has the name, and a call of what the library calls it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/algorithms.md").read_text()
# name, as papers and other systems write it -> file of the library, and what it declares
NAMES = {
    "hinge": ("pair_losses", "hinge"), "robust": ("pair_losses", "robust"), "exo_pair": ("pair_losses", "exo"),
    "discopop": ("pair_losses", "discopop"), "nca_pair": ("side_losses", "nca"), "bco_pair": ("side_losses", "bco_pair"),
    "sppo_hard": ("side_losses", "sppo_hard"), "apo_zero": ("side_losses", "apo_zero"),
    "apo_down": ("side_losses", "apo_down"), "BCO": ("bco", "bco"), "f-DPO": ("f_dpo", "f_dpo"),
    "LD-DPO": ("ld_dpo", "ld_dpo"), "AlphaPO": ("alphapo", "alphapo"), "RLOO": ("rloo", "rloo_clip"),
    "leave one out": ("rloo", "leave_one_out"), "LUSPO": ("off_policy", "luspo"), "VESPO": ("off_policy", "vespo"),
    "OPSM": ("off_policy", "opsm"), "dppo_tv": ("dppo", "dppo_tv"), "dppo_kl": ("dppo", "dppo_kl"), "DRO": ("dro", "dro"),
    "pass@k": ("pass_k", "pass_at_k"), "GSPO": ("gspo", "gspo_token"), "TIS": ("correction", "truncated_seq"),
    "IcePop": ("correction", "banded"), "AOT": ("aot", "aot"), "WPO": ("wpo", "wpo"),
    "Optimal token baseline": ("otb", "token_baseline"), "GKD": ("gkd", "gkd"), "MiniLLM": ("gkd", "minillm"),
    "SDFT": ("sdft", "sdft"), "TPO": ("tpo", "tpo"), "High-entropy tokens": ("entropy_mask", "grpo_entropy"),
    "VAPO": ("vapo", "vapo"), "Length-adaptive GAE": ("gae", "vapo_gae"), "PF-PPO": ("filtration", "best_random"),
    "DAPO": ("dapo", "dapo"), "CISPO": ("cispo", "cispo"), "SAPO": ("sapo", "sapo"), "GMPO": ("gmpo", "gmpo"),
    "GPG": ("gpg", "gpg"), "OPO": ("opo", "optimal_baseline"), "ReMax": ("remax", "over_greedy"),
    "Clip-Cov": ("covariance", "clip_cov"), "KL-Cov": ("covariance", "kl_cov"), "IPO": ("ipo", "ipo"),
    "KTO": ("kto", "kto"), "ORPO": ("orpo", "orpo"), "SimPO": ("simpo", "simpo"), "SPPO": ("sppo", "sppo")}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_name_and_its_call(name: str) -> None:
    file, function = NAMES[name]
    assert re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", PAGE), name
    assert re.search(rf"^(fn|loss) {function}\(", (ROOT / f"stdlib/{file}.rlf").read_text(), re.M), function
    assert f"`{file}.rlf`" in PAGE and f"{function}(" in PAGE, function


def test_every_file_of_the_library_is_named() -> None:
    """By the table of the page, or by another file that uses it."""
    files = {file.stem: file.read_text() for file in (ROOT / "stdlib").glob("*.rlf")}
    used = {name for text in files.values() for name in re.findall(r"^use std\.(\w+)", text, re.M)}
    assert not [name for name in files if f"`{name}.rlf`" not in PAGE and name not in used]
