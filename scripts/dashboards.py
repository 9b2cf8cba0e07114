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
    add(
        dashboard,
        "Targets",
        Graph(
            "SLO attainment",
            "percentunit",
            (
                Line(
                    "{{model}}", f"{sum_rates(attained, 'model')} / {sum_rates(measured, 'model')}"
                ),
            ),
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
        ),
    )
    add(
        dashboard,
        "Latency",
        Graph("Time to first token", "s", find_quantiles("cleave_gateway_ttft_seconds", "ttft")),
        Graph("Time per output token", "s", find_quantiles("cleave_gateway_tpot_seconds", "tpot")),
        Graph("Inter-token latency", "s", find_quantiles("cleave_gateway_itl_seconds")),
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
        Graph("Wait at the gateway", "s", find_quantiles("cleave_gateway_queue_seconds")),
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
            "In flight",
            "short",
            (Line("requests", f"sum(cleave_gateway_requests_in_flight{{{NAMESPACE}}})"),),
            "Of all models.",
            decimals=0,
        ),
        Graph(
            "Dispatch by reason",
            "reqps",
            (
                Line(
                    "{{reason}}", sum_rates(f"cleave_gateway_dispatches_total{{{MODEL}}}", "reason")
                ),
            ),
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
            decimals=0,
        ),
        Graph(
            "Not ready",
            "short",
            (
                Line(
                    "{{model}} {{role}} {{state}}",
                    "max by (model, role, state) "
                    f'(cleave_gateway_instances{{state!="ready",{MODEL}}})',
                ),
            ),
            decimals=0,
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
            "Since the last good canary handoff of the pair that waits longest.",
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
        ),
        Graph(
            "P99 of a reconcile",
            "s",
            (
                Line(
                    "{{kind}}", find_quantile(0.99, "cleave_operator_reconcile_seconds", "kind", "")
                ),
            ),
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
        ),
        Graph(
            "Leaders",
            "short",
            (Line("leading operators", "sum(cleave_operator_leading)"),),
            "Always one.",
            decimals=0,
        ),
        Graph(
            "Objects",
            "short",
            (Line("{{kind}}", "max by (kind) (cleave_operator_objects)"),),
            "What the operator knows of the cluster.",
            decimals=0,
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
