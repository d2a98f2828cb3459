"""Makes the Grafana dashboard of what `rltrace view` serves at /metrics, in Grafana's own schema.

    python dashboards/dashboard.py          # writes dashboards/rltrace.json anew

In: the names of the metrics, and the colours of `rltrace.events.OWNER_COLORS`. Out: one file to import into Grafana. To
add a panel, write a line in `PANELS`; `tests/exporters/test_prometheus.py` asks a real Prometheus each of its queries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from rltrace.events import OWNER_COLORS

FILE = Path(__file__).with_name("rltrace.json")
TITLE = "rltrace"
WIDTH = 24
"""Columns of a dashboard."""

RUN = 'instance=~"$instance"'
RANK = f'{RUN}, rank=~"$rank"'
"""What the two variables on the top choose."""

PER_MINUTE = "[$__rate_interval]"


class Panel(NamedTuple):
    """One picture."""

    kind: type[Any]
    title: str
    unit: str
    queries: dict[str, str]
    """By the legend of its lines."""
    about: str
    width: int = 12
    height: int = 8
    is_stacked: bool = False


PANELS: dict[str, list[Panel]] = {
    "The run": [
        Panel(stat.Panel, "Last step", "none", {"step": f"rltrace_step_number{{{RUN}}}"}, "Its number.", 4, 4),
        Panel(
            stat.Panel, "Mean step", "s",
            {"seconds": f"rltrace_step_seconds_sum{{{RUN}}} / rltrace_step_seconds_count{{{RUN}}}"},
            "Of all steps that ended; the first one, which warms everything up, is among them.", 4, 4,
        ),
        Panel(
            stat.Panel, "Tokens per second", "none", {"tokens/s": f"rltrace_step_tokens_per_second{{{RUN}}}"},
            "Of the last step.", 4, 4,
        ),
        Panel(
            stat.Panel, "Reward", "none", {"reward": f"rltrace_step_reward_mean{{{RUN}}}"},
            "Mean of the last step.", 4, 4,
        ),
        Panel(
            stat.Panel, "Processes that died", "none", {"died": f'rltrace_processes{{{RUN}, state="died"}}'},
            "`rltrace summary` names them.", 4, 4,
        ),
        Panel(
            stat.Panel, "Records lost", "none", {"lost": f"sum(rltrace_lost_records_total{{{RUN}}})"},
            "What the Recording lacks, such as events that a full disk did not take.", 4, 4,
        ),
    ],
    "Where a step goes": [
        Panel(
            timeseries.Panel, "Phases of the last step", "s",
            {"{{phase}}": f"max by (phase) (rltrace_step_phase_seconds{{{RANK}}})"},
            "Of the rank that took longest.", is_stacked=True,
        ),
        Panel(
            timeseries.Panel, "Slowest rank behind the fastest", "s",
            {
                "{{phase}}": f'max by (phase) (rltrace_step_phase_seconds{{{RUN}, rank!="driver"}}) '
                f'- min by (phase) (rltrace_step_phase_seconds{{{RUN}, rank!="driver"}})'
            },
            "In the last step, phase by phase.",
        ),
        Panel(
            bargauge.Panel, "Mean length of a phase", "s",
            {"{{phase}}": f"rltrace_phase_seconds_sum{{{RUN}}} / rltrace_phase_seconds_count{{{RUN}}}"},
            "Of all its spans on all ranks, those of the start-up too.",
        ),
        Panel(
            bargauge.Panel, "What bounds a step", "s",
            {"{{finding}}": f"sort_desc(rltrace_finding_step_seconds{{{RUN}}})"},
            "What each finding costs in a steady step. `rltrace why` says what to change.",
        ),
    ],
    "Rollout": [
        Panel(
            timeseries.Panel, "Requests in the engines", "none",
            {"{{state}}": f"rltrace_engine_requests{{{RUN}}}"}, "In the last step of each engine.", 8,
        ),
        Panel(
            timeseries.Panel, "Generated tokens per second", "none",
            {"tokens/s": f'rate(rltrace_request_tokens_total{{{RUN}, kind="generated"}}{PER_MINUTE})'},
            "Of requests that ended.", 8,
        ),
        Panel(
            timeseries.Panel, "KV cache", "percentunit", {"fullest engine": f"rltrace_engine_kv_cache_ratio{{{RUN}}}"},
            "Share that is taken.", 8,
        ),
        Panel(
            bargauge.Panel, "95 % of the requests took no longer than", "s",
            {"{{span}}": f"histogram_quantile(0.95, sum by (le, span) (rltrace_request_seconds_bucket{{{RUN}}}))"},
            "Over the whole run, as the agent loop, the server and the engine see them.",
        ),
        Panel(
            bargauge.Panel, "Stages of weight sync", "s",
            {
                "{{stage}}": f"rltrace_weight_sync_stage_seconds_sum{{{RUN}}} "
                f"/ on (instance) group_left rltrace_step_seconds_count{{{RUN}}}"
            },
            "Seconds of all processes together, per step.",
        ),
    ],
    "Memory": [
        Panel(
            timeseries.Panel, "Memory by owner", "bytes",
            {"{{owner}}": f"max by (owner) (rltrace_memory_bytes{{{RANK}}})"},
            "As its processes last said; choose one rank to see one device.", is_stacked=True,
        ),
        Panel(
            bargauge.Panel, "Peak of each owner", "bytes",
            {"{{owner}}": f"max by (owner) (rltrace_memory_peak_bytes{{{RANK}}})"},
            "The most that each held, each at its own time.",
        ),
        Panel(
            timeseries.Panel, "GPU memory that is used", "bytes",
            {"rank {{rank}}": f"rltrace_gpu_used_bytes{{{RANK}}}"}, "By whatever process, as NVML says.", 8,
        ),
        Panel(
            timeseries.Panel, "GPU busy", "percentunit", {"rank {{rank}}": f"rltrace_gpu_busy_ratio{{{RANK}}}"},
            "Share of the time in which a kernel ran, as NVML says.", 8,
        ),
        Panel(
            timeseries.Panel, "GPU power", "watt", {"rank {{rank}}": f"rltrace_gpu_power_watts{{{RANK}}}"},
            "As NVML says.", 8,
        ),
    ],
    "Problems": [
        Panel(
            timeseries.Panel, "Processes", "none", {"{{state}}": f"rltrace_processes{{{RUN}}}"},
            "Alive, and how the others ended.", 8,
        ),
        Panel(
            timeseries.Panel, "Exceptions", "none", {"{{error}}": f"rltrace_errors_total{{{RUN}}}"},
            "That left a span, caught or not.", 8,
        ),
        Panel(
            timeseries.Panel, "Out of memory", "none", {"phases": f"rltrace_out_of_memory_total{{{RUN}}}"},
            "Phases that ended with it.", 8,
        ),
    ],
}  # fmt: skip
"""By row."""


def queries() -> list[str]:
    """Return every query of the dashboard, those of its variables apart."""
    return [query for panels in PANELS.values() for panel in panels for query in panel.queries.values()]


def made() -> str:
    """Return the dashboard as Grafana imports it."""
    built = (
        dashboard.Dashboard(TITLE)
        .uid("rltrace")
        .description("Where every second and every byte of an RL step went: docs/prometheus.md of rltrace.")
        .tags(["rltrace", "RL"])
        .time("now-1h", "now")
        .refresh("30s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("instance", "Run", "label_values(rltrace_run_info, instance)"))
        .with_variable(_variable("rank", "Rank", f"label_values(rltrace_step_phase_seconds{{{RUN}}}, rank)"))
    )
    for title, panels in PANELS.items():
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(_panel(panel))
    whole = built.build()
    for variable in whole.templating.list_val or []:
        variable.auto = variable.auto_min = variable.auto_count = None  # an interval's, and no other variable's
    return JSONEncoder(sort_keys=True, indent=2).encode(whole) + "\n"


def _source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    chosen = dashboard.QueryVariable(name).label(label).datasource(_source()).query(query)
    return (
        chosen.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> Any:
    made = panel.kind().title(panel.title).description(panel.about).unit(panel.unit).datasource(_source())
    made = made.span(panel.width).height(panel.height)
    is_now = panel.kind is not timeseries.Panel
    for place, (legend, query) in enumerate(panel.queries.items()):
        asked = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + place))
        made = made.with_target(asked.instant() if is_now else asked.range())
    if not is_now:
        mode = common_models.StackingMode.NORMAL if panel.is_stacked else common_models.StackingMode.NONE
        made = made.fill_opacity(60 if panel.is_stacked else 10).stacking(common.StackingConfig().mode(mode))
    if panel.kind is bargauge.Panel:
        made = made.orientation(common_models.VizOrientation.HORIZONTAL)
    if "{{owner}}" in panel.queries:
        for owner, color in OWNER_COLORS.items():
            fixed = {"mode": "fixed", "fixedColor": color}
            made = made.override_by_name(owner, [models.DynamicConfigValue(id_val="color", value=fixed)])
    return made


if __name__ == "__main__":
    FILE.write_text(made())
