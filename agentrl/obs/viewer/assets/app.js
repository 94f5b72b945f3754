// The page: what is shown follows `state`; keys, the address, and the start.

const painters = [];

/** The filters changed: list, filters and curve follow; the open rollout stays. */
function filtersChanged() {
  refreshList();
  painters.forEach((painter) => painter());
  drawCurve();
  writeHash();
}

let ownHash = '';
page.changed = writeHash;
function writeHash() {
  ownHash = toHash();
  history.replaceState(null, '', ownHash);
}

/** Open a rollout; `changes` are of the state, such as `{view: 'group'}`. */
page.show = async function show(i, changes = {}) {
  if (i !== state.selected) state.row = 0;
  Object.assign(state, { selected: i }, changes);
  hideCard();
  drawnFrom = -1;
  scrollToSelected();
  drawList();
  drawCurve();
  writeHash();
  await drawRight();
};

/** Move through the list by `by` rollouts, or to the first of another group. */
function move(by, groups) {
  if (!CHOSEN.length) return;
  let at = CHOSEN.indexOf(state.selected);
  if (at < 0) at = by > 0 ? -1 : 0;
  let to = at + by;
  if (groups && at >= 0) {
    const group = R.group[CHOSEN[at]];
    while (CHOSEN[to] !== undefined && R.group[CHOSEN[to]] === group) to += by;
    while (by < 0 && to > 0 && R.group[CHOSEN[to - 1]] === R.group[CHOSEN[to]]) to--;
  }
  if (CHOSEN[to] !== undefined) page.show(CHOSEN[to]);
}

function clearFilters() {
  Object.assign(state, NO_FILTERS);
  byId('search').value = '';
  startSearch('', filtersChanged);
}

const KEYS = [
  ['j  k', 'next, previous rollout', { j: () => move(1), k: () => move(-1) }],
  [']  [', 'next, previous group', { ']': () => move(1, true), '[': () => move(-1, true) }],
  ['g', 'group side by side, and back', { g: () => state.selected >= 0 && page.show(state.selected, { view: state.view === 'group' ? 'rollout' : 'group' }) }],
  ['a', 'agents of an episode side by side, and back', { a: () => state.selected >= 0 && R.episode[state.selected] >= 0
    && page.show(state.selected, { view: state.view === 'agents' ? 'rollout' : 'agents' }) }],
  ['1 2 3 4', 'colour by who made it, log-probability, version, advantage',
    Object.fromEntries(MODES.map(({ key }, k) => [String(k + 1), () => setMode(key)]))],
  ['/', 'search', { '/': () => byId('search').focus() }],
  ['x', 'clear filters', { x: clearFilters }],
  ['Esc', 'close the card, leave the search', {}],
  ['?', 'these keys', { '?': () => toggleHelp() }],
];

function toggleHelp() {
  const help = byId('help');
  if (help.open) help.close(); else help.showModal();
}

function pressed(event) {
  if (event.key === 'Escape') { hideCard(); document.activeElement?.blur(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea')) return;
  for (const [, , actions] of KEYS) {
    if (!actions[event.key]) continue;
    event.preventDefault();
    actions[event.key]();
    return;
  }
}

function fillHead() {
  byId('title').textContent = INDEX.title;
  byId('about').append(...Object.entries(INDEX.about).map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
  byId('notes').append(...INDEX.notes.map((note) => h('span', {}, note)));
  byId('notes').hidden = !INDEX.notes.length;
  byId('help').append(h('h2', {}, 'Keys'), h('dl', {}, KEYS.map(([keys, what]) => h('div', {}, h('dt', {}, keys), h('dd', {}, what)))),
    h('p', {}, `Click a token to keep its card; click or drag in the curve to choose steps. Made ${INDEX.made}.`));
  byId('help').addEventListener('click', () => byId('help').close());
  byId('help-button').addEventListener('click', toggleHelp);
}

/** Show what the address says; without a rollout in it, the first of the list. */
async function followHash() {
  fromHash();
  byId('search').value = state.q;
  document.body.dataset.mode = state.mode;
  if (state.q !== search.words) startSearch(state.q, filtersChanged);
  refreshList();
  painters.forEach((painter) => painter());
  if (state.selected < 0 && CHOSEN.length) [state.selected] = CHOSEN;
  drawnFrom = -1;
  scrollToSelected();
  drawList();
  drawCurve();
  await drawRight();
}

async function start() {
  fillHead();
  for (const name of Object.keys(RANGES)) painters.push(makeRange(name, filtersChanged));
  painters.push(makeChips(filtersChanged));
  byId('sort').append(...SORTS.map(({ key, title }) => h('option', { value: key }, title)));
  byId('sort').addEventListener('change', (event) => { state.sort = event.target.value; filtersChanged(); });
  byId('direction').addEventListener('click', () => { state.down = !state.down; filtersChanged(); });
  byId('clear').addEventListener('click', clearFilters);
  let waiting = 0;
  byId('search').addEventListener('input', (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(async () => {
      state.q = event.target.value;
      await startSearch(state.q, filtersChanged);
      if (state.selected >= 0) drawRight();
    }, 150);
  });
  byId('search').addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || !CHOSEN.length) return;
    event.target.blur();
    page.show(CHOSEN[0]);
  });
  byId('list').addEventListener('scroll', drawList, { passive: true });
  new ResizeObserver(drawList).observe(byId('list'));
  watchCurve(filtersChanged);
  document.addEventListener('keydown', pressed);
  window.addEventListener('hashchange', () => { if (location.hash !== ownHash) followHash(); });
  await followHash();
  document.documentElement.dataset.ready = performance.now().toFixed(1);
}

start();
