"""OpenVINO GenAI: plain decoding, its prompt lookup, and a draft model."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from outrider.tools.lab.peers.engine import PLAIN, Clock, Generated, Settings

LOOKUP, DRAFT = "prompt-lookup", "draft"
# As its samples set them.
_OPTIONS: dict[str, dict[str, int]] = {
    PLAIN: {},
    LOOKUP: {"num_assistant_tokens": 5, "max_ngram_size": 3},
    DRAFT: {"num_assistant_tokens": 4},
}
_DEVICE = "CPU"


class OpenVino:
    def __init__(self, settings: Settings) -> None:
        assert settings.converted is not None
        self.version = genai.get_version()
        self.missing = {}
        self._settings = settings
        self._pipelines = {PLAIN: self._load(), LOOKUP: self._load(prompt_lookup=True)}
        if settings.converted_draft is None:
            self.missing[DRAFT] = settings.draft_fault or "needs a draft model; pass --draft CKPT"
        else:
            draft = genai.draft_model(settings.converted_draft, _DEVICE, **self._properties())
            self._pipelines[DRAFT] = self._load(draft_model=draft)
        self.modes = tuple(self._pipelines)

    def _load(self, **options: Any) -> genai.LLMPipeline:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # every prompt is to be computed
        scheduler.max_num_batched_tokens = max(256, self._settings.context)  # and at once, as without a scheduler
        return genai.LLMPipeline(
            self._settings.converted, _DEVICE, scheduler_config=scheduler, **self._properties(), **options
        )

    def _properties(self) -> dict[str, Any]:
        return {"INFERENCE_NUM_THREADS": self._settings.threads}

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        config = genai.GenerationConfig(do_sample=False, max_new_tokens=new, ignore_eos=True, **_OPTIONS[mode])
        prompt = np.array([ids], np.int64)
        given = genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt)))
        clock = Clock()
        found = self._pipelines[mode].generate(given, config, _Counting(clock))
        total_ms = clock.done()
        return clock.generated([int(token) for token in found.tokens[0]], total_ms)


class _Counting(genai.StreamerBase):  # type: ignore[misc]  # untyped
    """Is handed a token, or those of a round."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        self._clock.count(len(token) if isinstance(token, list) else 1)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass
