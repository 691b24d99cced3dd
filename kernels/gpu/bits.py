"""Single instructions and number formats that the kernels share.

Inline assembly does not run under Triton's interpreter, so each instruction has a plain form beside it.
Conversions are spelled in integers: they give the same bits on every device and in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dp4a(a, b, c):
    """``c`` plus the four products of the signed bytes of ``a`` and ``b``; int32 tensors of one shape."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            c += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
        return c
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def grid_bytes(selector):
    """Four signed bytes of IQ2_XXS from the four low nibbles of ``selector``.

    A nibble's low two bits choose 8, 25, 43 (or 0), its third bit the sign.
    """
    if INTERPRETED:
        out = tl.zeros_like(selector)
        for byte in tl.static_range(4):
            nibble = (selector >> (4 * byte)) & 7
            code = nibble & 3
            value = tl.where(code == 0, 8, tl.where(code == 1, 25, tl.where(code == 2, 43, 0)))
            value = tl.where(nibble >= 4, -value, value)
            out |= (value & 255) << (8 * byte)
        return out
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, 0x002b1908, 0x00d5e7f8, $1;",
            "=r,r",
            [selector],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def to_bf16(x):
    """float32 rounded to bfloat16 precision, ties to even."""
    u = x.to(tl.int32, bitcast=True)
    u = (u + 0x7FFF + ((u >> 16) & 1)) & -65536
    return u.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """The upper half of a float32 that is a bfloat16 already, as int16."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def from_bf16_bits(bits):
    """float32 from the int16 pattern of a bfloat16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """2^(exponent − 127) as float32, exponent int32 in 1 … 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(amax, largest):
    """``ceil(log2(amax / largest)) + 127``, int32."""
    u = tl.div_rn(amax, largest).to(tl.int32, bitcast=True)
    return (u >> 23) + ((u & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def e4m3_code(x):
    """FP8 E4M3 code, int32 0 … 255, of float32 values within ±448; ties to even."""
    u = x.to(tl.int32, bitcast=True)
    sign = (u >> 24) & 0x80
    a = u & 0x7FFFFFFF
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
    magnitude = a.to(tl.float32, bitcast=True)
    # Adding 2^14 leaves a multiple of 2^-9, the spacing of the subnormal codes, rounded to even.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return sign | tl.where(magnitude < 0.015625, subnormal, normal)


@triton.jit
def e4m3_half(code):
    """float16 of FP8 codes (int32), times 2^−8; exact."""
    return (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def e2m1_code(x):
    """FP4 E2M1 code, int32 0 … 15, of float32 values within ±6; ties to the even code."""
    a = tl.abs(x)
    code = (
        (a > 0.25).to(tl.int32) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    )
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_half(code):
    """float16 of FP4 codes (int32), times 2^−14; exact."""
    return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def hadamard_sign(row, column):
    """An entry of the Walsh-Hadamard matrix: −1 where ``row & column`` has an odd number of ones."""
    bits = row & column
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return 1.0 - 2.0 * (bits & 1).to(tl.float32)
