"""In-batch negatives of sentence-transformers, text against text: the callback is given the loss, where both columns meet.

python examples/sentence_transformers_trainer.py runs/sentences
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from gradscope.adapters.huggingface import ProbeCallback

COLOURS, THINGS = ("red", "green", "blue"), ("chair", "lamp", "table", "window", "bridge", "boat", "house", "door")
WORDS = ("unknown", "the", "a", "that", "is", *COLOURS, *THINGS)


def main(output: str) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=32)], device="cpu")
    rows = [(f"the {colour} {thing}", f"a {thing} that is {colour}") for colour in COLOURS for thing in THINGS] * 8
    data = Dataset.from_dict({"anchor": [a for a, _ in rows], "positive": [b for _, b in rows]})
    loss = losses.MultipleNegativesRankingLoss(model)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=f"{output}-trainer",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        learning_rate=5e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    callback = ProbeCallback(loss=loss, output=output, every=2)  # the one line
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss, callbacks=[callback]).train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/sentences")
