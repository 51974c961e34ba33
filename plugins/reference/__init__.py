"""The arithmetic of the ops' rules in NumPy, for readers, not for speed: the truth that kernels are compared with.

Functions take the arrays of one step at their exact sizes and return new arrays.
"""

from outrider.plugins.reference.choice import choice, fixed_weights, shared_exp
from outrider.plugins.reference.kv_slots import from_slots, to_slots
from outrider.plugins.reference.lanes import clamped_unit, gated_unit, lanes_exp, ordered_matmul
from outrider.plugins.reference.lanes_attention import attend
from outrider.plugins.reference.philox import philox4x32, uniform
from outrider.plugins.reference.quant_matmul import dequantize, quant_matmul, quantize_rows
from outrider.plugins.reference.race import RaceKey, exponential, noise_words, race

__all__ = [
    "RaceKey",
    "attend",
    "choice",
    "clamped_unit",
    "dequantize",
    "exponential",
    "fixed_weights",
    "from_slots",
    "gated_unit",
    "lanes_exp",
    "noise_words",
    "ordered_matmul",
    "philox4x32",
    "quant_matmul",
    "quantize_rows",
    "race",
    "shared_exp",
    "to_slots",
    "uniform",
]
