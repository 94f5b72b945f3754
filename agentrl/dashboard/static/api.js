// Requests to the server, and the address of the page: what is shown, so that a link shows it again.

/** The path of a request; a parameter that is a list is sent once for each item, an empty one is left out. */
export function path(name, parameters = {}) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const item of Array.isArray(value) ? value : [value]) if (item !== null && item !== undefined && item !== '') search.append(key, item);
  }
  return `api/${name}?${search}`;
}

async function answer(name, parameters) {
  const response = await fetch(path(name, parameters));
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try { message = JSON.parse(text).error; } catch { /* the reply of a proxy, which is no JSON */ }
  throw new Error(message || `status ${response.status}`);
}

export async function get(name, parameters) {
  return (await answer(name, parameters)).json();
}

export async function getText(name, parameters) {
  return (await answer(name, parameters)).text();
}

export async function getBytes(name, parameters) {
  return (await answer(name, parameters)).arrayBuffer();
}

/** What the address says. */
export function readAddress() {
  const search = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries([...search.keys()].map((key) => [key, search.get(key)]));
}

/** The hash of what is shown; empty values are left out. */
export function addressOf(place) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(place)) if (value !== '' && value !== null && value !== undefined) search.set(key, value);
  return `#${search}`;
}
