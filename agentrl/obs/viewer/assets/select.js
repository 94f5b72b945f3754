// Which rollouts are listed, in which order.

const NO_FILTERS = { step: null, reward: null, length: null, stop: [], status: [], q: '' };
Object.assign(state, NO_FILTERS, { sort: 'step', down: true });

const RANGES = { step: R.step, reward: R.reward, length: R.tokens };

const SORTS = [['step', 'step'], ['reward', 'reward'], ['advantage', 'advantage'], ['tokens', 'tokens'], ['sampled', 'sampled tokens'],
  ['turns', 'turns'], ['seconds', 'seconds'], ['logprob', 'mean log-probability']]
  .map(([key, title]) => ({ key, title, values: R[key] }))
  .concat(Object.keys(INDEX.metrics).sort().map((key) => ({ key: `m:${key}`, title: key, values: INDEX.metrics[key] })))
  .filter(({ values }) => values.some((value) => value !== null));

/** Whether a rollout failed, was dropped, or neither: each is in at least one class. */
function statusesOf(i) {
  const statuses = [];
  if (R.failure[i] >= 0) statuses.push(`failed: ${INDEX.failures[R.failure[i]]}`);
  if (R.dropped[i]) statuses.push('dropped');
  return statuses.length ? statuses : ['whole'];
}

function matches(i) {
  for (const name of Object.keys(RANGES)) {
    const range = state[name];
    const value = RANGES[name][i];
    if (range && (value === null || value < range[0] || value > range[1])) return false;
  }
  if (state.stop.length && !state.stop.includes(INDEX.stops[R.stop[i]])) return false;
  if (state.status.length && !statusesOf(i).some((status) => state.status.includes(status))) return false;
  return !state.q || search.found === null || search.found.has(i);
}

/** The items of the list: rollouts, and before each group its head where the order keeps groups together. */
function chosenItems() {
  const chosen = [];
  for (let i = 0; i < COUNT; i++) if (matches(i)) chosen.push(i);
  const turn = state.down ? -1 : 1;
  if (state.sort === 'step') {
    chosen.sort((a, b) => turn * (R.step[a] - R.step[b]) || R.group[a] - R.group[b] || a - b);
    const items = [];
    let last = -1;
    for (const i of chosen) {
      if (R.group[i] !== last) items.push({ group: (last = R.group[i]) });
      items.push({ rollout: i });
    }
    return { items, chosen };
  }
  const { values } = SORTS.find(({ key }) => key === state.sort) || SORTS[0];
  const missing = (i) => values[i] === null;
  chosen.sort((a, b) => missing(a) - missing(b) || turn * (values[a] - values[b]) || a - b);
  return { items: chosen.map((i) => ({ rollout: i })), chosen };
}

/** Look for the words in all rollouts; ids and last words at once, the tokens in the background. */
async function startSearch(words, changed) {
  const run = ++search.run;
  search.words = words.toLowerCase();
  search.found = words ? new Set() : null;
  byId('search-state').textContent = '';
  if (!words) { changed(); return; }
  for (let i = 0; i < COUNT; i++) {
    const group = GROUPS[R.group[i]];
    if ([R.id[i], group.prompt, group.excerpt, R.excerpt[i]].some((text) => text.toLowerCase().includes(search.words))) search.found.add(i);
  }
  changed();
  let rested = performance.now();
  for (let i = 0; i < COUNT; i++) {
    if (search.texts[i] === undefined) {
      search.texts[i] = wholeText(await openRollout(i)).toLowerCase();
      if (run !== search.run) return;
    }
    if (search.texts[i].includes(search.words)) search.found.add(i);
    if (performance.now() - rested > 120) {
      byId('search-state').textContent = `${Math.floor(100 * i / COUNT)} %`;
      changed();
      await new Promise((resolve) => setTimeout(resolve));
      if (run !== search.run) return;
      rested = performance.now();
    }
  }
  byId('search-state').textContent = '';
  changed();
}

// ---- the address: what is shown, so that a link shows it again

function toHash() {
  const hash = new URLSearchParams();
  if (state.selected >= 0) hash.set('r', R.id[state.selected]);
  if (state.row) hash.set('row', state.row);
  if (state.view !== 'rollout') hash.set('view', state.view);
  if (state.mode !== 'who') hash.set('color', state.mode);
  for (const name of Object.keys(RANGES)) if (state[name]) hash.set(name, state[name].join(':'));
  for (const name of ['stop', 'status']) if (state[name].length) hash.set(name, state[name].join(','));
  if (state.q) hash.set('q', state.q);
  if (state.sort !== 'step' || !state.down) hash.set('sort', (state.down ? '-' : '') + state.sort);
  return `#${hash}`;
}

function fromHash() {
  const hash = new URLSearchParams(location.hash.slice(1));
  Object.assign(state, NO_FILTERS, { sort: 'step', down: true });
  for (const name of Object.keys(RANGES)) {
    const range = (hash.get(name) || '').split(':').map(Number);
    if (hash.has(name) && range.every(Number.isFinite)) state[name] = [range[0], range[range.length - 1]];
  }
  for (const name of ['stop', 'status']) state[name] = (hash.get(name) || '').split(',').filter(Boolean);
  state.q = hash.get('q') || '';
  const sort = hash.get('sort') || '-step';
  state.down = sort.startsWith('-');
  state.sort = sort.replace(/^-/, '');
  if (!SORTS.some(({ key }) => key === state.sort)) state.sort = 'step';
  state.view = ['group', 'agents'].includes(hash.get('view')) ? hash.get('view') : 'rollout';
  state.mode = MODES.some(({ key }) => key === hash.get('color')) ? hash.get('color') : 'who';
  state.row = Number(hash.get('row')) || 0;
  state.selected = hash.has('r') ? R.id.indexOf(hash.get('r')) : -1;
}
