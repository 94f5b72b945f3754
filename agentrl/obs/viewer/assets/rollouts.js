// The rollouts that a page knows: a column of each value, their groups, and tokens, which are unpacked when a rollout is opened.
// How they are packed: agentrl/obs/viewer/page_data.py.

import { extent } from './dom.js';

export const SAMPLED = 1;
export const WHO = ['observed', 'sampled', 'demonstrated'];
export const REASONS = ['', 'it was not sampled by the policy', 'another row trains it', 'its policy version is too old'];

/** What of a rollout is shown: the open one, its view (rollout, group, agents), the colour of tokens, and the row. */
export const state = { selected: -1, view: 'rollout', mode: 'who', row: 0 };
export const search = { words: '', found: null, texts: [], run: 0 };
/** What a page does: `show(i, changes)` opens a rollout, `changed()` keeps the address, `load(i)` its packed bytes and
 * vocabulary, and the URLs of images by digest if the bytes have none. */
export const page = { show: null, changed: null, load: null };

export let INDEX = null;
export let R = null;
export let GROUPS = [];
let REWARDS = [0, 0];
export let STRONGEST = 1e-9;

/** Take an index of rollouts (`Index.data` in page_data.py) in place of the one before. */
export function useIndex(index) {
  INDEX = index;
  R = index.rollouts;
  GROUPS = index.groups;
  R.step = R.group.map((group) => GROUPS[group].step);
  GROUPS.forEach((group) => { group.members = []; });
  R.group.forEach((group, i) => GROUPS[group].members.push(i));
  for (const group of GROUPS) {
    const rewards = group.members.map((i) => R.reward[i]).filter((reward) => reward !== null);
    group.mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    group.deviation = rewards.length
      ? Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - group.mean) ** 2, 0) / rewards.length) : null;
  }
  REWARDS = extent(R.reward);
  STRONGEST = Math.max(1e-9, ...extent(R.advantage).map(Math.abs));
  opened.clear();
}

/** The tokenizer's id, and the text or the bytes, of each number of a token; with `numbersAreIds` numbers are the ids themselves. */
export function makeVocabulary({ ids, texts, why }, numbersAreIds = false) {
  const vocabulary = { ids: [], texts: texts && [], bytes: texts && [], why };
  ids.forEach((id, k) => {
    const number = numbersAreIds ? id : k;
    vocabulary.ids[number] = id;
    if (!texts) return;
    vocabulary.texts[number] = texts[k];
    vocabulary.bytes[number] = typeof texts[k] === 'string' ? null : Uint8Array.from(texts[k]);
  });
  return vocabulary;
}

/** Where a reward lies between the page's lowest and highest, in percent. */
export function rewardShare(reward) {
  if (reward === null) return 0;
  return REWARDS[0] === REWARDS[1] ? (reward > 0 ? 100 : 0)
    : 100 * (reward - REWARDS[0]) / (REWARDS[1] - REWARDS[0]);
}
export function rewardColor(reward) {
  if (reward === null) return 'var(--faint)';
  return `color-mix(in oklab, var(--low), var(--high) ${rewardShare(reward).toFixed(1)}%)`;
}

const opened = new Map();
const KEPT = 96;

/** Unpack a rollout; the newest few are kept. */
export async function openRollout(i) {
  if (opened.has(i)) return opened.get(i);
  const index = INDEX;
  const { bytes, vocabulary, images } = await page.load(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  const rollout = unpack(await new Response(stream).arrayBuffer(), vocabulary, images);
  if (index !== INDEX) return rollout;
  opened.set(i, rollout);
  if (opened.size > KEPT) opened.delete(opened.keys().next().value);
  return rollout;
}

function unpack(buffer, vocabulary, images) {
  const size = new DataView(buffer).getUint32(0, true);
  const rollout = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  rollout.vocabulary = vocabulary;
  let at = 4 + size;
  const take = (length) => buffer.slice(at, (at += length));
  for (const row of rollout.rows) {
    row.numbers = rollout.wide ? new Uint32Array(take(4 * row.tokens)) : new Uint16Array(take(2 * row.tokens));
    row.flags = new Uint8Array(take(row.tokens));
    row.vocabulary = vocabulary;
    const urls = rollout.images || images || {};
    row.pictures = new Map(row.images.map(([start, length, digest]) => [start, { length, digest, url: urls[digest] }]));
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
export function atToken(runs, t) {
  let low = 0;
  let high = runs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (runs[middle][0] <= t) low = middle; else high = middle - 1;
  }
  return runs.length ? runs[low][1] : -1;
}

/** The text of each token. A character over several tokens stands at its last; the others have none. */
export function tokenTexts(row) {
  if (row.texts) return row.texts;
  const texts = new Array(row.tokens);
  const { vocabulary } = row;
  let decoder = null;
  for (let t = 0; t < row.tokens; t++) {
    const number = row.numbers[t];
    if (!vocabulary.texts) { texts[t] = `${vocabulary.ids[number]} `; continue; }
    const bytes = vocabulary.bytes[number];
    if (bytes) {
      decoder = decoder || new TextDecoder('utf-8', { ignoreBOM: true });
      texts[t] = decoder.decode(bytes, { stream: true });
    } else {
      texts[t] = vocabulary.texts[number];
      if (decoder) { texts[t - 1] += decoder.decode(); decoder = null; }
    }
  }
  if (decoder) texts[row.tokens - 1] += decoder.decode();
  row.texts = texts;
  return texts;
}

/** All text of a rollout, for the search. */
export function wholeText(rollout) {
  const parts = rollout.rows.map((row) => tokenTexts(row).join(''));
  if (rollout.prompt) parts.push(rollout.prompt);
  if (rollout.player) for (const seat of rollout.player.seats) parts.push(...seat.moves);
  for (const turn of rollout.turns) if (turn.action !== undefined) parts.push(turn.action, turn.observation);
  return parts.join('\n');
}

/** Where the search words stand in a row: one flag a token. */
export function hitsOf(row) {
  if (!search.words) return null;
  const texts = tokenTexts(row).map((text) => text.toLowerCase());
  const whole = texts.join('');
  const hits = new Uint8Array(row.tokens);
  let token = 0;
  let end = texts.length ? texts[0].length : 0;
  for (let at = whole.indexOf(search.words); at >= 0; at = whole.indexOf(search.words, at + search.words.length)) {
    while (end <= at) end += texts[++token].length;
    hits[token] = 1;
    while (end < at + search.words.length) { end += texts[++token].length; hits[token] = 1; }
  }
  return hits;
}
