// Tokens: their text in blocks by who made them, coloured in four ways, and the card on hover.

import { byId, h, num, plural, signed } from './dom.js';
import { REASONS, SAMPLED, WHO, atToken, tokenTexts } from './rollouts.js';

export const MODES = [
  { key: 'who', title: 'who made it' },
  { key: 'logprob', title: 'log-prob' },
  { key: 'version', title: 'version' },
  { key: 'advantage', title: 'advantage' },
];
export const HEAT = [0.01, 0.05, 0.15, 0.4, 0.9, 1.6, 2.5, 4, 6];
const LONG = 900;
const ENDS = 160;

export function heatOf(logprob) {
  let level = 0;
  while (level < HEAT.length && -logprob > HEAT[level]) level++;
  return level;
}

/** The versions of a row's sampled tokens, oldest first. */
export function versionsOf(row) {
  return [...new Set(row.versions.map(([, version]) => version))].filter((version) => version >= 0).sort((a, b) => a - b);
}

/** Text with its line ends marked; an invisible token is marked too. */
export function textNodes(text) {
  if (text === '') return [h('i', { class: 'part' })];
  if (!text.includes('\n')) return [text];
  const nodes = [];
  text.split('\n').forEach((line, k) => {
    if (k) nodes.push(h('i', { class: 'return' }), '\n');
    if (line) nodes.push(line);
  });
  return nodes;
}

function tokenSpan(row, t, text, marks) {
  const flags = row.flags[t];
  const who = flags & 3;
  let name = `t w${who}`;
  if (who === SAMPLED) {
    name += ` h${heatOf(row.logprobs[t])} v${marks.versions.indexOf(atToken(row.versions, t)) % 8}`;
    if (!(flags & 4)) name += ' masked';
  } else if (who && !(flags & 4)) name += ' masked';
  if (flags & 4) name += ' trained';
  if (marks.hits && marks.hits[t]) name += ' hit';
  if (marks.differs && marks.differs[t]) name += ' differs';
  if (/^<[|｜].*[|｜]>$/.test(text)) name += ' special';
  const span = h('span', { class: name }, textNodes(text));
  span.token = { row, t, text, turn: marks.turn, advantage: marks.advantage };
  return span;
}

/** Draw a row from token `from` on. `marks`: hits, differs, advantage. */
export function drawRow(row, marks, from = 0) {
  const texts = tokenTexts(row);
  const blocks = [];
  const versions = versionsOf(row);
  let turn = 0;
  for (let start = 0; start < row.tokens;) {
    const who = row.flags[start] & 3;
    let end = start;
    while (end < row.tokens && (row.flags[end] & 3) === who) end++;
    if (who) turn++;
    if (end > from) {
      const shown = Math.max(start, from);
      const title = who ? `turn ${turn}` : start === 0 ? 'prompt' : 'observed';
      blocks.push(drawBlock(row, texts, shown, end, { ...marks, versions, turn: who ? turn : 0 }, who, title));
    }
    start = end;
  }
  return blocks;
}

/** An image, in place of the tokens that stand for it. */
function picture({ length, digest, url }) {
  const words = `${plural(length, 'token')} · ${digest.slice(0, 12)}`;
  return h('span', { class: 'picture', 'data-digest': digest }, url ? h('img', { src: url, alt: `image ${digest.slice(0, 12)}` }) : null,
    h('span', { class: 'picture-words' }, words));
}

export function drawBlock(row, texts, start, end, marks, who, title) {
  const body = h('div', { class: 'words' });
  const pieces = [];
  for (let t = start; t < end; t += row.pictures.get(t)?.length || 1) pieces.push(t);
  const draw = (some) => some.map((t) => (row.pictures.has(t) ? picture(row.pictures.get(t)) : tokenSpan(row, t, texts[t], marks)));
  const middle = pieces.slice(ENDS, -ENDS);
  const hidden = pieces.length > LONG && !middle.some((t) => marks.hits?.[t]);
  if (hidden) {
    const more = h('button', { type: 'button', class: 'more', onclick: () => more.replaceWith(...draw(middle)) },
      `${num(middle.length)} more tokens`);
    body.append(...draw(pieces.slice(0, ENDS)), more, ...draw(pieces.slice(-ENDS)));
  } else body.append(...draw(pieces));
  const label = h('div', { class: 'label' }, h('b', {}, title), h('span', {}, num(end - start)));
  return h('div', { class: `block by${who}` }, label, body);
}

/** A rollout that has no tokens, as the text that was kept. */
export function drawTexts(rollout) {
  const block = (who, title, text) => h('div', { class: `block by${who}` }, h('div', { class: 'label' }, h('b', {}, title)),
    h('div', { class: 'words' }, h('span', { class: `w${who}` }, textNodes(text))));
  const blocks = rollout.prompt ? [block(0, 'prompt', rollout.prompt)] : [];
  rollout.turns.forEach((turn, k) => {
    if (turn.action) blocks.push(block(1, `turn ${k + 1}`, turn.action));
    if (turn.observation) blocks.push(block(0, 'observed', turn.observation));
  });
  return blocks;
}

// ---- the card

let pinned = null;

export function visible(text) {
  return text === '' ? 'part of a character' : `${text.replace(/\n/g, '↵').replace(/\t/g, '⇥').replace(/ /g, '␣')}`;
}

function cardOf({ row, t, text, turn, advantage }) {
  const flags = row.flags[t];
  const who = flags & 3;
  const trained = Boolean(flags & 4);
  const sampled = who === SAMPLED;
  const line = (name, key, ...value) => h('div', { 'data-fact': key }, h('dt', {}, name), h('dd', {}, ...value));
  const logprob = row.logprobs[t];
  const request = atToken(row.requests, t);
  return [
    h('div', { class: 'token' }, h('code', {}, visible(text)), h('span', {}, `id ${row.vocabulary.ids[row.numbers[t]]}`)),
    h('dl', {},
      line('made by', 'who', h('span', { class: `who w${who}` }, WHO[who]), turn ? ` in turn ${turn}` : ''),
      line('mask', 'mask', trained ? '1, trained on' : `0: ${REASONS[flags >> 3]}`),
      line('log-prob', 'logprob', ...(sampled
        ? [h('b', {}, num(logprob, 4)), ` p ${num(Math.exp(logprob))}`, h('span', { class: `swatch t w1 h${heatOf(logprob)}` })] : ['–'])),
      line('version', 'version', sampled ? String(atToken(row.versions, t)) : '–'),
      line('advantage', 'advantage', advantage === null ? 'not recorded' : trained ? h('b', {}, signed(advantage)) : '– (mask 0)'),
      line('request', 'request', request >= 0 ? row.request_ids[request] || `number ${request}` : '–'),
      line('place', 'place', `${num(t + 1)} of ${num(row.tokens)}`)),
  ];
}

function showCard(span) {
  const tip = byId('tip');
  tip.replaceChildren(...cardOf(span.token));
  tip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const below = box.bottom + 8 + height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, box.left - 14))}px`;
  tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - height - 8)}px`;
}

export function hideCard() {
  pinned?.classList.remove('pinned');
  pinned = null;
  byId('tip').hidden = true;
}

export function pin(span) {
  hideCard();
  pinned = span;
  span.classList.add('pinned');
  showCard(span);
}

export function watchTokens(area) {
  area.addEventListener('pointerover', (event) => {
    const span = event.target.closest('.t');
    if (pinned) return;
    if (span && span.token) showCard(span); else hideCard();
  });
  area.addEventListener('pointerleave', () => { if (!pinned) hideCard(); });
  area.addEventListener('click', (event) => {
    const span = event.target.closest('.t');
    if (span && span.token && span !== pinned) pin(span); else hideCard();
  });
  area.addEventListener('scroll', hideCard, true);
}
