// The agents of an episode side by side: a column an agent, its turns in the rows of the steps in which they were.

import { h, num, plural, signed } from './dom.js';
import { GROUPS, R, SAMPLED, atToken, hitsOf, openRollout, page, rewardColor, tokenTexts } from './rollouts.js';
import { drawBlock, textNodes, versionsOf, watchTokens } from './tokens.js';
import { failureBox, paint } from './detail.js';
import { stretches } from './group.js';

/** The rollouts of an episode. */
function episodeOf(i) {
  if (R.episode[i] < 0) return [];
  return GROUPS[R.group[i]].members.filter((member) => R.episode[member] === R.episode[i]);
}

/** The turns of a rollout by their number: where each stands in a row, from what the agent read before it. */
function turnsOf(rollout) {
  const turns = new Map();
  for (const row of rollout.rows) {
    let read = 0;
    for (const { who, start, end } of stretches(row)) {
      if (who !== SAMPLED) { read = start; continue; }
      const name = row.request_ids[atToken(row.requests, start)] || '';
      const number = Number(name.slice(name.lastIndexOf('/') + 1));
      if (!turns.has(number)) turns.set(number, { row, read, start, end });
      read = end;
    }
  }
  return turns;
}

function drawTurn({ row, read, start, end }, number, advantage) {
  const texts = tokenTexts(row);
  const marks = { hits: hitsOf(row), advantage, versions: versionsOf(row), turn: number + 1 };
  const before = read < start ? [drawBlock(row, texts, read, start, { ...marks, turn: 0 }, 0, 'read')] : [];
  return [...before, drawBlock(row, texts, start, end, marks, SAMPLED, `turn ${number + 1}`)];
}

/** What an agent did in a step: its tokens, or the text of an agent that is not trained. */
function drawStep(seat, step, column) {
  const numbers = seat.steps.flatMap((at, number) => (at === step ? [number] : []));
  return numbers.flatMap((number) => {
    if (column.turns.has(number)) return drawTurn(column.turns.get(number), number, column.advantage);
    const text = seat.moves[number];
    if (text === undefined) return [h('p', { class: 'quiet' }, 'Its rollout is left out of this page.')];
    return [h('div', { class: 'block by0' }, h('div', { class: 'label' }, h('b', {}, `turn ${number + 1}`)),
      h('div', { class: 'words move' }, h('span', {}, textNodes(text))))];
  });
}

function seatHead(seat, reward, column, here) {
  const { member, advantage } = column;
  return h('div', { class: `cell seat${member === here ? ' here' : ''}` },
    h('div', {}, h('span', { class: 'reward', style: { '--reward': rewardColor(reward) } }, num(reward, 2)),
      advantage === null ? null : h('span', { class: `advantage ${advantage > 0 ? 'up' : advantage < 0 ? 'down' : ''}` }, signed(advantage)),
      h('b', {}, seat.agent), seat.role === seat.agent ? null : h('span', {}, seat.role)),
    h('div', { class: 'ids' }, `played by ${seat.player}`,
      member === undefined ? null : h('button', { type: 'button', title: 'Open it', onclick: () => page.show(member, { view: 'rollout' }) }, R.id[member])));
}

export async function drawAgents(i) {
  const members = episodeOf(i);
  const rollouts = await Promise.all(members.map(openRollout));
  const { seats, seat_rewards: rewards } = (await openRollout(i)).player;
  const columns = seats.map((_, seat) => {
    const at = members.findIndex((member) => R.seat[member] === seat);
    return at < 0 ? { member: undefined, advantage: null, turns: new Map() }
      : { member: members[at], advantage: R.advantage[members[at]], turns: turnsOf(rollouts[at]) };
  });
  const steps = Math.max(0, ...seats.flatMap((seat) => seat.steps.map((step) => step + 1)));
  const lines = [];
  for (let step = 0; step < steps; step++) {
    lines.push(h('div', { class: 'cell step', 'data-step': step }, `${step + 1}`), ...seats.map((seat, k) => {
      const cell = h('div', { class: 'cell', 'data-agent': seat.agent }, drawStep(seat, step, columns[k]));
      paint(cell, columns[k].advantage);
      return cell;
    }));
  }
  const table = h('div', { class: 'agents', style: { '--agents': seats.length } },
    h('div', { class: 'cell seat' }), seats.map((seat, k) => seatHead(seat, rewards[k], columns[k], i)), lines);
  watchTokens(table);
  return h('div', { class: 'body group-body' },
    h('p', { class: 'group-line' }, `${plural(seats.length, 'agent')}, ${plural(steps, 'step')}${R.opponent[i] ? ` · opponents: ${R.opponent[i]}` : ''}`),
    members.flatMap((member, k) => failureBox(member, rollouts[k])).slice(0, 1), table);
}
