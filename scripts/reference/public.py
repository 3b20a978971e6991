"""The names that users write against, by what they are for, in the order in which somebody needs them."""

from __future__ import annotations

from collections.abc import Mapping

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "Agent loops": (
        "penstock.agent_loops.AgentLoopBase",
        "penstock.agent_loops.AgentLoopOutput",
        "penstock.agent_loops.register",
        "penstock.agent_loops.Conversation",
        "penstock.agent_loops.segment.SegmentBuilder",
        "penstock.agent_loops.llm.EpisodeLLM",
        "penstock.agent_loops.llm.Reply",
        "penstock.agent_loops.chat.chat.ChatTokens",
        "penstock.agent_loops.tool_runner.ToolBox",
        "penstock.gateway.openai_agent.OpenAIAgentLoop",
        "penstock.agent_loops.env_check.try_loop",
    ),
    "Rewards": (
        "penstock.agent_loops.rewards.base.BaseReward",
        "penstock.agent_loops.rewards.base.Answer",
    ),
    "Tools": (
        "penstock.tools.functions.function_tool",
        "penstock.tools.BaseTool",
        "penstock.tools.ToolResult",
        "penstock.tools.ToolInfraError",
        "penstock.tools.base.ToolUnavailable",
        "penstock.tools.base.ToolGroup",
        "penstock.tools.registry.register_tool",
        "penstock.tools.registry.make_tools",
    ),
    "Sandboxes": (
        "penstock.sandbox.make.make_sandbox",
        "penstock.sandbox.protocol.Sandbox",
        "penstock.sandbox.protocol.Session",
        "penstock.sandbox.protocol.RunResult",
        "penstock.sandbox.protocol.SandboxError",
        "penstock.sandbox.protocol.SandboxLost",
        "penstock.sandbox.idempotency.current_call",
    ),
    "Tasks and trajectories": (
        "penstock.transfer_queue.types.Task",
        "penstock.transfer_queue.types.Outcome",
        "penstock.transfer_queue.types.OutcomeKind",
        "penstock.transfer_queue.types.Segment",
        "penstock.transfer_queue.types.Trajectory",
    ),
    "The queue": (
        "penstock.transfer_queue.queue.TransferQueue",
        "penstock.transfer_queue.queue.Limits",
        "penstock.transfer_queue.queue.Lease",
        "penstock.transfer_queue.queue.Batch",
        "penstock.transfer_queue.queue.QueueError",
        "penstock.transfer_queue.queue.LeaseLost",
        "penstock.transfer_queue.queue.QueueUnavailable",
        "penstock.transfer_queue.redis.queue.RedisTransferQueue",
        "penstock.transfer_queue.memory.MemoryTransferQueue",
    ),
    "Rollout servers": (
        "penstock.rollout_server.client.RolloutClient",
        "penstock.rollout_server.protocol.Engine",
        "penstock.rollout_server.protocol.GenerateRequest",
        "penstock.rollout_server.protocol.Sampling",
        "penstock.rollout_server.protocol.Chunk",
        "penstock.rollout_server.protocol.Generation",
        "penstock.weight_sync.WeightPublisher",
        "penstock.weight_sync.WeightReader",
    ),
    "The trainer": (
        "penstock.trainer.advantages.Episodes",
        "penstock.trainer.advantages.Advantages",
        "penstock.trainer.losses.LossInput",
        "penstock.trainer.losses.TokenLoss",
        "penstock.trainer.job.TrainJob",
        "penstock.trainer.loop.train",
    ),
    "Configuration": (
        "penstock.deploy.config.load_config",
        "penstock.deploy.config.parse_config",
        "penstock.deploy.config.dump_config",
        "penstock.deploy.config.ConfigError",
    ),
}
"""Title → dotted names; a name is documented where its module defines or imports it."""
