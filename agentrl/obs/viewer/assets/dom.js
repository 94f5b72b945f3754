// Elements and numbers. What is shown is made here as text nodes: nothing is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** Make an element. Children that are no nodes become text nodes: nothing is ever parsed as HTML. */
export function h(tag, options, ...children) {
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

export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 0];
}

export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  if (Number.isInteger(value)) return value.toLocaleString('en-US').replace('-', '−');
  const size = Math.abs(value);
  const text = size < 1e-3 ? value.toExponential(1) : value.toFixed(size >= 100 ? 1 : digits);
  return text.replace(/^-/, '−').replace(/e-/, 'e−');
}
export const signed = (value) => (value > 0 ? '+' : '') + num(value);
export const plural = (count, word) => `${num(count)} ${word}${count === 1 ? '' : 's'}`;
