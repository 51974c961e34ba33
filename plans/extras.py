"""Advice on installing an optional package that is missing."""

from __future__ import annotations


def install(extra: str, *, upgrade: bool = False) -> str:
    """The advice that ends a sentence: how to get the packages of `extra`, as pyproject.toml names them."""
    return f"run `pip install {'-U ' if upgrade else ''}'.[{extra}]'` at the top of Outrider's repository"


def install_on_gpu() -> str:
    """The advice on ONNX Runtime for a GPU, which lies where the one for the CPU would."""
    return (
        "in a new environment, run `pip install ./tools/onnxruntime-gpu '.[gpu]'` at the top of Outrider's repository"
    )
