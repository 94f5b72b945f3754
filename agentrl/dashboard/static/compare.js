// Two runs side by side: curves, last values, settings that differ, and rollouts of the same prompt.

import { h, num, signed } from '../viewer/dom.js';
import { state } from '../viewer/rollouts.js';
import { hideCard } from '../viewer/tokens.js';
import { get } from './api.js';
import { Chart } from './charts.js';
import { closeGroups, openGroups } from './group_reader.js';

const CURVES = ['train/reward', 'eval/reward', 'train/entropy', 'time/step_s'];

export function open(main, context) {
  const { place } = context;
  const others = context.runs.filter(({ run }) => run !== place.run);
  const titles = Object.fromEntries(context.runs.map(({ run, title }) => [run, title]));
  let other = others.some(({ run }) => run === place.other) ? place.other : others[0]?.run;
  const select = h('select', { 'aria-label': 'The other run', onchange: (event) => { other = event.target.value; context.go({ other }, false); start().catch(context.fail); } },
    others.map(({ run, title }) => h('option', { value: run }, title)));
  const filter = h('input', { type: 'search', placeholder: 'Filter   /', 'aria-label': 'Filter metrics and settings', 'data-search': true, oninput: draw });
  const charts = CURVES.map((key) => new Chart(key, { height: 150, sync: 'compare' }));
  const metrics = h('div', { class: 'scroll' });
  const settings = h('div', { class: 'scroll' });
  const prompts = h('div', { class: 'scroll' });
  const right = h('section', { id: 'right', class: 'compared', 'aria-label': 'Rollouts of both runs', hidden: true });
  let data = null;

  function table(caption, heads, rows) {
    return h('table', { class: 'plain' }, h('caption', {}, caption), h('thead', {}, h('tr', {}, heads.map((name) => h('th', { scope: 'col' }, name)))), h('tbody', {}, rows));
  }

  function draw() {
    if (!data) return;
    const words = filter.value.toLowerCase();
    const names = [titles[place.run], titles[other]];
    const fits = ({ key }) => key.toLowerCase().includes(words);
    metrics.replaceChildren(table('Last values', ['metric', ...names, 'difference'], data.metrics.filter(fits).map(({ key, values: [a, b] }) => h('tr', {}, h('th', { scope: 'row' }, key),
      h('td', { class: 'number' }, num(a)), h('td', { class: 'number' }, num(b)), h('td', { class: 'number' }, a === null || b === null ? '–' : signed(b - a))))));
    settings.replaceChildren(table('Settings that differ', ['key', ...names], data.settings.filter(fits).map(({ key, values }) => h('tr', {}, h('th', { scope: 'row' }, h('code', {}, key)), values.map((value) => h('td', {}, value ?? '–'))))));
    prompts.replaceChildren(table(`${num(data.shared_prompts)} prompts that both have, those first whose mean reward differs most`, ['prompt', ...names, 'difference', ''], data.prompts.map((row) => h('tr', {},
      h('th', { scope: 'row' }, row.prompt), row.rewards.map((reward) => h('td', { class: 'number' }, num(reward))), h('td', { class: 'number' }, signed(row.rewards[1] - row.rewards[0])),
      h('td', {}, h('button', { type: 'button', class: 'link', onclick: () => openPrompt(row).catch(context.fail) }, 'side by side'))))));
  }

  async function openPrompt(row) {
    right.hidden = false;
    state.mode = 'who';
    await openGroups([place.run, other].map((run, k) => ({ run, kind: '', step: row.steps[k], prompt: row.prompt, title: titles[run] })), { view: 'group', changed() {} });
    right.scrollIntoView({ block: 'start' });
  }

  async function start() {
    if (!other) { main.replaceChildren(h('p', { class: 'quiet' }, 'There is no other run under this folder.')); return; }
    select.value = other;
    const [compared, curves] = await Promise.all([get('comparison', { run: place.run, other }), get('curves', { run: [place.run, other], key: CURVES })]);
    data = compared;
    charts.forEach((chart, k) => chart.set([place.run, other].map((run) => ({ title: titles[run], ...curves[run][CURVES[k]] }))));
    draw();
  }

  main.append(h('div', { class: 'bar' }, h('b', {}, titles[place.run] ?? ''), ' and ', select, filter), h('div', { class: 'charts' }, charts.map(({ element }) => element)), right,
    h('div', { class: 'compare-tables' }, metrics, settings, prompts));
  return { ready: start(), watched: () => [other], update: start, escape() { hideCard(); right.hidden = true; }, close() { charts.forEach((chart) => chart.close()); closeGroups(); } };
}
