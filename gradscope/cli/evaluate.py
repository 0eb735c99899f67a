"""gradscope eval"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    encoder: Annotated[str, typer.Argument(help="A run, a checkpoint, tiny, a folder, or an open_clip NAME:TAG.")],
    data: Annotated[str, typer.Option(help="scenes, or a folder with SPLIT.jsonl.")] = "scenes",
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes. [default: eval-DATA-SPLIT.json in the run or here]")] = None,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples over images.", min=1)] = 2000,
    batch_size: Annotated[int, typer.Option(help="Records per forward pass.", min=1)] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Retrieval over a whole split, both directions, with 95 % intervals: a table, and the same numbers as JSON.

    Example: gradscope eval runs/demo/hn --data scenes --split test
    """
    from gradscope.console import out, progress
    from gradscope.cpu_speed import cpu_speed
    from gradscope.data.images import refuse_missing
    from gradscope.data.source import open_data
    from gradscope.encoders.load import load_encoder, resolve_device
    from gradscope.evaluate import evaluate as score
    from gradscope.evaluation_file import retrieval_table, write_evaluation

    place = resolve_device(device)
    source = open_data(data)
    records = source.records(split)
    refuse_missing(records)
    model = load_encoder(encoder, place)
    with cpu_speed(place, model.longest_sequence), progress("embedding") as advance:
        result, embedded = score(model, records, resamples=resamples, batch_size=batch_size, advance=advance)
    path = write_evaluation(output, encoder, source, split, result, embedded)
    out.print(retrieval_table(result, f"{encoder} on {data} {split}"))
    out.print(f"{embedded.truncated} captions were cut at {model.context} tokens; ties: {result.i2t.tied_share:.2%} of image queries, "
              f"{result.t2i.tied_share:.2%} of caption queries")  # fmt: skip
    out.print(f"JSON: {path}", soft_wrap=True)
