"""What cached accumulation costs: 8 micro-batches of 16 in one softmax of 128, against one batch of 128 and against plain pieces.

    python benchmarks/cached.py --output runs/bench_cached
    python benchmarks/cached.py --model ViT-B-32 --count 4 --size 4 --rounds 3 --output runs/bench_cached_b32     # some minutes

Forward, loss and backward, no optimizer; HN at gamma 0.5; random pictures and token ids; the encoder ``tiny``, or any of open_clip's
models with random weights. Arms:
    one batch    all rows at once: the reference
    cached       the same softmax in pieces (`gradscope.cached`): every piece embedded twice but the last
    narrow       the pieces with a softmax of their own: another, narrower problem, at the memory of one piece

How to read it: ``floor`` is cached's share of work, (4 k - 1) / (3 k) for k pieces where a backward costs two forwards. A ratio below
it says that small pieces suit this machine's caches better than the whole batch, as the ratio of ``narrow`` shows alone. ``gradient``
is the largest over parameters of |cached - one batch| / |one batch|, both fp32. How it can mislead: pictures lie in memory already, so
decoding, which both would pay once, is left out; on a GPU that the small piece leaves idle, pieces cost more than here; and where other
work holds the cores, threads wait for each other at every small operation, which pieces have more of: keep ``--threads`` below the idle
cores (on 2026-11-30, 2 threads beside eight other processes: 63 s against 13 s for what takes the same time alone).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from side_by_side import Arm, machine, report, say_machine, side_by_side
from talk import random_weights_are_meant
from torch import Tensor

from gradscope import cached
from gradscope.encoders.dual import DualEncoder
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.objectives.hn import HN
from gradscope.types import Batch

ONE, CACHED, NARROW = "one batch", "cached", "narrow"
FRAMEWORK = Clip(objective=HN(gamma=0.5))


def encoder_of(name: str) -> DualEncoder:
    if name == "tiny":
        from gradscope.encoders.load import load_encoder

        return load_encoder("tiny").train()
    from open_clip import create_model, get_model_config, get_tokenizer

    if get_model_config(name) is None:
        raise ValueError(f"'{name}' is no model of open_clip; give tiny or a name of open_clip.list_models()")
    torch.manual_seed(0)
    random_weights_are_meant()
    return DualEncoder(create_model(name, pretrained=None), get_tokenizer(name), {}, name).train()


def pieces_of(encoder: DualEncoder, count: int, size: int) -> list[Batch]:
    """Random pictures and ids, full to the context."""
    visual = encoder.model.visual
    side = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size, visual.image_size)
    generator, rows = torch.Generator().manual_seed(0), count * size
    pictures = torch.randn(rows, 3, *side, generator=generator)
    ids = torch.randint(1, encoder.tokenizer.vocab_size - 2, (rows, encoder.context), generator=generator)
    ids[:, 0], ids[:, -1] = encoder.tokenizer.prefix[0], encoder.tokenizer.suffix[0]
    return [_batch(pictures[start : start + size], ids[start : start + size]) for start in range(0, rows, size)]


def _batch(pictures: Tensor, ids: Tensor) -> Batch:
    names = tuple(map(str, range(len(ids))))
    return Batch(
        ids=names, images={"full": pictures}, texts={"full": ids}, lengths=torch.full((len(ids),), ids.shape[1]), captions=names
    )


def arms(encoder: DualEncoder, pieces: Sequence[Batch]) -> dict[str, Arm]:
    """Each leaves its gradient in ``.grad``."""
    whole = _batch(torch.cat([p.images["full"] for p in pieces]), torch.cat([p.texts["full"] for p in pieces]))

    def one_batch() -> None:
        encoder.zero_grad(set_to_none=True)
        total_loss(FRAMEWORK(encoder.embed(whole))).backward()

    def in_pieces() -> None:
        encoder.zero_grad(set_to_none=True)
        passed = cached.first_pass(encoder.embed, pieces, encoder.scale())
        total_loss(FRAMEWORK(passed.embeddings)).backward()
        passed.replay()

    def narrow() -> None:
        encoder.zero_grad(set_to_none=True)
        for piece in pieces:
            total_loss(FRAMEWORK(encoder.embed(piece))).backward()

    return {ONE: one_batch, CACHED: in_pieces, NARROW: narrow}


def difference(encoder: DualEncoder, work: dict[str, Arm]) -> float:
    """Largest over parameters of |cached - one batch| / |one batch|; parameters whose gradient is rounding alone are left out."""
    grads = []
    for name in (ONE, CACHED):
        work[name]()
        grads.append([p.grad.double() for p in encoder.parameters() if p.grad is not None])
    largest = max(float(g.abs().max()) for g in grads[0])
    pairs = [(a, b) for a, b in zip(*grads, strict=True) if float(a.abs().max()) > 1e-6 * largest]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cached accumulation.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_cached"), help="folder for CSV and JSON")
    parser.add_argument("--model", default="tiny", help="tiny, or a model of open_clip, which gets random weights")
    parser.add_argument("--count", type=int, default=8, help="micro-batches")
    parser.add_argument("--size", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    if min(given.count, given.rounds, given.threads) < 1 or given.size < 2:
        raise ValueError("give at least 1 micro-batch of 2 rows, 1 round and 1 thread")
    torch.set_num_threads(given.threads)
    facts = machine()
    say_machine(facts)
    encoder = encoder_of(given.model)
    work = arms(encoder, pieces_of(encoder, given.count, given.size))
    gradient = difference(encoder, work)
    frame = side_by_side(work, reference=ONE, rounds=given.rounds)
    notes = {
        "floor of cached": f"{(4 * given.count - 1) / (3 * given.count):.3f}",
        "gradient, cached against one batch": f"{gradient:.1e} relative",
    }
    title = f"{given.model}: {given.count} x {given.size} rows, forward + backward"
    report(frame, title=title, output=given.output, name="cached", facts=facts, notes=notes)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"cached: {error}", file=sys.stderr)
        sys.exit(2)
