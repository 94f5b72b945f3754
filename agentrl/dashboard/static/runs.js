// All runs under the folder that is served.

import { h, num } from '../viewer/dom.js';
import { addressOf } from './api.js';

function ago(seconds) {
  const age = Date.now() / 1000 - seconds;
  if (!seconds) return '–';
  if (age < 90) return `${Math.max(0, Math.round(age))} s ago`;
  if (age < 5400) return `${Math.round(age / 60)} min ago`;
  return age < 129600 ? `${Math.round(age / 3600)} h ago` : `${Math.round(age / 86400)} days ago`;
}

const COLUMNS = ['run', 'state', 'step', 'reward', 'evaluation', 's / step', 'written', 'environment', 'model'];

export function open(main, context) {
  const overlay = new Set((context.place.runs ?? '').split('\n').filter(Boolean));
  const filter = h('input', { type: 'search', placeholder: 'Filter by name, state, environment, model   /', 'aria-label': 'Filter runs', 'data-search': true, oninput: draw });
  const compare = h('a', { class: 'button' }, 'Curves of the chosen runs');
  const body = h('tbody', {});
  const count = h('span', { class: 'quiet-line' });

  function link() {
    const names = [...overlay].join('\n');
    compare.setAttribute('href', addressOf({ view: 'curves', run: context.place.run, runs: names }));
    compare.classList.toggle('off', overlay.size === 0);
  }

  function line(run) {
    const mark = h('input', { type: 'checkbox', 'aria-label': `Choose ${run.title} for the curves`, onchange: (event) => {
      if (event.target.checked) overlay.add(run.run); else overlay.delete(run.run);
      link();
    } });
    mark.checked = overlay.has(run.run);
    return h('tr', { 'data-run': run.run }, h('td', {}, mark),
      h('th', { scope: 'row' }, h('a', { href: addressOf({ view: 'curves', run: run.run }) }, run.title)),
      h('td', {}, h('span', { class: `state ${run.state}`, title: run.error }, run.state), run.damaged_lines ? h('span', { class: 'state failed' }, `${run.damaged_lines} damaged lines`) : null),
      h('td', { class: 'number' }, run.steps ? `${num(run.step)} / ${num(run.steps)}` : num(run.step)),
      h('td', { class: 'number' }, num(run.reward)), h('td', { class: 'number' }, num(run.evaluation)), h('td', { class: 'number' }, num(run.step_s, 1)),
      h('td', { class: 'number' }, ago(run.written_at)), h('td', {}, run.about.environment ?? '–'), h('td', {}, run.about.model ?? '–'));
  }

  function draw() {
    const words = filter.value.toLowerCase();
    const shown = context.runs.filter((run) => [run.title, run.state, ...Object.values(run.about)].some((text) => text.toLowerCase().includes(words)))
      .sort((a, b) => (b.state === 'running') - (a.state === 'running') || b.written_at - a.written_at);
    const focused = document.activeElement?.closest('tr')?.dataset.run;
    body.replaceChildren(...shown.map(line));
    if (!context.runs.length) body.append(h('tr', {}, h('td', { colspan: COLUMNS.length + 1 }, 'There is no run under this folder yet. agentrl train writes to runs/ unless run.dir is set; a run is shown when it begins.')));
    if (focused) [...body.querySelectorAll('tr')].find((row) => row.dataset.run === focused)?.querySelector('input')?.focus();
    count.textContent = shown.length === context.runs.length ? `${num(shown.length)} runs` : `${num(shown.length)} of ${num(context.runs.length)} runs`;
    link();
  }

  main.append(h('div', { class: 'bar' }, filter, count, compare), h('div', { class: 'scroll' }, h('table', { class: 'plain' },
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, h('span', { class: 'hidden-text' }, 'chosen')), COLUMNS.map((name) => h('th', { scope: 'col' }, name)))), body)));
  draw();
  return { update: draw, watched: () => context.runs.filter(({ state }) => state === 'running').slice(0, 50).map(({ run }) => run) };
}
