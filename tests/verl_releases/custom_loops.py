"""Agent loops of a user: one of its own that calls tools, and one around a loop that verl brings along."""

import asyncio
from types import SimpleNamespace

import verl
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


async def call_a_tool():
    """Call a tool that there is not: verl's own code answers the model with the error."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    loop = object.__new__(ToolAgentLoop)
    loop.tools, loop.max_tool_response_length, loop.tool_response_truncate_side = {}, 64, "left"
    extra = {5: (), 6: ({},)}.get(int(verl.__version__.split(".")[1]), ({}, SimpleNamespace()))
    await loop._call_tool(SimpleNamespace(name="calculator", arguments="{}"), *extra)


class OwnLoop(AgentLoopBase):
    """Answers by itself."""

    async def run(self, *_, **__):
        """Call two tools at a time, as verl's loop does, and answer."""
        await asyncio.gather(call_a_tool(), call_a_tool())
        return AgentLoopOutput(prompt_ids=[4], response_ids=[3, 2, 1], response_mask=[1, 1, 1], num_turns=1, metrics={})


class AskingTwice(SingleTurnAgentLoop):
    """Asks verl's loop, and again."""

    async def run(self, *args, **kwargs):
        """Answer as verl's loop does."""
        await super().run(*args, **kwargs)
        return await super().run(*args, **kwargs)
