"""The metrics of a gateway as it would send them."""

import os

from cleave.gateway.metrics.families import write_page
from cleave.gateway.metrics.gateway_families import list_families
from cleave.gateway.metrics.gateway_metrics import GatewayMetrics
from cleave.gateway.metrics.process_metrics import measure_processes
from cleave.time_slices import run_at_once


def write_gateway_page(metrics: GatewayMetrics) -> bytes:
    families = [*list_families(metrics), *measure_processes([os.getpid()])]
    return b"".join(run_at_once(write_page(families)))
