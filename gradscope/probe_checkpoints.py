"""The full reading set at given checkpoints, without training.

Each checkpoint reads the same batches (same seed) at fixed weights: a "step" is a batch, and no update follows, so the phases "step"
and "update" (accumulation, optimizer) have nothing to say and are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from gradscope.assembly import make_framework, make_reader
from gradscope.console import console, progress
from gradscope.cpu_speed import cpu_speed
from gradscope.data.batching import Batches
from gradscope.data.source import open_data
from gradscope.data.too_long import refuse_too_long
from gradscope.data.usable import usable
from gradscope.encoders.load import load_encoder, resolve_device
from gradscope.frameworks.clip import total_loss
from gradscope.optim import make_optimizer
from gradscope.provenance import provenance
from gradscope.recipe import Data, resolve
from gradscope.runlog import RunLog
from gradscope.train import report_failures


def probe_checkpoints(
    names: Sequence[str],
    *,
    data: Data,
    split: str,
    width: int,
    batches: int,
    gamma: float,
    seed: int,
    device: str,
    output: Path,
    trust_archive: bool = False,
) -> list[Path]:
    """One run directory per checkpoint under ``output``, in the order given; what was left out or cut is said.

    Raises:
        ValueError: bad names or data, or captions that are too long where ``data`` does not allow for it.
    """
    place = resolve_device(device)
    source = open_data(data.name, **data.settings())
    split = source.split_or_only(split)
    found = source.read(split)
    kept = usable(found.records, allow_missing=data.allow_missing, on_bad_image=data.on_bad_image, workers=0)
    records, notes = kept.records, [*found.notes, *kept.notes]
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    paths = [output / re.sub(r"[^A-Za-z0-9_.=-]+", "-", name).strip("-") for name in names]
    for path in paths:
        if path.exists():
            raise ValueError(f"'{path}' holds readings already; remove it or choose another --output")
    for name, path in zip(names, paths, strict=True):
        tables = {
            "data": {**dataclasses.asdict(data), "train_split": split},
            "encoder": {"name": name, "trust_archive": trust_archive},
            "objective": {"name": "hn", "gamma": gamma},
            "train": {"batch_size": width, "seed": seed, "device": str(place), "max_steps": batches, "epochs": 1},
            "probe": {"log_grads": True, "every": 1},
        }
        recipe = resolve(tables, {})
        encoder = load_encoder(name, place, trust_archive=trust_archive)
        framework = make_framework(recipe)
        reader = make_reader(recipe, encoder, framework, make_optimizer(encoder, recipe.train))
        assert reader is not None
        stream = Batches(records=records, encoder=encoder, batch_size=width, accumulate=1, seed=seed, decode=data.decode)
        cut = stream.tokenized.truncated()
        if data.on_too_long == "error":
            refuse_too_long([record.id for record in records], stream.tokenized.lengths.tolist(), encoder.context)
        if cut:
            console.print(f"{name}: {cut} of {len(records)} captions cut at {encoder.context} tokens", soft_wrap=True)
        count = min(batches, stream.steps_per_epoch)
        if count < batches:
            fills = f"{split} of {data.name} fills {count} batches of {width}, not {batches}"
            console.print(f"{name}: {fills}", style="yellow", markup=False)
        with cpu_speed(place, encoder.longest_sequence) as kernels:
            facts = provenance(
                kernels=kernels,
                width=width,
                truncated_captions=cut,
                data={
                    "name": data.name,
                    "split": split,
                    "train_sha256": found.fingerprint(),
                    "records": len(records),
                    "notes": notes,
                },
            )
            with (
                RunLog.create(path, recipe_toml=recipe.toml(), provenance=facts) as log,
                progress(f"probing {name}") as advance,
            ):
                for step, (batch,) in enumerate(stream.steps(1, count), 1):
                    encoder.zero_grad(set_to_none=True)
                    reader.begin(step, (step - 1) * width)
                    embeddings = encoder.embed(batch)
                    terms = framework(embeddings)
                    total = total_loss(terms)
                    with reader.watching(batch, embeddings, terms):
                        total.backward()
                    log.write_readings(reader.flush())
                    report_failures(reader, log)
                    log.write_steps([{"step": step, "samples": step * width, "epoch": 1, "loss": float(total.detach())}])
                    advance(step, count)
                log.finish()
    return paths
