"""ONNX Runtime on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.compiler.backends.base import Backend

if TYPE_CHECKING:
    from outrider.compiler.lowering.rule import Rule


class OnnxRuntimeCpuBackend(Backend):
    """ONNX Runtime on the CPU: the embedded default, which runs everywhere. Computes in float32."""

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        from outrider.compiler.lowering import OUR_ARITHMETIC
        from outrider.compiler.lowering.functions import FunctionBody
        from outrider.compiler.lowering.own_ops import CpuSigmoids

        return (*OUR_ARITHMETIC, FunctionBody(), CpuSigmoids())


BACKEND = OnnxRuntimeCpuBackend
