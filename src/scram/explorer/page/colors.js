// Color maps that the color-blind can read (viridis, cividis), weights to colors, and pictures of the grids.

const MAPS = {
  viridis: "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80 3fbc73 5ec962 84d44b addc30 " +
    "d8e219 fde725",
  cividis: "00224e 002e6a 1a386f 32436d 434e6c 535a6d 61656f 6f7073 7d7c78 8c8878 9b9476 aba072 bcae6c cdbb63 dec958 " +
    "f0d846 fee838",
};
const DECADES = 4; // of weights that the map spans

function hexes(name) { return MAPS[name].split(" ").map((text) => `#${text}`); }

// 256 colors, three bytes each.
function table(name) {
  const anchors = MAPS[name].split(" ").map((text) => [0, 2, 4].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const found = new Uint8ClampedArray(768);
  for (let n = 0; n < 256; n++) {
    const at = n / 255 * (anchors.length - 1), low = Math.min(Math.floor(at), anchors.length - 2);
    for (let c = 0; c < 3; c++)
      found[3 * n + c] = anchors[low][c] + (at - low) * (anchors[low + 1][c] - anchors[low][c]);
  }
  return found;
}

// 0 to 1, on a logarithmic scale below `most`.
function shade(weight, most) {
  return weight > 0 ? Math.max(0, 1 + Math.log10(weight / most) / DECADES) : 0;
}

// RGBA of the weights of all keys; `kinds` says how they are attended, null for exact attention. Keys that are attended
// themselves are opaque; routed ones have the color `routed`, denser with the weight, or null for that of their weight.
// What clusters stand for is soft.
function paintWeights(image, weights, most, colors, kinds, soft, routed) {
  const data = image.data;
  data.fill(0);
  for (let j = 0; j < weights.length; j++) {
    const own = kinds !== null && kinds[j] > 0, marked = own && kinds[j] === ROUTED && routed !== null;
    if (!own && kinds !== null && !soft) continue;
    const t = Math.min(1, shade(weights[j], most));
    if (t <= 0 && !own) continue;
    const at = Math.round(255 * t);
    for (let c = 0; c < 3; c++) data[4 * j + c] = marked ? routed[c] : colors[3 * at + c];
    data[4 * j + 3] = marked ? 140 + 115 * t : own ? 255 : kinds === null ? 70 + 185 * t : 200 * t;
  }
}

function rgb(hex) { return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); }

// RGBA of three planes of numbers: colors of 0 to 255, or features, each spread over its middle 96 %.
function paintPlanes(image, planes, length, count, spread) {
  for (let c = 0; c < 3; c++) {
    const plane = planes.subarray(Math.min(c, count - 1) * length, (Math.min(c, count - 1) + 1) * length);
    const sorted = spread ? Float32Array.from(plane).sort() : null;
    const low = spread ? sorted[Math.floor(0.02 * (length - 1))] : 0;
    const high = spread ? sorted[Math.ceil(0.98 * (length - 1))] : 255;
    for (let n = 0; n < length; n++) image.data[4 * n + c] = 255 * (plane[n] - low) / (high - low || 1);
  }
  for (let n = 0; n < length; n++) image.data[4 * n + 3] = 255;
}

// Grays, so that colors of weights on top can be told.
function paintGray(image) {
  const data = image.data;
  for (let n = 0; n < data.length; n += 4)
    data[n] = data[n + 1] = data[n + 2] = 0.3 * data[n] + 0.59 * data[n + 1] + 0.11 * data[n + 2];
}

// The color of a place: from blue to yellow with its column, darker to lighter with its row.
function placeColor(row, column, rows, columns) {
  const x = column / Math.max(columns - 1, 1), y = row / Math.max(rows - 1, 1), light = 0.35 + 0.65 * y;
  return [light * (30 + 225 * x), light * (100 + 110 * x), light * (255 - 215 * x)];
}
