// The page: the run and the view that the address names, keys, and events when a run has changed.

import { byId, h } from '../viewer/dom.js';
import { addressOf, get, path, readAddress } from './api.js';
import * as runs from './runs.js';
import * as curves from './curves.js';
import * as steps from './steps.js';
import { groups, rollouts } from './rollouts_view.js';
import * as compare from './compare.js';
import * as league from './league.js';
import * as cluster from './cluster.js';
import * as advice from './advice.js';

/** By name in the address: title, key, and the module that draws it. */
const VIEWS = {
  runs: ['Runs', 'r', runs],
  curves: ['Curves', 'c', curves],
  steps: ['Steps', 't', steps],
  rollouts: ['Rollouts', 'l', rollouts],
  groups: ['Groups', 'p', groups],
  compare: ['Compare', 'd', compare],
  league: ['Self-play', 's', league],
  cluster: ['Cluster', 'e', cluster],
  advice: ['Advice', 'v', advice],
};
const LIST_MS = 2000;

let place = {};
let known = [];
let view = null;
let drawing = 0;
let events = null;
let watched = '';

/** What views get: the runs, the address, and how to change it. */
const context = {
  get runs() { return known; },
  get run() { return known.find(({ run }) => run === place.run); },
  get place() { return place; },
  /** Go to another place: changes of the address; without `again` the view stays as it is. */
  go(changes, again = true) {
    place = { ...place, ...changes };
    const hash = addressOf(place);
    if (again) location.hash = hash;
    else history.replaceState(null, '', hash);
  },
  fail(error) { note(error); },
};

function note(error) {
  byId('notes').hidden = !error;
  byId('notes').textContent = error ? String(error.message ?? error) : '';
}

function drawTabs() {
  byId('tabs').replaceChildren(...Object.entries(VIEWS).filter(([name]) => name !== 'league' || context.run?.has_league || place.view === 'league')
    .map(([name, [title, key]]) => h('a', { href: addressOf({ view: name, run: place.run }), 'aria-current': name === place.view ? 'page' : null, title: `Key ${key}` }, title)));
}

function drawRuns() {
  const select = byId('run');
  const names = known.map(({ run }) => run).join('\n');
  if (select.dataset.names !== names) {
    select.dataset.names = names;
    select.replaceChildren(...known.map(({ run, title }) => h('option', { value: run }, title)));
  }
  select.value = place.run ?? '';
  const about = context.run ? [context.run.state, `step ${context.run.step}${context.run.steps ? ` of ${context.run.steps}` : ''}`, ...Object.values(context.run.about)] : [];
  byId('about').textContent = about.join(' · ');
  document.title = `${context.run ? `${context.run.title} · ` : ''}${VIEWS[place.view][0]} · agentrl view`;
}

async function listRuns() {
  const reply = await get('list_runs');
  known = reply.runs;
  if (!known.some(({ run }) => run === place.run)) {
    const newest = [...known].sort((a, b) => b.written_at - a.written_at)[0];
    place.run = newest?.run ?? '';
  }
}

/** Draw what the address says. */
async function show() {
  const mine = ++drawing;
  const before = place;
  place = readAddress();
  if (!VIEWS[place.view]) place.view = 'runs';
  try {
    if (!known.length || (place.run && !known.some(({ run }) => run === place.run))) await listRuns();
    else if (!place.run) place.run = before.run ?? known[0]?.run;
    if (mine !== drawing) return;
    if (!known.length) place.view = 'runs';
    drawTabs();
    drawRuns();
    view?.close?.();
    note(null);
    const main = h('div', { class: `view view-${place.view}` });
    byId('view').replaceChildren(main);
    view = { ...VIEWS[place.view][2].open(main, context) };
    watch();
    await view.ready;
  } catch (error) {
    if (mine === drawing) note(error);
  }
  if (mine === drawing) document.documentElement.dataset.ready = `${place.view} ${performance.now().toFixed(1)}`;
}

/** Get events of the runs that are shown. */
function watch() {
  const names = [...new Set([place.run, ...(view.watched?.() ?? [])])].filter(Boolean);
  if (events && watched === names.join('\n')) return;
  watched = names.join('\n');
  events?.close();
  events = new EventSource(path('events', { run: names }));
  events.addEventListener('open', () => { byId('live').textContent = 'live'; byId('live').dataset.state = 'live'; });
  events.addEventListener('error', () => { byId('live').textContent = 'connecting'; byId('live').dataset.state = ''; });
  events.addEventListener('change', async (event) => {
    const names = JSON.parse(event.data);
    try {
      await Promise.all([view.update?.(names), listRuns()]);
      drawRuns();
    } catch (error) { note(error); }
  });
}

const KEYS = [
  ...Object.entries(VIEWS).map(([name, [title, key]]) => [key, title, () => context.go({ view: name })]),
  ['/', 'search or filter', () => document.querySelector('[data-search]')?.focus()],
  ['?', 'these keys', () => toggleHelp()],
];

function toggleHelp() {
  const help = byId('help');
  if (help.open) help.close(); else help.showModal();
}

function pressed(event) {
  if (event.key === 'Escape') {
    view?.escape?.();
    if (document.activeElement?.matches('input, select, textarea')) {
      event.preventDefault();  // a browser would empty the field
      document.activeElement.blur();
    }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea, dialog')) return;
  const action = view?.keys?.[event.key]?.[1] ?? KEYS.find(([key]) => key === event.key)?.[2];
  if (!action) return;
  event.preventDefault();
  action();
}

function fillHelp() {
  const own = Object.entries({ ...rollouts.KEYS }).map(([key, title]) => [key, title]);
  byId('help').replaceChildren(h('h2', {}, 'Keys'), h('dl', {}, [...KEYS.map(([key, title]) => [key, title]), ...own, ['Esc', 'close the card, leave a field']]
    .map(([key, title]) => h('div', {}, h('dt', {}, key), h('dd', {}, title)))), h('button', { type: 'button', onclick: () => byId('help').close() }, 'Close'));
}

window.addEventListener('hashchange', show);
document.addEventListener('keydown', pressed);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', show);
byId('run').addEventListener('change', (event) => context.go({ view: place.view, run: event.target.value, r: '', g: '' }));
byId('help-button').addEventListener('click', toggleHelp);
byId('skip').addEventListener('click', (event) => { event.preventDefault(); byId('view').focus(); });
fillHelp();
setInterval(async () => {
  if (document.hidden || place.view !== 'runs') return;
  try { await listRuns(); drawRuns(); await view?.update?.([]); } catch (error) { note(error); }
}, LIST_MS);
show();
