"""docs/howto/add-a-call.md on a copy: the call compiles, computes what transformers does, and losses read it."""

from __future__ import annotations

import json

import pytest

from tests.howto.copies import PAGES, Copy, product_files
from tests.samples import thorough_between
from tests.tiny import make_all

PAGE = "add-a-call.md"
# the call on a layout of this world, against transformers
COMPARED = """
import sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from tests.backend_torch.shards import make_shard, plan_model
from tests.backend_torch.test_forward import ROWS, pack

tp, pp, cp = map(int, sys.argv[1:])
dist.init_process_group("gloo")
path = "models/sft"
net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
want = []
with torch.no_grad():
    for prompt, response in ROWS:
        states = net(torch.tensor([prompt + response]), output_hidden_states=True).hidden_states[-1][0]
        want.append(states[len(prompt) - 1 : -1].norm(dim=-1))
shard = make_shard(plan_model(path), dist.get_rank(), tp=tp, pp=pp, cp=cp)
found = shard.infer([pack(ROWS)], "hidden_norm", 1.0)
torch.testing.assert_close(found, torch.cat(want), rtol=1e-4, atol=1e-4)
assert found.std() > 0
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    made = Copy(tmp_path_factory.mktemp("call"), PAGE)
    make_all(made.root)
    (made.root / "compared.py").write_text(COMPARED)
    return made


def test_it_takes_two_files_of_the_product() -> None:
    assert product_files((PAGES / PAGE).read_text()) == ["backends/torch/model/outputs.py", "rldsl/plan/heads.py"]


@pytest.mark.thorough
def test_flows_call_it_and_losses_read_it(copy: Copy) -> None:
    """The first step trains the model that `ref` is a copy of, on the same batch."""
    copy.rlc("compile", "norms.rlf", "-o", "norms.plan")
    copy.rlc("verify", "norms.plan")
    copy.run("norms.plan", "--out", "out")
    found = json.loads((copy.root / "out/metrics.jsonl").read_text())
    assert found["actor/norm"] == pytest.approx(found["ref_norm"], rel=1e-5) and found["ref_norm"] < found["highest"]
    assert found["actor/grad_norm"] > 0


@pytest.mark.parametrize("tp, pp, cp", thorough_between([(2, 1, 1), (1, 2, 1), (1, 1, 2)]))
def test_it_equals_transformers(copy: Copy, tp: int, pp: int, cp: int) -> None:
    copy.together(2, "compared.py", str(tp), str(pp), str(cp))


@pytest.mark.parametrize("old, new, code", [
    ("ref.hidden_norm(gen)", "ref.hidden_norm(prompt)", "RL0213"),
    ("ref     = causal_lm", "ref     = value_model", "RL0206"),
    ("hidden_norm: token;", "hidden_norm: seq;", "RL0201"),
    ("ref.hidden_norm(gen)", "ref.hiden_norm(gen)", "RL0112")])
def test_mistakes_are_found(copy: Copy, old: str, new: str, code: str) -> None:
    text = (copy.root / "norms.rlf").read_text()
    assert old in text
    (copy.root / "wrong.rlf").write_text(text.replace(old, new))
    assert code in copy.rlc("check", "wrong.rlf", fails=True)


@pytest.mark.thorough
def test_the_reference_has_to_list_it(copy: Copy) -> None:
    page, listed = copy.root / "docs/language.md", "test_calls_are_those_of_the_heads"
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", "tests/docs/test_pages.py", "-k", listed)
    text = page.read_text()
    copy.python(*arguments)
    page.write_text("".join(line for line in text.splitlines(keepends=True) if "hidden_norm" not in line))
    assert "hidden_norm" in copy.python(*arguments, fails=True)
    page.write_text(text)
