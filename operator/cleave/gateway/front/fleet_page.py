"""What `GET /fleet` answers: every instance that this gateway follows. Used by the pages."""

from cleave.gateway.context import Context
from cleave.gateway.counts.fleet_metrics import to_word
from cleave.router.instance import Instance
from cleave.rpc import fleet_page
from cleave.rpc.fleet_page import FleetPage, KvPath
from cleave.rpc.v1 import agent_pb2

MAX_INSTANCES = 4_096
"""About 2 MB."""
_TEXT_LIMIT = 300
"""Characters of a reason or detail."""


def describe_fleet(context: Context) -> FleetPage:
    """The fleet as it is now, by name."""
    instances = context.router.directory.instances
    now = context.clock()
    return FleetPage(
        instances=tuple(_describe(instances[n], now) for n in sorted(instances)[:MAX_INSTANCES]),
        left_out=max(len(instances) - MAX_INSTANCES, 0),
        draining=context.draining,
    )


def _describe(instance: Instance, now: float) -> fleet_page.Instance:
    stated, load, ledger = instance.registration, instance.load, instance.ledger
    return fleet_page.Instance(
        name=instance.name,
        deployment=stated.deployment,
        model=stated.model,
        revision=stated.revision,
        role=to_word(agent_pb2.Role.Name(stated.role)),
        home=to_word(agent_pb2.Role.Name(stated.home or stated.role)),
        state=to_word(agent_pb2.State.Name(stated.state)),
        epoch=stated.epoch,
        contact=instance.contact.value,
        selectable=instance.selectable,
        reason=stated.reason[:_TEXT_LIMIT],
        restarts=stated.restarts,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        pending_tokens=int(ledger.prompt.pending + ledger.resident.pending),
        kv_cache_usage=load.kv_cache_usage,
        requests_in_flight=ledger.count_requests(),
        report_age_s=round(max(now - instance.heard_at, 0.0), 3),
        kv_path=KvPath(
            verified=stated.kv_path.verified,
            transport=stated.kv_path.transport,
            transfer_ms=stated.kv_path.transfer_ms,
            bytes_per_s=stated.kv_path.bytes_per_s,
            detail=stated.kv_path.detail[:_TEXT_LIMIT],
        ),
    )
