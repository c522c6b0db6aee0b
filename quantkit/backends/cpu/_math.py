"""The exponential of float32 lanes: a polynomial, without a branch or a call (Cephes, `expf`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._vector import clip, fill, floor, multiply_add, two_to

LOW, HIGH = np.float32(-80.0), np.float32(88.0)  # e to the -80, times a number, is none of those that processors are slow at
LOG2_E, HALF, ONE = np.float32(1.44269504), np.float32(0.5), np.float32(1.0)
LN2_HIGH, LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@jit
def exp(x: Any) -> Any:
    """Return e to the power of each lane, to two units in the last place, for -80 to 88; beyond, what those give."""
    x = clip(x, fill(LOW), fill(HIGH))
    n = floor(multiply_add(x, fill(LOG2_E), fill(HALF)))
    r = multiply_add(n, fill(LN2_LOW), multiply_add(n, fill(LN2_HIGH), x))
    p = multiply_add(multiply_add(fill(P0), r, fill(P1)), r, fill(P2))
    p = multiply_add(multiply_add(multiply_add(p, r, fill(P3)), r, fill(P4)), r, fill(P5))
    return multiply_add(p * r, r, r + fill(ONE)) * two_to(n)
