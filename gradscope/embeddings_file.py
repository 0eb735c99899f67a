"""A gallery's embeddings as one safetensors file, to be scored again without the model: the same numbers to the last bit.

    image          float32 [N, D]   unit rows           ids       uint8 [...]     JSON list of N strings, UTF-8
    text           float32 [M, D]   unit rows           captions  uint8 [M, 32]   sha256 of each caption
    image_of_text  int64 [M]                            metadata  schema, version, protocol (JSON: encoder, data, split, counts ...)

How it can mislead: captions are kept as digests only, so a dump per query names a caption by its image and number.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from gradscope.evaluate import Embedded
from gradscope.metrics.gallery_scores import check_gallery
from gradscope.protocol import Protocol, read_protocol

SCHEMA, VERSION = "gradscope.embeddings", "1"
SUFFIX = ".safetensors"

_TENSORS = {
    "image": (torch.float32, 2),
    "text": (torch.float32, 2),
    "image_of_text": (torch.int64, 1),
    "ids": (torch.uint8, 1),
    "captions": (torch.uint8, 2),
}


def is_embeddings_file(name: str) -> bool:
    """Whether a name on the command line means a file of embeddings: a safetensors file that is not a model's weights.

    A damaged file counts as one, so that reading it says what is wrong.
    """
    if not name.endswith(SUFFIX) or not Path(name).is_file():
        return False
    try:
        with safe_open(name, framework="pt") as file:
            return (file.metadata() or {}).get("schema") == SCHEMA
    except (SafetensorError, OSError):
        return True


def save_embeddings(path: Path, embedded: Embedded, protocol: Protocol) -> None:
    """Writes the file whole or not at all. Raises ValueError if the name does not end in .safetensors."""
    if path.suffix != SUFFIX:
        raise ValueError(f"embeddings are stored as safetensors; give a name that ends in {SUFFIX} instead of '{path}'.")
    tensors = {
        "image": embedded.image.float(),
        "text": embedded.text.float(),
        "image_of_text": embedded.image_of_text,
        "ids": _bytes(json.dumps(embedded.ids, ensure_ascii=False).encode()),
        "captions": _bytes(bytes.fromhex("".join(embedded.digests))).reshape(len(embedded.digests), 32),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    metadata = {"schema": SCHEMA, "version": VERSION, "protocol": json.dumps(protocol.facts(), ensure_ascii=False)}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
    partial.replace(path)


def save_pairs(
    path: str | Path, image: Tensor, text: Tensor, image_of_text: Tensor | None = None, *, encoder: str = "another loop's"
) -> None:
    """Embeddings of any two towers, for ``what-if``, ``audit``, ``embedding-geometry`` and ``eval``.

    Args:
        image, text: [N, D] and [M, D]; normalised here.
        image_of_text: int64 [M], the row of ``image`` that each row of ``text`` belongs to; None pairs row i with row i.
        encoder: what the rows came from, printed beside every number.

    Raises:
        ValueError: shapes that do not belong together; a name that does not end in .safetensors.
    """
    owner = torch.arange(len(text)) if image_of_text is None else image_of_text.cpu()
    if image_of_text is None and len(image) != len(text):
        raise ValueError(f"{len(image)} and {len(text)} rows do not pair up; give image_of_text, or one row of text for each image")
    image, text = (F.normalize(rows.detach().float().cpu(), dim=1) for rows in (image, text))
    check_gallery(image, text, owner)
    rows = tuple(map(str, range(len(text))))
    digests = tuple(hashlib.sha256(row.encode()).hexdigest() for row in rows)
    embedded = Embedded(ids=rows[: len(image)], image=image, text=text, image_of_text=owner, truncated=0, digests=digests)
    protocol = Protocol(
        encoder=encoder, data="rows as given", split="all", sha256="", images=len(image), captions=len(text), expected=len(image),
        missing=0, bad=0, context=0, truncated=0, preprocessing="not known", precision="fp32 rows as given",
    )  # fmt: skip
    save_embeddings(Path(path), embedded, protocol)


def load_embeddings(path: str | Path) -> tuple[Embedded, Protocol]:
    """Reads and checks a file.

    Raises:
        ValueError: no such file, damaged, not a file of embeddings, or contents that do not belong together.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"'{path}' does not exist; make it with `gradscope eval ENCODER --data DATA --save-embeddings {path}`.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_schema(metadata)
            tensors = {name: _tensor(file, name) for name in _TENSORS}
        return _assembled(tensors, metadata)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"'{path}' is damaged or no safetensors file ({error}); write it again with --save-embeddings.") from error
    except ValueError as error:
        raise ValueError(f"'{path}' cannot be scored: {error}; write it again with `gradscope eval ... --save-embeddings`.") from error


def _bytes(raw: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())


def _check_schema(metadata: dict[str, str]) -> None:
    found = metadata.get("schema"), metadata.get("version")
    if found[0] != SCHEMA:
        raise ValueError("it holds no embeddings of gradscope (weights of a model, perhaps)")
    if found[1] != VERSION:
        raise ValueError(f"its layout has version {found[1]}, this program reads {VERSION}")


def _tensor(file: Any, name: str) -> Tensor:
    dtype, dims = _TENSORS[name]
    if name not in file.keys():  # noqa: SIM118  (not a mapping)
        raise ValueError(f"it has no tensor '{name}'")
    tensor: Tensor = file.get_tensor(name)
    if tensor.dtype != dtype or tensor.ndim != dims:
        raise ValueError(f"tensor '{name}' is {tensor.dtype} with {tensor.ndim} dimensions, expected {dtype} with {dims}")
    return tensor


def _assembled(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[Embedded, Protocol]:
    try:
        ids, facts = json.loads(bytes(tensors["ids"].numpy())), json.loads(metadata.get("protocol", ""))
    except ValueError as error:
        raise ValueError(f"its ids or its protocol are not JSON ({error})") from error
    if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids) or not isinstance(facts, dict):
        raise ValueError("its ids are not a list of strings, or its protocol is not a table")
    protocol = read_protocol(facts)
    image, text, owner, digests = (tensors[name] for name in ("image", "text", "image_of_text", "captions"))
    fits = len(ids) == len(image) and (protocol.images, protocol.captions) == (len(image), len(text))
    if not fits or tuple(digests.shape) != (len(text), 32):
        raise ValueError(
            f"it has {len(image):,} images, {len(ids):,} ids, {len(text):,} captions, {len(digests):,} digests and a protocol of "
            f"{protocol.images:,} and {protocol.captions:,}"
        )
    check_gallery(image, text, owner)
    embedded = Embedded(
        ids=tuple(ids),
        image=image,
        text=text,
        image_of_text=owner,
        truncated=protocol.truncated,
        digests=tuple(row.tobytes().hex() for row in digests.numpy()),
        context=protocol.context,
        preprocessing=protocol.preprocessing,
        precision=protocol.precision,
    )
    return embedded, protocol
