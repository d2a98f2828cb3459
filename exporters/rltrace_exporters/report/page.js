'use strict';
const tip = document.getElementById('tip');
const svgNames = 'http://www.w3.org/2000/svg';

function place(x, y) {
  tip.hidden = false;
  const left = Math.min(Math.max(8, x + 14), innerWidth - tip.offsetWidth - 8);
  const above = y - tip.offsetHeight - 12;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : Math.min(y + 18, innerHeight - tip.offsetHeight - 8)}px`;
}

function hide() { tip.hidden = true; }

function say(element, x, y) {
  tip.textContent = element.dataset.tip;
  place(x, y);
}

document.addEventListener('pointermove', (event) => {
  const element = event.target.closest?.('[data-tip]');
  if (element) say(element, event.clientX, event.clientY);
  else if (!event.target.closest?.('.pointed')) hide();
});
document.addEventListener('pointerdown', (event) => {
  const element = event.target.closest?.('[data-tip]');
  if (element) say(element, event.clientX, event.clientY);
});
document.addEventListener('pointerleave', hide);

// What has the keyboard's focus keeps its tooltip while the page moves to it.
function sayFocused() {
  const element = document.activeElement?.matches(':focus-visible') && document.activeElement.closest('[data-tip]');
  if (!element) return hide();
  const box = element.getBoundingClientRect();
  say(element, box.left, box.top);
}
document.addEventListener('focusin', sayFocused);
document.addEventListener('scroll', () => { if (!tip.hidden) sayFocused(); }, {passive: true});
document.addEventListener('focusout', hide);

// Bars of a plot: one of them takes part in tabbing, the arrow keys go from one to the next.
for (const plot of document.querySelectorAll('.plot')) {
  const bars = [...plot.querySelectorAll('.bar')];
  if (!bars.length) continue;
  bars[0].setAttribute('tabindex', '0');
  plot.addEventListener('keydown', (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    const at = bars.indexOf(event.target.closest('.bar'));
    if (!step || at < 0) return;
    event.preventDefault();
    bars[at].setAttribute('tabindex', '-1');
    const next = bars[Math.min(Math.max(at + step, 0), bars.length - 1)];
    next.setAttribute('tabindex', '0');
    next.focus();
  });
}

// Layers: the values of the moment at the pointer, or at the line that the arrow keys move.
function mark(color) {
  const svg = document.createElementNS(svgNames, 'svg'), rect = document.createElementNS(svgNames, 'rect');
  for (const [name, value] of [['width', 10], ['height', 10]]) { svg.setAttribute(name, value); rect.setAttribute(name, value); }
  rect.setAttribute('fill', color);
  svg.append(rect);
  return svg;
}

function row(name, value, unit, color) {
  const tr = document.createElement('tr'), first = tr.insertCell();
  if (color) first.append(mark(color));
  first.append(name);
  tr.insertCell().textContent = `${value.toLocaleString('en', {maximumFractionDigits: 2})} ${unit}`;
  return tr;
}

for (const area of document.querySelectorAll('.pointed')) {
  const data = JSON.parse(area.nextElementSibling.textContent);
  const line = document.createElement('i');
  line.hidden = true;
  area.append(line);
  let at = 0;
  const show = (x, y) => {
    const box = area.getBoundingClientRect(), moment = data.xs[at], table = document.createElement('table');
    let sum = 0;
    for (const [name, color, values] of data.layers) {
      if (values[at] > 0) table.append(row(name, values[at], data.unit, color));
      sum += values[at];
    }
    table.prepend(row('all together', sum, data.unit, ''));
    tip.replaceChildren(`${moment.toFixed(2)} s`, table);
    line.hidden = false;
    line.style.left = `${moment / data.to * 100}%`;
    place(x ?? box.left + moment / data.to * box.width, y ?? box.top);
  };
  area.addEventListener('pointermove', (event) => {
    const box = area.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * data.to;
    const dot = document.elementsFromPoint(event.clientX, event.clientY).find((one) => one.classList.contains('dot'));
    at = Math.max(0, data.xs.findLastIndex((moment) => moment <= x));
    if (dot) say(dot, event.clientX, event.clientY); else show(event.clientX, event.clientY);
    event.stopPropagation();
  });
  area.addEventListener('pointerleave', () => { line.hidden = true; hide(); });
  area.addEventListener('focus', () => { if (area.matches(':focus-visible')) show(); });
  area.addEventListener('blur', () => { line.hidden = true; });
  area.addEventListener('keydown', (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(Math.max(at + step, 0), data.xs.length - 1);
    show();
  });
}

document.addEventListener('keydown', (event) => { if (event.key === 'Escape') hide(); });
addEventListener('beforeprint', () => { for (const details of document.querySelectorAll('details')) details.open = true; });
