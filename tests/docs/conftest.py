from tests.agent_loops.conftest import tokenizer_for

__all__ = ["tokenizer_for"]
