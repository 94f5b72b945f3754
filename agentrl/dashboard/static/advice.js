// What the doctor finds in the run, with the keys to change.

import { h } from '../viewer/dom.js';
import { get } from './api.js';

const KEY = /((?:[a-z_]+\.)+[a-z_0-9]+(?:=[^\s,;]+)?)/;

/** Text with keys such as algo.kl_coef=0.01 as code. */
function withKeys(text) {
  return text.split(new RegExp(KEY, 'g')).map((part) => (new RegExp(`^${KEY.source}$`).test(part) ? h('code', {}, part) : part));
}

function finding({ severity, title, evidence, advice }) {
  return h('article', { class: `finding ${severity}` }, h('h2', {}, h('span', { class: `state ${severity}` }, severity), ' ', title),
    h('ul', {}, evidence.map((line) => h('li', {}, line))),
    advice.length ? h('div', { class: 'do' }, h('h3', {}, 'What to change'), h('ul', {}, advice.map((line) => h('li', {}, withKeys(line))))) : null);
}

export function open(main, context) {
  async function refresh() {
    const { findings, error } = await get('advice', { run: context.place.run });
    main.replaceChildren(...(error ? [h('p', { class: 'quiet' }, error)] : []), ...findings.map(finding));
  }
  main.append(h('p', { class: 'quiet' }, 'Reading the run …'));
  return { ready: refresh(), update: refresh };
}
