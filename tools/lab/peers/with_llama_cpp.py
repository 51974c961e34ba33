"""llama.cpp by its Python bindings: plain decoding, their prompt lookup, and a draft model."""

from __future__ import annotations

from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from numpy.typing import NDArray

from outrider.tools.lab.peers.engine import PLAIN, Clock, Generated, Settings

LOOKUP, DRAFT = "prompt-lookup", "draft"
_DRAFTED = 4  # the bindings leave the number to the drafter; ours is as long
_AHEAD = 16  # tokens of a draft may lie after the last that is wanted; the bindings' lookup drafts 10


class LlamaCpp:
    def __init__(self, settings: Settings) -> None:
        assert settings.converted is not None
        self.version = str(llama_cpp.__version__)
        self.missing = {}
        self._plain: Any = _load(settings.converted, settings)  # some of its methods have no types
        # A model that verifies drafts copies the logits of all tokens, so plain decoding has one of its own.
        self._verifying: Any = _load(settings.converted, settings, draft_model=LlamaPromptLookupDecoding())
        self._drafters: dict[str, Any] = {LOOKUP: self._verifying.draft_model}
        if settings.converted_draft is None:
            self.missing[DRAFT] = settings.draft_fault or "needs a draft model; pass --draft CKPT"
        else:
            self._drafters[DRAFT] = _Drafting(_load(settings.converted_draft, settings))
        self.modes = (PLAIN, *self._drafters)

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        model = self._plain if mode == PLAIN else self._verifying
        model.reset()
        if mode != PLAIN:
            model.draft_model = self._drafters[mode]
            if mode == DRAFT:
                self._drafters[DRAFT].model.reset()
        clock, found = Clock(), list[int]()
        for token in islice(model.generate(ids, temp=0.0), new):
            found.append(int(token))
            clock.count(1)
        return clock.generated(found, clock.done())


class _Drafting(LlamaDraftModel):  # type: ignore[misc, unused-ignore]  # Any, where it is not installed
    """A smaller model's own greedy tokens. It keeps the KV cache of what is the same as before."""

    def __init__(self, model: Llama) -> None:
        self.model = model

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        return np.array(list(islice(self.model.generate(input_ids.tolist(), temp=0.0), _DRAFTED)), np.intc)


def _load(path: str, settings: Settings, draft_model: LlamaDraftModel | None = None) -> Llama:
    return Llama(
        path,
        n_ctx=settings.context + _AHEAD,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        draft_model=draft_model,
        logits_all=draft_model is not None,  # else the bindings have room for those of 512 tokens
        verbose=False,
    )
