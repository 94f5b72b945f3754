// Charts by uPlot: a metric over steps, a line a run.

import uPlot from './vendor/uPlot.esm.js';
import { h, num } from '../viewer/dom.js';

const PALETTE = ['--accent', '--orange', '--high', '--pink', '--teal', '--violet', '--brown', '--low'];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The colour of line `k`. */
export function lineColor(k) {
  return color(PALETTE[k % PALETTE.length]);
}

/** The mark of line `k` in legends: its colour, and dashes from the ninth on. */
export function swatch(k) {
  return h('i', { class: `line-swatch${k >= PALETTE.length ? ' dashed' : ''}`, style: { '--line': `var(${PALETTE[k % PALETTE.length]})` } });
}

/** An exponential moving average; `weight` 0 leaves the values as they are. */
function smooth(values, weight) {
  let last = null;
  let debt = 0;
  return values.map((value) => {
    if (value === null || !weight) return value;
    last = last === null ? value * (1 - weight) : last * weight + value * (1 - weight);
    debt = debt * weight + 1 - weight;
    return last / debt;
  });
}

/** Lines of several x axes over one: missing values are null. */
function join(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, k) => [step, k]));
  const columns = lines.map((line) => {
    const values = new Array(steps.length).fill(null);
    line.steps.forEach((step, k) => { values[place.get(step)] = line.values[k]; });
    return values;
  });
  return [steps, ...columns];
}

/** A chart of lines `[{title, steps, values}]` with its values as a table; `set` draws other lines into it. */
export class Chart {
  constructor(title, { height = 190, sync = '', smoothing = 0 } = {}) {
    this.height = height;
    this.sync = sync;
    this.smoothing = smoothing;
    this.plot = null;
    this.area = h('div', { class: 'plot', role: 'img' });
    this.table = h('tbody', {});
    this.element = h('figure', { class: 'chart' }, h('figcaption', {}, title), this.area,
      h('details', {}, h('summary', {}, 'values'), h('table', {},
        h('thead', {}, h('tr', {}, ['', 'last', 'lowest', 'highest', 'steps'].map((name) => h('th', { scope: 'col' }, name)))), this.table)));
    this.title = title;
    this.shape = '';
    this.resize = new ResizeObserver(() => this.plot?.setSize({ width: this.area.clientWidth || 300, height: this.height }));
    this.resize.observe(this.area);
  }

  set(lines) {
    this.lines = lines;
    const [steps, ...columns] = join(lines);
    const data = [steps, ...columns.map((values) => smooth(values, this.smoothing))];
    const shape = `${lines.map(({ title }) => title).join('\n')}|${matchMedia('(prefers-color-scheme: dark)').matches}`;
    if (this.plot && shape === this.shape) this.plot.setData(data);
    else this.draw(lines, data);
    this.shape = shape;
    this.fillTable(lines);
  }

  draw(lines, data) {
    this.plot?.destroy();
    const ink = color('--faint');
    const axis = { stroke: ink, grid: { stroke: color('--edge-soft'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
    this.plot = new uPlot({
      width: this.area.clientWidth || 300,
      height: this.height,
      scales: { x: { time: false } },
      legend: { show: lines.length > 0, live: true },
      cursor: { sync: this.sync ? { key: this.sync } : undefined, drag: { x: true, y: false } },
      axes: [{ ...axis, size: 26 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => num(tick)) }],
      series: [{ label: 'step', value: (_, value) => (value === null ? '–' : String(value)) }, ...lines.map(({ title }, k) => ({
        label: title, stroke: lineColor(k), width: 1.6, spanGaps: true, dash: k >= PALETTE.length ? [5, 4] : undefined,
        points: { show: data[0].length < 40, size: 5 }, value: (_, value) => num(value),
      }))],
    }, data, this.area);
  }

  fillTable(lines) {
    const summaries = lines.map(({ title, values }) => {
      const known = values.filter((value) => value !== null);
      return [title, known.length ? known[known.length - 1] : null, known.length ? Math.min(...known) : null, known.length ? Math.max(...known) : null, known.length];
    });
    this.table.replaceChildren(...summaries.map(([title, ...values]) => h('tr', {}, h('th', { scope: 'row' }, title), values.map((value) => h('td', {}, num(value))))));
    this.area.setAttribute('aria-label', `${this.title}: ${summaries.map(([title, last]) => `${title} ${num(last)}`).join(', ') || 'no values'}`);
    this.area.dataset.points = summaries.reduce((sum, summary) => sum + summary[4], 0);
  }

  close() {
    this.resize.disconnect();
    this.plot?.destroy();
  }
}
