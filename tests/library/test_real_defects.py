"""The sixteen numerical defects found in ReaL (research/real.md 4.3), each shown to be absent here. One small program
runs three steps on two ranks, with prompts of different lengths, cut-off and finished sequences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rldsl.backends.torch.generate.sampling import threshold
from rldsl.backends.torch.train.optimizer import learning_rate

from rldsl.plan.codec import decode
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.transfer_slices import rank_slices
from tests.backend_torch.shards import layout_of, pack, plan_model, shard_of
from tests.backend_torch.test_forward import ROWS
from tests.checkpoint.runs import lines
from tests.checkpoint.runs import run as run_plan
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.library.harness import Batch, run_fn, run_loss
from tests.moe.shards import make
from tests.plan_algebra.models import layout, mesh, model
from tests.tiny import make_model, make_sums, write_jsonl

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    root = tmp_path_factory.mktemp("defects")
    sets = {"base": str(make_model(root / "base")), "rows": str(write_jsonl(root / "p.jsonl", make_sums(64)))}
    return run_program(HERE / "defects.rlf", sets, root / "run", "place *.* on mesh(0:2) dp=2\n")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """Two ranks with the same prompt."""
    root = tmp_path_factory.mktemp("ranks")
    rows = [{"prompt": "12+34=", "part": i} for i in range(2)]
    sets = {"base": str(make_model(root / "base")), "rows": str(write_jsonl(root / "p.jsonl", rows))}
    return run_program(HERE / "defects_ranks.rlf", sets, root / "run", "place *.* on mesh(0:2) dp=2\n")


def test_01_training_uses_the_temperature_of_sampling(run: Metrics) -> None:
    """1. Temperature missing from the training loss: at T = 0.6 the first ratio must be 1, so nothing is clipped."""
    for line in run:
        assert line["actor/clip_frac"] == 0 and line["actor/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("kl", "up"), [(50.0, True), (1.0, False)])
def test_02_adaptive_kl_has_the_right_sign(kl: float, up: bool) -> None:
    """2. Adaptive KL fed with -beta KL: at a divergence of 50 and a target of 6 the coefficient fell."""
    beta = float(run_fn("std.ppo", "adaptive_kl(0.1, kl, n=128, horizon=10000)", Batch.random(), kl=kl))
    assert (beta > 0.1) is up
    assert beta == pytest.approx(0.1 * (1 + (0.2 if up else -0.2) * 128 / 10_000))


def test_03_beta_changes_once_a_step(run: Metrics) -> None:
    """3. Adaptive beta updated in the loss, once a micro-batch: here by exactly one factor a step."""
    beta = 0.1
    for line in run:
        beta *= 1 + max(min(line["kl"] / 0.05 - 1, 0.2), -0.2) * 6 / 10
        assert line["beta"] == pytest.approx(beta, rel=1e-5)


def test_04_the_loss_knows_no_layout() -> None:
    """4. Mean of means over micro-batches and ranks: with ragged rows it is not the mean over tokens."""
    b = Batch.random(seed=9, prompts=5, n=3)
    lp, adv = b.logprobs(1), b.tokens(2)
    want = -float((lp.data * adv.data).mean())
    for dp in (1, 2, 4):
        for mbs in (0, 1, 7):
            done = run_loss("std.rloo", "reinforce_token(adv=adv)", b, dict(logprobs=lp), dp=dp, mbs=mbs, adv=adv)
            assert done.loss == pytest.approx(want, rel=1e-10)
            torch.testing.assert_close(done.grads["logprobs"], -adv.data / adv.data.numel(), rtol=1e-10, atol=1e-12)


def test_05_the_schedule_is_as_long_as_the_run(run: Metrics) -> None:
    """5. Schedule length times epochs: three updates, two of warm-up, must end at the end of the run."""
    assert [line["actor/lr"] for line in run] == pytest.approx(
        [learning_rate(Optimizer(lr=1e-3, schedule="linear", warmup=2), i, 3) for i in range(3)])


def test_05_epochs_count_once(tmp_path: Path) -> None:
    """5. Three steps of two minibatches in two epochs are twelve updates, not twenty-four."""
    sets = {"base": str(make_model(tmp_path / "base")), "rows": str(write_jsonl(tmp_path / "p.jsonl", make_sums(64)))}
    plan = decode(compile_program(HERE / "defects.rlf", sets, None, tmp_path), "p")
    assert {m.name: m.planned_updates for m in plan.models} == {"actor": 3, "other": 12, "ref": 0}


def test_06_completions_belong_to_their_prompts(run: Metrics) -> None:
    """6. GRPO with lengths in another order than tokens: prompts differ in length, those of a group do not."""
    assert all(line["widths"] > 0 and line["prompts"] == 0 for line in run)


def test_07_preference_offsets_hold_in_micro_batches() -> None:
    """7. DPO's reference by offsets of the full batch: micro-batches of one pair give the same."""
    b = Batch.pairs(seed=3)
    won, lost = b.logprobs(1, "pair.chosen"), b.logprobs(2, "pair.rejected")
    ref = {"rc": b.logprobs(3, "pair.chosen"), "rr": b.logprobs(4, "pair.rejected")}
    call = "dpo(ref_chosen=rc, ref_rejected=rr, beta=0.3)"
    done = [run_loss("std.dpo", call, b, dict(chosen=won, rejected=lost), mbs=mbs, **ref) for mbs in (0, 1, 2)]
    parts = [[float(t.sum()) for t in b.split(x)] for x in (won, lost, ref["rc"], ref["rr"])]
    want = sum(math.log1p(math.exp(-0.3 * (a - c - x + y))) for a, c, x, y in zip(*parts)) / b.rows
    assert all(d.loss == pytest.approx(want, rel=1e-10) for d in done)


def test_08_no_logits_mask_changes_logprobs(run: Metrics) -> None:
    """8. Log-probabilities after top-k and top-p, masked or not: here always before them, in every call."""
    assert all(line["mismatch"] < 1e-4 for line in run)


def test_09_a_stopped_minibatch_makes_no_step(run: Metrics) -> None:
    """9. Early stop multiplied the loss by 0 and stepped: weight decay of 0.5 must not move the model."""
    assert [line["other/updates"] for line in run] == [0, 0, 0]
    assert all(line["stayed"] == pytest.approx(0, abs=1e-6) for line in run)


def test_10_metrics_are_means_of_what_they_say(run: Metrics) -> None:
    """10. Metrics without mask, of the last minibatch, or with another sign: the mean advantage of groups is 0, and a
    loss's metric is that of all rows."""
    assert all(line["advantage"] == pytest.approx(0, abs=1e-5) for line in run)
    b = Batch.random(seed=5, edge="empty")
    lp, old, adv = b.logprobs(1), b.logprobs(2), b.tokens(3)
    done = run_loss("std.ppo", "ppo_clip(old=old, adv=adv)", b, dict(logprobs=lp), dp=2, mbs=1, old=old, adv=adv)
    assert done.metrics["kl"] == pytest.approx(float((old.data - lp.data).mean()), rel=1e-10)


def test_10_metrics_are_those_of_all_minibatches(ranks: Metrics) -> None:
    """10. Only the last minibatch, or the loss with its sign turned: the mean over both, as large as minus the mean."""
    for line in ranks:
        assert line["actor/loss"] == pytest.approx(-(line["first"] + line["second"]) / 2, rel=1e-5)
        assert abs(line["first"] - line["second"]) > 1e-3


def test_11_samples_are_independent(run: Metrics) -> None:
    """11. One seed for all ranks: completions of a prompt differ, and so do two calls."""
    assert all(line["samples"] > 0 and line["calls"] > 0 for line in run)


def test_11_ranks_do_not_draw_alike(ranks: Metrics) -> None:
    """11. The first prompt of one rank is that of the other: with one seed for all ranks so were its completions."""
    assert all(line["apart"] > 0 for line in ranks)


def test_12_moments_are_part_of_the_program(run: Metrics) -> None:
    """12. Running moments in a corner of two interfaces, lost at recovery: a `state` goes on from step to step."""
    assert [line["m"] for line in run] == [2, 4, 8]


@pytest.mark.thorough
def test_12_a_resumed_run_has_its_states(tmp_path: Path) -> None:
    """12. ... and after recovery it is what it was: three steps at once, or two and one."""
    sets = {"base": str(make_model(tmp_path / "base")), "rows": str(write_jsonl(tmp_path / "p.jsonl", make_sums(64)))}
    program = HERE.parent / "checkpoint/small.rlf"
    plan = compile_program(program, sets | {"steps": 3}, "place *.* on mesh(0:1)\n", tmp_path)
    assert run_plan(plan, tmp_path / "whole") == run_plan(plan, tmp_path / "parts", stop_after=2) == [""]
    assert run_plan(plan, tmp_path / "parts", resume=tmp_path / "parts") == [""]
    betas = [[line["beta"] for line in lines(tmp_path / out)] for out in ("whole", "parts")]
    assert betas[0] == betas[1] and len(set(betas[0])) == 3


def test_13_top_p_works_on_what_top_k_left() -> None:
    """13. Union of two sets on the same logits: top-k keeps two tokens, renormalized, then top-p 0.6 keeps the
    first."""
    scores = torch.tensor([[0.40, 0.25, 0.20, 0.15]]).log()
    kept = scores >= threshold(scores, Sampling(top_k=2, top_p=0.6))
    assert kept.tolist() == [[True, False, False, False]]  # 0.40 / 0.65 > 0.6; alone, top-p would keep two


def test_14_inference_has_no_noise(run: Metrics) -> None:
    """14. Noise (of an expert router) in inference: generation and two forward passes of frozen weights agree."""
    assert run[0]["mismatch"] < 1e-4 and abs(run[0]["kl"]) < 1e-4 and run[0]["stayed"] < 1e-5


def test_14_a_router_makes_no_noise(tmp_path: Path) -> None:
    """14. Router noise in inference: with it in the config, transformers' own training forward differs each time, and
    log-probabilities here are those of a model without it."""
    from transformers import AutoModelForCausalLM

    quiet, noisy = (make(tmp_path / f"{noise}", "mixtral", router_jitter_noise=noise) for noise in (0.0, 0.5))
    model = AutoModelForCausalLM.from_pretrained(noisy).train()
    with torch.no_grad():
        assert not torch.equal(model(torch.tensor([[5, 6, 7]])).logits, model(torch.tensor([[5, 6, 7]])).logits)
    found = [shard_of(plan_model(path), layout_of(), 0, False)[0].infer([pack(ROWS)], "logprobs", 1.0)
             for path in (quiet, noisy, noisy)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize(("src", "dst"), [((4, 1), (1, 4)), ((2, 2), (4, 1)), ((4, 1), (2, 2))])
def test_15_senders_share_the_load(src: tuple[int, int], dst: tuple[int, int]) -> None:
    """15. One replica sent everything: to ranks that hold nothing, the busiest of equal senders sends its part."""
    made, a, b = model(), mesh((0, 4)), mesh((4, 8))
    sent = dict.fromkeys(range(4), 0)
    way = plan_reshard(made, layout(a, dp=src[0], tp=src[1]), a, layout(b, dp=dst[0], tp=dst[1]), b, 8)
    for rank in sent:
        sent[rank] = sum(lane.stop - lane.start for lane in rank_slices(way, rank)[0])
    assert max(sent.values()) <= 1.01 * sum(sent.values()) / 4


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_16_the_least_rate_comes_at_the_end(schedule: str) -> None:
    """16. Warm-up subtracted twice: the least rate came `warmup` steps early."""
    options = Optimizer(lr=1.0, schedule=schedule, warmup=10, min_lr_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(options, i, 100) for i in range(100)]
    assert rates[9] <= 1.0 and max(rates) == pytest.approx(1.0)
    assert all(x > y for x, y in zip(rates[10:], rates[11:])) and rates[-1] == min(rates[10:])


def test_a_score_counts_only_where_the_sequence_ended(run: Metrics) -> None:
    """A reward at a cut-off sequence: `finished_rewards` gives none, and the data has such sequences."""
    assert sum(line["unfinished"] for line in run) > 0
    assert all(line["cut"] == pytest.approx(0, abs=1e-4) for line in run)
