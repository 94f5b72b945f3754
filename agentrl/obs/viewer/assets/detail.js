// The open rollout: its head, its tokens, and what is known of it beside them.

import { byId, h, num, plural, signed } from './dom.js';
import { GROUPS, INDEX, R, STRONGEST, hitsOf, openRollout, page, rewardColor, search, state, tokenTexts } from './rollouts.js';
import { HEAT, MODES, drawRow, drawTexts, heatOf, hideCard, pin, versionsOf, visible, watchTokens } from './tokens.js';
import { drawGroup } from './group.js';
import { drawAgents } from './agents.js';

function head(i, rollout) {
  const group = GROUPS[R.group[i]];
  const stop = INDEX.stops[R.stop[i]];
  const facts = [
    `step ${R.step[i]}`, stop.replace('_', ' '), plural(R.turns[i], 'turn'),
    `${plural(R.tokens[i], 'token')}, ${num(R.sampled[i])} sampled`,
    `${num(R.seconds[i], 1)} s${R.tool_seconds[i] ? `, ${num(R.tool_seconds[i], 1)} s in tools` : ''}`,
  ];
  const tab = (view, title) => h('button', { type: 'button', role: 'tab', 'aria-selected': state.view === view ? 'true' : 'false',
    onclick: () => page.show(i, { view }) }, title);
  return h('div', { class: 'head' },
    h('div', { class: 'name' },
      h('span', { class: 'big reward', style: { '--reward': rewardColor(R.reward[i]) } }, num(R.reward[i], 3)),
      h('div', { class: 'who-is' },
        h('h2', {}, R.id[i], R.advantage[i] === null ? null
          : h('span', { class: `advantage ${R.advantage[i] > 0 ? 'up' : R.advantage[i] < 0 ? 'down' : ''}` }, `advantage ${signed(R.advantage[i])}`)),
        h('p', { class: 'question', title: group.prompt }, group.excerpt || group.prompt),
        h('p', { class: 'facts' }, facts.map((fact) => h('span', {}, fact)), h('span', { class: 'prompt-id' }, group.prompt)))),
    siblings(i, group),
    h('div', { class: 'tools' },
      h('div', { class: 'tabs', role: 'tablist' }, tab('rollout', 'Rollout'), tab('group', `Group of ${group.members.length}`),
        rollout.player ? tab('agents', plural(rollout.player.seats.length, 'agent')) : null),
      rollout.rows.length > 1 && state.view === 'rollout' ? rowTabs(i, rollout) : null,
      h('div', { class: 'modes', role: 'radiogroup', 'aria-label': 'Colour of tokens' }, MODES.map(({ key, title }, k) => h('button', {
        type: 'button', role: 'radio', 'aria-checked': state.mode === key ? 'true' : 'false', title: `Key ${k + 1}`, 'data-mode-key': key,
        onclick: () => setMode(key) }, title))),
      h('div', { class: 'legend', id: 'legend' })));
}

/** One tile a rollout of the group. */
function siblings(i, group) {
  return h('div', { class: 'siblings', title: 'The rollouts of this prompt' }, group.members.map((member) => h('button', {
    type: 'button', class: member === i ? 'here' : '', title: `${R.id[member]}: reward ${num(R.reward[member])}`,
    style: { '--reward': rewardColor(R.reward[member]) }, onclick: () => page.show(member) })));
}

function rowTabs(i, rollout) {
  return h('div', { class: 'tabs rows' }, rollout.rows.map((row, k) => h('button', { type: 'button',
    'aria-selected': k === state.row ? 'true' : 'false', onclick: () => page.show(i, { row: k }) }, `${row.agent} ${row.row}${row.fork ? ` · ${row.fork}` : ''}`)));
}

function legend(rollout) {
  const swatch = (name, title) => h('span', {}, h('i', { class: `swatch ${name}` }), title);
  const rows = rollout.rows;
  if (state.mode === 'logprob') {
    const scale = HEAT.concat([9]).map((limit, k) => h('i', { class: `swatch scale t w1 h${k}`, title: `log-prob about −${limit}` }));
    return [h('span', {}, 'p = 1', h('span', { class: 'scales' }, scale), '0.002')];
  }
  if (state.mode === 'version') {
    const versions = [...new Set(rows.flatMap(versionsOf))];
    return versions.slice(0, 8).map((version, k) => swatch(`t w1 v${k}`, `version ${version}`));
  }
  if (state.mode === 'advantage') {
    const known = R.advantage[state.selected] !== null;
    return known ? [swatch('t w1 trained good', 'better than its group'), swatch('t w1 trained bad', 'worse'), swatch('t w0', 'not trained on')]
      : [h('span', {}, 'No advantages were recorded for this step.')];
  }
  const kinds = new Set(rows.flatMap((row) => [...row.flags].map((flag) => ((flag & 3) ? (flag & 3) * 2 + Number(!(flag & 4)) : 0))));
  const words = { 2: ['t w1', 'sampled, trained on'], 3: ['t w1 masked', 'sampled, masked'], 4: ['t w2', 'demonstrated'], 5: ['t w2 masked', 'demonstrated, masked'], 0: ['t w0', 'observed'] };
  return [2, 3, 4, 5, 0].filter((kind) => kinds.has(kind)).map((kind) => swatch(...words[kind]));
}

export function paint(element, advantage) {
  const share = advantage === null ? 0 : Math.min(1, Math.abs(advantage) / STRONGEST);
  element.classList.toggle('good', advantage !== null && advantage > 0);
  element.classList.toggle('bad', advantage !== null && advantage < 0);
  element.style.setProperty('--strength', `${(12 + 50 * share).toFixed(0)}%`);
}

function facts(title, pairs) {
  const rows = pairs.filter(([, value]) => value !== undefined && value !== null && value !== '');
  if (!rows.length) return null;
  return h('section', {}, h('h3', {}, title), h('dl', {}, rows.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))));
}

function readable(value) {
  if (typeof value === 'number') return num(value);
  return typeof value === 'string' ? value : JSON.stringify(value);
}

function beside(i, rollout) {
  const group = GROUPS[R.group[i]];
  const metrics = Object.keys(INDEX.metrics).sort().map((key) => [key, INDEX.metrics[key][i]]).filter(([, value]) => value !== null);
  const better = group.members.filter((member) => R.reward[member] > R.reward[i]).length;
  const label = rollout.label === null || rollout.label === undefined ? null
    : h('section', {}, h('h3', {}, 'Label'), h('p', { class: 'label-text' }, readable(rollout.label)));
  return h('aside', {},
    label,
    facts('Group', [['mean', num(group.mean)], ['deviation', num(group.deviation)], ['better than this', `${better} of ${group.members.length}`]]),
    facts('Metrics', metrics.map(([key, value]) => [key, num(value)])),
    turnTable(rollout),
    unlikely(rollout.rows[Math.min(state.row, rollout.rows.length - 1)]),
    facts('Metadata', Object.entries(rollout.metadata || {}).map(([key, value]) => [key, readable(value)])));
}

function turnTable(rollout) {
  if (!rollout.turns.length) return null;
  return h('section', {}, h('h3', {}, 'Turns'), h('table', {},
    h('tr', {}, ['', 'finish', 'reward'].map((title) => h('th', {}, title))),
    rollout.turns.map((turn, k) => h('tr', { class: turn.finish === 'stop' ? '' : 'odd' }, h('td', {}, `${k + 1}`), h('td', {}, turn.finish), h('td', {}, num(turn.reward))))));
}

/** The least likely tokens that the policy sampled: where a rollout turned, mostly. */
function unlikely(row) {
  if (!row || !row.sampled) return null;
  const places = [];
  for (let t = 0; t < row.tokens; t++) if (row.logprobs[t] < -0.05) places.push(t);
  places.sort((a, b) => row.logprobs[a] - row.logprobs[b]);
  if (!places.length) return null;
  const texts = tokenTexts(row);
  return h('section', {}, h('h3', {}, 'Least likely tokens'), h('div', { class: 'unlikely' }, places.slice(0, 8).map((t) => h('button', {
    type: 'button', onclick: () => jumpTo(row, t) }, h('code', {}, visible(texts[t])), h('span', { class: `t w1 h${heatOf(row.logprobs[t])}` }, num(row.logprobs[t], 2))))));
}

function jumpTo(row, t) {
  for (const more of document.querySelectorAll('#text .more')) more.click();
  const span = [...document.querySelectorAll('#text .t')].find((each) => each.token && each.token.row === row && each.token.t === t);
  if (!span) return;
  span.scrollIntoView({ block: 'center' });
  setTimeout(() => pin(span), 60);
}

export function failureBox(i, rollout) {
  const boxes = [];
  if (rollout.failure) {
    boxes.push(h('div', { class: 'failure' }, h('b', {}, `${rollout.failure.kind} failure · ${rollout.failure.error}`), h('pre', {}, rollout.failure.message)));
  }
  if (R.dropped[i]) boxes.push(h('div', { class: 'failure' }, h('b', {}, 'Dropped'), ` by ${rollout.filtered ? `the filter ${rollout.filtered}` : 'the failure policy'}: it was not trained on.`));
  return boxes;
}

function drawRollout(i, rollout) {
  const row = rollout.rows[Math.min(state.row, rollout.rows.length - 1)];
  const text = h('article', { id: 'text' }, failureBox(i, rollout),
    row ? drawRow(row, { hits: hitsOf(row), advantage: R.advantage[i] }) : drawTexts(rollout),
    row ? null : h('p', { class: 'quiet' }, 'This rollout has no tokens: nothing was sampled before it failed.'));
  paint(text, R.advantage[i]);
  watchTokens(text);
  return h('div', { class: 'body' }, text, beside(i, rollout));
}

let drawing = 0;

/** Draw the open rollout, its group or its episode. */
export async function drawRight() {
  const mine = ++drawing;
  const i = state.selected;
  const right = byId('right');
  if (i < 0) {
    right.replaceChildren(h('p', { class: 'quiet middle' }, R?.id.length ? 'No rollout fits the filters.' : 'No rollouts.'));
    return;
  }
  const rollout = await openRollout(i);
  if (state.view === 'agents' && R.episode[i] < 0) state.view = 'rollout';
  const body = state.view === 'group' ? await drawGroup(i) : state.view === 'agents' ? await drawAgents(i) : drawRollout(i, rollout);
  if (mine !== drawing) return;
  const { why } = rollout.vocabulary;
  const notes = why ? [h('div', { class: 'no-text' }, `Tokens are shown as ids: ${why}`)] : [];
  right.replaceChildren(head(i, rollout), ...notes, body);
  byId('legend').replaceChildren(...legend(rollout));
  right.dataset.rollout = R.id[i];
  if (search.words) document.querySelector('#text .hit')?.scrollIntoView({ block: 'center' });
}

/** Colour the tokens in another way. */
export async function setMode(mode) {
  state.mode = mode;
  document.body.dataset.mode = mode;
  for (const button of document.querySelectorAll('[data-mode-key]')) button.setAttribute('aria-checked', button.dataset.modeKey === mode);
  page.changed();
  if (state.selected >= 0) byId('legend')?.replaceChildren(...legend(await openRollout(state.selected)));
}
