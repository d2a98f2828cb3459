"""Agent loops of a user: one of its own, and one around a loop that verl brings along."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class OwnLoop(AgentLoopBase):
    """Answers by itself."""

    async def run(self, *_, **__):
        """Answer."""
        return AgentLoopOutput(prompt_ids=[4], response_ids=[3, 2, 1], response_mask=[1, 1, 1], num_turns=1, metrics={})


class AskingTwice(SingleTurnAgentLoop):
    """Asks verl's loop, and again."""

    async def run(self, *args, **kwargs):
        """Answer as verl's loop does."""
        await super().run(*args, **kwargs)
        return await super().run(*args, **kwargs)
