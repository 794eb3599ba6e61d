"""The weighted sums that a fingerprint is made of, over bytes in memory and on an accelerator.

A tensor is taken as the bytes of its elements in row-major order, little-endian. These are read as 32-bit words
x(0), x(1), ... (bytes that are missing count as zero). Modulo 2^64,

    total    = sum of x(i) * 2^(32 * (i mod 2))        the plain sum of the bytes as 64-bit words
    weighted = sum of x(i) * w(i)                      w(i) = R[i mod 2^16] * M(i >> 16), all odd

R and M are pseudo-random: R[j] is output j of splitmix64 with seed 2, M(b) output b with seed 3, each with the lowest
bit set. Nothing of this may change without a new `fingerprint.VERSION`: fingerprints are kept in manifests.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from .extents import Box, Part, Run, Shape, get_row_major_strides
from .kernel import find_kernel

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Bytes = npt.NDArray[np.uint8]
    Words = npt.NDArray[np.uint64]
    Indices = npt.NDArray[np.int64]

MASK = (1 << 64) - 1
PERIOD = 1 << 16  # 32-bit words after which R begins again
_PAIRS = PERIOD // 2  # the same in 64-bit words

_SEED_R, _SEED_M = 2, 3
_BLOCKS = 4  # at a time: 1 MiB, which stays in a core's cache from one sum to the next


def list_rows(box: Box, shape: Shape) -> tuple[Indices, int]:
    """Return where the consecutive runs of `box` start, in elements, and their one length."""
    strides = get_row_major_strides(shape)
    split, length = len(shape), 1
    while split:
        split -= 1
        length *= box.sizes[split]
        if box.sizes[split] != shape[split]:
            break
    starts = np.array([sum(map(int.__mul__, box.offsets, strides))], np.int64)
    for size, stride in zip(box.sizes[:split], strides[:split], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _generate(seed: int, first: int, count: int) -> Words:
    """Return outputs `first`... of splitmix64, made odd."""
    z = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around in silence
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z ^ (z >> np.uint64(31))) | np.uint64(1))


@functools.lru_cache(maxsize=1)
def get_weights() -> Words:
    """Return R, the weights of the `PERIOD` words of a block."""
    return _generate(_SEED_R, 0, PERIOD)


def get_multipliers(first: int, count: int) -> Words:
    """Return M for `count` blocks from block `first` on."""
    return _generate(_SEED_M, first, count)


@functools.lru_cache(maxsize=1024)
def _get_multiplier(block: int) -> int:
    return int(get_multipliers(block, 1)[0])


@functools.lru_cache(maxsize=1)
def _get_pair_weights() -> tuple[Words, Words]:
    """Return (A, B) with x * A[k] + (x >> 32) * B[k] = low * R[2k] + high * R[2k + 1] for 64-bit words x.

    The high half gets 2^32 * A[k] from the first term, so B makes up for it. This way 64-bit words are multiplied
    as they lie in memory, and only one of the two terms needs a copy of them.
    """
    weights = get_weights()
    low, high = weights[0::2].copy(), weights[1::2]
    return low, high - (low << np.uint64(32))


@functools.lru_cache(maxsize=1)
def _get_shifted_weights() -> tuple[Words, Words]:
    """Return (A, B) with, over the words x of a block and the words y that begin four bytes later,

        sum of x * A + sum of y * B = sum of low * R[even] + high * R[odd]

    So nothing is taken apart: both sums are of words as they lie in memory, where y takes the high half of one word
    and the low half of the next. The last y would reach beyond the block and is left out, see `_sum_within_block`.
    In x * A the high half gets 2^32 * A, in y * B the next low half 2^32 * B; each is made up for in the other.
    """
    weights = get_weights()
    first, second = weights[0::2].copy(), weights[1::2].copy()
    shift = np.uint64(32)
    second -= first << shift  # of A only the lower half counts, which is that of R[even]
    first[1:] -= weights[1:-1:2] << shift
    return first, second


def _view_shifted(words: Words) -> Words:
    """Return the words that begin four bytes later: one less in each row."""
    count = words.shape[-1] - 1
    view: Words = np.ndarray((*words.shape[:-1], count), np.uint64, words, 4, words.strides)
    return view


def _sum_whole_blocks(words: Words) -> Words:
    """Return the weighted sum of every row, a whole block each, before its multiplier."""
    first, second = _get_shifted_weights()
    # einsum multiplies and adds in one pass without the interpreter's lock, unaligned words included. Several
    # calls on smaller pieces make threads wait for the lock longer than they calculate.
    sums = np.einsum("ij,j->i", words, first)
    sums += np.einsum("ij,j->i", _view_shifted(words), second[:-1])
    sums += (words[:, -1] >> np.uint64(32)) * second[-1]
    return np.asarray(sums)


def _sum_within_block(words: Words, place: int) -> int:
    """Return the weighted sum of words that begin at word `place` of a block, before its multiplier."""
    first, second = (each[place : place + words.size] for each in _get_shifted_weights())
    found = int(np.einsum("i,i->", words, first))
    found += int(np.einsum("i,i->", _view_shifted(words), second[:-1]))
    found += (int(words[-1]) >> 32) * int(second[-1])
    if place:  # the word before is not there, which A makes up for
        found += (int(words[0]) << 32) * int(get_weights()[2 * place - 1])
    return found


class Sums:
    """Both sums over parts of one tensor, as Python integers that grow; take them modulo 2^64 at the end."""

    def __init__(self) -> None:
        self.total = 0
        self.weighted = 0

    def add_run(self, position: int, data: Bytes) -> None:
        """Add consecutive bytes that start `position` bytes into the tensor."""
        kernel = find_kernel()
        if kernel is not None:
            total, weighted = kernel.compute_sums(position, data.__array_interface__["data"][0], data.size)
            self.total += total
            self.weighted += weighted
            return
        head = min(-position % 8, data.size)
        if head:
            self._add_partial_word(position, data[:head])
        tail = (data.size - head) % 8
        if tail:
            self._add_partial_word(position + data.size - tail, data[data.size - tail :])
        body = data[head : data.size - tail]
        if body.size:
            self._add_words((position + head) // 8, body)

    def _add_partial_word(self, position: int, data: Bytes) -> None:
        word = int.from_bytes(data.tobytes(), "little") << (8 * (position % 8))
        block, place = divmod(position // 8, _PAIRS)
        low, high = _get_pair_weights()
        self.total += word
        self.weighted += _get_multiplier(block) * (word * int(low[place]) + (word >> 32) * int(high[place]))

    def _add_words(self, index: int, body: Bytes) -> None:
        """Add whole 64-bit words, the first of which is word `index` of the tensor. They need not be aligned."""
        words = body.view(np.uint64)
        done = 0
        while done < words.size:
            block, place = divmod(index + done, _PAIRS)
            left = words.size - done
            if place or left < _PAIRS:
                size = min(_PAIRS - place, left)
                self.weighted += _get_multiplier(block) * _sum_within_block(words[done : done + size], place)
            else:
                size = min(left // _PAIRS, _BLOCKS) * _PAIRS
                sums = _sum_whole_blocks(words[done : done + size].reshape(-1, _PAIRS))
                sums *= get_multipliers(block, sums.size)
                self.weighted += int(np.add.reduce(sums))
            self.total += int(np.add.reduce(words[done : done + size]))
            done += size

    def add_rows(self, positions: Indices, rows: Bytes, unit: int) -> None:
        """Add many short runs of equal length that start `positions` bytes into the tensor, in ascending order.

        `unit` (1, 2, 4) divides all positions and the length. Uses 10 times the memory of the rows, and 20 or 40
        times where rows of 2- or 1-byte elements don't begin at whole words.
        """
        length = rows.shape[1]
        kernel = find_kernel()
        if kernel is not None:
            rows, starts = np.ascontiguousarray(rows), np.ascontiguousarray(positions, np.int64)
            total, weighted = kernel.compute_row_sums(starts.ctypes.data, len(starts), rows.ctypes.data, length)
            self.total += total
            self.weighted += weighted
            return
        common = int(np.bitwise_or.reduce(positions)) | length
        rows = np.ascontiguousarray(rows) if rows.__array_interface__["data"][0] % 8 == 0 else rows.copy()
        if common % 8 == 0 and length >= 64:
            self._add_rows_of_pairs(positions >> 3, rows.view(np.uint64))
        else:
            self._add_rows_of_units(positions, rows, 4 if common % 4 == 0 else unit)

    def _add_rows_of_pairs(self, indices: Indices, x: Words) -> None:
        length = x.shape[1]
        places = indices & (_PAIRS - 1)
        is_split = places + length > _PAIRS  # a row that two multipliers share
        for row in np.flatnonzero(is_split).tolist():
            self.add_run(int(indices[row]) * 8, x[row].view(np.uint8))
        if is_split.any():
            x, indices, places = x[~is_split], indices[~is_split], places[~is_split]
        if not indices.size:
            return
        low, high = (np.lib.stride_tricks.sliding_window_view(each, length) for each in _get_pair_weights())
        products = low[places]
        products *= x
        inner = np.add.reduce(products, axis=1)
        products = high[places]
        products *= x >> np.uint64(32)
        inner += np.add.reduce(products, axis=1)
        blocks = indices // _PAIRS
        inner *= get_multipliers(int(blocks[0]), int(blocks[-1] - blocks[0]) + 1)[blocks - blocks[0]]
        self.weighted += int(np.add.reduce(inner))
        self.total += int(np.add.reduce(x, axis=None))

    def _add_rows_of_units(self, positions: Indices, rows: Bytes, unit: int) -> None:
        x = rows.view(f"u{unit}").astype(np.uint64)
        places = positions[:, None] + np.arange(0, rows.shape[1], unit, dtype=np.int64)
        if unit < 4:
            x <<= ((places & 3) * 8).astype(np.uint64)
        words = places >> 2
        first, last = int(words[0, 0]) // PERIOD, int(words[-1, -1]) // PERIOD
        weights = get_weights()[words & (PERIOD - 1)]
        weights *= get_multipliers(first, last - first + 1)[(words >> 16) - first]
        weights *= x
        self.weighted += int(np.add.reduce(weights, axis=None))
        x <<= ((words & 1) * 32).astype(np.uint64)
        self.total += int(np.add.reduce(x, axis=None))


@functools.lru_cache(maxsize=8)
def _get_device_weights(device: torch.device) -> torch.Tensor:
    import torch

    return torch.from_numpy(get_weights().view(np.int64).copy()).to(device)


def sum_on_device(flat: torch.Tensor, part: Part, shape: Shape) -> tuple[int, int]:
    """Return both sums over a contiguous 1-D tensor, made by operations of its own device on wrapping 64-bit integers.

    For accelerators, block by block. Works on the CPU as well, more slowly; that is how it is tested. Peak memory:
    64 bytes per 32-bit word or shorter element, on the device.
    """
    import torch

    size, device = flat.element_size(), flat.device
    if isinstance(part, Run):
        places = torch.arange(part.start, part.start + part.length, device=device)
    else:
        places = torch.zeros((), dtype=torch.int64, device=device)
        for offset, count, stride in zip(part.offsets, part.sizes, get_row_major_strides(shape), strict=True):
            places = places[..., None] + torch.arange(offset, offset + count, device=device) * stride
        places = places.reshape(-1)
    unit = min(size, 4)
    x = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[unit]).to(torch.int64)
    x &= (1 << (8 * unit)) - 1
    if size > 4:  # several words each
        places = (places[:, None] * (size // 4) + torch.arange(size // 4, device=device)).reshape(-1)
    elif size < 4:
        places *= size
        x <<= (places & 3) * 8
        places >>= 2
    blocks = places >> 16
    first, last = _get_block_range(part, shape, size)
    multipliers = torch.from_numpy(get_multipliers(first, last - first + 1).view(np.int64)).to(device)
    weights = _get_device_weights(device)[places & (PERIOD - 1)]
    weights *= multipliers[blocks - first]
    weights *= x
    x <<= (places & 1) * 32
    total, weighted = torch.stack((x.sum(), weights.sum())).tolist()
    return total & MASK, weighted & MASK


def _get_block_range(part: Part, shape: Shape, size: int) -> tuple[int, int]:
    """Return the numbers of the first and the last block of weights that a part uses."""
    if isinstance(part, Run):
        first, last = part.start, part.start + part.length - 1
    else:
        strides = get_row_major_strides(shape)
        ends = (offset + count - 1 for offset, count in zip(part.offsets, part.sizes, strict=True))
        first, last = sum(map(int.__mul__, part.offsets, strides)), sum(map(int.__mul__, ends, strides))
    return first * size // 4 // PERIOD, ((last + 1) * size - 1) // 4 // PERIOD
