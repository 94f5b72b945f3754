// The time of steps by phase, and why engines and learner were idle.

import { h, num } from '../viewer/dom.js';
import { get } from './api.js';

const SHOWN = 40;
const WORDS = { learner: 'the learner computed', weight_sync: 'weights were synced', tools: 'episodes waited for tools or environments',
  long_tail: 'few episodes were left', evaluation: 'an evaluation', other: 'anything else' };

function percent(share) {
  return share === undefined || share === null ? '–' : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

/** A bar of parts `[name, size, title]`; `whole` is the size of its full width. */
function bar(kind, names, parts, whole) {
  const text = parts.map(([, , title]) => title).join(', ');
  return h('div', { class: 'parts', role: 'img', 'aria-label': text, title: text }, parts.map(([name, size]) => h('i', {
    class: `${kind} c${names.indexOf(name) % 14}`, style: { width: `${100 * size / (whole || 1)}%` } })));
}

function legend(kind, names, words = {}) {
  return h('div', { class: 'legend' }, names.map((name, k) => h('span', { title: words[name] ?? '' }, h('i', { class: `part-swatch ${kind} c${k % 14}` }), name.replace('_', ' '))));
}

export function open(main, context) {
  const { place } = context;
  let last = Number(place.last ?? 0);
  let data = null;
  let chosen = Number(place.step ?? 0);
  const list = h('div', { class: 'steps', role: 'list', 'aria-label': 'Steps' });
  const detail = h('section', { class: 'step-detail', 'aria-label': 'Step', 'aria-live': 'polite' });
  const heads = h('div', { class: 'legends' });
  const older = h('button', { type: 'button', class: 'button', onclick: () => page(data.steps[0].step - 1) }, 'older');
  const newer = h('button', { type: 'button', class: 'button', onclick: () => page(last + SHOWN >= data.last ? 0 : last + SHOWN) }, 'newer');
  const range = h('span', { class: 'quiet-line' });

  async function page(to) {
    last = to;
    await refresh();
  }

  async function refresh() {
    data = await get('steps', { run: place.run, last, limit: SHOWN });
    const longest = Math.max(...data.steps.map(({ seconds }) => seconds), 1e-9);
    heads.replaceChildren(h('b', {}, 'time by phase'), legend('phase', data.phases), h('b', {}, 'engines idle because'), legend('cause', data.causes, WORDS));
    range.textContent = data.steps.length ? `steps ${data.steps[0].step} to ${data.steps[data.steps.length - 1].step} of ${data.last}` : 'no step has finished yet';
    older.disabled = !data.steps.length || data.steps[0].step <= data.first;
    newer.disabled = !last;
    list.replaceChildren(...[...data.steps].reverse().map((step) => line(step, longest)));
    if (chosen) await drawDetail();
  }

  function line(step, longest) {
    const phases = Object.entries(step.phases).map(([name, seconds]) => [name, seconds, `${name} ${num(seconds, 2)} s`]);
    const causes = Object.entries(step.engine_idle).map(([name, share]) => [name, share, `idle: ${name.replace('_', ' ')} ${percent(share)}`]);
    return h('div', { class: `step-line${step.step === chosen ? ' here' : ''}`, role: 'listitem' },
      h('button', { type: 'button', onclick: () => { chosen = step.step; context.go({ step: chosen }, false); refresh(); }, 'aria-label': `Step ${step.step}, ${num(step.seconds, 1)} seconds` },
        h('b', {}, String(step.step)), h('span', {}, `${num(step.seconds, 1)} s`)),
      h('div', { class: 'bars' }, bar('phase', data.phases, phases, Math.max(longest, phases.reduce((sum, [, seconds]) => sum + seconds, 0))),
        Object.keys(step.engine_idle).length ? bar('cause', data.causes, causes, 1) : null));
  }

  function table(title, rows) {
    return h('table', { class: 'plain' }, h('caption', {}, title), h('tbody', {}, rows.map(([name, ...values]) => h('tr', {}, h('th', { scope: 'row' }, name), values.map((value) => h('td', { class: 'number' }, value))))));
  }

  async function drawDetail() {
    const step = data.steps.find((candidate) => candidate.step === chosen);
    if (!step) { detail.replaceChildren(); return; }
    const phases = Object.entries(step.phases).sort((a, b) => b[1] - a[1]);
    const parts = [h('h2', {}, `Step ${step.step}`), h('p', {}, `${num(step.seconds, 2)} s, reward ${num(step.reward)}, ${num(step.tokens_per_s, 0)} sampled tokens a second`),
      table('seconds by phase', phases.map(([name, seconds]) => [name, num(seconds, 3), percent(seconds / step.seconds)])),
      table('engines without a request', data.causes.filter((name) => name in step.engine_idle).map((name) => [WORDS[name], percent(step.engine_idle[name])])),
      table('besides', [['learner without work', percent(step.learner_idle)], ['slots whose episode waited for tools', percent(step.slot_idle.tools)], ['slots without an episode', percent(step.slot_idle.long_tail)]]),
      h('a', { class: 'button', href: `#${new URLSearchParams({ view: 'rollouts', run: place.run, steps: `${step.step}:${step.step}` })}` }, 'rollouts of this step')];
    detail.replaceChildren(...parts);
    if (step.traced) await drawTrace(step.step);
    else detail.append(h('p', { class: 'quiet-line' }, 'obs.trace=true records the spans of steps, phases, episodes and tool calls.'));
  }

  async function drawTrace(step) {
    const trace = await get('trace', { run: place.run, step });
    if (chosen !== step) return;
    const tracks = new Map();
    for (const span of trace.spans) {
      const key = `${span[0]}/${span[1]}`;
      if (!tracks.has(key)) tracks.set(key, []);
      tracks.get(key).push(span);
    }
    const rows = [...tracks].sort(([a], [b]) => a.localeCompare(b, 'en', { numeric: true })).slice(0, 60);
    detail.append(h('h3', {}, `Trace, ${num(trace.end, 2)} s${trace.left_out ? `, without ${num(trace.left_out)} short spans` : ''}`),
      h('div', { class: 'trace', role: 'img', 'aria-label': `Spans of step ${step}` }, rows.map(([, spans]) => h('div', { class: 'track' }, spans.map(([group, , begin, seconds, name, details]) => h('i', {
        class: `span g${group === 1 ? 1 : 2} n${['phase', 'rollout', 'turn', 'request'].indexOf(name)}${name.startsWith('tool') ? ' tool' : ''}`, title: `${name} ${details}: ${num(seconds, 3)} s from ${num(begin, 3)} s`,
        style: { left: `${100 * begin / trace.end}%`, width: `${Math.max(0.08, 100 * seconds / trace.end)}%` } }))))));
  }

  main.append(h('div', { class: 'bar' }, older, newer, range), heads, h('div', { class: 'columns-two' }, list, detail));
  return { ready: refresh(), update: () => (last ? null : refresh()) };
}
