"""Two environments as OpenEnv's documentation has them: one with actions, one that serves tools."""

from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    """Guesses a number."""

    guess: int


class Heard(Observation):
    hint: str = ""


class Guessing(Environment[Move, Heard, State]):
    def __init__(self):
        super().__init__()
        self.target = 0

    def reset(self, seed=None, episode_id=None, target=0, **kwargs):
        self.target = target
        return Heard(hint=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        right = action.guess == self.target
        return Heard(hint="right" if right else "higher", done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        return State()


class Serving(MCPEnvironment):
    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()
