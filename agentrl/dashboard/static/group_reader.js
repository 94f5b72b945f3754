// The open rollout: its group is requested from the server, and drawn by the modules of the viewer.

import { byId, h } from '../viewer/dom.js';
import { R, makeVocabulary, page, state, useIndex } from '../viewer/rollouts.js';
import { drawRight } from '../viewer/detail.js';
import { hideCard } from '../viewer/tokens.js';
import { get, getBytes } from './api.js';

let members = [];
let opening = 0;

page.load = async (i) => {
  const { group, place: [start, end] } = members[i];
  const reply = await getBytes('tokens', { run: group.run, kind: group.kind, step: group.step, start, end });
  const size = new DataView(reply).getUint32(0, true);
  const vocabulary = makeVocabulary(JSON.parse(new TextDecoder().decode(new Uint8Array(reply, 4, size))), true);
  return { bytes: new Uint8Array(reply, 4 + size), vocabulary };
};

/** The columns of one index behind those of another: groups of two runs become one, so that they stand side by side. */
function joinIndexes(indexes, titles) {
  const [first] = indexes;
  const joined = { rollouts: {}, metrics: {}, groups: [first.groups[0]], stops: [], failures: [] };
  const number = (names, name) => (names.includes(name) ? names.indexOf(name) : names.push(name) - 1);
  for (const name of Object.keys(first.rollouts)) joined.rollouts[name] = [];
  const sizes = indexes.map((index) => index.rollouts.id.length);
  for (const key of new Set(indexes.flatMap((index) => Object.keys(index.metrics)))) {
    joined.metrics[key] = indexes.flatMap((index, k) => index.metrics[key] ?? new Array(sizes[k]).fill(null));
  }
  indexes.forEach((index, k) => {
    const { rollouts } = index;
    for (const [name, values] of Object.entries(rollouts)) {
      joined.rollouts[name].push(...values.map((value) => {
        if (name === 'id') return `${titles[k]} · ${value}`;
        if (name === 'group') return 0;
        if (name === 'stop') return number(joined.stops, index.stops[value]);
        if (name === 'failure') return value < 0 ? value : number(joined.failures, index.failures[value]);
        return name === 'episode' && value >= 0 ? value + 1e6 * k : value;
      }));
    }
  });
  return joined;
}

/** Beside the open rollout, the tool calls that its chat format reads in it; the server needs a while for the first. */
async function showCalls(i) {
  const mine = opening;
  const { group, place: [start, end] } = members[i];
  const { calls } = await get('calls', { run: group.run, kind: group.kind, step: group.step, start, end });
  const aside = document.querySelector('#right aside');
  if (mine !== opening || state.selected !== i || state.view !== 'rollout' || !aside || aside.querySelector('.calls')) return;
  const own = calls.filter(({ row }) => row === state.row);
  if (!own.length) return;
  aside.prepend(h('section', { class: 'calls' }, h('h3', {}, 'Tool calls'), h('ol', {}, own.map(({ turn, name, arguments: text, fault }) => h('li', { class: fault ? 'odd' : '' },
    h('span', {}, `turn ${turn} `), h('code', {}, `${name || '?'} ${text}`), fault ? h('em', {}, fault) : null)))));
}

/**
 * Open groups `[{run, kind, step, prompt, title}]`, of which several stand side by side, and in them the rollout `id`.
 * `right` is the element that gets them.
 */
export async function openGroups(groups, { id = '', view = 'rollout', changed }) {
  const mine = ++opening;
  const indexes = await Promise.all(groups.map(({ run, kind, step, prompt }) => get('group', { run, kind, step, prompt })));
  if (mine !== opening) return;
  members = indexes.flatMap((index, k) => index.places.map((place) => ({ group: groups[k], place })));
  useIndex(groups.length > 1 ? joinIndexes(indexes, groups.map(({ title }) => title)) : indexes[0]);
  page.changed = changed;
  page.show = async (i, changes = {}) => {
    if (i !== state.selected) state.row = 0;
    Object.assign(state, { selected: i }, changes);
    hideCard();
    changed();
    await drawRight();
    if (state.view === 'rollout' && i >= 0) await showCalls(i);
  };
  const damaged = indexes.flatMap((index) => index.damaged);
  await page.show(Math.max(R.id.indexOf(id), R.id.length ? 0 : -1), { view });
  if (damaged.length) byId('right').prepend(h('div', { class: 'failure', role: 'alert' }, `The checksum of ${damaged.join(', ')} is wrong: agentrl audit checks the whole file.`));
}

/** The id of the open rollout. */
export function openedId() {
  return state.selected >= 0 && R ? R.id[state.selected] : '';
}

/** Nothing is open any more: replies that come late are not drawn. */
export function closeGroups() {
  opening++;
  state.selected = -1;
  hideCard();
}
