"""A calculator as an environment: `calculate` evaluates, `submit` ends with a number. Data: {"prompt", "answer"}."""

import ast
import math
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Calculator:
    def reset(self, answer, **row):
        """Begins with one row of the data."""
        self.answer, self.submitted = float(answer), None

    def calculate(self, expression: str) -> str:
        """Evaluates an arithmetic expression with + - * / and parentheses.

        Args:
            expression: For example "(2 + 3) * 4".
        """
        if len(expression) > 200:
            raise ValueError("the expression has more than 200 characters")
        return f"{value_of(ast.parse(expression.strip(), mode='eval').body):g}"

    def submit(self, number: float) -> str:
        """Hands in the result. The first number counts.

        Args:
            number: The result.
        """
        if self.submitted is None:
            self.submitted = float(number)
        return "Thank you."

    def get_reward(self) -> float:
        """1 for the right number, else 0."""
        return float(self.submitted is not None and math.isclose(self.submitted, self.answer, rel_tol=1e-6))


def value_of(node: ast.expr) -> float:
    """Of numbers and four operators; nothing that is written is executed. The model reads what it raises."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only numbers, + - * / and parentheses")
