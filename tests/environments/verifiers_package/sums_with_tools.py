"""A taskset of verifiers with a tool, as an installed package has it: single answers, and several turns."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


class Sum(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer < 0:
            raise RuntimeError("no such answer")
        return float(str(self.data.answer) in (trace.nodes[-1].message.content or ""))


class Sums(vf.Taskset[Sum]):
    def load(self):
        yield Sum(Data(prompt="1 + 1 = ", answer=2), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
