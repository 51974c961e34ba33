"""transformers, PyTorch eager: plain decoding, assisted generation with a draft model, and prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from outrider.tools.lab.peers.engine import PLAIN, Clock, Generated, Settings

ASSISTED, LOOKUP = "assisted", "prompt-lookup"
LOOKUP_TOKENS = 10  # the number in the library's documentation; it has no default


class Transformers:
    def __init__(self, settings: Settings) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(settings.threads)
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self._model: Any = _load(settings.checkpoint)  # its `generate` is untyped
        self._assisting: dict[str, dict[str, Any]] = {LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
        self.missing = {}
        if settings.draft:
            self._assisting[ASSISTED] = {"assistant_model": _load(settings.draft)}
        else:
            self.missing[ASSISTED] = "needs a draft model; pass --draft CKPT"
        self.modes = (PLAIN, *self._assisting)

    @torch.inference_mode()
    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        prompt = torch.tensor([ids])
        return self._plain(prompt, new) if mode == PLAIN else self._assisted(prompt, new, self._assisting[mode])

    def _plain(self, prompt: torch.Tensor, new: int) -> Generated:
        """The bare loop over the model with its own cache: `generate` would add its bookkeeping to every token."""
        clock, found = Clock(), list[int]()
        out = self._model(prompt, use_cache=True, logits_to_keep=1)
        for _ in range(new - 1):
            token = out.logits[:, -1:].argmax(-1)
            found.append(int(token))
            clock.count(1)
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
        found.append(int(out.logits[:, -1].argmax(-1)))
        clock.count(1)
        return clock.generated(found, clock.done())

    def _assisted(self, prompt: torch.Tensor, new: int, assisting: dict[str, Any]) -> Generated:
        clock = Clock()
        out = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new,
            streamer=_Counting(clock),
            **assisting,
        )
        total_ms = clock.done()
        return clock.generated(out[0, prompt.shape[1] :].tolist(), total_ms)


class _Counting(BaseStreamer):  # type: ignore[misc]
    """Is handed the prompt, and then the tokens of each round."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._prompt = clock, True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self._clock.count(value.numel())
        self._prompt = False

    def end(self) -> None:
        pass


def _load(checkpoint: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(Path(checkpoint), dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None  # of two runs of one length, the same work is compared
    model.generation_config.pad_token_id = 0  # without an end token it asks for one, and uses it for batches alone
    return model
