"""Writes Grafana's dashboards: `python scripts/dashboards.py OUTDIR` (scripts/generate).

One function per dashboard; each panel has a title, a unit, queries and a description. Tests
evaluate every query with a real Prometheus, so no panel stays empty.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from panels import (
    MODEL,
    NAMESPACE,
    PLANNED,
    RATE,
    Graph,
    Kind,
    Line,
    add,
    find_quantile,
    find_quantiles,
    make_board,
    sum_rates,
)


def serving() -> Dashboard:
    """The dashboard of latency, attainment and errors as clients experience them."""
    attained = f'cleave_gateway_slo_total{{missed="",{MODEL}}}'
    measured = f"cleave_gateway_slo_total{{{MODEL}}}"
    dashboard = make_board("serving", "Cleave / Serving", "Latency, SLO attainment and errors.")
    attainment = f"{sum_rates(attained, 'model')} / {sum_rates(measured, 'model')}"
    failed = f'cleave_gateway_requests_total{{outcome=~"failed|broken|unavailable",{MODEL}}}'
    add(
        dashboard,
        "Now",
        Graph(
            "Within both targets",
            "percentunit",
            (Line("{{model}}", attainment),),
            "Share of responses that meet both targets at present.",
            decimals=1,
            kind=Kind.NUMBERS,
        ),
        Graph(
            "P90 to the first token",
            "s",
            (Line("{{model}}", find_quantile(0.9, "cleave_gateway_ttft_seconds", "model")),),
            "Nine of ten streams begin sooner.",
            kind=Kind.NUMBERS,
        ),
        Graph(
            "Requests without a response",
            "reqps",
            (Line("per second", f"{sum_rates(failed)} or vector(0)"),),
            "Failed, broken off, or without an instance. The gateway's log has the reasons; the "
            "alerts are CleaveRequestsFail and CleaveManyRequestsFail.",
            kind=Kind.NUMBERS,
            limits=((0.001, "orange"),),
        ),
        Graph(
            "In flight",
            "short",
            (Line("requests", f"sum(cleave_gateway_requests_in_flight{{{NAMESPACE}}})"),),
            "Requests that gateways work on, of all models.",
            decimals=0,
            kind=Kind.NUMBERS,
        ),
    )
    add(
        dashboard,
        "Targets",
        Graph(
            "SLO attainment",
            "percentunit",
            (Line("{{model}}", attainment),),
            "Share of responses that met both targets. Unserved requests count as missed.",
        ),
        Graph(
            "Goodput",
            "reqps",
            (
                Line("{{model}} in time", sum_rates(attained, "model")),
                Line("{{model}} all", sum_rates(measured, "model")),
            ),
            "Responses per second: those that met both targets, and all.",
        ),
        Graph(
            "What was missed",
            "reqps",
            (
                Line(
                    "{{missed}}",
                    sum_rates(f'cleave_gateway_slo_total{{missed!="",{MODEL}}}', "missed"),
                ),
            ),
            "TTFT: prompts wait, so prefill has too little capacity. TPOT: decoding is full.",
        ),
    )
    add(
        dashboard,
        "Latency",
        Graph(
            "Time to first token",
            "s",
            find_quantiles("cleave_gateway_ttft_seconds", "ttft"),
            "Of streams, with queueing, and its target.",
        ),
        Graph(
            "Time per output token",
            "s",
            find_quantiles("cleave_gateway_tpot_seconds", "tpot"),
            "Of streams, after the first token, on average over a stream, and its target.",
        ),
        Graph(
            "Inter-token latency",
            "s",
            find_quantiles("cleave_gateway_itl_seconds", "itl_p99"),
            "Between two pieces of a stream, of a sample. A P99 far above the P50 means pauses.",
        ),
        Graph(
            "Distribution of the time to first token",
            "s",
            (
                Line(
                    "{{le}}",
                    f"sum by (le) (increase(cleave_gateway_ttft_seconds_bucket{{{MODEL}}}{RATE}))",
                ),
            ),
            "Streams by bucket. Two bands: some prompts wait or are computed elsewhere.",
            kind=Kind.BUCKETS,
        ),
        Graph(
            "P90 to first token by role",
            "s",
            (Line("{{role}}", find_quantile(0.9, "cleave_gateway_ttft_seconds", "role")),),
            "By the role of the instance that computed the prompt.",
        ),
        Graph(
            "P90 of each phase",
            "s",
            (Line("{{phase}}", find_quantile(0.9, "cleave_gateway_phase_seconds", "phase")),),
            "Split requests: from a request to an instance to its first bytes. Decode includes the "
            "pull.",
        ),
    )
    add(
        dashboard,
        "Traffic",
        Graph(
            "Requests by outcome",
            "reqps",
            (
                Line(
                    "{{outcome}}", sum_rates(f"cleave_gateway_requests_total{{{MODEL}}}", "outcome")
                ),
            ),
            "Refused: the client's error. Shed: load or limits. Unavailable: no instance. Failed "
            "and broken: engines, before and after the first byte.",
        ),
        Graph(
            "Tokens per second",
            "short",
            (
                Line("prompt", sum_rates(f"cleave_gateway_prompt_tokens_total{{{MODEL}}}")),
                Line("output", sum_rates(f"cleave_gateway_output_tokens_total{{{MODEL}}}")),
            ),
            "Of requests that have ended; prompts with what engines find in their caches.",
        ),
        Graph(
            "Dispatch by reason",
            "reqps",
            (
                Line(
                    "{{reason}}", sum_rates(f"cleave_gateway_dispatches_total{{{MODEL}}}", "reason")
                ),
            ),
            "Disaggregated: split over two instances. No-prefill and no-decode are fallbacks.",
        ),
        Graph(
            "Wait at the gateway",
            "s",
            find_quantiles("cleave_gateway_queue_seconds"),
            "Requests wait here only where tenants have limits or late requests are refused.",
        ),
        Graph(
            "Shed requests",
            "reqps",
            (
                Line(
                    "{{reason}} {{tenant}}",
                    sum_rates(f"cleave_gateway_shed_total{{{NAMESPACE}}}", "reason, tenant"),
                ),
            ),
            "Of all models.",
        ),
        Graph(
            "Failures hidden from clients",
            "reqps",
            (
                Line(
                    "{{phase}} {{cause}}",
                    sum_rates(f"cleave_gateway_retries_total{{{NAMESPACE}}}", "phase, cause")
                    + " > 0",
                ),
                Line("{{how}}", sum_rates(f"cleave_gateway_recoveries_total{{{MODEL}}}", "how")),
            ),
            "Attempts that were retried, of all models, and streams that another engine continued.",
        ),
    )
    return dashboard


def pools() -> Dashboard:
    """The dashboard of instances, their roles and KV transfers."""
    dashboard = make_board("pools", "Cleave / Pools and KV", "Instances, their roles and handoffs.")
    add(
        dashboard,
        "Instances",
        Graph(
            "Ready, by role",
            "short",
            (
                Line(
                    "{{model}} {{role}}",
                    f'max by (model, role) (cleave_gateway_instances{{state="ready",{MODEL}}})',
                ),
            ),
            "Instances that take requests, by the role that they have now.",
            decimals=0,
        ),
        Graph(
            "All, by state",
            "short",
            (
                Line(
                    "{{model}} {{role}} {{state}}",
                    f"max by (model, role, state) (cleave_gateway_instances{{{MODEL}}}) > 0",
                ),
            ),
            "At present. Starting and verifying pass; unreachable ones do not report.",
            decimals=0,
            kind=Kind.TABLE,
        ),
        Graph(
            "Flips in an hour",
            "short",
            (
                Line(
                    "{{from}} to {{to}}",
                    f"sum by (from, to) (increase(cleave_gateway_flips_total{{{MODEL}}}[1h]))",
                ),
            ),
            "Instances that changed their role and that changed it back.",
            decimals=0,
        ),
    )
    add(
        dashboard,
        "Handoffs",
        Graph(
            "By result",
            "reqps",
            (
                Line(
                    "{{result}}",
                    sum_rates(f"cleave_gateway_handoffs_total{{{NAMESPACE}}}", "result"),
                ),
            ),
            "Of all models. A refused or failed handoff recomputes the prompt; no token is wrong.",
        ),
        Graph(
            "Transferred tokens per second",
            "short",
            (
                Line(
                    "{{model}}",
                    sum_rates(f"cleave_gateway_handoff_tokens_total{{{MODEL}}}", "model"),
                ),
            ),
            "Of prompts.",
        ),
        Graph(
            "KV lost",
            "cps",
            (
                Line("{{reason}}", sum_rates(f"cleave_kv_lost_total{{{NAMESPACE}}}", "reason")),
                Line("nixl", sum_rates(f"vllm:nixl_num_failed_transfers_total{{{NAMESPACE}}}")),
            ),
            "Counted by engines per rank, including KV that they recomputed themselves.",
        ),
        Graph(
            "Pairs by canary handoffs",
            "short",
            (
                Line(
                    "{{model}} {{state}}",
                    f"max by (model, state) (cleave_gateway_kv_pairs{{{MODEL}}})",
                ),
            ),
            "Closed: not picked together, because canaries moved no KV, the wrong one, or slowly.",
            decimals=0,
            kind=Kind.NUMBERS,
        ),
        Graph(
            "Age of the oldest proof",
            "s",
            (
                Line(
                    "{{model}}",
                    f"max by (model) (cleave_gateway_kv_proof_age_seconds_max{{{MODEL}}})",
                ),
            ),
            "Since the last good canary handoff of the pair that waits longest. Above ten minutes "
            "the alert CleaveProofsAreStale follows.",
            kind=Kind.NUMBERS,
            limits=((600, "red"),),
        ),
        Graph(
            "Rate of the slowest pair",
            "Bps",
            (
                Line(
                    "{{model}}",
                    f"min by (model) (cleave_gateway_kv_pair_bytes_per_second_min{{{MODEL}}})",
                ),
            ),
            "KV to one GPU in canary handoffs.",
        ),
    )
    add(
        dashboard,
        "Engines",
        Graph(
            "Requests",
            "short",
            (
                Line(
                    "{{model}} {{role}} {{state}}",
                    f"max by (model, role, state) (cleave_gateway_engine_requests{{{MODEL}}})",
                ),
            ),
            "As engines report them. Prompts that wait at prefill instances delay first tokens.",
            decimals=0,
        ),
        Graph(
            "Maximum KV usage",
            "percentunit",
            (
                Line(
                    "{{model}} {{role}}",
                    f"max by (model, role) (cleave_gateway_engine_kv_usage_max{{{MODEL}}})",
                ),
            ),
            "Of the fullest instance. Near 100 % engines preempt requests and compute them again.",
        ),
        Graph(
            "Cached share of prompts",
            "percentunit",
            (_compare_caches("engine", "max"), _compare_caches("predicted", "sum")),
            "As engines report it and as gateways predict it when they choose instances.",
        ),
        Graph(
            "P90 of a handoff",
            "s",
            (
                Line(
                    "{{model}}",
                    find_quantile(
                        0.9,
                        "cleave_gateway_phase_seconds",
                        "model",
                        f'{{phase="decode",{MODEL}}}',
                    ),
                ),
            ),
            "From a request to a decode instance to its first byte: the KV pull and one iteration.",
        ),
    )
    return dashboard


def _compare_caches(source: str, join: str) -> Line:
    """Cached tokens of prompts per token. `join`: how the figures of all gateways for one engine
    make one; each has the engine's own figures, and predicts what itself sends."""

    def add_engines(tokens: str) -> str:
        counter = f'cleave_gateway_cache_{tokens}_tokens_total{{source="{source}",{MODEL}}}'
        return f"sum by (model) ({join} by (model, engine) (rate({counter}{RATE})))"

    return Line(f"{{{{model}}}} {source}", f"{add_engines('hit')} / {add_engines('prompt')}")


def control() -> Dashboard:
    """The dashboard of the operator and the gateway processes."""
    dashboard = make_board(
        "control", "Cleave / Control plane", "The operator and the gateway processes."
    )
    add(
        dashboard,
        "Operator",
        Graph(
            "Reconciles",
            "ops",
            (
                Line(
                    "{{kind}} {{outcome}}",
                    sum_rates("cleave_operator_reconciles_total", "kind, outcome"),
                ),
            ),
            "Objects compared with what they should be. Failed ones are repeated with back-off.",
        ),
        Graph(
            "P99 of a reconcile",
            "s",
            (
                Line(
                    "{{kind}}", find_quantile(0.99, "cleave_operator_reconcile_seconds", "kind", "")
                ),
            ),
            "With the writes to the API server.",
        ),
        Graph(
            "Queue",
            "short",
            (Line("objects", "sum(cleave_operator_queue_depth)"),),
            "Objects due for a reconcile.",
            decimals=0,
        ),
        Graph(
            "Writes",
            "ops",
            (
                Line(
                    "{{action}} {{outcome}}",
                    sum_rates("cleave_operator_actions_total", "action, outcome"),
                ),
            ),
            "To the API server. Many that repeat without an end: something else writes as well.",
        ),
        Graph(
            "Leaders",
            "short",
            (Line("leading operators", "sum(cleave_operator_leading)"),),
            "Always one: none writes nothing, two would write against each other.",
            decimals=0,
            kind=Kind.NUMBERS,
            limits=((0, "red"), (1, "green"), (2, "red")),
        ),
        Graph(
            "Objects",
            "short",
            (Line("{{kind}}", "max by (kind) (cleave_operator_objects)"),),
            "What the operator knows of the cluster.",
            decimals=0,
            kind=Kind.TABLE,
        ),
    )
    add(dashboard, "Plans", *_plans())
    add(
        dashboard,
        "Gateways",
        Graph(
            "Processes",
            "short",
            (
                Line("serving", f"sum(cleave_gateway_processes{{{NAMESPACE}}})"),
                Line(
                    "replaced in an hour",
                    f"sum(increase(cleave_gateway_process_restarts_total{{{NAMESPACE}}}[1h]))",
                ),
            ),
            "Of all gateways. A replaced process lost its connections; its log has the reason.",
            decimals=0,
        ),
        Graph(
            "CPU",
            "percentunit",
            (
                Line(
                    "{{pod}}",
                    f"sum by (pod) (rate(process_cpu_seconds_total{RATE}) "
                    f"and on (pod, instance) cleave_gateway_processes{{{NAMESPACE}}})",
                ),
            ),
            "Share of one core.",
        ),
        Graph(
            "Memory",
            "bytes",
            (
                Line(
                    "{{pod}}",
                    "sum by (pod) (process_resident_memory_bytes "
                    f"and on (pod, instance) cleave_gateway_processes{{{NAMESPACE}}})",
                ),
            ),
            "Resident, of each gateway pod.",
        ),
    )
    return dashboard


def _plans() -> tuple[Graph, ...]:
    """Panels that compare predictions for the running plan with observations."""
    labels = "deployment, source"

    def compare(latency: str) -> Graph:
        selector = f'{{latency="{latency}",quantile="0.9",{PLANNED}}}'
        query = f"max by ({labels}) (cleave_operator_latency_seconds{selector})"
        line = Line("{{deployment}} {{source}}", query)
        text = "Predicted for the running plan at the observed traffic, and observed."
        return Graph(f"P90 {latency.upper()}, predicted and observed", "s", (line,), text)

    return (
        compare("ttft"),
        compare("tpot"),
        Graph(
            "Attainment, predicted and observed",
            "percentunit",
            (
                Line(
                    "{{deployment}} {{source}}",
                    f"max by ({labels}) (cleave_operator_attainment{{{PLANNED}}})",
                ),
            ),
            "Share of responses within both targets. Predicted far above: the model is too fast.",
        ),
        Graph(
            "Prediction error",
            "percentunit",
            (
                Line(
                    "{{deployment}}",
                    f"max by (deployment) (cleave_operator_prediction_error{{{PLANNED}}})",
                ),
            ),
            "Above planning.replan.driftThreshold, no plan changes until the model is corrected.",
        ),
        Graph(
            "Correction of the latency model",
            "none",
            (
                Line(
                    "{{deployment}} {{phase}}",
                    f"max by (deployment, phase) (cleave_operator_correction{{{PLANNED}}})",
                ),
            ),
            "Observed iteration time divided by that of the profile. 1: no correction.",
        ),
        Graph(
            "Planner results in an hour",
            "short",
            (Line("{{result}}", "sum by (result) (increase(cleave_operator_plans_total[1h]))"),),
            "Plans: planned, infeasible, failed. Reviews: keep, correct, propose, apply.",
            decimals=0,
            kind=Kind.TABLE,
        ),
    )


DASHBOARDS = (serving, pools, control)


def main(argv: Sequence[str]) -> int:
    """Write all dashboards into the folder argv[0]; 2 when the usage is wrong."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        sys.stderr.write("usage: python scripts/dashboards.py OUTDIR\n")
        return 2
    for make in DASHBOARDS:
        text = JSONEncoder(sort_keys=True, indent=2).encode(make().build())
        (Path(argv[0]) / f"{make.__name__}.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
