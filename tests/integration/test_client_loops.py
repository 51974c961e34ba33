"""Loops of LangChain and of OpenAI's agents against the server: a tool is asked for, called, and its result read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest

from outrider import Runtime
from outrider.plans.chat_template import ChatTemplate
from tests.integration.served import KEY, listening
from tests.integration.test_tools import HERMES

pytestmark = pytest.mark.long
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def address(branch_plan: Path) -> Iterator[str]:
    runtime = Runtime.load(branch_plan, threads=1)
    runtime.tokenizer._chat_template = ChatTemplate(HERMES, source="the test's")
    with listening(runtime) as address:
        yield f"{address}/v1"


def test_langchain(address: str) -> None:
    models = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    tools = pytest.importorskip("langchain_core.tools")

    @tools.tool
    def score(a: Literal["x", "yy"]) -> str:
        """Look a score up."""
        return f"{a} has 7"

    model = models.ChatOpenAI(base_url=address, api_key=KEY, model="toy", max_tokens=80, **SAMPLED)
    talk = [messages.HumanMessage("hi")]
    talk.append(model.bind_tools([score], tool_choice="required", strict=True).invoke(talk))
    assert [call["name"] for call in talk[-1].tool_calls] == ["score"]
    talk += [score.invoke(call) for call in talk[-1].tool_calls]
    assert talk[-1].content.endswith(" has 7")
    ended = model.invoke(talk)
    assert isinstance(ended.content, str)
    assert ended.usage_metadata["output_tokens"] > 0
    assert "".join(str(part.content) for part in model.stream(talk)) == ended.content


def test_agents(address: str) -> None:
    agents = pytest.importorskip("agents")
    called: list[str] = []

    @agents.function_tool
    def score(a: Literal["x", "yy"]) -> str:
        """Look a score up."""
        called.append(a)
        return f"{a} has 7"

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=address, api_key=KEY)
    settings = agents.ModelSettings(tool_choice="required", temperature=1.0, max_tokens=80, extra_body={"seed": 3})
    agent = agents.Agent(
        name="scorer",
        instructions="Say scores.",
        model=agents.OpenAIChatCompletionsModel(model="toy", openai_client=client),
        tools=[score],
        model_settings=settings,
    )
    ended = asyncio.run(agents.Runner.run(agent, "hi", max_turns=4))
    assert len(called) == 1
    assert isinstance(ended.final_output, str)
    assert [item.type for item in ended.new_items] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
