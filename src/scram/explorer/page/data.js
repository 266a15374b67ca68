// The data of the page: base64, deflated arrays, differences undone. Python writes them in scram/explorer/pack.py.

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) bytes[n] = raw.charCodeAt(n);
  return bytes;
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function planesOf(raw, entry) {
  const [count, length] = entry.shape, planes = new Int16Array(count * length);
  for (let p = 0; p < count; p++) {
    const at = p * length, low = 2 * at, high = low + length, before = at - entry.back * length;
    for (let n = 0; n < length; n++) {
      const folded = raw[low + n] | raw[high + n] << 8;
      planes[at + n] = folded >> 1 ^ -(folded & 1);
    }
    if (entry.how[p] === 1) for (let n = 1; n < length; n++) planes[at + n] += planes[at + n - 1];
    if (entry.how[p] === 2) for (let n = 0; n < length; n++) planes[at + n] += planes[before + n];
  }
  return planes;
}

async function arraysOf(about, text) {
  const bytes = bytesOf(text.trim());
  const pairs = await Promise.all(about.arrays.map(async (entry) => {
    const raw = await inflated(bytes.subarray(entry.at, entry.at + entry.bytes));
    return [entry.name, entry.kind === "floats" ? new Float32Array(raw.buffer) : planesOf(raw, entry)];
  }));
  return Object.fromEntries(pairs);
}
