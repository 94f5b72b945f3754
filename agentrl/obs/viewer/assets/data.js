// The data of the page: the index, which is there at once, and tokens, which are unpacked when a rollout is opened.
// How they are packed: agentrl/obs/viewer/page_data.py.

const byId = (id) => document.getElementById(id);

/** Make an element. Children that are no nodes become text nodes: nothing is ever parsed as HTML. */
function h(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === 'class') element.className = value;
    else if (key === 'style') for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text);
    else if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const INDEX = JSON.parse(byId('index').textContent);
const R = INDEX.rollouts;
const GROUPS = INDEX.groups;
const COUNT = R.id.length;
const SAMPLED = 1;
const WHO = ['observed', 'sampled', 'demonstrated'];
const REASONS = ['', 'it was not sampled by the policy', 'another row trains it', 'its policy version is too old'];

R.step = R.group.map((group) => GROUPS[group].step);
GROUPS.forEach((group) => { group.members = []; });
R.group.forEach((group, i) => GROUPS[group].members.push(i));
for (const group of GROUPS) {
  const rewards = group.members.map((i) => R.reward[i]).filter((reward) => reward !== null);
  group.mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  group.deviation = rewards.length
    ? Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - group.mean) ** 2, 0) / rewards.length) : null;
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 0];
}
const REWARDS = extent(R.reward);
const STRONGEST = Math.max(1e-9, ...extent(R.advantage).map(Math.abs));

/** Where a reward lies between the page's lowest and highest, in percent. */
function rewardShare(reward) {
  if (reward === null) return 0;
  return REWARDS[0] === REWARDS[1] ? (reward > 0 ? 100 : 0)
    : 100 * (reward - REWARDS[0]) / (REWARDS[1] - REWARDS[0]);
}
function rewardColor(reward) {
  if (reward === null) return 'var(--faint)';
  return `color-mix(in oklab, var(--low), var(--high) ${rewardShare(reward).toFixed(1)}%)`;
}

function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  if (Number.isInteger(value)) return value.toLocaleString('en-US').replace('-', '−');
  const size = Math.abs(value);
  const text = size < 1e-3 ? value.toExponential(1) : value.toFixed(size >= 100 ? 1 : digits);
  return text.replace(/^-/, '−').replace(/e-/, 'e−');
}
const signed = (value) => (value > 0 ? '+' : '') + num(value);
const plural = (count, word) => `${num(count)} ${word}${count === 1 ? '' : 's'}`;

let VOCABULARY = null;
let BLOBS = '';
const STARTS = [0];
for (const length of R.packed) STARTS.push(STARTS[STARTS.length - 1] + length);

/** The parts of the page behind the script: the vocabulary and the packed tokens. */
const parsed = new Promise((resolve) => {
  document.addEventListener('DOMContentLoaded', () => {
    VOCABULARY = JSON.parse(byId('vocabulary').textContent);
    VOCABULARY.bytes = VOCABULARY.texts && VOCABULARY.texts.map((text) => (typeof text === 'string' ? null : Uint8Array.from(text)));
    BLOBS = byId('blobs').textContent;
    resolve();
  });
});

const opened = new Map();
const KEPT = 96;

/** Unpack a rollout; the newest few are kept. */
async function openRollout(i) {
  if (opened.has(i)) return opened.get(i);
  await parsed;
  const binary = atob(BLOBS.slice(STARTS[i], STARTS[i + 1]));
  const bytes = new Uint8Array(binary.length);
  for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  const rollout = unpack(await new Response(stream).arrayBuffer());
  opened.set(i, rollout);
  if (opened.size > KEPT) opened.delete(opened.keys().next().value);
  return rollout;
}

function unpack(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const rollout = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  const take = (length) => buffer.slice(at, (at += length));
  for (const row of rollout.rows) {
    row.numbers = rollout.wide ? new Uint32Array(take(4 * row.tokens)) : new Uint16Array(take(2 * row.tokens));
    row.flags = new Uint8Array(take(row.tokens));
    const halves = new Uint16Array(take(2 * row.sampled));
    row.logprobs = new Float32Array(row.tokens).fill(NaN);
    let next = 0;
    for (let t = 0; t < row.tokens; t++) if ((row.flags[t] & 3) === SAMPLED) row.logprobs[t] = half(halves[next++]);
  }
  return rollout;
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** The value at token t of runs [[start, value], …]. */
function atToken(runs, t) {
  let low = 0;
  let high = runs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (runs[middle][0] <= t) low = middle; else high = middle - 1;
  }
  return runs.length ? runs[low][1] : -1;
}

/** The text of each token. A character over several tokens stands at its last; the others have none. */
function tokenTexts(row) {
  if (row.texts) return row.texts;
  const texts = new Array(row.tokens);
  let decoder = null;
  for (let t = 0; t < row.tokens; t++) {
    const number = row.numbers[t];
    if (!VOCABULARY.texts) { texts[t] = `${VOCABULARY.ids[number]} `; continue; }
    const bytes = VOCABULARY.bytes[number];
    if (bytes) {
      decoder = decoder || new TextDecoder('utf-8', { ignoreBOM: true });
      texts[t] = decoder.decode(bytes, { stream: true });
    } else {
      texts[t] = VOCABULARY.texts[number];
      if (decoder) { texts[t - 1] += decoder.decode(); decoder = null; }
    }
  }
  if (decoder) texts[row.tokens - 1] += decoder.decode();
  row.texts = texts;
  return texts;
}

/** All text of a rollout, for the search. */
function wholeText(rollout) {
  const parts = rollout.rows.map((row) => tokenTexts(row).join(''));
  if (rollout.prompt) parts.push(rollout.prompt);
  if (rollout.player) for (const seat of rollout.player.seats) parts.push(...seat.moves);
  for (const turn of rollout.turns) if (turn.action !== undefined) parts.push(turn.action, turn.observation);
  return parts.join('\n');
}
