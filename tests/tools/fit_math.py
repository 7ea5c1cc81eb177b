#!/usr/bin/env python3
"""The polynomials of ops/math.h, fitted at Chebyshev nodes in 50 digits. Needs mpmath (pip install mpmath).

Prints, for each, the largest error of the fit and the coefficients as ops/math.h lists them, from the highest power
down.
"""
from mpmath import chebyfit, erfc, exp, log, log1p, mp, mpf, nstr

mp.dps = 50


def near_zero(f, at_zero):
    """f, whose formula is 0 / 0 at 0."""
    return lambda x: f(x) if abs(x) > mpf("1e-15") else mpf(at_zero)


half_ln2 = log(2) / 2
FITS = {
    "exp: (e^r - 1 - r) / r^2": (near_zero(lambda r: (exp(r) - 1 - r) / r**2, 0.5), -half_ln2, half_ln2, 5),
    "log: (log(1 + f) - f + f^2 / 2) / f^3": (near_zero(lambda f: (log1p(f) - f + f**2 / 2) / f**3, mpf(1) / 3),
                                              -mpf(1) / 3, mpf(1) / 3, 9),
    # u = 2 / (2 + t) for t from 10, where half of erfc is below the smallest float, to 0
    "normal: erfc(t) e^(t^2) / 2u": (lambda u: erfc(2 / u - 2) * exp((2 / u - 2) ** 2) / (2 * u), mpf(1) / 6, 1, 10),
}

for name, (f, low, high, terms) in FITS.items():
    coefficients, error = chebyfit(f, [low, high], terms, error=True)
    print(f"{name}, {terms} terms, error {nstr(error, 2)}")
    print("   ", ", ".join(nstr(c, 10) + "f" for c in coefficients))
