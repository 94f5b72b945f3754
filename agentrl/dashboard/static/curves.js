// Metrics over steps, of several runs in the same charts.

import { h, num } from '../viewer/dom.js';
import { get } from './api.js';
import { Chart, swatch } from './charts.js';

const FIRST = ['train/reward', 'eval/reward', 'train/entropy', 'train/grad_norm', 'rollout/turns', 'time/step_s'];
const MOST_RUNS = 16;

export function open(main, context) {
  const { place } = context;
  const runs = new Set([place.run, ...(place.runs ?? '').split('\n')].filter((name) => context.runs.some(({ run }) => run === name)));
  let keys = (place.keys ?? '').split('\n').filter(Boolean);
  let metrics = {};
  let smoothing = Number(place.smooth ?? 0);
  const charts = new Map();
  const area = h('div', { class: 'charts' });
  const runList = h('div', { class: 'choices', role: 'group', 'aria-label': 'Runs' });
  const keyList = h('div', { class: 'choices', role: 'group', 'aria-label': 'Metrics' });
  const filter = h('input', { type: 'search', placeholder: 'Filter metrics   /', 'aria-label': 'Filter metrics', 'data-search': true, oninput: drawKeys });
  const slider = h('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: smoothing, 'aria-label': 'Smoothing', oninput: (event) => {
    smoothing = Number(event.target.value);
    keep();
    redraw();
  } });

  function keep() {
    context.go({ runs: [...runs].filter((name) => name !== place.run).join('\n'), keys: keys.join('\n'), smooth: smoothing || '' }, false);
  }

  function choice(title, chosen, change, ...marks) {
    const box = h('input', { type: 'checkbox', onchange: (event) => change(event.target.checked) });
    box.checked = chosen;
    return h('label', {}, box, ...marks, h('span', {}, title));
  }

  function drawRuns() {
    const order = [...runs];
    runList.replaceChildren(...context.runs.map(({ run, title, state }) => choice(title, runs.has(run), async (checked) => {
      if (checked) runs.add(run); else runs.delete(run);
      if (runs.size > MOST_RUNS) runs.delete(run);
      keep();
      drawRuns();
      await refresh();
    }, order.includes(run) ? swatch(order.indexOf(run)) : null, state === 'running' ? h('span', { class: 'state running' }, 'running') : null)));
  }

  function drawKeys() {
    const words = filter.value.toLowerCase();
    const names = Object.keys(metrics).filter((key) => key.toLowerCase().includes(words));
    keyList.replaceChildren(...names.map((key) => choice(key, keys.includes(key), async (checked) => {
      keys = checked ? [...keys, key] : keys.filter((name) => name !== key);
      keep();
      await refresh();
    }, h('span', { class: 'last' }, num(metrics[key])))));
  }

  let data = {};
  async function refresh() {
    data = await get('curves', { run: [...runs], key: keys });
    redraw();
  }

  function redraw() {
    const titles = Object.fromEntries(context.runs.map(({ run, title }) => [run, title]));
    for (const [key, chart] of charts) if (!keys.includes(key)) { chart.close(); charts.delete(key); }
    for (const key of keys) {
      if (!charts.has(key)) charts.set(key, new Chart(key, { sync: 'steps' }));
    }
    const elements = keys.map((key) => charts.get(key).element);
    if (elements.length !== area.children.length || elements.some((element, k) => element !== area.children[k])) area.replaceChildren(...elements);
    for (const key of keys) {
      const chart = charts.get(key);
      chart.smoothing = smoothing;
      chart.set([...runs].filter((run) => data[run]).map((run) => ({ title: titles[run], ...data[run][key] })));
    }
    if (!keys.length) area.replaceChildren(h('p', { class: 'quiet' }, Object.keys(metrics).length ? 'No metric is chosen.' : 'This run has no metrics yet.'));
  }

  async function start() {
    metrics = await get('metrics', { run: place.run });
    if (!keys.length) keys = FIRST.filter((key) => key in metrics);
    if (!keys.length) keys = Object.keys(metrics).slice(0, 6);
    drawRuns();
    drawKeys();
    await refresh();
  }

  main.append(h('div', { class: 'side' }, h('details', { open: innerWidth > 760 }, h('summary', {}, 'Runs'), runList),
    h('details', { open: innerWidth > 760 }, h('summary', {}, 'Metrics'), filter, keyList), h('label', { class: 'smoothing' }, 'smoothing ', slider)), area);
  return {
    ready: start(),
    watched: () => [...runs],
    async update(names) {
      if (!names.some((name) => runs.has(name))) return;
      const before = Object.keys(metrics).length;
      metrics = await get('metrics', { run: place.run });
      if (!before) await start();
      else { drawKeys(); await refresh(); }
    },
    close() { charts.forEach((chart) => chart.close()); },
  };
}
