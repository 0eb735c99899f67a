"""The Triton kernels against float64: run by Triton's interpreter on the CPU, and compiled for two GPUs that need not be here."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton_interpreted
from host_waits import Waits
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradscope.kernels import triton_strip, triton_tiles
from gradscope.kernels.cells import Cells
from gradscope.kernels.library import library_products
from gradscope.kernels.stream import _kernel, stream
from gradscope.kernels.triton_found import launch_fails, say_once, why_not

#: Relative error of losses and gradients that fp32 rows allow, and what a cosine that is 4e-7 off does by the scale, at the least.
TOLERANCE = 2e-5
COSINE = 4e-7
#: A is rounded to bf16 where the rows are of two bytes.
HALF_TOLERANCE = 1e-2


@pytest.fixture(scope="module")
def interpreted():
    """What the kernels answered on fresh random rows, in a process where the interpreter was chosen before triton was imported."""
    if triton.__version__.startswith("3.6.") and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of triton 3.6, which torch 2.11 brings, makes ints of arrays of one number: numpy 2.4 refuses")
    script = Path(triton_interpreted.__file__)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", triton_interpreted.CASES)
def test_as_float64(interpreted, name):
    found = interpreted["cases"][name]
    case = triton_interpreted.CASES[name]
    exact = max(TOLERANCE, COSINE * case.scale)
    for gradient in ("image", "text"):
        assert found[gradient] < (exact if case.dtype == torch.float32 else HALF_TOLERANCE), gradient
    for value in ("loss", "scale"):
        assert found[value] < exact, value
    for cosine in ("row_max", "column_max", "top"):
        assert found[cosine] < 1e-6, cosine


def test_losses_from_next_to_nothing_to_far_too_large(interpreted):
    losses = [case["true_loss"] for case in interpreted["cases"].values()]
    assert min(losses) < 1e-20
    assert max(losses) > 40


def test_zeros_are_counted(interpreted):
    assert interpreted["zeros"]["found"] == interpreted["zeros"]["expected"] > 0


def test_equal_inputs_give_equal_bits(interpreted):
    assert interpreted["repeated"]


def test_several_runs_of_rows_answer_as_one(interpreted):
    assert interpreted["runs"]


@pytest.mark.parametrize("settings", ["live, exclude", "live, positives", "external, exclude", "centred, positives"])
def test_the_whole_loss_with_these_passes(interpreted, settings):
    assert max(interpreted["losses"][settings].values()) < TOLERANCE, interpreted["losses"][settings]


def test_nothing_around_the_kernels_waits_for_a_gpu(interpreted):
    assert interpreted["waits"] == []


@pytest.mark.parametrize("margin", ["live", "centred", "external"])
@pytest.mark.parametrize("more", [{}, {"groups": torch.tensor([4, 1, 1, 0, 4, 2])}, {"top": 2}])
def test_the_loss_never_waits_for_a_gpu(margin, more):
    """In the form that a GPU takes. Several positives do wait: how many pairs there are is a shape."""
    rows = [torch.nn.functional.normalize(torch.randn(6, 5), dim=1).requires_grad_() for _ in range(3)]
    scale = torch.tensor(9.0, requires_grad=True)
    with Waits() as waits:
        stream(*rows[:2], scale, gamma=0.4, margin=margin, margin_text=rows[2], backend="safe", **more).loss.mean().backward()
    assert waits.seen == []


def test_waits_are_seen():
    with Waits() as waits:
        mask = torch.arange(4) > 1
        torch.arange(4)[mask].sum().item()
    assert len(waits.seen) == 2


def compiled(kernel, dtype, precision, capability, cache, given=False, groups=True):
    """The kernel as a GPU would get it: triton compiles without one."""
    tiles = triton_strip.tiles_for(torch.float32 if dtype == "fp32" else torch.bfloat16)
    meta = {
        "GIVEN": given,
        "HAS_GROUPS": groups,
        "PRECISION": precision,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.inner,
    }
    meta["GROUP"] = tiles.walk
    types = {"q": dtype, "k": dtype, "cells": dtype, "groups": "i64", "zeros": "i32"}
    sizes = ("n_rows", "n_columns", "width", "first")
    names = [name for name in kernel.arg_names if name not in meta]
    signature = {name: "i32" if name in sizes else "*" + types.get(name, "fp32") for name in names}
    meta |= {} if given else {"given": None}
    meta |= {} if groups else {"groups": None}
    signature |= dict.fromkeys(meta, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in sizes or name == "width"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=meta, attrs=aligned)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack(kernel, folder):
    """Bytes of registers spilled to the stack, as the driver's tool reads them off the machine code."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return int(said.partition("STACK:")[2].split()[0])


@pytest.mark.parametrize(
    ("kernel", "dtype", "capability", "given"),
    [
        ("sums_kernel", "fp32", 90, True),
        ("cells_kernel", "fp32", 80, True),
        ("cells_kernel", "fp32", 90, False),
        ("cells_kernel", "bf16", 90, False),
    ],
)
def test_compiles_without_spills_and_without_tf32(kernel, dtype, capability, given, tmp_path):
    found = compiled(getattr(triton_tiles, kernel), dtype, "ieee", capability, tmp_path, given=given, groups=given)
    assert "tf32" not in found.asm["ptx"]
    assert found.metadata.shared <= 99 * 1024  # what the smallest GPUs of 8.x and 12.x have
    assert stack(found, tmp_path) == 0


def test_tf32_is_there_when_asked_for(tmp_path):
    assert "tf32" in compiled(triton_tiles.sums_kernel, "fp32", "tf32", 80, tmp_path).asm["ptx"]


@pytest.mark.parametrize(("precision", "inside"), [("ieee", "ieee"), ("ieee-tiles", "ieee"), ("tf32", "tf32")])
@pytest.mark.parametrize("callers", ["highest", "high"])
def test_the_callers_tf32_switch_does_not_count_and_comes_back(precision, inside, callers):
    """The switch of CUDA's library is there without a GPU."""
    switch, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(callers)
        theirs = switch.fp32_precision
        with library_products(torch.device("cuda"), precision):
            assert switch.fp32_precision == inside
        assert (switch.fp32_precision, torch.get_float32_matmul_precision()) == (theirs, callers)
        with library_products(torch.device("cpu"), precision):
            assert switch.fp32_precision == theirs
    finally:
        torch.set_float32_matmul_precision(before)


def test_both_passes_have_the_same_default():
    defaults = {inspect.signature(f).parameters["precision"].default for f in (triton_strip.forward_strip, triton_strip.backward_strip)}
    assert defaults == {"ieee"}
    assert "IEEE" in triton_strip.words()


def cells(dtype):
    rows = torch.eye(4, dtype=dtype)
    return Cells(image=rows, text=rows, keys=rows, gamma=0.0)


@pytest.mark.parametrize(
    ("dtype", "precision", "words"),
    [(torch.float64, "ieee", "float64 were given.*float32"), (torch.float32, "fast", "'fast' is unknown; give one of ieee")],
)
def test_what_the_kernels_lack_is_refused(dtype, precision, words):
    with pytest.raises(ValueError, match=words):
        triton_strip.forward_strip(cells(dtype), torch.ones(()), slice(0, 4), precision=precision)


def test_the_cpu_has_the_torch_blocks():
    assert why_not(torch.eye(3)) == "cpu is no NVIDIA GPU"
    assert why_not(torch.eye(3).double()).startswith("rows of torch.float64 were given")


def test_what_cannot_be_launched_is_said_and_not_raised():
    """Without a GPU the trial fails as it would without a C compiler: on the way to the first launch."""
    assert launch_fails(torch.device("cpu")).startswith("a kernel cannot be built or launched (RuntimeError: ")


def test_a_gpu_without_triton_takes_the_torch_blocks_and_says_so_once(capsys):
    with FakeTensorMode():
        rows = torch.empty(4, 3, dtype=torch.float64, device="cuda")
    say_once.cache_clear()
    for _ in range(2):
        kernel = _kernel(Cells(image=rows, text=rows, keys=rows, gamma=0.0), "auto")
    assert kernel.words.startswith("torch blocks, two exp per cell; no Triton: rows of torch.float64 were given")
    assert capsys.readouterr().err.count("takes torch's blocks") == 1


def test_what_can_be_launched_is_found(interpreted):
    assert interpreted["launch"] == ""


def test_triton_asked_for_in_vain_is_refused():
    with pytest.raises(ValueError, match="cannot be used: cpu is no NVIDIA GPU; give backend 'auto'"):
        stream(torch.eye(3), torch.eye(3), torch.ones(()), backend="triton")


def test_torch_blocks_need_no_triton():
    code = "import sys; sys.modules['triton'] = None; import torch; from gradscope.kernels.stream import stream; " + (
        "x = torch.eye(3); print(float(stream(x, x, torch.tensor(1.0)).loss.sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(3 * torch.log(torch.tensor(1 + 2 / torch.e)).item(), rel=1e-6)
