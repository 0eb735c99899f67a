"""Does the optimizer see the gradient? Adam's normalised step, and the update really applied.

With Adam's bias-corrected moments m_hat, v_hat (after this step) over all entries:
    step_q10, step_q50, step_q90, step_q99    quantiles of |m_hat| / (sqrt(v_hat) + eps): 1 is a full step of the learning rate
    eps_dominated                 share of entries with sqrt(v_hat) < eps: their steps shrink by about g / eps
    stale                         share of entries with 0 < |g| < sqrt(v_hat) / 100: the memory of larger gradients mutes this one
    update_ratio.<tower>          norm(weights after - before) / norm(weights before), as applied (decay and clipping included)

Quantiles come from 0.05-decade bins between 1e-20 and 1e3, so they are right to 12 %. A normal distribution of gradients has a stale
share of about 0.8 %; half of v's memory is ln 2 / (1 - beta2) steps old, 693 at .999.
Source: Adam (Kingma and Ba, 2015); paper facts, section 7.2. How it can mislead: early steps have little memory, so stale starts low.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics.gradients import true_norm
from gradscope.quantities import quantities
from gradscope.quantities.gradient import parts_of
from gradscope.types import Reading, Step

QUANTILES = (0.10, 0.50, 0.90, 0.99)
STALE = 100.0
_LOW, _HIGH, _PER_DECADE = -20, 3, 20


@quantities.register("optimizer")
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    phase: ClassVar[str] = "update"
    tier: ClassVar[str] = "full"
    needs: ClassVar[tuple[str, ...]] = ("before",)

    def __call__(self, step: Step) -> list[Reading]:
        values = _adam(step)
        assert step.before is not None
        for part, indices in parts_of(step.names).items():
            if "." in part:
                continue
            before = [step.before[i] for i in indices]
            change = [step.parameters[i].detach() - step.before[i] for i in indices]
            values[f"update_ratio.{part}"] = true_norm(change) / true_norm(before)
        return [Reading(quantity="optimizer", key=k, term="total", value=v, unit=_unit(k)) for k, v in values.items()]


def _unit(key: str) -> str:
    return "learning rates" if key.startswith("step_q") else "ratio" if key.startswith("update") else "share"


def _adam(step: Step) -> dict[str, Tensor]:
    """Moments are read where an Adam keeps them; an optimizer without them has no normalised step: {}."""
    assert step.optimizer is not None
    counts = torch.zeros((_HIGH - _LOW) * _PER_DECADE + 1, dtype=torch.int64, device=step.embeddings.text.device)
    one = torch.ones((), dtype=torch.int64, device=counts.device)
    totals = torch.zeros(3, dtype=torch.float64, device=counts.device)  # entries, eps-dominated, stale
    found_any = False
    for group in step.optimizer.param_groups:
        for parameter in group["params"]:
            state = step.optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state or parameter.grad is None:
                continue
            found_any = True
            beta1, beta2 = group["betas"]
            root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
            size = (state["exp_avg"] / (1 - beta1 ** state["step"])).abs() / (root + group["eps"])
            bins = (size.log10().clamp(_LOW, _HIGH).nan_to_num(nan=_HIGH) - _LOW).mul(_PER_DECADE).long()
            counts.scatter_add_(0, bins.flatten(), one.expand(bins.numel()))  # bincount would make a GPU wait for the host
            gradient = parameter.grad.abs()
            stale = (gradient > 0) & (gradient * STALE < root)
            totals += torch.stack([torch.ones_like(root).sum(), (root < group["eps"]).sum(), stale.sum()]).double()
    if not found_any:
        return {}
    cumulative = counts.cumsum(0).double() / counts.sum()
    centres = 10.0 ** (_LOW + (torch.arange(len(counts), dtype=torch.float64, device=counts.device) + 0.5) / _PER_DECADE)
    places = torch.stack([(cumulative < q).sum() for q in QUANTILES]).clamp(max=len(counts) - 1)
    found = centres.gather(0, places)
    values = {f"step_q{round(100 * q)}": found[i] for i, q in enumerate(QUANTILES)}
    return {**values, "eps_dominated": totals[1] / totals[0], "stale": totals[2] / totals[0]}
