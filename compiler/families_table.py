"""`compiler families`: the model families that can be compiled, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.compiler.formats.gguf_config import ARCHITECTURES
from outrider.compiler.models.families import FAMILIES, UNIT_TITLES, Family

NOTE = (
    "Weights in safetensors: float32, float16, bfloat16; AWQ, GPTQ, compressed-tensors of 4 and 8 bits, but for phi3 "
    "and for experts; experts of gpt-oss in MXFP4. GGUF where it says so. Others are refused by their model_type."
)


def family_rows() -> list[dict[str, Any]]:
    """Return what the table holds, JSON-able, a row a family."""
    return [
        {
            "model_type": family.name,
            "models": family.title,
            "attention": _attention(family),
            "rotation": _rotation(family),
            "layer": _layer(family),
            "gguf": family.name in ARCHITECTURES,
        }
        for family in FAMILIES.values()
    ]


def print_families(console: Console) -> None:
    table = Table("model_type", "models", "attention", "rotation", "layer", "GGUF", box=None, pad_edge=False)
    for row in family_rows():
        cells = (row[key] for key in ("model_type", "models", "attention", "rotation", "layer"))
        table.add_row(*cells, "yes" if row["gguf"] else "")
    console.print(table)
    console.print(NOTE, markup=False)


def _attention(family: Family) -> str:
    said = {
        "never": "full",
        "all": "a window, unless sliding_window is null",
        "switched": "full, or a window with use_sliding_window",
        "all_switched": "full, or a window with use_sliding_window",
    }
    sees = (
        f"full in each {_ordinal(family.slides)} layer, else a window"
        if isinstance(family.slides, int)
        else said[family.slides]
    )
    norm = {"none": "", "head": "; q and k normed", "whole": "; q and k normed whole"}[family.qk_norm]
    capped = "; soft-capped" if family.factors.get("attention_softcap", ("", None))[1] is not None else ""
    return sees + norm + capped + ("; sinks" if family.sinks else "")


def _rotation(family: Family) -> str:
    if family.unrotated_every is not None:
        return f"all but each {_ordinal(family.unrotated_every)} layer"
    if family.own_local_rope:
        return "layers with a window apart"
    return "a part of each head; longrope" if family.partial_rotation else "whole heads"


def _layer(family: Family) -> str:
    norms = [place for place, has in (("before", family.norm_before), ("after", family.norm_after)) if has]
    unit = UNIT_TITLES[family.activation]
    experts = ""
    if family.experts is not None:
        unit, experts = ("clamped SwiGLU", " experts") if family.experts.clamped else (unit, " experts, or one MLP")
    names = {"embedding_scale": "embedding", "score_scale": "scores", "residual_scale": "residual"}
    names |= {"logit_divisor": "logits", "logit_softcap": "logits capped"}
    scaled = ["embedding"] if family.scaled_embedding else []
    scaled += [word for key, word in names.items() if family.factors.get(key, ("", None))[1] is not None]
    multipliers = f"; scaled: {', '.join(scaled)}" if scaled else ""
    return f"norms {' and '.join(norms)}; {unit}{experts}{multipliers}"


def _ordinal(number: int) -> str:
    return f"{number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }"
