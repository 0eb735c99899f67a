"""Where the embeddings of somebody's loop are seen: the hooks that see them, and which of them to believe.

    a loss module        its call (open_clip's losses, any module that takes two matrices and a scale)
    a loss of sentence-transformers    its embeddings on their way into the softmax, cached or not
    nothing told         the model and the modules up to two levels inside it, until one of them returns, or is called with, two
                         matrices of embeddings and a scale, or has its two ``encode_...`` methods called; from then on that one only

Hooks return at once while torch.compile traces (so they break no graph), inside a backward (activation checkpointing computes again)
and without gradient. How it can mislead: the first module that fits is taken; quantity ``hooks`` shows whether it was the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.attach import found
from gradscope.attach.found import Found
from gradscope.attach.wrapping import Hook, replace_method

#: How far inside the model embeddings are looked for.
DEPTH = 2

#: Methods of one tower each (open_clip, OpenAI's CLIP; Hugging Face), first tower first.
METHODS = (
    ("encode_image", "encode_text"),
    ("get_image_features", "get_text_features"),
    ("encode_audio", "encode_text"),
    ("get_audio_features", "get_text_features"),
)


class EmbeddingSource:
    """Calls ``seen`` with what it finds, after the forward pass and before the backward.

    Args:
        seen: takes a ``Found``, and whether a backward of the whole loss passes these very tensors (not so where a loss caches).
    """

    def __init__(self, model: nn.Module, loss: nn.Module | None, seen: Callable[[Found, bool], None]) -> None:
        self.model, self.loss, self.seen = model, loss, seen
        self.token_ids: Tensor | None = None
        #: Rows that the last forward pass of the model with gradient made; 0 if not known.
        self.rows = 0
        #: What autocast computed in when the model was called, if it was on.
        self.dtype: torch.dtype | None = None
        self.told = False
        self.left_out = 0  # columns of hard negatives
        self.returned = "the model returned no two matrices of embeddings"
        self._inside = 0  # forward passes of searched modules that are under way
        self._encoded: dict[str, Tensor] = {}
        self._undo: list[Callable[[], Any]] = []
        self._searching: list[Callable[[], Any]] = []

    @property
    def directions(self) -> tuple[str, ...] | None:
        """Those of a loss that states its own; () if it is none that the probe knows; None if it states nothing."""
        stated = getattr(self.loss, "directions", None)
        if stated is None or not hasattr(self.loss, "partition_mode"):
            return None
        if getattr(self.loss, "hardness_mode", None) is not None:
            return ()
        if tuple(stated) == ("query_to_doc",):
            return ("i2t",)
        both = set(stated) == {"query_to_doc", "doc_to_query"} and self.loss.partition_mode == "per_direction"  # type: ignore[union-attr]
        return ("i2t", "t2i") if both else ()

    def attach(self) -> None:
        self._undo.append(self.model.register_forward_pre_hook(Hook(self._inputs), with_kwargs=True).remove)
        if self.loss is None:
            self._search()
            return
        self._undo.append(self.model.register_forward_hook(Hook(self._count_rows)).remove)
        if hasattr(self.loss, "compute_loss_from_embeddings"):
            self._wrap(self.loss, "compute_loss_from_embeddings", self._columns)
        elif hasattr(self.loss, "calculate_loss") and hasattr(self.loss, "mini_batch_size"):
            self._wrap(self.loss, "calculate_loss", self._cached_columns)
        else:
            self._undo.append(self.loss.register_forward_pre_hook(Hook(self._call), with_kwargs=True).remove)

    def detach(self) -> None:
        for undo in (*self._searching, *self._undo):
            undo()
        self._searching, self._undo = [], []

    def stop_searching(self) -> None:
        for undo in self._searching:
            undo()
        self._searching = []

    # ---- a loss

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._tell(None if passive() else found.in_call(args, kwargs), self._whole)

    def _wrap(self, loss: Any, name: str, look: Callable[[Any], None]) -> None:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(embeddings: Any, *args: Any, **kwargs: Any) -> Any:
                if not passive():
                    look(embeddings)
                return original(embeddings, *args, **kwargs)

            return wrapper

        self._undo.append(replace_method(loss, name, around))

    def _columns(self, embeddings: list[Tensor]) -> None:
        """Anchors, positives, and columns of hard negatives, which the readings leave out."""
        self.left_out = len(embeddings) - 2
        self._tell(Found(image=embeddings[0], text=embeddings[1], scale=float(self.loss.scale)), lambda seen: True)  # type: ignore[union-attr, arg-type]

    def _cached_columns(self, pieces: list[list[Tensor]]) -> None:
        self.left_out = len(pieces) - 2
        image, text = (torch.cat([piece.detach() for piece in column]) for column in pieces[:2])
        self._tell(Found(image=image, text=text, scale=float(self.loss.scale)), lambda seen: False)  # type: ignore[union-attr, arg-type]

    def _whole(self, seen: Found) -> bool:
        """Whether the model made all these rows in one forward pass; open_clip's accumulation joins rows of several."""
        return self.rows in (0, len(seen.image))

    # ---- a model

    def _search(self) -> None:
        for module in candidates(self.model):
            hooks = (
                module.register_forward_pre_hook(Hook(self._may_be_called), with_kwargs=True),
                module.register_forward_hook(Hook(self._may_return), always_call=True),
            )
            self._searching += [hook.remove for hook in hooks]
            self._searching += self._methods(module)

    def _methods(self, module: nn.Module) -> list[Callable[[], Any]]:
        """Wraps the module's two methods of one tower each, if it has such."""
        pair = next((pair for pair in METHODS if all(callable(getattr(module, name, None)) for name in pair)), ())
        return [replace_method(module, name, self._encodes(pair, name)) for name in pair]

    def _encodes(self, pair: tuple[str, ...], name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                if not elsewhere() and not self.told:
                    rows = getattr(output, "pooler_output", output)  # Hugging Face returns a record
                    self._encoded[name] = rows  # a locked tower runs without gradient
                    if name == pair[1]:
                        ids = found.token_ids(args, kwargs)
                        self.token_ids = self.token_ids if ids is None else ids
                    if not self._inside:  # inside a forward pass, what that returns comes first
                        self._both(pair)
                return output

            return wrapper

        return around

    def _both(self, pair: tuple[str, ...]) -> bool:
        """Tells of both towers' rows once each has been encoded; whether it did."""
        seen = found.by_order([self._encoded[name] for name in pair if name in self._encoded])
        if seen is None:
            return False
        self._encoded = {}
        if passive():
            return False  # an evaluation
        self._tell(seen, lambda _: True)
        return True

    def _may_return(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = max(0, self._inside - 1)
        seen = None if passive() or self.told else found.in_output(output)
        if seen is not None and found.are_logits(seen):
            self.returned = "the model returned logits, not embeddings"
            for pair in METHODS if module is self.model else ():
                if self._both(pair):
                    return
            return
        if seen is not None and (seen.scale is not None or module is self.model):
            self.stop_searching()
            self._undo.append(module.register_forward_hook(Hook(self._returned)).remove)
            if module is not self.model:
                self._undo.append(module.register_forward_pre_hook(Hook(self._inputs), with_kwargs=True).remove)
            self._tell(seen, lambda _: True)

    def _may_be_called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if passive() or self.told:
            return
        ids = found.token_ids(args, kwargs)
        self.token_ids = self.token_ids if ids is None else ids
        seen = found.in_call(args, kwargs)
        if seen is not None and seen.scale is not None and seen.image.requires_grad:
            self.stop_searching()
            self._undo.append(module.register_forward_pre_hook(Hook(self._call), with_kwargs=True).remove)
            self._tell(seen, self._whole)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._tell(None if passive() else found.in_output(output), lambda _: True)

    def _inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if passive():
            return
        device = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), "cpu")
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        ids = found.token_ids(args, kwargs)
        self.token_ids = self.token_ids if ids is None else ids

    def _count_rows(self, module: nn.Module, args: Any, output: Any) -> None:
        if not passive():
            seen = found.in_output(output)
            self.rows = 0 if seen is None else len(seen.image)

    def _tell(self, seen: Found | None, whole: Callable[[Found], bool]) -> None:
        if seen is not None and not self.told:
            self.seen(seen, whole(seen))


def candidates(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and what is up to ``DEPTH`` levels inside it; of a compiled module itself only, since its inside is traced, and of
    ``DataParallel``, whose inside sees parts of the batch."""
    yield model
    if hasattr(model, "_orig_mod") or isinstance(model, nn.DataParallel):
        return
    for name, module in model.named_modules():
        if name and name.count(".") < DEPTH and "_orig_mod" not in name:
            yield module


def passive() -> bool:
    """Whether this forward pass is none of ours: traced by the compiler, a recomputation inside a backward, or without gradient."""
    return elsewhere() or not torch.is_grad_enabled()


def elsewhere() -> bool:
    """Whether it is traced by the compiler, or a recomputation inside a backward."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1
