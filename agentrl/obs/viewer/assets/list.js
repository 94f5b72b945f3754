// The list of rollouts, drawn only where it is seen, and the filters above it.

const LINE = 54;
let ITEMS = [];
let CHOSEN = [];
let PLACE = new Map();

function refreshList() {
  const { items, chosen } = chosenItems();
  ITEMS = items;
  CHOSEN = chosen;
  PLACE = new Map();
  items.forEach((item, place) => { if (item.rollout !== undefined) PLACE.set(item.rollout, place); });
  byId('list-space').style.height = `${ITEMS.length * LINE}px`;
  byId('count').textContent = chosen.length === COUNT ? plural(COUNT, 'rollout') : `${num(chosen.length)} of ${num(COUNT)}`;
  const filtered = Object.keys(RANGES).some((name) => state[name]) || state.stop.length || state.status.length || state.q;
  byId('clear').hidden = !filtered;
  byId('direction').textContent = state.down ? '↓' : '↑';
  byId('sort').value = state.sort;
  byId('list').classList.toggle('empty', !ITEMS.length);
  byId('list').dataset.shown = chosen.length;
  drawnFrom = -1;
  drawList();
}

let drawnFrom = -1;
let drawnTo = -1;

function drawList() {
  const list = byId('list');
  const from = Math.max(0, Math.floor(list.scrollTop / LINE) - 6);
  const to = Math.min(ITEMS.length, Math.ceil((list.scrollTop + list.clientHeight) / LINE) + 6);
  if (from === drawnFrom && to === drawnTo) return;
  drawnFrom = from;
  drawnTo = to;
  const lines = [];
  for (let place = from; place < to; place++) {
    const item = ITEMS[place];
    const line = item.rollout === undefined ? groupLine(item.group) : rolloutLine(item.rollout);
    line.style.top = `${place * LINE}px`;
    lines.push(line);
  }
  byId('list-space').replaceChildren(...lines);
}

function stripes(parts) {
  const total = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  let at = 0;
  const stops = parts.map(([color, size]) => {
    const from = at;
    at += 100 * size / total;
    return `${color} ${from.toFixed(2)}% ${at.toFixed(2)}%`;
  });
  return `linear-gradient(90deg, ${stops.join(', ')})`;
}

const BAR_COLORS = ['var(--bar-observed)', 'var(--bar-sampled)', 'var(--bar-demonstrated)'];

function barOf(i) {
  const parts = [];
  for (let k = 0; k < R.bar[i].length; k += 2) parts.push([BAR_COLORS[R.bar[i][k]], R.bar[i][k + 1]]);
  return parts.length ? stripes(parts) : 'none';
}

function rewardBadge(i) {
  return h('span', { class: 'reward', style: { '--reward': rewardColor(R.reward[i]) } }, num(R.reward[i], 2));
}

function groupLine(group) {
  const { step, excerpt, prompt, members, mean } = GROUPS[group];
  return h('div', { class: 'line group', title: `${prompt}\n${excerpt}`, onclick: () => { page.show(members[0], { view: 'group' }); } },
    h('div', { class: 'first' }, h('b', {}, `step ${step}`), h('span', { class: 'words' }, excerpt || prompt),
      h('span', { class: 'aside' }, `mean ${num(mean, 2)}`)),
    h('div', { class: 'tiles', style: { background: stripes(members.map((i) => [rewardColor(R.reward[i]), 1])) } }));
}

function rolloutLine(i) {
  const failed = R.failure[i] >= 0;
  const stop = INDEX.stops[R.stop[i]];
  const grouped = state.sort === 'step';
  return h('div', { class: `line rollout${i === state.selected ? ' selected' : ''}${failed ? ' failed' : ''}`, role: 'option',
    'aria-selected': i === state.selected ? 'true' : 'false', 'data-rollout': R.id[i], onclick: () => page.show(i) },
    h('div', { class: 'first' }, rewardBadge(i),
      h('span', { class: 'id' }, R.id[i]),
      stop === 'terminated' ? null : h('span', { class: `stop ${stop}` }, stop.replace('_', ' ')),
      R.dropped[i] ? h('span', { class: 'stop dropped' }, 'dropped') : null,
      h('span', { class: 'aside' }, grouped ? '' : `step ${R.step[i]} · `, sortNote(i), plural(R.turns[i], 'turn'), ` · ${num(R.tokens[i])}`)),
    h('div', { class: 'excerpt' }, R.excerpt[i] || GROUPS[R.group[i]].excerpt),
    h('div', { class: 'bar', style: { background: barOf(i) } }));
}

/** The value a list is sorted by, where the line does not show it anyway. */
function sortNote(i) {
  if (['step', 'reward', 'tokens', 'turns'].includes(state.sort)) return '';
  const { title, values } = SORTS.find(({ key }) => key === state.sort);
  return `${title} ${num(values[i])} · `;
}

function scrollToSelected() {
  const place = PLACE.get(state.selected);
  if (place === undefined) return;
  const list = byId('list');
  const top = place * LINE;
  if (top < list.scrollTop + LINE) list.scrollTop = Math.max(0, top - LINE * 2);
  else if (top + LINE > list.scrollTop + list.clientHeight) list.scrollTop = top + LINE * 2 - list.clientHeight;
}

// ---- filters

const RANGE_WORDS = { step: 'step', reward: 'reward', length: 'tokens' };

/** A small histogram, on which a range is drawn with the mouse, and two numbers. */
function makeRange(name, changed) {
  const [low, high] = extent(RANGES[name]);
  const field = byId(`range-${name}`);
  const bins = new Array(24).fill(0);
  const binOf = (value) => Math.min(bins.length - 1, Math.floor(bins.length * (value - low) / (high - low || 1)));
  for (const value of RANGES[name]) if (value !== null) bins[binOf(value)]++;
  const most = Math.max(...bins, 1);
  const bars = bins.map((count) => h('i', { style: { height: count ? `${Math.max(6, 100 * Math.sqrt(count / most))}%` : '0' } }));
  const histogram = h('div', { class: 'histogram', title: `Drag to choose a range of ${RANGE_WORDS[name]}` }, bars);
  const inputs = ['from', 'to'].map((end) => h('input', { type: 'number', step: 'any', 'aria-label': `${RANGE_WORDS[name]} ${end}` }));
  const edge = (bin) => low + (high - low) * bin / bins.length;
  const whole = (value, up) => (name === 'reward' ? Number(value.toFixed(4)) : up ? Math.floor(value) : Math.ceil(value));
  const binAt = (event) => {
    const box = histogram.getBoundingClientRect();
    return Math.max(0, Math.min(bins.length - 1, Math.floor(bins.length * (event.clientX - box.left) / box.width)));
  };
  let start = -1;
  const choose = (event) => {
    const [a, b] = [start, binAt(event)].sort((x, y) => x - y);
    state[name] = a === 0 && b === bins.length - 1 ? null : [whole(edge(a), false), b === bins.length - 1 ? high : whole(edge(b + 1), true)];
    changed();
  };
  histogram.addEventListener('pointerdown', (event) => { start = binAt(event); histogram.setPointerCapture(event.pointerId); choose(event); });
  histogram.addEventListener('pointermove', (event) => { if (start >= 0) choose(event); });
  histogram.addEventListener('pointerup', () => { start = -1; });
  inputs.forEach((input) => input.addEventListener('change', () => {
    const [from, to] = inputs.map((each) => (each.value === '' ? null : Number(each.value)));
    state[name] = from === null && to === null ? null : [from === null ? low : from, to === null ? high : to];
    changed();
  }));
  field.append(h('legend', {}, RANGE_WORDS[name]), histogram, h('div', { class: 'ends' }, inputs[0], h('span', {}, '–'), inputs[1]));
  return () => {
    const [from, to] = state[name] || [low, high];
    inputs[0].placeholder = num(low, 2);
    inputs[1].placeholder = num(high, 2);
    inputs[0].value = state[name] ? from : '';
    inputs[1].value = state[name] ? to : '';
    field.classList.toggle('set', Boolean(state[name]));
    const centre = (bin) => (edge(bin) + edge(bin + 1)) / 2;
    const reach = (high - low) / bins.length / 2;
    bars.forEach((bar, bin) => bar.classList.toggle('out', centre(bin) + reach < from || centre(bin) - reach > to));
  };
}

function makeChips(changed) {
  const counts = { stop: new Map(), status: new Map() };
  const count = (name, value) => counts[name].set(value, (counts[name].get(value) || 0) + 1);
  for (let i = 0; i < COUNT; i++) {
    count('stop', INDEX.stops[R.stop[i]]);
    statusesOf(i).forEach((status) => count('status', status));
  }
  const chips = [];
  for (const name of ['stop', 'status']) {
    for (const [value, number] of [...counts[name]].sort((a, b) => b[1] - a[1])) {
      const chip = h('button', { type: 'button', class: 'chip', 'data-value': value, onclick: () => {
        state[name] = state[name].includes(value) ? state[name].filter((other) => other !== value) : [...state[name], value];
        changed();
      } }, value.replace('_', ' '), h('b', {}, num(number)));
      chips.push([chip, name, value]);
    }
  }
  byId('chips').append(h('span', { class: 'what' }, 'ended'), ...chips.filter((c) => c[1] === 'stop').map(([chip]) => chip),
    h('span', { class: 'what' }, 'and is'), ...chips.filter((c) => c[1] === 'status').map(([chip]) => chip));
  return () => {
    for (const [chip, name, value] of chips) chip.setAttribute('aria-pressed', state[name].includes(value));
  };
}
