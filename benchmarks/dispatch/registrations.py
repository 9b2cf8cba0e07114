"""Instances as their agents would state them, ready and verified."""

from cleave.rpc.v1 import agent_pb2


def state(
    name: str, role: "agent_pb2.Role.ValueType", kv_blocks: int = 32_000
) -> agent_pb2.WatchEvent:
    """What a router hears of one."""
    registration = agent_pb2.Registration(
        instance=name,
        deployment="chat",
        model="m",
        revision="r",
        boot_id=f"{name}-boot",
        role=role,
        state=agent_pb2.STATE_READY,
        engine_url="http://127.0.0.1:8000",
        kv_block_size=16,
        kv_blocks_total=kv_blocks,
        kv_path=agent_pb2.KvPath(verified=True),
    )
    return agent_pb2.WatchEvent(registration=registration)
