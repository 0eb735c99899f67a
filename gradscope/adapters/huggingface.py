"""The probe as a callback of Hugging Face's ``Trainer``, and of the trainers of sentence-transformers, which are built on it.

    Trainer(..., callbacks=[ProbeCallback(output="runs/mine")])
    SentenceTransformerTrainer(..., loss=loss, callbacks=[ProbeCallback(loss=loss, output="runs/mine")])

It attaches when training starts and detaches when it ends. The loss of sentence-transformers is where both columns meet: without it the
probe sees one tower at a time and says so. How it can mislead: after an exception the trainer tells nobody; call
``callback.probe.detach()`` before training again in the same process.
"""

from __future__ import annotations

from typing import Any

from torch import nn

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("gradscope.adapters.huggingface needs transformers: pip install transformers accelerate") from error

from gradscope.probe import Probe


class ProbeCallback(TrainerCallback):
    """Reads a run of a Hugging Face trainer.

    Args:
        loss: the loss module, where the model itself does not return both embeddings.
        settings: of ``gradscope.Probe`` (output, probe_set, every, ...).
    """

    def __init__(self, *, loss: nn.Module | None = None, **settings: Any) -> None:
        self._loss, self._settings = loss, settings
        self.probe: Probe | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]  # accelerate's wrapper, which holds the loss scale too
        inner = getattr(optimizer, "optimizer", optimizer)
        scaler = getattr(optimizer, "scaler", None)
        precision = "fp16" if args.fp16 else "bf16" if args.bf16 else None
        settings = {"precision": precision, **self._settings}
        self.probe = Probe(kwargs["model"], loss=self._loss, optimizer=inner, scaler=scaler, **settings)
        self.probe.attach()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.probe is not None and state.epoch is not None:
            self.probe.epoch = int(state.epoch) + 1

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.probe is not None:
            self.probe.detach(complete=True)
