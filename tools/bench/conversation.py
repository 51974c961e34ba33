"""Token ids of a conversation as far as it has come: through the plan's chat template, or as raw text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.plans.errors import RequestError
from outrider.plans.manifest import Geometry
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.prompt import chat_prompt, encode_prompt
from outrider.tools.bench.prompts import room_for_prompts
from outrider.tools.bench.questions import Question

_BETWEEN = "\n\n"  # an answer and the next turn, in raw text


@dataclass(frozen=True)
class Conversation:
    """How a plan reads conversations. `templated`: as messages through its chat template, else a turn's text and its
    answer's one behind another, with a blank line before the next turn."""

    tokenizer: Tokenizer
    geometry: Geometry
    templated: bool

    def encode(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Token ids up to where the answer to the last of `turns` begins; `answers` are those before.

        Raises `RequestError` where they do not fit the context, or the template refuses them.
        """
        if not self.templated:
            text = "".join(f"{turn}{answer}{_BETWEEN}" for turn, answer in zip(turns, answers, strict=False))
            return encode_prompt(text + turns[-1], self.tokenizer, self.geometry, add_special_tokens=True)
        messages = []
        for index, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        return chat_prompt(messages, self.tokenizer, self.geometry)

    def check_room(self, questions: Sequence[Question], new: int) -> list[list[int]]:
        """The tokens of every question's turns, each with the answers before it left empty.

        Raises `RequestError` for a question whose turns do not fit the context beside `new` tokens for every answer.
        """
        room_for_prompts(self.geometry.context, new)
        sizes = []
        for question in questions:
            turns = question.turns
            try:
                own = [len(self.encode(turns[: 1 + index], [""] * index)) for index in range(len(turns))]
            except RequestError as error:
                raise RequestError(f"{question.place}: {error}") from None
            if own[-1] + new * len(turns) > self.geometry.context:
                raise RequestError(
                    f"{question.place}: the question has {own[-1]} tokens in {len(turns)} turns, which do not fit into "
                    f"the plan's context of {self.geometry.context} beside answers of --new {new} tokens each; lower "
                    "--new, leave the line out, or build the plan with a larger capacity.context."
                )
            sizes.append(own)
        return sizes
