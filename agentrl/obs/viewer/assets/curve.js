// Curves over steps. A click shows the rollouts of a step, a drag those of several.

const SVG = 'http://www.w3.org/2000/svg';
function s(tag, options, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(options || {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const STEPS = INDEX.curve.steps;
const SERIES = INDEX.curve.series;
const SHOWN_STEPS = [...new Set(R.step)].sort((a, b) => a - b);
const REWARD_KEYS = Object.keys(SERIES).filter((key) => key === 'train/reward' || /^eval\/([^=]*\/)?reward$/.test(key))
  .sort((a, b) => b.startsWith('train/') - a.startsWith('train/')).slice(0, 5);
let curveKeys = [];

function curveOptions() {
  const options = [];
  if (REWARD_KEYS.length) options.push(h('option', { value: '' }, 'reward'));
  for (const key of Object.keys(SERIES)) options.push(h('option', { value: key }, key));
  return options;
}

/** Steps at which 1, 2 or 5 times a power of ten divides an axis into about `count`. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(10)));
  return found;
}

/** A running mean, so that the trend of a noisy curve shows. */
function smooth(points) {
  const reach = Math.max(1, Math.round(points.length / 24));
  return points.map(([x], k) => {
    const near = points.slice(Math.max(0, k - reach), k + reach + 1);
    return [x, near.reduce((sum, point) => sum + point[1], 0) / near.length];
  });
}

let scale = null;

function drawCurve() {
  const svg = byId('curve');
  const width = svg.clientWidth || 400;
  const height = svg.clientHeight || 130;
  const chosen = byId('curve-key').value;
  curveKeys = chosen ? [chosen] : REWARD_KEYS;
  const lines = curveKeys.map((key) => ({ key, points: STEPS.map((step, k) => [step, SERIES[key][k]]).filter((point) => point[1] !== null) }))
    .filter(({ points }) => points.length);
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  if (!lines.length) {
    svg.append(s('text', { x: width / 2, y: height / 2, class: 'none' }, 'no metrics.jsonl in this run'));
    scale = null;
    return;
  }
  const [x0, x1] = extent(lines.flatMap(({ points }) => points.map(([x]) => x)).concat(SHOWN_STEPS));
  let [y0, y1] = extent(lines.flatMap(({ points }) => points.map(([, y]) => y)));
  if (y0 >= 0 && y1 <= 1 && y1 > 0.3) [y0, y1] = [0, 1];
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const box = { left: 34, right: width - 10, top: 8, bottom: height - 18 };
  const x = (value) => box.left + (box.right - box.left) * (x1 === x0 ? 0.5 : (value - x0) / (x1 - x0));
  const y = (value) => box.bottom - (box.bottom - box.top) * (value - y0) / (y1 - y0);
  scale = { x0, x1, box, x, y, lines };
  for (const tick of ticks(y0, y1, 4)) {
    svg.append(s('line', { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick), class: 'grid' }),
      s('text', { x: box.left - 6, y: y(tick) + 3, class: 'y' }, String(tick).replace('-', '−')));
  }
  for (const tick of ticks(x0, x1, 6).filter(Number.isInteger)) svg.append(s('text', { x: x(tick), y: height - 4, class: 'x' }, num(tick)));
  if (state.step) {
    const [from, to] = state.step.map((step) => x(Math.max(x0, Math.min(x1, step))));
    svg.append(s('rect', { x: from - 1.5, width: to - from + 3, y: box.top, height: box.bottom - box.top, class: 'chosen' }));
  }
  lines.forEach(({ key, points }, k) => svg.append(...drawLine(key, points, k, x, y)));
  if (state.selected >= 0) {
    const at = x(R.step[state.selected]);
    svg.append(s('path', { d: `M${at - 4} ${box.bottom + 6}L${at} ${box.bottom}L${at + 4} ${box.bottom + 6}Z`, class: 'here' }));
  }
  svg.append(s('line', { id: 'cross', y1: box.top, y2: box.bottom, x1: -9, x2: -9, class: 'cross' }));
  readCurve(null);
}

function drawLine(key, points, k, x, y) {
  const path = (some) => `M${some.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join('L')}`;
  if (key.startsWith('eval/')) {
    return [s('path', { d: path(points), class: `line eval s${k}` }), ...points.map(([a, b]) => s('circle', { cx: x(a), cy: y(b), r: 3.2, class: `dot s${k}` }))];
  }
  if (points.length < 12) return [s('path', { d: path(points), class: `line s${k}` })];
  return [s('path', { d: path(points), class: `line raw s${k}` }), s('path', { d: path(smooth(points)), class: `line s${k}` })];
}

/** The values at a step above the curve; without a step, the last ones. */
function readCurve(step) {
  if (!scale) { byId('curve-read').replaceChildren(); return; }
  const near = (points) => points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  const parts = scale.lines.map(({ key, points }, k) => {
    const point = step === null ? points[points.length - 1] : near(points);
    const title = curveKeys.length > 1 ? key.replace('/reward', '') : '';
    return h('span', { class: `s${k}` }, title, ' ', h('b', {}, num(point[1])));
  });
  byId('curve-read').replaceChildren(step === null ? '' : h('span', { class: 'at' }, `step ${step}`), ...parts);
}

function watchCurve(changed) {
  const svg = byId('curve');
  let start = null;
  const stepAt = (event) => {
    const inside = (event.clientX - svg.getBoundingClientRect().left - scale.box.left) / (scale.box.right - scale.box.left);
    return Math.round(scale.x0 + Math.max(0, Math.min(1, inside)) * (scale.x1 - scale.x0));
  };
  const nearest = (step) => SHOWN_STEPS.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best));
  const pick = (event, end) => {
    const [from, to] = [start, end].sort((a, b) => a - b);
    const steps = SHOWN_STEPS.filter((step) => step >= from && step <= to);
    const one = nearest(end);
    state.step = steps.length > 1 ? [steps[0], steps[steps.length - 1]] : [one, one];
    changed();
  };
  svg.addEventListener('pointerdown', (event) => {
    if (!scale) return;
    start = stepAt(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener('pointermove', (event) => {
    if (!scale) return;
    const step = stepAt(event);
    const cross = byId('cross');
    cross.setAttribute('x1', scale.x(step));
    cross.setAttribute('x2', scale.x(step));
    readCurve(step);
    if (start !== null && Math.abs(step - start) > 0) pick(event, step);
  });
  svg.addEventListener('pointerup', (event) => {
    if (start === null) return;
    if (stepAt(event) === start) pick(event, start);
    start = null;
  });
  svg.addEventListener('pointerleave', () => { if (scale) drawCurve(); });
  byId('curve-key').append(...curveOptions());
  byId('curve-key').addEventListener('change', drawCurve);
  new ResizeObserver(drawCurve).observe(svg);
}
