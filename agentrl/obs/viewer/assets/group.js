// The rollouts of one prompt side by side. Those that are alike token by token share a column.

import { h, num, plural, signed } from './dom.js';
import { GROUPS, INDEX, R, hitsOf, openRollout, page, rewardColor } from './rollouts.js';
import { drawRow, drawTexts, watchTokens } from './tokens.js';
import { failureBox, paint } from './detail.js';

const COLUMNS = 24;
const COMPARED = 12e6;

function alike(members, rollouts) {
  const found = new Map();
  members.forEach((i, k) => {
    const row = rollouts[k].rows[0];
    const key = row ? `${R.reward[i]}|${R.stop[i]}|${row.numbers.join()}` : `none ${i}`;
    if (!found.has(key)) found.set(key, { row, rollout: rollouts[k], members: [] });
    found.get(key).members.push(i);
  });
  return [...found.values()];
}

function commonStart(rows) {
  if (!rows.length) return 0;
  let t = 0;
  const [first] = rows;
  while (t < first.tokens && rows.every((row) => row.numbers[t] === first.numbers[t] && t < row.tokens)) t++;
  return t;
}

/** The stretches of a row that one made: the prompt, a turn, an observation. */
export function stretches(row) {
  const found = [];
  for (let start = 0; start < row.tokens;) {
    const who = row.flags[start] & 3;
    let end = start;
    while (end < row.tokens && (row.flags[end] & 3) === who) end++;
    found.push({ who, start, end });
    start = end;
  }
  return found;
}

/** Flags of the tokens of `row` that `other` lacks, stretch by stretch; null where that would take too long. */
function differences(row, other) {
  const differs = new Uint8Array(row.tokens);
  const others = stretches(other);
  let budget = COMPARED;
  for (const [k, { who, start, end }] of stretches(row).entries()) {
    const facing = others[k] && others[k].who === who ? others[k] : { start: 0, end: 0 };
    budget -= (end - start) * (facing.end - facing.start);
    if (budget < 0) return null;
    mark(differs, start, row.numbers.subarray(start, end), other.numbers.subarray(facing.start, facing.end));
  }
  return differs;
}

/** Mark the tokens of `a` that a longest common subsequence with `b` leaves out; `a` begins at token `at`. */
function mark(differs, at, a, b) {
  const width = b.length + 1;
  const longest = new Uint16Array((a.length + 1) * width);
  for (let x = a.length - 1; x >= 0; x--) {
    for (let y = b.length - 1; y >= 0; y--) {
      longest[x * width + y] = a[x] === b[y] ? longest[(x + 1) * width + y + 1] + 1
        : Math.max(longest[(x + 1) * width + y], longest[x * width + y + 1]);
    }
  }
  for (let x = 0, y = 0; x < a.length;) {
    if (y < b.length && a[x] === b[y]) { x++; y++; }
    else if (y < b.length && longest[x * width + y + 1] >= longest[(x + 1) * width + y]) y++;
    else differs[at + x++] = 1;
  }
}

export async function drawGroup(i) {
  const group = GROUPS[R.group[i]];
  const rollouts = await Promise.all(group.members.map(openRollout));
  const reward = ({ members }) => (members.includes(i) ? Infinity : R.reward[members[0]] ?? -Infinity);
  const variants = alike(group.members, rollouts).sort((a, b) => reward(b) - reward(a) || 0);
  const rows = variants.map(({ row }) => row).filter(Boolean);
  const shared = promptLength(rows);
  const [reference, neighbour] = variants;
  const columns = h('div', { class: 'columns' }, variants.slice(0, COLUMNS).map((variant) => drawColumn(variant, variant === reference ? neighbour : reference, shared, i)));
  const rest = variants.slice(COLUMNS);
  const more = h('button', { type: 'button', class: 'more', onclick: () => {
    more.replaceWith(...rest.map((variant) => drawColumn(variant, reference, shared, i)));
  } }, `${num(rest.length)} more columns`);
  if (rest.length) columns.append(more);
  watchTokens(columns);
  const kinds = variants.length === group.members.length ? 'all different' : variants.length === 1 ? 'all alike' : `${num(variants.length)} different`;
  const prompt = shared && rows.length
    ? h('details', { class: 'shared' }, h('summary', {}, `The prompt of all, ${num(shared)} tokens`), drawRow(head0(rows[0], shared), { advantage: null }))
    : null;
  if (prompt) watchTokens(prompt);
  return h('div', { class: 'body group-body' },
    h('p', { class: 'group-line' }, `${plural(group.members.length, 'rollout')}, ${kinds} · mean reward ${num(group.mean)}, deviation ${num(group.deviation)} `,
      group.deviation === 0 && group.members.length > 1 ? h('span', { class: 'flat' }, 'every reward is the same: no gradient') : null,
      variants.length > 1 ? [' · underlined: differs from ', h('b', {}, R.id[i]), ', and there from its neighbour'] : null,
      rollouts.some(({ rows: all }) => all.length > 1) ? ' · of several rows, the first' : null),
    prompt, columns);
}

/** What all share, as far as nobody sampled any of it. */
function promptLength(rows) {
  const common = commonStart(rows);
  for (let t = 0; t < common; t++) if (rows[0].flags[t] & 3) return t;
  return common;
}

function head0(row, tokens) {
  return { ...row, tokens, numbers: row.numbers.subarray(0, tokens), flags: row.flags.subarray(0, tokens), texts: null };
}

/** A column; `other` is what it is compared with. */
function drawColumn({ row, rollout, members }, other, shared, here) {
  const [first] = members;
  const advantage = R.advantage[first];
  const isReference = members.includes(here);
  const differs = row && other?.row ? differences(row, other.row) : null;
  const stop = INDEX.stops[R.stop[first]];
  const column = h('div', { class: `column${isReference ? ' here' : ''}` },
    h('div', { class: 'column-head' },
      h('div', {}, h('span', { class: 'reward', style: { '--reward': rewardColor(R.reward[first]) } }, num(R.reward[first], 2)),
        advantage === null ? null : h('span', { class: `advantage ${advantage > 0 ? 'up' : advantage < 0 ? 'down' : ''}` }, signed(advantage)),
        members.length > 1 ? h('b', { class: 'times' }, `× ${members.length}`) : null,
        h('span', { class: 'aside' }, `${plural(R.turns[first], 'turn')} · ${num(R.tokens[first])}`,
          stop === 'terminated' ? '' : ` · ${stop.replace('_', ' ')}`)),
      h('div', { class: 'ids' }, members.slice(0, 12).map((member) => h('button', { type: 'button', class: member === here ? 'here' : '',
        title: 'Open it', onclick: () => page.show(member, { view: 'rollout' }) }, R.id[member])),
        members.length > 12 ? h('span', {}, `and ${members.length - 12} more`) : null)),
    failureBox(first, rollout),
    row ? drawRow(row, { hits: hitsOf(row), differs, advantage }, shared) : drawTexts(rollout),
    row && other?.row && !differs ? h('p', { class: 'quiet' }, 'Too long to compare token by token.') : null);
  paint(column, advantage);
  return column;
}
