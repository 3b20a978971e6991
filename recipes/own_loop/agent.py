"""The shortest useful agent loop: call tools until the model answers.

penstock run recipes/calculator.yaml agent.loop=recipes/own_loop/agent.py:MyAgent
"""

from penstock.agent_loops import AgentLoopBase, register


@register("my_agent")
class MyAgent(AgentLoopBase):
    async def run(self, task):
        segment = self.chat.start(task.messages, tools=self.tools.schemas)
        while not segment.done:
            reply = await self.llm.generate(segment)
            calls = self.chat.tool_calls(reply)
            if not calls:
                break
            segment.observe(self.chat.render_tools(await self.tools.call_all(calls)))
        return segment.output()
