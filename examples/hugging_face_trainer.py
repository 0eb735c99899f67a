"""``transformers.Trainer`` on a CLIPModel: the probe is a callback.

python examples/hugging_face_trainer.py runs/hugging_face
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments

from gradscope.adapters.huggingface import ProbeCallback


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}, "return_loss": True}


def main(output: str) -> None:
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 100, "max_position_embeddings": 12, "eos_token_id": 99}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**tower, "image_size": 16, "patch_size": 8}, projection_dim=32))
    rows = [
        {"pixel_values": torch.randn(3, 16, 16), "input_ids": torch.cat([torch.randint(1, 98, (11,)), torch.tensor([99])])}
        for _ in range(64)
    ]
    arguments = TrainingArguments(
        output_dir=f"{output}-trainer",
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    callback = ProbeCallback(output=output, every=2)  # the one line
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[callback]).train()  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/hugging_face")
