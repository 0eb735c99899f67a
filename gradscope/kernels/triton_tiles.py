"""The two Triton kernels of the streaming loss, one tile of the logits each: sums of the forward, gradient cells of the backward; and
one that is launched to see whether any can be (``triton_found``).

A tile is BLOCK_M rows x BLOCK_N columns of logits = scale * q k^T. The products are read where they are GIVEN, and formed in the tile
otherwise, over the inner width in chunks of BLOCK_K, fp32 accumulated.
Cells that are no negatives are -inf: the positive (column = first + row), cells of equal ``groups``, and what lies beyond the edge.
    sums_kernel   per tile and row: largest logit m and sum of exp(logit - m); per tile and column the same
    cells_kernel  A = row_weight exp(logit - row_shift) + column_weight exp(logit - column_shift), stored for the block of rows, and per
                  tile <A, logits> and the number of negatives whose A is exactly 0
Each tile writes to places of its own and no atomics are used, so that equal inputs give equal bits.

Source: the online softmax of Milakov and Gimelshein (2018) and its tiles in FlashAttention (Dao et al., 2022), here in both directions
and over negatives only. How it can mislead: PRECISION "tf32" rounds fp32 factors to 11 bits, which at scale 100 moves logits by .02.

A tile's place is int64, offsets inside it are int32: a million rows of 4096 numbers overflow int32, 128 rows of a million do not.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# The arguments are pointers and blocks of Triton's language, which has no types for them.

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def try_kernel(place):
    """Whether anything can be built and launched at all."""
    tl.store(place, 1)


@triton.jit
def _place(n_rows, n_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile of this program. GROUP row blocks are walked together, so that the cache keeps their rows and columns."""
    row_blocks = tl.cdiv(n_rows, BLOCK_M)
    column_blocks = tl.cdiv(n_columns, BLOCK_N)
    program = tl.program_id(0)
    start = program // (GROUP * column_blocks) * GROUP
    height = tl.minimum(row_blocks - start, GROUP)
    inside = program % (GROUP * column_blocks)
    return start + inside % height, inside // height


@triton.jit
def _logits(
    q, k, given, scale, groups, row, column, n_rows, n_columns, width, first,
    GIVEN: tl.constexpr, HAS_GROUPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Logits [BLOCK_M, BLOCK_N] of the tile that begins at (row, column), -inf where a cell is no negative."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    in_rows, in_columns = m < n_rows - row, n < n_columns - column
    if GIVEN:
        given += row * n_columns + column
        products = tl.load(given + (m[:, None] * n_columns + n[None, :]), mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    else:
        q, k = q + row * width, k + column * width  # one int64 each; offsets inside a tile fit int32, which halves their registers
        products = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, width, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            a = tl.load(q + (m[:, None] * width + inner[None, :]), mask=in_rows[:, None] & (inner < width)[None, :], other=0.0)
            b = tl.load(k + (n[None, :] * width + inner[:, None]), mask=in_columns[None, :] & (inner < width)[:, None], other=0.0)
            products = tl.dot(a, b, products, input_precision=PRECISION)
    hidden = (n[None, :] + column == m[:, None] + (first + row)) | ~(in_rows[:, None] & in_columns[None, :])
    if HAS_GROUPS:
        of_rows = tl.load(groups + first + row + m, mask=in_rows, other=0)
        of_columns = tl.load(groups + column + n, mask=in_columns, other=0)
        hidden = hidden | (of_rows[:, None] == of_columns[None, :])
    return tl.where(hidden, float("-inf"), products * tl.load(scale))


@triton.jit
def _largest_and_sum(logits, AXIS: tl.constexpr):
    """Per row or column: the largest logit and the sum of exp(logit - largest), -inf and 0 where there is no negative."""
    largest = tl.max(logits, AXIS)
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # -inf minus -inf would be nan
    return largest, tl.sum(tl.exp(logits - tl.expand_dims(shift, AXIS)), AXIS)


@triton.jit
def sums_kernel(
    q, k, given, scale, groups, row_max, row_sum, column_max, column_sum, n_rows, n_columns, width, first,
    GIVEN: tl.constexpr, HAS_GROUPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile's sums: row_max, row_sum [column blocks, n_rows]; column_max, column_sum [row blocks, n_columns]."""
    row_block, column_block = _place(n_rows, n_columns, BLOCK_M, BLOCK_N, GROUP)
    row, column = row_block.to(tl.int64) * BLOCK_M, column_block.to(tl.int64) * BLOCK_N
    logits = _logits(
        q, k, given, scale, groups, row, column, n_rows, n_columns, width, first,
        GIVEN, HAS_GROUPS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    largest, total = _largest_and_sum(logits, 1)
    place = column_block.to(tl.int64) * n_rows + rows
    tl.store(row_max + place, largest, mask=rows < n_rows)
    tl.store(row_sum + place, total, mask=rows < n_rows)
    largest, total = _largest_and_sum(logits, 0)
    place = row_block.to(tl.int64) * n_columns + columns
    tl.store(column_max + place, largest, mask=columns < n_columns)
    tl.store(column_sum + place, total, mask=columns < n_columns)


@triton.jit
def cells_kernel(
    q, k, given, scale, groups, row_shift, row_weight, column_shift, column_weight, cells, inner_sum, zeros,
    n_rows, n_columns, width, first,
    GIVEN: tl.constexpr, HAS_GROUPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of A into cells [n_rows, n_columns], with <A, logits> and the count of zeros into inner_sum, zeros [tiles].

    ``cells`` may be the memory of ``given``: a tile is read before it is written, and no other reads it.
    """
    row_block, column_block = _place(n_rows, n_columns, BLOCK_M, BLOCK_N, GROUP)
    row, column = row_block.to(tl.int64) * BLOCK_M, column_block.to(tl.int64) * BLOCK_N
    logits = _logits(
        q, k, given, scale, groups, row, column, n_rows, n_columns, width, first,
        GIVEN, HAS_GROUPS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    in_rows, in_columns = m < n_rows - row, n < n_columns - column
    gradient = tl.exp(logits - tl.load(row_shift + row + m, mask=in_rows, other=0.0)[:, None])
    gradient *= tl.load(row_weight + row + m, mask=in_rows, other=0.0)[:, None]
    by_column = tl.exp(logits - tl.load(column_shift + column + n, mask=in_columns, other=0.0)[None, :])
    gradient += by_column * tl.load(column_weight + column + n, mask=in_columns, other=0.0)[None, :]
    cells += row * n_columns + column
    tl.store(
        cells + (m[:, None] * n_columns + n[None, :]), gradient.to(cells.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :]
    )
    empty = gradient == 0.0
    inner = tl.where(empty, 0.0, gradient * logits)  # 0 times -inf would be nan
    tl.store(inner_sum + tl.program_id(0), tl.sum(tl.sum(inner, 1), 0))
    empty &= logits != float("-inf")
    tl.store(zeros + tl.program_id(0), tl.sum(tl.sum(empty.to(tl.int32), 1), 0))
