"""Kernels of other sources, measured beside ours: each variant's changes of files under `plugins/csrc/cuda`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from plans.errors import OutriderError
from plugins.cuda.compile import SOURCES

Change = tuple[str, str, str]
"""A file, the text in it, which is there once, and the text in its place."""

_QUANT, _HALF = "engine/quant_product.cu.h", "engine/half_product.cu.h"
_FIT = "OUTRIDER_FIT(kQuantWarps * 32, 3)\n"
_HALF_FIT = [
    (_HALF, f"OUTRIDER_KERNEL {kernel}(", f"OUTRIDER_KERNEL OUTRIDER_FIT(256, 2) {kernel}(")
    for kernel in ("outrider_half_product", "outrider_normed_half_product")
]
_HALF_LOADS = """\
    Bytes16 w[4] = {}, a[4] = {};
    for (int n = 0; n < 4; ++n) w[n] = weights.eight(first_output + 8 * n + group, own);
    for (int m = 0; m < 4; ++m) {
      if (m < 2 || second) a[m] = x.eight(first_row + 8 * m + group, own);
    }
"""
_HALF_AHEAD = """\
    Bytes16 w[4], a[4];
    for (int n = 0; n < 4; ++n) w[n] = coming[n];
    for (int m = 0; m < 4; ++m) a[m] = inputs[m];
    if (k + kHalfWarps * kHalfInputs < x.inputs) fetch(own + kHalfWarps * kHalfInputs);
"""
_HALF_SUMS = "  float sums[2][4][4] = {};\n"
_HALF_FETCH = """\
  Bytes16 coming[4] = {}, inputs[4] = {};
  const auto fetch = [&](i64 own) {
    for (int n = 0; n < 4; ++n) coming[n] = weights.eight(first_output + 8 * n + group, own);
    for (int m = 0; m < 4; ++m) {
      if (m < 2 || second) inputs[m] = x.eight(first_row + 8 * m + group, own);
    }
  };
  if (warp * kHalfInputs < x.inputs) fetch(warp * kHalfInputs + 8 * turn);
"""

VARIANTS: dict[str, Sequence[Change]] = {
    "quant_two_blocks": [
        (_QUANT, f"{_FIT}{kernel}(", f"OUTRIDER_FIT(kQuantWarps * 32, 2)\n{kernel}(")
        for kernel in ("outrider_quant_product", "outrider_normed_quant_product")
    ],
    "quant_half_the_ring": [(_QUANT, "kBits == 4 ? 6 : 4;", "kBits == 4 ? 3 : 2;")],
    "half_unrolled": [
        (_HALF, "  for (i64 k = warp * kHalfInputs;", "  OUTRIDER_UNROLL(2)\n  for (i64 k = warp * kHalfInputs;"),
        *_HALF_FIT,
    ],
    "half_ahead": [(_HALF, _HALF_LOADS, _HALF_AHEAD), (_HALF, _HALF_SUMS, _HALF_SUMS + _HALF_FETCH), *_HALF_FIT],
}


def write_variant(name: str, changes: Sequence[Change], folder: Path) -> None:
    """Write the changed sources into `folder`. Raises `OutriderError` where a text is not there once."""
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    for file, old, new in changes:
        path = folder / "cuda" / file
        text = path.read_text(encoding="utf-8")
        if (found := text.count(old)) != 1:
            raise OutriderError(f"variant {name}: {file} has {old!r} {found} times, not once; mend VARIANTS")
        path.write_text(text.replace(old, new), encoding="utf-8")
