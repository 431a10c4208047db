"""A tiny training run, and the committed weights through our engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

import dayshift.planner
from dayshift.engine import Engine, EngineConfig
from dayshift.planner.training import export
from dayshift.planner.training.documents import TurnEncoder, make_rows
from dayshift.planner.training.gate import CASES, GateCase, GateRecords, play_missing, run_case
from dayshift.planner.training.model import ModelConfig, PlannerModel, Visibility
from dayshift.planner.training.tokenizer import train_tokenizer
from dayshift.planner.training.train import Stage, TrainConfig, Trainer, train

TINY = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
WEIGHTS = Path(dayshift.planner.__file__).parent / "weights"


@pytest.fixture
def tiny_config() -> TrainConfig:
    return TrainConfig(
        model=TINY,
        curriculum=(Stage(1.0, 256, 256),),
        num_rows=2,
        row_length=256,
        steps=40,
        warmup_steps=4,
        learning_rate=1e-2,
        num_workers=1,
        device="cpu",
        report_every_s=0.0,
    )


def test_training_lowers_the_loss_and_exports_what_it_trained(tiny_config: TrainConfig, tmp_path: Path):
    losses = train(tiny_config, tmp_path)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    loaded, fresh = PlannerModel(TINY), PlannerModel(TINY)
    export.load(loaded, tmp_path)
    name, weight = next(iter(loaded.state_dict().items()))
    assert not torch.equal(weight, fresh.state_dict()[name])


def test_learning_rate_warms_up_and_decays_to_nothing(tiny_config: TrainConfig):
    rates = [tiny_config.learning_rate_at(step, step / 40) for step in range(41)]
    assert rates[0] < rates[3] == max(rates)
    assert rates[-1] == 0.0


def test_exported_model_has_the_logits_of_transformers(tmp_path: Path):
    torch.manual_seed(0)
    model = PlannerModel(TINY)
    export.export(model, train_tokenizer(vocab_size=1024, seed=0, num_operations=50), tmp_path)
    export.load(model, tmp_path)  # bfloat16 values, as exported
    reference = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 1024, (1, 200))
    visibility = Visibility(1, 200, torch.device("cpu"))
    visibility.update(torch.full((1, 200), 200), torch.zeros(1, 200))
    with torch.no_grad():
        ours = model(ids, visibility.attend, torch.float32) @ model.model.embed_tokens.weight.T
        theirs = reference(ids).logits
    assert (ours - theirs).abs().max() < 1e-4


def test_training_step_is_reproducible(tiny_config: TrainConfig):
    tokenizer = train_tokenizer(vocab_size=1024, seed=0, num_operations=50)

    def losses() -> list[float]:
        trainer = Trainer(tiny_config)
        batches = (
            make_rows(
                number, TurnEncoder(tokenizer), num_rows=2, row_length=256, max_window=256, max_document=256
            )
            for number in range(3)
        )
        return [trainer.step(batch, 1e-3).item() for batch in batches]

    assert losses() == losses()


def test_committed_weights_play_an_operation_from_memory():
    assert WEIGHTS.joinpath("model.safetensors").stat().st_size <= export.MAX_WEIGHTS_BYTES
    engine = Engine(EngineConfig(model=str(WEIGHTS), device="cpu"))
    [(_, score)] = run_case(engine, GateCase("window 768", 768, True), [0], num_at_once=1)
    engine.close()
    assert score.wrong == []
    assert score.places == {"recalled": 4}


def test_a_gate_is_shared_among_processes_and_goes_on_where_it_was(tmp_path: Path):
    config = EngineConfig(model=str(WEIGHTS), device="cpu", max_num_seqs=1, num_kv_blocks=640)
    [case] = [case for case in CASES if not case.has_left]
    engine = Engine(config)
    alone = dict(run_case(engine, case, [0, 1], num_at_once=1))
    engine.close()
    path = tmp_path / "gate.jsonl"
    GateRecords(path).add(0, alone[0])
    play_missing(config, [case], GateRecords(path), num_operations=2, num_processes=1)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2
    assert GateRecords(path).missing(case, 3) == [2]
    assert GateRecords(path).total(case, 2) == alone[0].plus(alone[1])
