"""The probe as a Lightning callback.

    trainer = Trainer(callbacks=[ProbeCallback(output="runs/mine")])

It attaches when training starts and detaches when it ends, also by an exception. Micro-batches, precision and clipping are Lightning's;
the probe takes the optimizer and the loss scale from the trainer. How it can mislead: ``training_step`` may call submodules of the
LightningModule up to two levels inside; deeper ones must be given (``model=``), or told by ``callback.probe.watch`` in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("gradscope.adapters.lightning needs Lightning: pip install lightning") from error

from gradscope.probe import Probe

#: Lightning's words for half precision -> ours.
PRECISIONS = {"16-mixed": "fp16", "16-true": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16"}


class ProbeCallback(Callback):
    """Reads a Lightning run.

    Args:
        model, loss: take the LightningModule and return the module to watch, and the loss module, where these are not found.
        settings: of ``gradscope.Probe`` (output, probe_set, every, ...).

    Raises:
        ValueError: more than one optimizer; what ``Probe`` raises.
    """

    def __init__(
        self,
        *,
        model: Callable[[LightningModule], nn.Module] | None = None,
        loss: Callable[[LightningModule], nn.Module] | None = None,
        **settings: Any,
    ) -> None:
        self._model, self._loss, self._settings = model, loss, settings
        self.probe: Probe | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"the probe reads one optimizer; this run has {len(trainer.optimizers)}")
        self.probe = Probe(
            self._model(pl_module) if self._model else pl_module,
            loss=self._loss(pl_module) if self._loss else None,
            optimizer=trainer.optimizers[0],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **{"precision": PRECISIONS.get(str(trainer.precision)), **self._settings},
        )
        self.probe.attach()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.probe is not None:
            self.probe.epoch = trainer.current_epoch + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(complete=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(complete=False)

    def _end(self, complete: bool) -> None:
        if self.probe is not None:
            self.probe.detach(complete=complete)
