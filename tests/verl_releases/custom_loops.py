"""Agent loops of a user: one of its own, and one around a loop that verl brings along."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class OwnLoop(AgentLoopBase):
    """Answers by itself."""

    async def run(self, *_, **__):
        """Answer."""
        return "own answer"


class AskingTwice(SingleTurnAgentLoop):
    """Asks verl's loop, and again."""

    async def run(self, *args, **kwargs):
        """Answer as verl's loop does."""
        await super().run(*args, **kwargs)
        return await super().run(*args, **kwargs)
