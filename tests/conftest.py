"""What several test files share: a cache folder of their own, a few scenes, and a CLIP small enough to train in milliseconds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: The shape of ``small_encoder``: 16-pixel pictures, tiny's own merges and context.
SMALL = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16},
        "text_cfg": {"context_length": 128, "vocab_size": 2014, "width": 32, "heads": 2, "layers": 1},
    },
    "preprocess_cfg": {"size": [16, 16], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bicubic"},
}


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is read from, or written to, the user's cache."""
    os.environ["GRADSCOPE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ.pop("GRADSCOPE_DATA", None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order: for tests that compare bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def scenes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 train, 40 val and 64 test scenes."""
    from gradscope.data.scenes import materialise

    return materialise(tmp_path_factory.mktemp("data"), seed=1, train=160, val=40, test=64)


@pytest.fixture(scope="session")
def make_encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_encoder(seed=0, config=SMALL, half=False)``: a folder in open_clip's local-dir layout, with random weights."""
    import torch
    from open_clip import CLIP
    from safetensors.torch import save_file

    from gradscope.encoders.tiny_model import FOLDER

    def make(*, seed: int = 0, config: dict = SMALL, half: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("encoder")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CLIP(**config["model_cfg"])
        (folder / "open_clip_config.json").write_text(json.dumps(config))
        state = {name: t.half() if half else t.clone() for name, t in model.state_dict().items()}
        save_file(state, folder / "open_clip_model.safetensors")
        shutil.copy(FOLDER / "bpe.txt.gz", folder)
        return folder

    return make


@pytest.fixture(scope="session")
def small_encoder(make_encoder: Callable[..., Path]) -> Path:
    return make_encoder()
