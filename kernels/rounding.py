"""Stochastic rounding of FP32 to BF16, by random bits that are a function of what is rounded and when."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import tl, triton

SEED = 0x2545F491
FACTORS = 0x7FEB352D, 0x846CA68B
"""Those of the integer hash "lowbias32": each output bit depends on each input bit almost without bias."""
WORD = 0xFFFFFFFF


def random_bits(draw: Tensor, tensor_index: int, count: int) -> Tensor:
    """16 random bits for each of ``count`` elements of one tensor, the same as the kernels draw for it.

        bits_i = hash(i ^ hash(hash(draw ^ seed) + tensor_index)) mod 2^16, in integers of 32 bits.

    Args:
        draw: int32 of one element on the device; another value draws anew.
        tensor_index: tells the tensors of one draw apart.
        count: a number of elements, in their order in memory.

    Returns:
        int32 ``[count]``, from 0 to 65535.
    """
    # In 64 bits, of which the lower 32 are right whatever overflows: torch has no full set of unsigned operations.
    key = _hash(_hash((draw.reshape(()).long() ^ SEED) & WORD).add_(tensor_index).bitwise_and_(WORD))
    elements = torch.arange(count, device=draw.device, dtype=torch.int64).bitwise_and_(WORD)
    return _hash(elements.bitwise_xor_(key)).bitwise_and_(0xFFFF).int()


def _hash(words: Tensor) -> Tensor:
    """Of int64 that hold 32 bits; overwritten."""
    words.bitwise_xor_(words >> 16).mul_(FACTORS[0]).bitwise_and_(WORD)
    words.bitwise_xor_(words >> 15).mul_(FACTORS[1]).bitwise_and_(WORD)
    return words.bitwise_xor_(words >> 16)


@torch.no_grad()
def round_stochastically(values: Tensor, noise: Tensor, out: Tensor) -> None:
    """``out`` = ``values``, rounded up or down in BF16 with the probabilities whose mean is the value itself.

    Half a word of noise is added below the bits that stay, and what is below them is cut off. A
    value that BF16 holds has none there, so it comes out as it is; so do infinities. A finite value
    beyond BF16's largest number may become infinite. NaN becomes 0x7FC0. Nothing is allocated.

    Args:
        values: FP32, dense in any order of dimensions; scratch afterwards.
        noise: int32, as ``random_bits`` draws it; scratch afterwards.
        out: BF16 in the layout of ``values``.
    """
    # NaN is given one form, whose lower half is 0: noise would carry others into the sign.
    torch.nan_to_num_(values, nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))
    noise.add_(_in_memory_order(values).view(torch.int32)).bitwise_right_shift_(16)
    _in_memory_order(out).view(torch.int16).copy_(noise)


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


if triton is not None:
    SEED_WORD = tl.constexpr(SEED)
    FIRST_FACTOR = tl.constexpr(FACTORS[0])
    SECOND_FACTOR = tl.constexpr(FACTORS[1])

    @triton.jit
    def _hash_words(words):
        words = (words ^ (words >> 16)) * FIRST_FACTOR
        words = (words ^ (words >> 15)) * SECOND_FACTOR
        return words ^ (words >> 16)

    @triton.jit
    def noise(draw, tensor_index, start, lane):
        """``random_bits`` of the elements ``start + lane`` (int64 and int32); ``draw`` and the index are int32."""
        key = _hash_words(_hash_words(draw.to(tl.uint32) ^ SEED_WORD) + tensor_index.to(tl.uint32))
        return (_hash_words((start.to(tl.uint32) + lane.to(tl.uint32)) ^ key) & 0xFFFF).to(tl.int32)

    @triton.jit
    def brain_to_fp32(bits):
        """BF16, read as int16, in integers: before sm_80 Triton 3.2 compiles no conversion from or to it."""
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def fp32_to_brain(values, bits):
        """``round_stochastically`` by the noise ``bits``: int16 that hold BF16."""
        whole = tl.where(values == values, values.to(tl.int32, bitcast=True), 0x7FC00000)
        return ((whole + bits) >> 16).to(tl.int16)
