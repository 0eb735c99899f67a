"""The probe in the loops of other libraries, run for real: on the same weights and batch, readings equal a plain loop's to 1e-6."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from test_probe import Towers, batch, hooks_of, info_nce
from torch import Tensor, nn
from torch.nn import functional as F

import gradscope
from gradscope.probe import Probe
from gradscope.runlog import Run

#: Readings that depend on the loop's clock, or on where clipping happens.
OTHER = ("probe",)
SETTINGS: dict[str, Any] = {"probe_set": "full", "every": 1, "second_backward": True}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same(found: dict[Any, Any], expected: dict[Any, Any], without: tuple[str, ...] = ()) -> int:
    """Compares every reading of the batch and of the step; returns how many."""
    keys = [key for key in expected if key[0] not in (*OTHER, *without)]
    assert keys
    for key in keys:
        assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-9, nan_ok=True), key
    return len(keys)


def plain(model: nn.Module, *inputs: Tensor, loss: Any = info_nce, lr: float = 1e-3) -> dict[Any, Any]:
    with Probe(model, **SETTINGS) as probe:
        output = model(*inputs)
        loss(*(output.values() if isinstance(output, dict) else output)).backward()
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0).step()
    return probe.last


# ---- Lightning


def test_lightning(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from gradscope.adapters.lightning import ProbeCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.towers = Towers()

        def training_step(self, pieces: Any, index: int) -> Tensor:
            return info_nce(*self.towers(*pieces))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = ProbeCallback(output=tmp_path / "run", **SETTINGS)
    features, ids = batch(0, 6)
    trainer = Trainer(
        max_epochs=2,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(features, ids), batch_size=6))
    run = Run(tmp_path / "run")
    assert run.done
    assert run.steps["epoch"].tolist() == [1, 2]
    first = run.readings[run.readings["step"] == 1]
    found = {(row.quantity, row.term, row.key): row.value for row in first.itertuples()}
    found = {(q, t, k.replace("towers.", "")): v for (q, t, k), v in found.items()}
    assert same(found, plain(Towers(), features, ids)) > 100
    assert hooks_of(module, trainer.optimizers[0]) == 0


def test_lightning_clips_after_it_was_read_and_an_exception_detaches(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from gradscope.adapters.lightning import ProbeCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.towers = Towers()

        def training_step(self, pieces: Any, index: int) -> Tensor:
            if index == 2:
                raise RuntimeError("on purpose")
            return info_nce(*self.towers(*pieces))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    callback, module = ProbeCallback(**SETTINGS), Module()
    trainer = Trainer(
        max_epochs=1,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        gradient_clip_val=0.01,
        accumulate_grad_batches=2,
    )
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, DataLoader(TensorDataset(*batch(0, 24)), batch_size=6))
    assert callback.probe is not None
    assert callback.probe.last["accumulation", "total", "norm_clipped"] == pytest.approx(0.01, rel=1e-3)
    assert callback.probe.last["accumulation", "total", "norm"] > 0.1
    assert callback.probe.last["hooks", "infonce", "factor"] == pytest.approx(0.5, rel=1e-5)
    assert hooks_of(module, trainer.optimizers[0]) == 0


# ---- Hugging Face


def test_hugging_face_trainer(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments

    from gradscope.adapters.huggingface import ProbeCallback

    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 60, "max_position_embeddings": 12, "eos_token_id": 59},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=8,
        logit_scale_init_value=3.0,
    )

    def model() -> CLIPModel:
        torch.manual_seed(0)
        return CLIPModel(config)

    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "pixel_values": torch.randn(3, 8, 8, generator=generator),
            "input_ids": torch.cat([torch.randint(1, 58, (11,), generator=generator), torch.tensor([59])]),
            "return_loss": True,
        }
        for _ in range(4)
    ]

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        items = sorted(items, key=lambda item: float(item["pixel_values"][0, 0, 0]))
        return {
            "pixel_values": torch.stack([item["pixel_values"] for item in items]),
            "input_ids": torch.stack([item["input_ids"] for item in items]),
            "return_loss": True,
        }

    callback = ProbeCallback(output=tmp_path / "run", **SETTINGS)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        per_device_train_batch_size=4,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
        max_grad_norm=0.0,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(model=model(), args=arguments, train_dataset=rows, data_collator=collate, callbacks=[callback])  # type: ignore[arg-type]
    trainer.train()
    twin = model()
    inputs = collate(rows)
    with Probe(twin, **SETTINGS) as probe:
        twin(**inputs).loss.backward()
        torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.0).step()
    run = Run(tmp_path / "run")
    first = run.readings[run.readings["step"] == 1]
    found = {(row.quantity, row.term, row.key): row.value for row in first.itertuples()}
    assert same(found, probe.last) > 100
    assert found["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    assert found["zeros", "infonce", "structural.parameters"] > 0
    assert run.done
    assert hooks_of(trainer.model, trainer.optimizer.optimizer) == 0  # type: ignore[arg-type, union-attr]


# ---- sentence-transformers


def sentence_encoder(folder: Path) -> Any:
    """A BERT of one narrow layer with a vocabulary of letters."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    home = folder / "bert"
    if not home.exists():
        torch.manual_seed(0)
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
        config = BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16,
        )  # fmt: skip
        BertModel(config).save_pretrained(home)
        (folder / "vocab.txt").write_text("\n".join(words))
        BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}).save_pretrained(home)
    return SentenceTransformer(modules=[Transformer(str(home)), Pooling(16)], device="cpu")


PAIRS = {"anchor": ["a b c", "d e f", "g h i", "j k l"], "positive": ["a c m", "d f n", "g i o", "j l p"]}


@pytest.mark.parametrize("kind", ["one way", "symmetric", "cached"])
def test_sentence_transformers(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    from gradscope.adapters.huggingface import ProbeCallback

    model = sentence_encoder(tmp_path)
    if kind == "cached":
        loss: Any = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    elif kind == "symmetric":
        loss = losses.MultipleNegativesRankingLoss(model, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
    else:
        loss = losses.MultipleNegativesRankingLoss(model)
    callback = ProbeCallback(loss=loss, output=tmp_path / "run", **SETTINGS)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "st"),
        per_device_train_batch_size=4,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        disable_tqdm=True,
        max_grad_norm=0.0,
        learning_rate=1e-2,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(PAIRS), loss=loss, callbacks=[callback]
    )
    trainer.train()
    run = Run(tmp_path / "run")
    first = run.readings[run.readings["step"] == 1]
    found = {(row.quantity, row.term, row.key): row.value for row in first.itertuples()}
    assert "compute_loss_from_embeddings" not in loss.__dict__
    assert "calculate_loss" not in loss.__dict__
    printed = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert found["loss", "infonce", "trained"] == pytest.approx(printed, rel=1e-4)
    directions = ("i2t", "t2i") if kind == "symmetric" else ("i2t",)
    assert {key.split(".")[1] for q, _, key in found if q == "residual" and "." in key} == set(directions)

    twin = sentence_encoder(tmp_path)
    with Probe(twin, directions=directions, **SETTINGS) as probe:
        rows = [twin(twin.tokenize(column))["sentence_embedding"] for column in PAIRS.values()]
        probe.watch(*rows, 20.0)
        logits = 20.0 * F.normalize(rows[0]) @ F.normalize(rows[1]).T
        target = torch.arange(4)
        parts = [F.cross_entropy(m, target) for m in (logits, logits.T)[: len(directions)]]
        (sum(parts) / len(parts)).backward()
        torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0).step()
    for key, value in probe.last.items():  # the order of the rows in the batch is the trainer's: readings that do not depend on it
        if key[0] in ("loss", "saturation", "residual", "gap", "accumulation") and "top" not in key[2] and "zero" not in key[2]:
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    if kind != "cached":
        assert found["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-6)


def test_a_softmax_over_other_cells_is_not_taken_for_infonce(tmp_path: Path) -> None:
    from sentence_transformers import losses

    model = sentence_encoder(tmp_path)
    gte = losses.MultipleNegativesRankingLoss(
        model, directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), partition_mode="joint"
    )
    assert Probe(model, loss=gte).reader.heads.trained == ""


# ---- open_clip


def clip(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    tower = {"width": 16, "layers": 2}
    return open_clip.CLIP(  # type: ignore[no-any-return]
        embed_dim=8,
        vision_cfg={**tower, "image_size": 8, "patch_size": 4, "head_width": 8},
        text_cfg={**tower, "context_length": 10, "vocab_size": 60, "heads": 2},
        output_dict=True,
    )


class Pictures:
    """What open_clip's loop asks of its data."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches, self.num_batches, self.num_samples = batches, len(batches), sum(len(b[0]) for b in batches)
        self.dataloader = self

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def pictures(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(1, 60, (size, 10), generator=generator)


def train_open_clip(
    model: nn.Module, loss: nn.Module, accum: int, batches: list[tuple[Tensor, Tensor]], precision: str = "fp32"
) -> Any:
    """open_clip's own ``train_one_epoch``."""
    from open_clip_train.train import train_one_epoch

    args = argparse.Namespace(
        device="cpu", precision=precision, distill=False, accum_freq=accum, skip_scheduler=True, horovod=False, grad_clip_norm=None,
        rank=0, local_rank=0, distributed=False, world_size=1, log_every_n_steps=100, wandb=False, save_logs=False, tensorboard=False,
        log_local=False, batch_size=4,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    train_one_epoch(model, {"train": Pictures(batches)}, loss, 0, optimizer, None, None, None, args)
    return optimizer


@pytest.mark.parametrize("told", [True, False])
def test_open_clip_loop(tmp_path: Path, told: bool) -> None:
    model, loss = clip(), open_clip.ClipLoss()
    with gradscope.Probe(model, loss=loss if told else None, output=tmp_path / "run", **SETTINGS):
        train_open_clip(model, loss, 1, [pictures(seed, 4) for seed in range(3)])
    run = Run(tmp_path / "run")
    first = run.readings[run.readings["step"] == 1]
    found = {(row.quantity, row.term, row.key): row.value for row in first.itertuples()}
    expected = plain(clip(), *pictures(0, 4), loss=open_clip.ClipLoss())
    assert same(found, expected, without=("optimizer",)) > 100
    assert run.steps["step"].tolist() == [1, 2, 3]


def test_open_clip_accumulation_is_read_at_its_full_width(tmp_path: Path) -> None:
    """G23: the softmax is over all micro-batches; no single backward holds its gradient, and none is claimed."""
    model, loss = clip(), open_clip.ClipLoss()
    batches = [pictures(seed, 4) for seed in range(3)]
    with gradscope.Probe(model, loss=loss, output=tmp_path / "run", probe_set="full", every=1):
        train_open_clip(model, loss, 3, batches)
    run = Run(tmp_path / "run")
    found = {(row.quantity, row.term, row.key): row.value for row in run.readings.itertuples()}
    assert run.provenance["width"] == 12
    assert ("gradient", "infonce", "norm") not in found
    wide = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    expected = plain(clip(), *wide, loss=open_clip.ClipLoss())
    for key in (("loss", "infonce", "trained"), ("residual", "infonce", "mean.i2t")):
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    # Each of the three backwards holds the whole loss's gradient at the scale, so open_clip's loop adds it up three times.
    scale, towers = expected["gradient", "infonce", "norm.scale"], expected["gradient", "infonce", "norm"]
    assert found["accumulation", "total", "norm"] == pytest.approx((towers**2 + 8 * scale**2) ** 0.5, rel=1e-4)
    assert "whole step, cached" in run.readings["stamps"].iloc[0]
