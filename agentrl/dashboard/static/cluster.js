// The process of the run, its engines, what they measure, its logs and checkpoints.

import { h, num } from '../viewer/dom.js';
import { get, getText } from './api.js';

function card(title, ...content) {
  return h('section', { class: 'card' }, h('h2', {}, title), content);
}

function facts(rows) {
  return rows.length ? h('dl', { class: 'facts-list' }, rows.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))) : h('p', { class: 'quiet-line' }, 'none');
}

function age(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

export function open(main, context) {
  const { place } = context;
  const log = h('pre', { class: 'log', tabindex: 0, 'aria-label': 'Log', hidden: true });
  const cards = h('div', { class: 'cards' });
  let shown = '';

  async function openLog(name) {
    shown = name;
    const text = await getText('log', { run: place.run, name });
    log.hidden = false;
    log.textContent = text || 'empty';
    log.scrollTop = log.scrollHeight;
  }

  async function refresh() {
    const data = await get('cluster', { run: place.run });
    const { process, end, journal } = data;
    const metric = (prefix) => Object.entries(data.metrics).filter(([key]) => key.startsWith(prefix))
      .sort(([a], [b]) => b.endsWith('/total') - a.endsWith('/total')).map(([key, value]) => [key.slice(prefix.length), value]);
    const share = (rows) => rows.map(([name, value]) => [name.replace('_', ' '), `${(100 * value).toFixed(1)} %`]);
    cards.replaceChildren(
      card('Process', facts([['state', data.state], ...(process ? [['process', `${process.pid} on ${process.host}`], ['since', process.since]] : []),
        ...(end?.error ? [['ended by', `${end.error}: ${end.message}`]] : []), ['disk free', data.free_gib === null ? '–' : `${num(data.free_gib, 1)} GiB`]])),
      card('Engines idle, last step', facts(share(metric('engine_idle/')))),
      card('Learner and slots, last step', facts([...share(metric('learner_idle/')).map(([name, value]) => [`learner idle, ${name}`, value]), ...share(metric('slot_idle/')).map(([name, value]) => [`slots idle, ${name}`, value])])),
      card('Engines', facts(['rollout/engine_restarts', 'rollout/max_running', 'rollout/cache_hit', 'rollout/cache_stale', 'sync/mib'].filter((key) => key in data.metrics).map((key) => [key, num(data.metrics[key])]))),
      card('Engines kept on this machine', data.kept_engines.length ? facts(data.kept_engines.map(({ url, text, gpus }) => [url, `${text}${gpus.length ? `, GPU ${gpus.join(',')}` : ''}`])) : h('p', { class: 'quiet-line' }, 'none; see sampler.keep_minutes')),
      card('Host memory, GiB', facts(metric('host_memory/').map(([name, value]) => [name.replace('_gib', ''), num(value, 2)]))),
      card('Groups', journal === null ? h('p', { class: 'quiet-line' }, 'no journal') : journal.error ? h('p', {}, journal.error)
        : facts([['admitted', num(journal.admitted)], ['in progress', num(journal.in_progress)], ['waiting for a step', num(journal.waiting)], ['last trained step', num(journal.trained)]])),
      card('Checkpoints', data.checkpoints.length ? facts([['count', num(data.checkpoints.length)], ['newest', data.checkpoints[data.checkpoints.length - 1]]]) : h('p', { class: 'quiet-line' }, 'none')),
      card('Logs', !data.logs.length ? h('p', { class: 'quiet-line' }, 'none') : h('ul', { class: 'logs' }, data.logs.map(({ name, bytes, age_s: seconds }) => h('li', {}, h('button', { type: 'button', class: 'link', onclick: () => openLog(name).catch(context.fail) }, name), ` ${num(Math.ceil(bytes / 1024))} KiB, ${age(seconds)}`)))),
      card('Settings', facts(Object.entries(data.settings).map(([key, value]) => [key, value]))));
    if (shown) await openLog(shown);
  }
  main.append(log, cards);
  return { ready: refresh(), update: refresh, escape() { log.hidden = true; shown = ''; } };
}
