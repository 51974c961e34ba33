"""llama.cpp by its Python bindings: plain decoding, their prompt lookup, and a draft model."""

from __future__ import annotations

from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from numpy.typing import NDArray

from tools.peers.engine import PLAIN, Clock, Generated, Settings

LOOKUP, DRAFT = "prompt-lookup", "draft"
_DRAFTED = 4  # the bindings leave the number to the drafter; ours is as long
_AHEAD = 16  # tokens of a draft may lie behind the last that is wanted; the bindings' lookup drafts 10


class LlamaCpp:
    def __init__(self, settings: Settings) -> None:
        assert settings.converted is not None
        self.version = str(llama_cpp.__version__)
        self.missing = {}
        self._plain: Any = _load(settings.converted, settings)  # its `reset` is untyped
        # A model that verifies drafts copies the logits of all tokens, so plain decoding has one of its own.
        self._verifying: Any = _load(settings.converted, settings, logits_all=True)
        self._drafters: dict[str, Any] = {LOOKUP: LlamaPromptLookupDecoding()}
        self._draft: Any = None
        if settings.converted_draft is None:
            self.missing[DRAFT] = settings.draft_fault or "needs a draft model; pass --draft CKPT"
        else:
            self._draft = _load(settings.converted_draft, settings)
            self._drafters[DRAFT] = _Drafting(self._draft)
        self.modes = (PLAIN, *self._drafters)

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        model = self._plain if mode == PLAIN else self._verifying
        for used in (model, self._draft):
            if used is not None:
                used.reset()
        if mode != PLAIN:
            model.draft_model = self._drafters[mode]
        clock, found = Clock(), list[int]()
        for token in islice(model.generate(ids, temp=0.0), new):
            found.append(int(token))
            clock.count(1)
        return clock.generated(found, clock.done())


class _Drafting:
    """A smaller model's own greedy tokens, as the bindings ask a drafter for them. It keeps the KV cache of what is the same as before."""

    def __init__(self, model: Llama) -> None:
        self._model = model

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        return np.array(list(islice(self._model.generate(input_ids.tolist(), temp=0.0), _DRAFTED)), np.intc)


def _load(path: str, settings: Settings, logits_all: bool = False) -> Llama:
    threads, context = settings.threads, settings.context + _AHEAD
    return Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, logits_all=logits_all, verbose=False)
