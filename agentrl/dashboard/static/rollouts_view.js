// The table of rollouts or groups, and beside it the one that is open.

import { byId, h, num, signed } from '../viewer/dom.js';
import { R, page, search, state } from '../viewer/rollouts.js';
import { setMode } from '../viewer/detail.js';
import { MODES, hideCard } from '../viewer/tokens.js';
import { get } from './api.js';
import { closeGroups, openGroups, openedId } from './group_reader.js';
import { PagedTable } from './table.js';

const TYPED_MS = 200;
const OPENED_MS = 60;

function cell(text, name = '') {
  const span = h('span', name ? { class: name } : {});
  span.textContent = text;
  return span;
}

const number = (digits) => (row, column, value) => cell(value === undefined ? '' : num(value, digits), 'number');
const text = (row, column, value) => cell(value ?? '');
const reward = (row, column, value) => cell(value === undefined ? '' : num(value, 3), `number ${value > 0 ? 'up' : ''}`);

const COLUMNS = {
  rollouts: [
    { id: 'step', name: 'step', field: 'step', width: 44, minWidth: 44, sortable: true, formatter: number(0) },
    { id: 'reward', name: 'reward', field: 'reward', width: 58, minWidth: 58, sortable: true, formatter: reward },
    { id: 'advantage', name: 'adv.', field: 'advantage', width: 72, minWidth: 72, sortable: true, formatter: (row, column, value) => cell(value === null || value === undefined ? '' : signed(value), 'number') },
    { id: 'turns', name: 'turns', field: 'turns', width: 46, minWidth: 46, sortable: true, formatter: number(0) },
    { id: 'tokens', name: 'tokens', field: 'tokens', width: 56, minWidth: 56, sortable: true, formatter: number(0) },
    { id: 'seconds', name: 'seconds', field: 'seconds', width: 60, minWidth: 60, sortable: true, formatter: number(1) },
    { id: 'stop', name: 'ended', field: 'stop', width: 96, minWidth: 80, formatter: (row, column, value, definition, item) => cell(item.dropped ? `${value}, dropped` : (value ?? '').replace('_', ' '), item.failure || item.dropped || value === 'damaged' ? 'bad' : '') },
    { id: 'id', name: 'rollout', field: 'id', width: 110, formatter: text },
    { id: 'excerpt', name: 'last action', field: 'excerpt', width: 260, formatter: text },
  ],
  groups: [
    { id: 'step', name: 'step', field: 'step', width: 44, minWidth: 44, sortable: true, formatter: number(0) },
    { id: 'reward', name: 'mean reward', field: 'reward', width: 84, minWidth: 84, sortable: true, formatter: reward },
    { id: 'deviation', name: 'deviation', field: 'deviation', width: 72, minWidth: 72, sortable: true, formatter: (row, column, value, definition, item) => cell(value === undefined ? '' : num(value), `number ${value === 0 && item.rollouts > 1 ? 'bad' : ''}`) },
    { id: 'rollouts', name: 'rollouts', field: 'rollouts', width: 62, minWidth: 62, sortable: true, formatter: number(0) },
    { id: 'failed', name: 'failed', field: 'failed', width: 50, minWidth: 50, formatter: number(0) },
    { id: 'tokens', name: 'mean tokens', field: 'tokens', width: 84, minWidth: 84, formatter: number(0) },
    { id: 'prompt', name: 'prompt', field: 'prompt', width: 130, formatter: text },
    { id: 'excerpt', name: 'question', field: 'excerpt', width: 260, formatter: text },
  ],
};
/** Columns on screens that have no room for more. */
const NARROW = ['step', 'reward', 'tokens', 'stop', 'rollouts', 'excerpt'];
const SORTS = { rollouts: ['step', 'reward', 'advantage', 'tokens', 'sampled', 'turns', 'seconds'], groups: ['step', 'reward', 'deviation', 'rollouts'] };
const STOPS = ['terminated', 'truncated', 'max_turns', 'max_tokens', 'max_time', 'aborted', 'failed', 'damaged'];
const STATUSES = ['whole', 'failed', 'dropped', 'damaged'];

function makeView(kind) {
  return { open: (main, context) => open(kind, main, context), KEYS: { 'j k': 'next, previous row', g: 'group side by side, and back', a: 'agents of an episode side by side, and back', '1 2 3 4': 'colour by who made it, log-probability, version, advantage' } };
}

export const rollouts = makeView('rollouts');
export const groups = makeView('groups');

function open(kind, main, context) {
  const { place } = context;
  const asked = ['kind', 'steps', 'rewards', 'stop', 'status', 'prompt', 'words', 'sort', 'order'];
  const query = Object.fromEntries(asked.map((name) => [name, place[name] ?? '']));
  const count = h('span', { class: 'quiet-line', role: 'status' });
  const grid = h('div', { class: 'grid' });
  const right = h('section', { id: 'right', 'aria-label': 'Rollout', tabindex: -1 }, h('p', { class: 'quiet middle' }, 'Choose a row: click it, or press j.'));
  const back = h('button', { type: 'button', class: 'button back', onclick: () => { main.classList.remove('opened'); table.resize && table.grid.resizeCanvas(); } }, '← table');
  let opened = null;
  let timer = 0;

  function field(name, label, control) {
    control.setAttribute('aria-label', label);
    control.value = query[name];
    control.addEventListener(control.tagName === 'SELECT' ? 'change' : 'input', () => {
      clearTimeout(timer);
      timer = setTimeout(() => { query[name] = control.value.trim(); restart(); }, control.tagName === 'SELECT' ? 0 : TYPED_MS);
    });
    return h('label', { class: 'field' }, h('span', {}, label), control);
  }
  const options = (names, all) => h('select', {}, h('option', { value: '' }, all), names.map((name) => h('option', { value: name }, name.replace('_', ' '))));
  const order = h('button', { type: 'button', class: 'button', title: 'Turn the order round', 'aria-label': 'Turn the order round', onclick: () => { query.order = query.order === 'ascending' ? '' : 'ascending'; sortMark(); restart(); } });
  const words = h('input', { type: 'search', placeholder: 'Search texts, ids, prompts   /', 'data-search': true });
  const sort = h('select', {}, SORTS[kind].map((name) => h('option', { value: name === 'step' ? '' : name }, name)));

  function sortMark() { order.textContent = query.order === 'ascending' ? '↑' : '↓'; }

  function restart() {
    search.words = query.words.toLowerCase();
    context.go(query, false);
    table.restart().catch(context.fail);
  }

  function showCount(reply) {
    const what = kind === 'rollouts' ? 'rollouts' : 'groups';
    count.textContent = `${num(reply.matching)}${kind === 'rollouts' && reply.matching !== reply.total ? ` of ${num(reply.total)}` : ''} ${what}${reply.complete ? '' : ', reading …'}`;
    grid.dataset.matching = reply.matching;
    grid.dataset.complete = reply.complete;
    if (reply.errors.length) context.fail(reply.errors.join('; '));
    if (!reply.matching && reply.complete) grid.dataset.empty = reply.total ? 'Nothing fits the filters.' : 'This run has no rollouts: they are written with the first step; see obs.rollouts.';
    else delete grid.dataset.empty;
  }

  function openRow(row, view) {
    clearTimeout(timer);
    timer = setTimeout(() => {
      opened = row;
      main.classList.add('opened');
      openGroups([{ run: place.run, kind: query.kind, step: row.step, prompt: row.prompt }], { id: row.id ?? '', view, changed: keep }).catch(context.fail);
    }, OPENED_MS);
  }

  function keep() {
    context.go({ g: opened ? `${opened.step}:${opened.prompt}` : '', r: openedId(), show: state.view === 'rollout' ? '' : state.view, color: state.mode === 'who' ? '' : state.mode }, false);
  }

  sortMark();
  main.append(
    h('div', { class: 'left' },
      h('div', { class: 'filters' },
        h('label', { class: 'field wide' }, h('span', {}, 'search'), words),
        field('kind', 'of', h('select', {}, h('option', { value: '' }, 'training'), h('option', { value: 'eval' }, 'evaluations'))),
        field('steps', 'steps', h('input', { placeholder: '10:20', size: 8 })), field('rewards', 'rewards', h('input', { placeholder: '0:1', size: 6 })),
        field('stop', 'ended', options(STOPS, 'all')), field('status', 'and is', options(STATUSES, 'any')), field('prompt', 'prompt', h('input', { placeholder: 'prompt id', size: 12 })),
        field('sort', 'sort by', sort), order, count),
      grid),
    h('div', { class: 'rightside' }, back, right));
  words.value = query.words;
  words.setAttribute('aria-label', 'Search');
  words.addEventListener('input', () => { clearTimeout(timer); timer = setTimeout(() => { query.words = words.value.trim(); restart(); }, TYPED_MS); });

  const table = new PagedTable(grid, {
    columns: innerWidth > 760 ? COLUMNS[kind] : COLUMNS[kind].filter(({ id }) => NARROW.includes(id)),
    label: kind === 'rollouts' ? 'Rollouts' : 'Groups',
    request: (offset, limit) => get(kind, { run: place.run, ...query, offset, limit }),
    changed: showCount,
    sorted(column, descending) { query.sort = column === 'step' ? '' : column; query.order = descending ? '' : 'ascending'; sort.value = query.sort; sortMark(); restart(); },
    open: (row) => openRow(row, kind === 'groups' ? 'group' : state.view),
  });

  async function start() {
    search.words = query.words.toLowerCase();
    if (MODES.some(({ key }) => key === place.color)) state.mode = document.body.dataset.mode = place.color;
    await table.refresh();
    const [, step, prompt] = (place.g ?? '').match(/^(\d+):(.*)$/s) ?? [];
    if (step) openRow({ step: Number(step), prompt, id: place.r ?? '' }, ['group', 'agents'].includes(place.show) ? place.show : 'rollout');
  }

  const other = (view) => () => state.selected >= 0 && page.show(state.selected, { view: state.view === view ? 'rollout' : view });
  return {
    ready: start(),
    update: (names) => (names.includes(place.run) ? table.refresh() : null),
    keys: {
      j: ['next row', () => table.move(1)],
      k: ['previous row', () => table.move(-1)],
      g: ['group side by side, and back', other('group')],
      a: ['agents of an episode', () => state.selected >= 0 && R.episode[state.selected] >= 0 && other('agents')()],
      ...Object.fromEntries(MODES.map(({ key }, k) => [String(k + 1), [key, () => setMode(key)]])),
    },
    escape() { hideCard(); if (byId('tip').hidden && innerWidth <= 760) main.classList.remove('opened'); },
    close() { clearTimeout(timer); table.close(); closeGroups(); },
  };
}
