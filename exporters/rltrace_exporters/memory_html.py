"""Draws the picture of memory as one HTML file, by plotly: hover for the bytes, click an owner to hide it."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from rltrace_exporters.memory_picture import Device, Picture

LETTER = 0.011
"""Of the step's width."""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
  body {{ font: 14px/1.5 system-ui, sans-serif; color: #0f172a; max-width: 1280px; margin: 24px auto; padding: 0 16px }}
  h1 {{ font-size: 20px; margin: 0 }}
  h2 {{ font-size: 16px; margin: 28px 0 0 }}
  p {{ color: #475569; margin: 2px 0; overflow-wrap: anywhere }}
  code {{ font-size: 12px }}
</style>
<script>{script}</script></head>
<body><h1>{title}</h1><p><code>{command}</code></p>
{devices}{more}</body></html>
"""


def draw(drawn: Picture) -> bytes:
    """The file; it needs nothing from elsewhere."""
    more = f"<p>{drawn.left_out} more devices are left out.</p>" if drawn.left_out else ""
    devices = "".join(map(_section, drawn.devices))
    page = _PAGE.format(
        title=escape(drawn.title), command=escape(drawn.command), script=get_plotlyjs(), devices=devices, more=more
    )
    return page.encode()


def _section(device: Device) -> str:
    chart = _figure(device).to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return f"<h2>{escape(device.name)}</h2><p>{escape(device.note)}</p>{chart}\n"


def _figure(device: Device) -> go.Figure:
    figure = make_subplots(
        cols=2, column_widths=[0.62, 0.38], shared_yaxes=True, horizontal_spacing=0.03,
        subplot_titles=(device.moments, "each phase when it holds most"),
    )  # fmt: skip
    for layer in device.layers:
        hover = f"{layer.owner} %{{y:,.2f}} {device.unit}<extra></extra>"
        line = {"width": 0.5, "color": layer.color, "shape": "hv"}
        figure.add_scatter(
            x=device.seconds, y=layer.area, name=layer.owner, legendgroup=layer.owner, stackgroup="bytes",
            mode="lines", line=line, fillcolor=layer.color, hovertemplate=hover, col=1, row=1,
        )  # fmt: skip
        figure.add_bar(
            x=device.phases, y=layer.bars, name=layer.owner, legendgroup=layer.owner, showlegend=False,
            marker={"color": layer.color, "line": {"width": 0}}, hovertemplate=hover, col=2, row=1,
        )  # fmt: skip
    line = {"width": 1.2, "color": "#0f172a", "shape": "hv"}
    figure.add_scatter(
        x=device.seconds, y=device.used, name="used", mode="lines", line=line,
        hovertemplate=f"used %{{y:,.2f}} {device.unit}<extra></extra>", col=1, row=1,
    )  # fmt: skip
    _add_bands(figure, device)
    figure.update_layout(
        barmode="stack", bargap=0.25, height=440, margin={"l": 60, "r": 10, "t": 40, "b": 100}, hovermode="x unified",
        template="plotly_white", legend={"traceorder": "reversed", "font": {"size": 10}, "tracegroupgap": 0},
    )  # fmt: skip
    figure.update_yaxes(range=(device.floor, device.top))
    figure.update_yaxes(title_text=device.unit, col=1, row=1)
    figure.update_xaxes(title_text="seconds from the step's beginning", title_standoff=8, col=1, row=1)
    figure.update_xaxes(tickangle=-40, tickfont={"size": 10}, col=2, row=1)
    return figure


def _add_bands(figure: go.Figure, device: Device) -> None:
    """The phases above the areas: a strip, and a line through where one begins."""
    whole = (float(device.seconds[-1]) if len(device.seconds) else 0.0) or 1.0
    for place, band in enumerate(device.bands):
        figure.add_shape(
            type="rect", x0=band.start, x1=band.end, y0=0.945, y1=1.0, yref="y domain", line={"width": 0},
            fillcolor=("#475569", "#94a3b8")[place % 2], col=1, row=1,
        )  # fmt: skip
        figure.add_shape(
            type="line", x0=band.start, x1=band.start, y0=0, y1=0.945, yref="y domain",
            line={"width": 0.6, "color": "#64748b", "dash": "dot"}, col=1, row=1,
        )  # fmt: skip
        figure.add_annotation(
            x=(band.start + band.end) / 2, y=0.972, yref="y domain", yanchor="middle", showarrow=False,
            text=band.label((band.end - band.start) / whole / LETTER), font={"size": 9, "color": "white"}, col=1, row=1,
        )  # fmt: skip
