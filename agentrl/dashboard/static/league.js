// Self-play: ratings, and the score of each player against each other.

import { h, num, signed } from '../viewer/dom.js';
import { get } from './api.js';
import { Chart } from './charts.js';

function payoff(players, matrix, title) {
  const cell = (record) => (record === null ? h('td', { class: 'none' }, '')
    : h('td', { class: 'payoff', style: { '--score': `${(100 * record.score).toFixed(0)}%` }, title: `${num(record.wins)} won, ${num(record.draws)} drawn, ${num(record.losses)} lost` },
      h('b', {}, record.score.toFixed(2)), h('span', {}, num(record.wins + record.draws + record.losses))));
  return h('table', { class: 'plain payoffs' }, h('caption', {}, title), h('thead', {}, h('tr', {}, h('td', {}), players.map((player) => h('th', { scope: 'col' }, player)))),
    h('tbody', {}, players.map((player, k) => h('tr', {}, h('th', { scope: 'row' }, player), matrix[k].map(cell)))));
}

export function open(main, context) {
  const chart = new Chart('rating over steps', { height: 260 });
  const body = h('div', { class: 'league' });

  async function refresh() {
    const data = await get('league', { run: context.place.run });
    const seats = Object.entries(data.by_seat);
    body.replaceChildren(h('h2', {}, `After step ${data.step}`),
      h('table', { class: 'plain' }, h('caption', {}, 'Ratings'), h('thead', {}, h('tr', {}, ['player', 'rating', '±', 'rating − 3 ±', 'score against the policy: largest difference between seats'].map((name) => h('th', { scope: 'col' }, name)))),
        h('tbody', {}, data.ratings.map(({ player, rating, sigma, low }) => h('tr', { class: player === data.policy ? 'here' : '' }, h('th', { scope: 'row' }, player), [rating, sigma, low].map((value) => h('td', { class: 'number' }, num(value, 2))),
          h('td', { class: 'number' }, player in data.asymmetry ? signed(data.asymmetry[player]) : '–'))))),
      h('div', { class: 'scroll' }, payoff(data.players, data.payoff, 'Payoff: score of the row against the column, and games; 1 is all won')),
      ...(seats.length > 1 ? seats.map(([seat, matrix]) => h('details', {}, h('summary', {}, `Payoff in seat ${seat}`), h('div', { class: 'scroll' }, payoff(data.players, matrix, `Row in seat ${seat}`)))) : []));
    chart.set(Object.entries(data.curves).map(([title, line]) => ({ title, ...line })));
  }
  main.append(chart.element, body);
  return { ready: refresh(), update: refresh, close: () => chart.close() };
}
