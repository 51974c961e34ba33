"""Requests of OpenAI's API, submitted: the prompts, options and grammars of a body.

Neither HTTP nor events: the server waits for what is submitted here, and so does a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.plans.errors import RequestError
from outrider.runtime.handle import Handle
from outrider.runtime.options.options import Options
from outrider.runtime.server.errors import invalid
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.served import ServedRuntime
from outrider.runtime.server.tool_calling import ToolCalling
from outrider.runtime.server.tool_formats import format_of
from outrider.runtime.text.prompt import chat_prompt, encode_prompt

Admit = Callable[[int, int], object]


@dataclass(frozen=True)
class Submission:
    """A handle of every choice of every prompt, those of a prompt together, and the tools that they may call.

    `contexts` are the token ids that each choice continues; `prompt_tokens` those of all prompts, each counted once;
    `seed` is that of all draws.
    """

    handles: list[Handle]
    contexts: list[list[int]]
    prompts: int
    prompt_tokens: int
    seed: int
    calling: ToolCalling | None
    logprobs: bool


class Submitter:
    """Submits bodies that ask for the model of that name, of at most `max_choices` choices each."""

    def __init__(self, served: ServedRuntime, model: str, max_choices: int) -> None:
        self._served, self.model, self._max_choices = served, model, max_choices

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for any other model; None is the one that there is."""
        if name not in (None, self.model):
            raise invalid(404, "model_not_found", f"There is no model {name!r} here; pass {self.model!r}.")

    def submit(
        self,
        asked: CompletionRequest | ChatRequest,
        client: str | None = None,
        admit: Admit | None = None,
        owner: str = "",
    ) -> Submission:
        """Submit every choice of every prompt, all or none. Raises ApiError, and OutriderError as `submit_all`.

        Requests of one `owner` share cached prefixes and memories.

        `admit` is called before, with the tokens of all prompts and the most that may be new; it may raise too. Texts
        are encoded and grammars compiled here, once each: not for the thread of an event loop.
        """
        self.check_model(asked.model)
        asked.check()
        prompts, most = 1 if isinstance(asked, ChatRequest) else len(asked.prompts), self._max_choices
        if prompts * asked.n > most:
            raise RequestError(
                f"The request asks for {prompts * asked.n} choices (prompts: {prompts}, n: {asked.n}); at most "
                f"{most} are allowed in a request. Send fewer prompts at a time, or a smaller n."
            )
        calling = self._calling(asked) if isinstance(asked, ChatRequest) else None
        by_prompt = list(self._wanted(asked, calling, owner))
        prompt_tokens = sum(len(ids) for ids, _ in by_prompt)
        if admit is not None:
            admit(prompt_tokens, sum(self._most_new(ids, own) for ids, options in by_prompt for own in options))
        wanted = [(ids, own) for ids, options in by_prompt for own in options]
        handles = self._served.submit_all(wanted, priority=asked.priority, deadline=asked.deadline, client=client)
        logprobs, seed = asked.logprobs is not None and asked.logprobs is not False, wanted[0][1]["seed"] or 0
        return Submission(
            handles, [ids for ids, _ in wanted], len(handles) // asked.n, prompt_tokens, seed, calling, logprobs
        )

    def _most_new(self, ids: list[int], options: Options) -> int:
        return max(0, min(options["max_new_tokens"] or 0, self._served.manifest.target.context - len(ids)))

    def _calling(self, asked: ChatRequest) -> ToolCalling | None:
        """The tools that an answer may call. Raises RequestError for schemas, or a template, that cannot be served."""
        grammars, asked_form = self._served.grammars, asked.response_format
        schema = None if asked_form is None else asked_form.schema_of_text
        if schema is not None:
            grammars.check_schema(schema, "response_format.json_schema.schema")
        if not asked.calls_tools:
            return None
        template = self._served.tokenizer.check_chat(tools=True)
        if "tools" not in template.names:
            raise RequestError(
                "The chat template of the plan does not know tools, so that the model would not see them; leave tools "
                "out, or serve a plan whose template has them."
            )
        special = self._served.tokenizer.special_tokens.values()
        form = format_of(template, special, self._served.manifest.text.tool_parser)
        calling = asked.calling(form)
        try:
            grammars.check(calling.grammar, "The grammar of all tools together")
        except RequestError:
            for place, tool in enumerate(asked.tools or ()):  # whose fault it is
                grammars.check_schema(tool.function.schema_of_arguments, f"tools[{place}].function.parameters")
            raise
        return calling

    def _wanted(
        self, asked: CompletionRequest | ChatRequest, calling: ToolCalling | None, owner: str
    ) -> Iterator[tuple[list[int], list[Options]]]:
        """Token ids of each prompt, and the options of its choices."""
        tokenizer, geometry = self._served.tokenizer, self._served.manifest.target
        if isinstance(asked, ChatRequest):
            variables = dict(asked.chat_template_kwargs or {})
            if asked.reasoning_effort is not None and "reasoning_effort" in tokenizer.check_chat().names:
                variables.setdefault("reasoning_effort", asked.reasoning_effort)
            if calling is not None:
                variables["tools"] = [tool.plain() for tool in asked.tools or ()]
            ids = chat_prompt([message.plain() for message in asked.messages], tokenizer, geometry, variables)
            limit = max(1, geometry.context - len(ids)) if asked.limit is None else asked.limit
            options = asked.options(limit, (asked.top_logprobs or 0) if asked.logprobs else None, owner)
            if calling is not None:
                options = [Options(**{**own, "structured_outputs": {"grammar": calling.grammar}}) for own in options]
            yield ids, options
            return
        options = asked.options(asked.max_tokens, asked.logprobs, owner)
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                yield encode_prompt(prompt, tokenizer, geometry, add_special_tokens=True), options
            else:
                yield prompt, options
