"""gradscope eval"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.launch import leads

if TYPE_CHECKING:
    import torch

    from gradscope.evaluate import Embedded
    from gradscope.evaluation_file import Evaluation
    from gradscope.gallery import Gallery
    from gradscope.recipe import Data
    from gradscope.run_checkpoints import Chosen

#: Galleries whose whole score matrix would take more bytes than this are announced with a memory estimate.
_LARGE = 2**30

DataName = Annotated[
    str | None, typer.Option(help="A name of `gradscope data list`, or a folder or file of your own.", show_default="scenes")
]
SplitName = Annotated[str | None, typer.Option(help="May be joined, a+b.", show_default="the data set's own choice")]
DataDir = Annotated[str | None, typer.Option(help="Folder of a public data set.", show_default="$GRADSCOPE_DATA, the cache")]
ImageKey = Annotated[str | None, typer.Option(help="Key or column of the picture's path in files of your own.")]
CaptionKey = Annotated[str | None, typer.Option(help="Key or column of the captions.")]
ImageRoot = Annotated[str | None, typer.Option(help="Folder that relative picture paths belong to.")]
Encoding = Annotated[str | None, typer.Option(help="Text encoding of files of your own.")]
Caption = Annotated[str | None, typer.Option(help="Which caption, where a data set offers several (dci: long, short).")]
AllowMissing = Annotated[bool, typer.Option("--allow-missing", help="Leave out records without a picture, counted.")]
OnBadImage = Annotated[str, typer.Option(help="error, or skip: look at all pictures first.")]
Decode = Annotated[str, typer.Option(help="Of pictures: fast, exact or scaled.")]
Cache = Annotated[str, typer.Option(help="images: decode each picture once and keep it, ready to use, in the cache folder; or none.")]
OnTooLong = Annotated[str, typer.Option(help="Captions over the context: truncate or error.")]
Resamples = Annotated[int, typer.Option(help="Bootstrap resamples over images.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Records per forward pass.", min=1)]
Workers = Annotated[int, typer.Option(help="Processes that decode pictures.", min=0)]
TrustArchive = Annotated[
    bool, typer.Option("--trust-archive", help="Open a TorchScript archive whose checksum is not known to be OpenAI's.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def evaluate(
    encoder: Annotated[
        str, typer.Argument(help="A run, a checkpoint, tiny, a folder, an open_clip NAME:TAG, or stored embeddings (.safetensors).")
    ],
    data: DataName = None,
    split: SplitName = None,
    data_dir: DataDir = None,
    image_key: ImageKey = None,
    caption_key: CaptionKey = None,
    image_root: ImageRoot = None,
    encoding: Encoding = None,
    caption: Caption = None,
    allow_missing: AllowMissing = False,
    on_bad_image: OnBadImage = "error",
    decode: Decode = "fast",
    cache: Cache = "none",
    on_too_long: OnTooLong = "truncate",
    checkpoint: Annotated[str, typer.Option(help="Of a run: last, best (on validation) or both.")] = "last",
    trained_on: Annotated[
        str | None,
        typer.Option(
            help="What the encoder was trained on, DATA[:SPLIT]: items seen are counted.", show_default="what the run recorded"
        ),
    ] = None,
    save_embeddings: Annotated[Path | None, typer.Option(help="Keep the embeddings, to be scored again without the model.")] = None,
    per_query: Annotated[Path | None, typer.Option(help="A CSV with rank, score and winner of every query.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the JSON goes.", show_default="eval-DATA-SPLIT.json in the run or here")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the JSON instead of tables.")] = False,
    resamples: Resamples = 2000,
    batch_size: BatchSize = 128,
    workers: Workers = 0,
    trust_archive: TrustArchive = False,
    device: Device = "auto",
) -> None:
    """Retrieval over a whole split, both directions, with 95 % intervals: tables, and the same numbers as JSON.

    Example: gradscope eval runs/demo/hn --data scenes --split test

    On several processes: torchrun --nproc-per-node 2 -m gradscope eval runs/demo/hn
    """
    from gradscope.embeddings_file import SUFFIX, is_embeddings_file
    from gradscope.paths import check_writable

    settings = data_settings(
        data, data_dir=data_dir, image_key=image_key, caption_key=caption_key, image_root=image_root, encoding=encoding,
        caption=caption, allow_missing=allow_missing, on_bad_image=on_bad_image, decode=decode, cache=cache,
        on_too_long=on_too_long,
    )  # fmt: skip
    check_writable(save_embeddings, per_query, output)
    if save_embeddings and save_embeddings.suffix != SUFFIX:
        raise ValueError(f"--save-embeddings needs a name that ends in {SUFFIX}; got '{save_embeddings}'")
    if is_embeddings_file(encoder):
        meaningless = {
            "--data": data, "--split": split, "--trained-on": trained_on, "--save-embeddings": save_embeddings,
            "--checkpoint": None if checkpoint == "last" else checkpoint,
        }  # fmt: skip
        refuse_settings_of_files(encoder, meaningless)
        if leads():  # not divided: there is nothing to embed
            _show([_stored(encoder, per_query, output, resamples)], json_)
        return
    from gradscope.console import progress
    from gradscope.distributed import first_rank_first
    from gradscope.encoders.load import resolve_device
    from gradscope.gallery import read_gallery
    from gradscope.launch import processes
    from gradscope.run_checkpoints import chosen_checkpoints

    place = resolve_device(device)
    found = []
    with processes(place):
        with progress("checking pictures") as advance, first_rank_first():
            gallery = read_gallery(settings, split, workers=workers, advance=advance)
        for chosen in chosen_checkpoints(encoder, checkpoint):
            embedded = embed(
                chosen.load, gallery, settings, batch_size=batch_size, workers=workers, trust_archive=trust_archive, place=place
            )
            targets = [None if path is None else _suffixed(path, chosen.suffix) for path in (save_embeddings, per_query, output)]
            found.append(_scored(encoder, chosen, gallery, embedded, trained_on, targets, resamples))
    _show([one for one in found if one is not None], json_)


def data_settings(data: str | None, **given: Any) -> Data:
    """The flags as the recipe's table of data, checked as there. ValueError names the flag."""
    import dataclasses

    from gradscope.recipe import Recipe, check

    given["folder"] = given.pop("data_dir")
    values = {key: value for key, value in given.items() if value is not None}
    settings = dataclasses.replace(Recipe().data, name=data or "scenes", **values)
    check(dataclasses.replace(Recipe(), data=settings))
    return settings


def refuse_settings_of_files(name: str, given: dict[str, Any]) -> None:
    """What belongs to embedding would be ignored where embeddings are read."""
    ignored = [flag for flag, value in given.items() if value is not None]
    if ignored:
        raise ValueError(f"'{name}' holds finished embeddings, so {', '.join(ignored)} would be ignored; leave it out.")


def embed(
    name: str, gallery: Gallery, settings: Data, *, batch_size: int, workers: int, trust_archive: bool, place: torch.device
) -> Embedded:
    """Loads an encoder and embeds the gallery, with a progress bar; a large gallery is announced with its memory."""
    from gradscope.console import progress
    from gradscope.cpu_speed import cpu_speed
    from gradscope.data.image_cache import picture_reader
    from gradscope.encoders.load import load_encoder
    from gradscope.evaluate import embed_records

    model = load_encoder(name, place, trust_archive=trust_archive)
    captions = sum(len(record.captions) for record in gallery.records)
    announce_memory(len(gallery.records), captions, int(model.config["model_cfg"].get("embed_dim", 512)))
    preprocess = model.config["preprocess_cfg"]
    read = picture_reader(gallery.records, preprocess, decode=settings.decode, cache=settings.cache, workers=workers)
    with cpu_speed(place, model.longest_sequence), progress("embedding") as advance:
        return embed_records(
            model,
            gallery.records,
            batch_size=batch_size,
            workers=workers,
            decode=settings.decode,
            on_too_long=settings.on_too_long,
            read=read,
            advance=advance,
        )


def announce_memory(images: int, captions: int, width: int) -> None:
    """Says what scoring will take, where a matrix of all scores would not fit."""
    from gradscope.console import console
    from gradscope.evaluate import memory_note

    if 8 * images * captions > _LARGE:
        console.print(memory_note(images, captions, width))


def _suffixed(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def _scored(
    encoder: str,
    chosen: Chosen,
    gallery: Gallery,
    embedded: Embedded,
    trained_on: str | None,
    targets: list[Path | None],
    resamples: int,
) -> tuple[Path, Evaluation] | None:
    """Scores one checkpoint and writes its files; ``targets`` are the embeddings, the queries and the JSON. Of several ranks the first
    writes; None on the others, which help to score."""
    from gradscope.distributed import rank, world
    from gradscope.embeddings_file import save_embeddings
    from gradscope.evaluate import details, score
    from gradscope.evaluation_file import (
        Evaluation,
        default_path,
        evaluation_content,
        not_over_other_data,
        write_json,
        write_queries,
    )
    from gradscope.gallery import protocol_of

    protocol = protocol_of(chosen.name, gallery, embedded, note=chosen.note)
    stored, queries, output = targets
    if stored and rank() == 0:
        save_embeddings(stored, embedded, protocol)
    result = score(embedded, resamples=resamples, shared=world() > 1)
    if rank():
        return None
    if result.i2t.non_finite == result.i2t.n_queries and result.t2i.non_finite == result.t2i.n_queries:
        raise ValueError(f"no score of '{chosen.name}' is finite, so there is no recall; look at it with `gradscope encoders check`.")
    if queries:
        write_queries(queries, embedded, result)
    evaluation = Evaluation(
        protocol=protocol,
        result=result,
        details=details(embedded, result),
        contamination=_contamination(encoder, trained_on, gallery, embedded, result),
    )
    usual = _suffixed(default_path(encoder, protocol.data, protocol.split), chosen.suffix)
    path = output or not_over_other_data(usual, protocol.sha256)
    return write_json(path, evaluation_content(evaluation)), evaluation


def _contamination(encoder: str, trained_on: str | None, gallery: Gallery, embedded: Embedded, result: Any) -> Any:
    """None where it is not known what the encoder was trained on."""
    from gradscope.console import progress
    from gradscope.contamination import contamination
    from gradscope.gallery import seen_in_training, training_items
    from gradscope.run_checkpoints import stored_training_items

    recorded = stored_training_items(encoder)
    name = trained_on or (str(recorded) if recorded else None)
    if name is None:
        return None
    with progress("looking for training items") as advance:
        seen = seen_in_training(gallery, training_items(name), advance=advance)
    return contamination(embedded, result, seen.any, trained_on=name, counts=seen.counts(), sentence=seen.sentence())


def _stored(file: str, per_query: Path | None, output: Path | None, resamples: int) -> tuple[Path, Evaluation]:
    """The numbers of a file of embeddings; no model is loaded."""
    from gradscope.embeddings_file import load_embeddings
    from gradscope.evaluate import details, score
    from gradscope.evaluation_file import Evaluation, evaluation_content, write_json, write_queries

    embedded, protocol = load_embeddings(file)
    announce_memory(len(embedded.image), len(embedded.text), embedded.image.shape[1])
    result = score(embedded, resamples=resamples)
    if per_query:
        write_queries(per_query, embedded, result)
    evaluation = Evaluation(protocol=protocol, result=result, details=details(embedded, result))
    path = output or Path(file).with_suffix(".eval.json")
    return write_json(path, evaluation_content(evaluation)), evaluation


def _show(found: list[tuple[Path, Evaluation]], as_json: bool) -> None:
    from gradscope.console import console, out
    from gradscope.evaluation_file import contamination_table, curve_table, hardness_table, retrieval_table

    if as_json:
        import json

        contents = [json.loads(path.read_text(encoding="utf-8")) for path, _ in found]
        typer.echo(json.dumps(contents[0] if len(contents) == 1 else contents, indent=2, ensure_ascii=False))
        for path, _ in found:
            console.print(f"JSON: {path}", soft_wrap=True)
        return
    for path, evaluation in found:
        protocol, result = evaluation.protocol, evaluation.result
        title = f"{protocol.encoder} on {protocol.data} {protocol.split} ({protocol.images:,} images, {protocol.captions:,} captions)"
        out.print(retrieval_table(result, title, protocol))
        ties = f"ties: {result.i2t.tied_share:.2%} of image queries, {result.t2i.tied_share:.2%} of caption queries"
        lost = result.i2t.non_finite + result.t2i.non_finite
        out.print(f"{ties}{f'; {lost:,} queries are not finite and count as misses' if lost else ''}")
        if evaluation.details:
            out.print(hardness_table(evaluation.details))
            out.print(curve_table(evaluation.details))
        seen = evaluation.contamination
        if seen and seen.counts["any"]:
            out.print(contamination_table(evaluation))
        elif seen:
            out.print(f"trained on {seen.trained_on}: {seen.sentence}", soft_wrap=True)
        out.print(f"JSON: {path}", soft_wrap=True)
