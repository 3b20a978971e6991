"""The names that users write against, by what they are for, in the order in which somebody needs them."""

from __future__ import annotations

from collections.abc import Mapping

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "Agent loops": (
        "penstock.agent_loops.AgentLoopBase",
        "penstock.agent_loops.AgentLoopOutput",
        "penstock.agent_loops.register",
        "penstock.agent_loops.Conversation",
        "penstock.agent_loops.SegmentBuilder",
        "penstock.agent_loops.EpisodeLLM",
        "penstock.agent_loops.ChatTokens",
        "penstock.agent_loops.ToolBox",
        "penstock.gateway.OpenAIAgentLoop",
    ),
    "Rewards": ("penstock.agent_loops.rewards.BaseReward", "penstock.agent_loops.rewards.Answer"),
    "Tools": (
        "penstock.tools.function_tool",
        "penstock.tools.BaseTool",
        "penstock.tools.ToolResult",
        "penstock.tools.ToolInfraError",
        "penstock.tools.ToolUnavailable",
        "penstock.tools.ToolGroup",
        "penstock.tools.register_tool",
        "penstock.tools.make_tools",
    ),
    "Sandboxes": (
        "penstock.sandbox.make_sandbox",
        "penstock.sandbox.Sandbox",
        "penstock.sandbox.Session",
        "penstock.sandbox.RunResult",
        "penstock.sandbox.SandboxError",
        "penstock.sandbox.SandboxLost",
        "penstock.sandbox.current_call",
    ),
    "Testing": (
        "penstock.testing.try_loop",
        "penstock.testing.check_env",
        "penstock.testing.EpisodeState",
        "penstock.testing.EnvCheck",
        "penstock.testing.MemoryTransferQueue",
        "penstock.testing.FakeClient",
        "penstock.testing.FakeEngine",
        "penstock.testing.FakeSandbox",
    ),
    "Tasks and trajectories": (
        "penstock.transfer_queue.Task",
        "penstock.transfer_queue.Outcome",
        "penstock.transfer_queue.OutcomeKind",
        "penstock.transfer_queue.Segment",
        "penstock.transfer_queue.Trajectory",
    ),
    "The queue": (
        "penstock.transfer_queue.TransferQueue",
        "penstock.transfer_queue.RunContext",
        "penstock.transfer_queue.Limits",
        "penstock.transfer_queue.Lease",
        "penstock.transfer_queue.Batch",
        "penstock.transfer_queue.QueueError",
        "penstock.transfer_queue.LeaseLost",
        "penstock.transfer_queue.QueueUnavailable",
        "penstock.transfer_queue.RedisTransferQueue",
    ),
    "Rollout servers": (
        "penstock.rollout_server.RolloutClient",
        "penstock.rollout_server.Engine",
        "penstock.rollout_server.GenerateRequest",
        "penstock.rollout_server.Sampling",
        "penstock.rollout_server.Chunk",
        "penstock.rollout_server.Generation",
        "penstock.weight_sync.WeightPublisher",
        "penstock.weight_sync.WeightReader",
    ),
    "The trainer": (
        "penstock.trainer.advantages.Episodes",
        "penstock.trainer.advantages.Advantages",
        "penstock.trainer.losses.LossInput",
        "penstock.trainer.losses.TokenLoss",
        "penstock.trainer.TrainJob",
        "penstock.trainer.train",
    ),
    "Configuration": (
        "penstock.deploy.load_config",
        "penstock.deploy.parse_config",
        "penstock.deploy.dump_config",
        "penstock.deploy.ConfigError",
    ),
}
"""Title → dotted names; a name is documented where its module defines or imports it."""
