"""Writes the picture of memory as one HTML file: the SVG, its figures, and a script that shows them at the pointer."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rltrace_exporters.memory_image import COLUMNS, figure_of, saved
from rltrace_exporters.memory_picture import Device, Picture

_DIGITS = 3
"""Behind the point, of GiB or MiB and of seconds."""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
  body {{ font: 14px/1.5 system-ui, sans-serif; color: #0f172a; max-width: 1500px; margin: 16px auto; padding: 0 16px }}
  p {{ color: #475569; margin: 2px 0; overflow-wrap: anywhere }}
  #picture {{ position: relative }}
  svg {{ width: 100%; height: auto; display: block }}
  [id^="owner:"] {{ cursor: pointer }}
  .dim {{ opacity: 0.12 }}
  #line {{ position: absolute; width: 1px; background: #0f172a; pointer-events: none }}
  #said {{ position: absolute; background: white; border: 1px solid #94a3b8; padding: 4px 8px; font-size: 12px;
          pointer-events: none; white-space: nowrap; z-index: 1 }}
  #said td:last-child {{ text-align: right; padding-left: 12px; font-variant-numeric: tabular-nums }}
  #said i {{ display: inline-block; width: 10px; height: 10px; margin-right: 6px }}
</style></head>
<body><p><code>{command}</code></p>
<p>Point at a moment or a bar for its bytes; click an owner to see it alone, and again to see all.</p>
<div id="picture">{svg}<div id="line" hidden></div><div id="said" hidden></div></div>
<script>const devices = {figures};
{script}</script></body></html>
"""

# The boxes are of axes, in shares of the picture's width and height from its upper left corner.
_SCRIPT = """
const picture = document.getElementById('picture');
const said = document.getElementById('said'), line = document.getElementById('line');
const owners = [...picture.querySelectorAll('[id^="owner:"]')];
let alone = null;

const isIn = (box, x, y) => box[0] <= x && x <= box[2] && box[1] <= y && y <= box[3];
const share = (box, x, y) => isIn(box, x, y) ? (x - box[0]) / (box[2] - box[0]) : null;
const lastAt = (times, at) => Math.max(0, times.findLastIndex((time) => time <= at));

function found(x, y) {
  for (const device of devices) {
    let at = share(device.area_box, x, y);
    if (at !== null && device.seconds.length) {
      const seconds = at * device.seconds.at(-1), place = lastAt(device.seconds, seconds);
      return {device, box: device.area_box, title: `${seconds.toFixed(3)} s`, used: device.used[place],
              sizes: device.layers.map((layer) => layer.area[place])};
    }
    at = share(device.bars_box, x, y);
    const place = at === null ? -1 : Math.floor(device.bars_from + at * device.bars_span + 0.5);
    if (device.phases[place] !== undefined)
      return {device, box: device.bars_box, title: device.phases[place], used: device.tops[place],
              sizes: device.layers.map((layer) => layer.bars[place])};
  }
  return null;
}

function row(color, name, size, unit) {
  const tr = document.createElement('tr');
  const mark = document.createElement('i');
  mark.style.background = color;
  tr.insertCell().append(mark, name);
  tr.insertCell().textContent = `${size.toLocaleString(undefined, {maximumFractionDigits: 3})} ${unit}`;
  return tr;
}

picture.addEventListener('mousemove', (event) => {
  const frame = picture.getBoundingClientRect();
  const x = (event.clientX - frame.left) / frame.width, y = (event.clientY - frame.top) / frame.height;
  const shown = found(x, y);
  said.hidden = line.hidden = shown === null;
  if (shown === null) return;
  const {device, box, title, used, sizes} = shown;
  const table = document.createElement('table');
  table.append(row('#0f172a', 'used, in all', used, device.unit));
  for (let place = sizes.length - 1; place >= 0; place--) {
    const {color, owner} = device.layers[place];
    if (sizes[place]) table.append(row(color, owner, sizes[place], device.unit));
  }
  said.replaceChildren(title, table);
  const left = x * frame.width + 14;
  said.style.left = `${left + said.offsetWidth > frame.width ? left - said.offsetWidth - 28 : left}px`;
  said.style.top = `${box[1] * frame.height + 30}px`;
  Object.assign(line.style, {left: `${x * frame.width}px`, top: `${box[1] * frame.height}px`,
                             height: `${(box[3] - box[1]) * frame.height}px`});
});
picture.addEventListener('mouseleave', () => { said.hidden = line.hidden = true; });
picture.addEventListener('click', (event) => {
  const owner = event.target.closest('[id^="owner:"]')?.id ?? null;
  alone = owner === alone ? null : owner;
  for (const drawn of owners) drawn.classList.toggle('dim', alone !== null && drawn.id !== alone);
});
"""


def draw(drawn: Picture) -> bytes:
    """The file; it needs nothing from elsewhere."""
    with rc_context({"svg.fonttype": "none"}):  # text that can be searched, and is a tenth of its outlines
        figure = figure_of(drawn)
        svg = saved(figure, "svg").decode()
    page = _PAGE.format(
        title=escape(drawn.title),
        command=escape(drawn.command),
        svg=svg[svg.index("<svg") :],
        figures=json.dumps(_figures(drawn, figure), separators=(",", ":")).replace("<", "\\u003c"),
        script=_SCRIPT,
    )
    return page.encode()


def _figures(drawn: Picture, figure: Figure) -> list[dict[str, Any]]:
    """Of each device what the script shows, and where its axes are."""
    rows = (figure.axes[place : place + COLUMNS] for place in range(0, len(figure.axes), COLUMNS))
    return [_device(device, *axes[:2]) for device, axes in zip(drawn.devices, rows, strict=True)]


def _device(device: Device, area: Axes, bars: Axes) -> dict[str, Any]:
    first, last = bars.get_xlim()
    return {
        "name": device.name,
        "unit": device.unit,
        "seconds": _rounded(device.seconds),
        "used": _rounded(device.used),
        "phases": device.phases,
        "tops": _rounded(device.tops),
        "layers": [
            {"owner": layer.owner, "color": layer.color, "area": _rounded(layer.area), "bars": _rounded(layer.bars)}
            for layer in device.layers
        ],
        "area_box": _box(area),
        "bars_box": _box(bars),
        "bars_from": first,
        "bars_span": last - first,
    }


def _rounded(values: Any) -> list[float]:
    return [round(float(value), _DIGITS) for value in np.asarray(values)]


def _box(axes: Axes) -> list[float]:
    """Left, top, right and bottom of axes, in shares of the picture."""
    place = axes.get_position()
    return [float(side) for side in (place.x0, 1 - place.y1, place.x1, 1 - place.y0)]
