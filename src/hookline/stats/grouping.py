"""What kernels do with numbers that follow each other: add up groups, and unpack words of four.

A word of four float8 numbers is taken apart by instructions that Triton does not use by itself:
two numbers are converted at once, and compared as they then lie beside each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(0x7C007C00)
"""Twice the infinity of float16; with the sign bits set, twice the other one."""

_WORD = """
{
.reg .b16 a, b, h<4>;
.reg .b32 p, q, s;
.reg .f32 f<4>, t<3>;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.KIND p, a;
cvt.rn.f16x2.KIND q, b;
min.f16x2 s, p, q;
min.f16x2 $0, $5, s;
max.f16x2 s, p, q;
max.f16x2 $1, $6, s;
mov.b32 {h0, h1}, p;
mov.b32 {h2, h3}, q;
cvt.f32.f16 f0, h0;
cvt.f32.f16 f1, h1;
cvt.f32.f16 f2, h2;
cvt.f32.f16 f3, h3;
add.f32 t0, f0, f1;
add.f32 t1, f2, f3;
add.f32 t0, t0, t1;
add.f32 $2, $7, t0;
fma.rn.f32 t2, f0, f0, $8;
fma.rn.f32 t2, f1, f1, t2;
fma.rn.f32 t2, f2, f2, t2;
fma.rn.f32 $3, f3, f3, t2;
}
"""
_E4M3_WORD = tl.constexpr(_WORD.replace("KIND", "e4m3x2"))
_E5M2_WORD = tl.constexpr(_WORD.replace("KIND", "e5m2x2"))


@triton.jit
def group_sum(x, GROUP: tl.constexpr):
    """Add up each group of numbers that follow each other; a thread has them all."""
    return x if GROUP == 1 else tl.sum(tl.reshape(x, (x.shape[0] // GROUP, GROUP)), 1)


@triton.jit
def group_min(x, GROUP: tl.constexpr):
    """Give the smallest of each group."""
    return x if GROUP == 1 else tl.min(tl.reshape(x, (x.shape[0] // GROUP, GROUP)), 1)


@triton.jit
def group_max(x, GROUP: tl.constexpr):
    """Give the largest of each group."""
    return x if GROUP == 1 else tl.max(tl.reshape(x, (x.shape[0] // GROUP, GROUP)), 1)


@triton.jit
def read_words(
    x_ptr,
    n,
    start,
    stride,
    low,
    high,
    total,
    squares,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    IS_E4M3: tl.constexpr,
):
    """Read tiles of float8 in words, as long as `UNROLL` whole ones are left; say where it ended.

    `x_ptr` is the address of bytes, and a multiple of 16.
    """
    WORDS: tl.constexpr = BLOCK // 4
    lanes = tl.arange(0, WORDS)
    least = tl.full([WORDS], _LEAST, tl.int32)
    most = least | tl.full([WORDS], 0x80008000, tl.uint32).to(tl.int32, bitcast=True)
    while start + (UNROLL - 1) * stride + BLOCK <= n:
        few = tl.zeros([WORDS], tl.float32)
        few_squares = tl.zeros([WORDS], tl.float32)
        for step in tl.static_range(UNROLL):
            words_ptr = (x_ptr + start + step * stride).to(tl.pointer_type(tl.int32))
            word = tl.load(tl.multiple_of(words_ptr, 16) + lanes)
            least, most, few, few_squares = tl.inline_asm_elementwise(
                _E4M3_WORD if IS_E4M3 else _E5M2_WORD,
                "=&r,=&r,=&f,=&f,r,r,r,f,f",
                [word, least, most, few, few_squares],
                dtype=(tl.int32, tl.int32, tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        total += group_sum(few, GROUP // 4).to(tl.float64)
        squares += group_sum(few_squares, GROUP // 4).to(tl.float64)
        start += UNROLL * stride
    low = tl.minimum(low, group_min(tl.minimum(_half(least), _half(least >> 16)), GROUP // 4))
    high = tl.maximum(high, group_max(tl.maximum(_half(most), _half(most >> 16)), GROUP // 4))
    return low, high, total, squares, start


@triton.jit
def _half(x):
    """Give the float16 in the lower half of words."""
    return (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
