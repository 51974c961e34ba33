"""Plan to tokens: `Runtime.load(plan).generate(prompt)`. No PyTorch, no compiler."""

from runtime.generation import FinishReason, Generation, GenerationStream, Span
from runtime.runtime import Runtime
from runtime.session import Session
from runtime.stats import Stats

__all__ = ["FinishReason", "Generation", "GenerationStream", "Runtime", "Session", "Span", "Stats"]
