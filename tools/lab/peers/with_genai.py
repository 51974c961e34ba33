"""onnxruntime-genai: plain decoding, its n-gram lookup, and its draft model."""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai

from outrider.tools.lab.peers.engine import PLAIN, Clock, Generated, Settings, choose_end_token

DRAFT = "draft"
# The first n-gram settings are those of its documentation, without and with a width that follows what is accepted; the
# last has the largest width that it takes. A draft model proposes its default number of tokens.
LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram": {"ngram_size": 4, "max_draft_tokens": 8, "ngram_chained_lookup": True},
    "ngram-adaptive": {"ngram_size": 4, "max_draft_tokens": 8, "ngram_chained_lookup": True, "min_adaptive_k": 2},
    "ngram-16": {"ngram_size": 4, "max_draft_tokens": 16, "ngram_chained_lookup": True},
}
_TRIES = 8  # other end tokens, where one was generated and ended the generation


class Genai:
    def __init__(self, settings: Settings) -> None:
        assert settings.converted is not None
        self.version = version("onnxruntime-genai")
        self._settings, self._target = settings, Path(settings.converted)
        self._generated = Counter[int]()
        self._load_all()
        self.modes = tuple(self._models)

    def _load_all(self) -> None:
        """Load all models with an end token that was not generated so far."""
        self.missing, self._models = dict[str, str](), dict[str, genai.Model]()  # what is loaded is freed first
        self._end_token = choose_end_token(self._generated, int(_read(self._target)["vocab_size"]))
        plain = self._load()
        self._models[PLAIN] = plain
        if hasattr(genai.GeneratorParams, "set_speculative_options"):
            self._models |= dict.fromkeys(LOOKUPS, plain)
            self._add_draft()
        else:
            self.missing = dict.fromkeys((*LOOKUPS, DRAFT), f"version {self.version} cannot; install 0.18 or later")

    def _add_draft(self) -> None:
        if self._settings.converted_draft is None:
            self.missing[DRAFT] = self._settings.draft_fault or "needs a draft model; pass --draft CKPT"
            return
        try:
            self._models[DRAFT] = self._load(Path(self._settings.converted_draft))
        except RuntimeError as error:  # of another vocabulary, for instance
            self.missing[DRAFT] = str(error)

    def _load(self, draft: Path | None = None) -> genai.Model:
        """The model, whose threads and end token are not the ones it was converted with."""
        target, decoder = self._target, {"session_options": {"intra_op_num_threads": self._settings.threads}}
        overlay: dict[str, Any] = {"eos_token_id": self._end_token, "decoder": decoder}  # a list would not replace
        if draft is not None:
            smaller = _read(draft)["decoder"]
            smaller["session_options"] |= decoder["session_options"]
            overlay["draft"] = smaller | {"filename": os.path.relpath(draft / smaller["filename"], target)}
        config = genai.Config(str(target))
        config.overlay(json.dumps({"model": overlay}))
        return genai.Model(config)

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        found = self._generate(mode, ids, new)
        for _ in range(_TRIES):
            if len(found.ids) == new:
                break
            self._generated[self._end_token] += 1  # which the sequence leaves out
            self._load_all()
            self._generate(mode, ids, new)  # brings the weights back into the caches
            found = self._generate(mode, ids, new)
        return found

    def _generate(self, mode: str, ids: list[int], new: int) -> Generated:
        model = self._models[mode]
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + new)
        if mode in LOOKUPS:
            params.set_speculative_options(**LOOKUPS[mode])
        generator = genai.Generator(model, params)  # allocates its KV, as our session has before
        clock = Clock()
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
            clock.count(1)
        total_ms = clock.done()
        found = [int(token) for token in generator.get_sequence(0)][len(ids) :]
        self._generated.update(found)
        return clock.generated(found, total_ms)


def _read(folder: Path) -> dict[str, Any]:
    model: dict[str, Any] = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
    return model
