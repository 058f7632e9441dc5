"""Which rows and columns an entry of a product comes from: read off the equations.

y_r = x W_r^T      y[i, j] = row i of x times row j of W
dW_r = dy_r^T x    dW[i, j] = column i of dy times column j of x
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FACTOR = r"(d?[A-Za-z]+)(?:_[a-z0-9])?(\^T)?"
_PRODUCT = re.compile(rf"(d?[A-Za-z]+(?:_partial)?)(?:_[a-z0-9])? = {_FACTOR} {_FACTOR}(?=$|,| \+)")


@dataclass(frozen=True, slots=True)
class Product:
    """out = left right, where a turned factor is transposed."""

    out: str
    left: str
    is_left_turned: bool
    right: str
    is_right_turned: bool


def products_of(equation: str, arrays: Sequence[str]) -> list[Product]:
    """The products that an equation says whose arrays are all among those that are shown."""
    products = []
    for found in _PRODUCT.finditer(equation):
        out, left, is_left_turned, right, is_right_turned = found.groups()
        if {out, left, right} <= set(arrays):
            products.append(Product(out, left, bool(is_left_turned), right, bool(is_right_turned)))
    return products
