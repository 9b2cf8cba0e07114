"""Writes Grafana's dashboards: `python scripts/dashboards.py OUTDIR` (scripts/generate).

One function a dashboard, one line a panel: title, unit, and what each of its lines shows. Every
query is asked of a real Prometheus in tests, so a panel cannot be empty for ever.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from panels import (
    MODEL,
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
    """What clients get."""
    attained = f'cleave_gateway_slo_total{{missed="",{MODEL}}}'
    answered = f"cleave_gateway_slo_total{{{MODEL}}}"
    board = make_board("serving", "Cleave / Serving", "What clients get, and what they do not.")
    add(
        board,
        "Targets",
        Graph(
            "SLO attainment",
            "percentunit",
            (
                Line(
                    "{{model}}", f"{sum_rates(attained, 'model')} / {sum_rates(answered, 'model')}"
                ),
            ),
            "Share of answers that met both targets. Unserved ones count as missed.",
        ),
        Graph(
            "Goodput",
            "reqps",
            (
                Line("{{model}} in time", sum_rates(attained, "model")),
                Line("{{model}} all", sum_rates(answered, "model")),
            ),
            "Answers per second that met both targets, beside all.",
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
        board,
        "Latency",
        Graph("Time to first token", "s", find_quantiles("cleave_gateway_ttft_seconds", "ttft")),
        Graph("Time per output token", "s", find_quantiles("cleave_gateway_tpot_seconds", "tpot")),
        Graph("Gaps between pieces", "s", find_quantiles("cleave_gateway_itl_seconds")),
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
            "Of split requests: an instance asked to its first bytes. Decode includes the pull.",
        ),
        Graph("Wait at the gateway", "s", find_quantiles("cleave_gateway_queue_seconds")),
    )
    add(
        board,
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
            "Tokens",
            "short",
            (
                Line("prompt", sum_rates(f"cleave_gateway_prompt_tokens_total{{{MODEL}}}")),
                Line("output", sum_rates(f"cleave_gateway_output_tokens_total{{{MODEL}}}")),
            ),
            "Per second.",
        ),
        Graph("In flight", "short", (Line("requests", "sum(cleave_gateway_requests_in_flight)"),)),
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
            "Not taken",
            "reqps",
            (
                Line(
                    "{{reason}} {{tenant}}",
                    sum_rates("cleave_gateway_shed_total", "reason, tenant"),
                ),
            ),
        ),
        Graph(
            "Failures that clients did not see",
            "reqps",
            (
                Line(
                    "{{phase}} {{cause}}", sum_rates("cleave_gateway_retries_total", "phase, cause")
                ),
                Line("{{how}}", sum_rates("cleave_gateway_recoveries_total", "how")),
            ),
            "Attempts that were made again, and streams that went on with another engine.",
        ),
    )
    return board


def pools() -> Dashboard:
    """Instances, roles, and the KV between them."""
    board = make_board("pools", "Cleave / Pools and KV", "Instances, their roles and hand-offs.")
    add(
        board,
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
        ),
        Graph(
            "Not ready",
            "short",
            (
                Line(
                    "{{role}} {{state}}",
                    f'max by (role, state) (cleave_gateway_instances{{state!="ready",{MODEL}}})',
                ),
            ),
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
            "Instances lent to the other pool and taken home.",
        ),
    )
    add(
        board,
        "Hand-offs",
        Graph(
            "By result",
            "reqps",
            (Line("{{result}}", sum_rates("cleave_gateway_handoffs_total", "result")),),
            "refused and failed ones cost a prompt computed again, never a wrong token.",
        ),
        Graph(
            "Tokens handed over",
            "short",
            (
                Line(
                    "{{model}}",
                    sum_rates(f"cleave_gateway_handoff_tokens_total{{{MODEL}}}", "model"),
                ),
            ),
            "Prompt tokens per second.",
        ),
        Graph(
            "KV lost",
            "reqps",
            (
                Line("{{reason}}", sum_rates("cleave_kv_lost_total", "reason")),
                Line("nixl", sum_rates("vllm:nixl_num_failed_transfers_total")),
            ),
            "Counted by engines, each rank for itself: also what they computed again themselves.",
        ),
    )
    add(
        board,
        "Engines",
        Graph(
            "Requests",
            "short",
            (
                Line(
                    "{{role}} {{state}}",
                    f"max by (model, role, state) (cleave_gateway_engine_requests{{{MODEL}}})",
                ),
            ),
        ),
        Graph(
            "KV memory of the fullest",
            "percentunit",
            (
                Line(
                    "{{model}} {{role}}",
                    f"max by (model, role) (cleave_gateway_engine_kv_usage_max{{{MODEL}}})",
                ),
            ),
        ),
        Graph(
            "P90 of a hand-off",
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
            "A decode instance asked to its first byte: the pull of the KV, and a step.",
        ),
    )
    return board


def control() -> Dashboard:
    """The operator and the gateways themselves."""
    board = make_board(
        "control", "Cleave / Control plane", "The operator and the gateway processes."
    )
    add(
        board,
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
        Graph("Queue", "short", (Line("objects", "sum(cleave_operator_queue_depth)"),)),
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
        Graph("Leaders", "short", (Line("operators that write", "sum(cleave_operator_leading)"),)),
        Graph("Objects", "short", (Line("{{kind}}", "max by (kind) (cleave_operator_objects)"),)),
    )
    add(board, "Plans", *_plans())
    add(
        board,
        "Gateways",
        Graph(
            "Processes",
            "short",
            (
                Line("that serve", "sum(cleave_gateway_processes)"),
                Line(
                    "replaced in an hour",
                    "sum(increase(cleave_gateway_process_restarts_total[1h]))",
                ),
            ),
        ),
        Graph(
            "CPU",
            "percentunit",
            (
                Line(
                    "{{pod}}",
                    f"sum by (pod) (rate(process_cpu_seconds_total{RATE}) "
                    "and on (pod, instance) cleave_gateway_processes)",
                ),
            ),
            "Of a core.",
        ),
        Graph(
            "Memory",
            "bytes",
            (
                Line(
                    "{{pod}}",
                    "sum by (pod) (process_resident_memory_bytes "
                    "and on (pod, instance) cleave_gateway_processes)",
                ),
            ),
        ),
    )
    return board


def _plans() -> tuple[Graph, ...]:
    """What was predicted of what runs, and what was seen of it."""
    of = "deployment, source"

    def compare(latency: str) -> Graph:
        wanted = f'{{latency="{latency}",quantile="0.9",{MODEL}}}'
        query = f"max by ({of}) (cleave_operator_latency_seconds{wanted})"
        line = Line("{{deployment}} {{source}}", query)
        text = "What the planner says of what runs, at the traffic that is seen, and what it does."
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
                    f"max by ({of}) (cleave_operator_attainment{{{MODEL}}})",
                ),
            ),
        ),
        Graph(
            "Prediction error",
            "percentunit",
            (
                Line(
                    "{{deployment}}",
                    f"max by (deployment) (cleave_operator_prediction_error{{{MODEL}}})",
                ),
            ),
            "Above planning.replan.driftThreshold plans wait until the latency model is corrected.",
        ),
        Graph(
            "Correction of the latency model",
            "none",
            (
                Line(
                    "{{deployment}} {{phase}}",
                    f"max by (deployment, phase) (cleave_operator_correction{{{MODEL}}})",
                ),
            ),
            "What passes take, by what its profile says. 1: it is right.",
        ),
        Graph(
            "Answers of the planner in an hour",
            "short",
            (Line("{{result}}", "sum by (result) (increase(cleave_operator_plans_total[1h]))"),),
            "planned, infeasible, failed; of looks at what runs: keep, correct, propose, apply.",
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
