// The data in the page: the index, which is there at once, and behind the script the vocabulary and the packed tokens.

useIndex(JSON.parse(byId('index').textContent));
const COUNT = R.id.length;
const STARTS = [0];
for (const length of R.packed) STARTS.push(STARTS[STARTS.length - 1] + length);

const parsed = new Promise((resolve) => {
  document.addEventListener('DOMContentLoaded', () => {
    resolve({ blobs: byId('blobs').textContent, vocabulary: makeVocabulary(JSON.parse(byId('vocabulary').textContent)),
      images: JSON.parse(byId('images').textContent) });
  });
});

page.load = async (i) => {
  const { blobs, vocabulary, images } = await parsed;
  const binary = atob(blobs.slice(STARTS[i], STARTS[i + 1]));
  const bytes = new Uint8Array(binary.length);
  for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
  return { bytes, vocabulary, images };
};
