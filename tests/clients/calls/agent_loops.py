"""Loops of agent frameworks: the model calls a tool twice, the tool runs, the model answers.

The model is the fake server with two scripted calls: a model that can do this is too large for a test.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import agents
import openai
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = "What is 2 + 3, and the result + 5?"
SUMS = [(2, 3), (5, 5)]
run: list[tuple[int, int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    run.append((a, b))
    return a + b


def openai_agent() -> Any:
    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=openai.AsyncOpenAI())
    return agents.Agent(name="sums", model=model, tools=[agents.function_tool(add)])


def call_openai_agents() -> None:
    run.clear()
    answer = agents.Runner.run_sync(openai_agent(), QUESTION)
    assert run == SUMS
    assert answer.final_output
    outputs = [item.output for item in answer.new_items if item.type == "tool_call_output_item"]
    assert outputs == [5, 10] or outputs == ["5", "10"]


def call_openai_agents_streamed() -> None:
    async def stream() -> str:
        run.clear()
        answer = agents.Runner.run_streamed(openai_agent(), QUESTION)
        async for _ in answer.stream_events():
            pass
        return str(answer.final_output)

    assert asyncio.run(stream())
    assert run == SUMS


def call_langgraph() -> None:
    run.clear()
    agent = create_agent(ChatOpenAI(model=os.environ["MODEL"]), [tool(add)])
    messages = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
    assert run == SUMS
    assert [message.content for message in messages if message.type == "tool"] == ["5", "10"]
    assert messages[-1].text


def call_langgraph_streamed() -> None:
    run.clear()
    agent = create_agent(ChatOpenAI(model=os.environ["MODEL"], streaming=True), [tool(add)])
    assert list(agent.stream({"messages": [{"role": "user", "content": QUESTION}]}, stream_mode="messages"))
    assert run == SUMS
