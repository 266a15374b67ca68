// Attention of one query: over windows, routed keys and clusters as SCRAM has it, and over all keys.

const WINDOW = 1, ROUTED = 2; // why a key is attended itself; 0 where its cluster stands for it
const MOST_RAISED = 2; // of the spread of a cluster's scores, that counts in its logit

class Model {
  constructor(about, arrays) {
    this.about = about;
    this.arrays = arrays;
    this.heads = about.heads.length;
    this.points = about.queries.points;
    this.keys = about.keys.points;
    this.offsets = windowOffsets(about.radius);
    this.logits = new Float32Array(this.keys);
    this.words = Math.ceil(about.clusters / 32) * 2; // of 16 bits
  }

  // The index of a key at a row and column of its picture, and back.
  index(row, column) { return row * this.about.keys.width + column; }
  place(index, side = "keys") {
    const width = this.about[side].width;
    return [Math.floor(index / width), index % width];
  }

  // The query at a place of its pane, and the place of a query there: in one pane queries stand at every stride-th key.
  queryAt(index) {
    const { queries, keys, panes } = this.about;
    if (panes === 2) return index;
    return flatIndex(coordinates(keys.grid, index).map((at) => Math.floor(at / queries.stride)), queries.grid);
  }
  placeOf(query) {
    const { queries, keys, panes } = this.about;
    if (panes === 2) return this.place(query, "queries");
    return this.place(flatIndex(coordinates(queries.grid, query).map((at) => at * queries.stride), keys.grid));
  }

  // The tile of a query, by its coordinates among tiles.
  tile(query) {
    const { queries, tile } = this.about;
    return coordinates(queries.grid, query).map((at, axis) => Math.floor(at * queries.stride / tile[axis]));
  }

  // The first row and column of a query's tile in its pane and those behind it; null where tiles are no rectangles.
  tileFrame(query) {
    const { queries, tile, panes } = this.about, stride = panes === 2 ? queries.stride : 1;
    if (!this.arrays.routes || queries.grid.length !== 2) return null;
    const at = this.tile(query), ends = [0, 1].map((end) => at.map((one, axis) =>
      Math.ceil(Math.min((one + end) * tile[axis], queries.whole[axis]) / stride)));
    return { top: ends[0][0], left: ends[0][1], bottom: ends[1][0], right: ends[1][1] };
  }

  // Which clusters the tile of a query attends key by key.
  routes(head, query) {
    const found = new Uint8Array(this.about.clusters), planes = this.arrays.routes;
    if (!planes) return found;
    const { queries, tile } = this.about;
    const across = queries.whole.map((extent, axis) => Math.ceil(extent / tile[axis]));
    const tiles = across.reduce((all, one) => all * one, 1), at = flatIndex(this.tile(query), across);
    for (let c = 0; c < found.length; c++)
      found[c] = planes[(head * this.words + (c >> 4)) * tiles + at] >> (c & 15) & 1;
    return found;
  }

  // Keys of the first `count` matches after `sweep` sweeps, best first; null for none.
  matches(head, query, sweep, count) {
    const { sweeps, matches, early_matches: early } = this.about, planes = this.arrays.matches;
    if (!matches) return [];
    const last = sweep === sweeps, kept = last ? matches : early;
    const block = last ? 0 : 2 * this.heads * (matches + (sweeps - sweep - 1) * early);
    return Array.from({ length: Math.min(count, kept) }, (_, n) => {
      const plane = block + 2 * (this.heads * (kept - 1 - n) + head);
      const row = planes[plane * this.points + query], column = planes[(plane + 1) * this.points + query];
      return row < 0 ? null : this.index(row, column);
    });
  }

  // Keys in the window around a key, cut at the borders of the grid.
  window(key) {
    const grid = this.about.keys.grid, center = coordinates(grid, key);
    const found = [];
    for (const offset of this.offsets) {
      let index = 0, inside = true;
      for (let axis = 0; axis < grid.length; axis++) {
        const at = center[axis] + offset[axis];
        inside = inside && at >= 0 && at < grid[axis];
        index = index * grid[axis] + at;
      }
      if (inside) found.push(index);
    }
    return found;
  }

  // Scaled scores of all keys, up to a number that is the same for all of them.
  scores(head, query) {
    const { step, channels } = this.about.heads[head], own = this.arrays[`q${head}`];
    const keys = this.arrays[`k${Math.floor(head / this.about.group)}`], found = this.logits.fill(0);
    for (let c = 0; c < channels; c++) {
      const factor = own[c * this.points + query] * step * step;
      if (factor === 0) continue;
      for (let j = 0, at = c * this.keys; j < this.keys; j++, at++) found[j] += factor * keys[at];
    }
    return found;
  }

  // The score before the scale, as `Matches.score` has it.
  score(head, query, logit) {
    return (logit + this.arrays.base[head * this.points + query] * this.about.base_step) / this.about.scale;
  }

  // Clusters as a query sees them: how many keys they stand for, scaled scores, and how far those of keys are apart.
  clusters(head, query, inWindows) {
    const { about, arrays } = this, count = about.clusters;
    if (!count) return { count: 0, routed: [], spread: 0 };
    const share = about.heads.length / about.cluster_heads, own = Math.floor(head / share);
    const { step, channels } = about.heads[head], centers = arrays[`centers${own}`];
    const left = arrays.sizes.slice(own * count, (own + 1) * count), label = arrays.label.subarray(own * this.keys);
    const routed = this.routes(head, query), sizes = arrays.sizes.subarray(own * count);
    for (const key of inWindows) if (label[key] >= 0) left[label[key]] -= 1;
    for (let n = 0; n < count; n++) if (routed[n]) left[n] = 0;
    const logits = new Float32Array(count), features = arrays[`q${head}`];
    for (let c = 0; c < channels; c++) {
      const factor = features[c * this.points + query] * step * about.center_steps[own];
      for (let n = 0; n < count; n++) logits[n] += factor * centers[c * count + n];
    }
    const spread = (arrays.spread[head * this.points + query] * about.spread_step) ** 2;
    const spreads = arrays.spreads ? arrays.spreads.subarray(own * count) : new Float32Array(count);
    return {
      count, left, logits, label, routed, spread, spreads, means: arrays[`means${own}`],
      meanStep: about.mean_steps[own], slope: arrays[`slope${own}`],
      routedClusters: routed.reduce((all, one) => all + one, 0),
      routedKeys: routed.reduce((all, one, n) => all + one * sizes[n], 0),
    };
  }

  // For each key WINDOW, ROUTED or 0.
  kinds(inside, { label, routed }) {
    const found = new Uint8Array(this.keys);
    for (let j = 0; label && j < this.keys; j++) if (label[j] >= 0 && routed[label[j]]) found[j] = ROUTED;
    for (const key of inside) found[key] = WINDOW;
    return found;
  }

  // Everything about one query; `factor` multiplies the scale.
  attend(head, query, { sweep, count, factor = 1 }) {
    const logits = this.scores(head, query), places = this.matches(head, query, sweep, count);
    const windows = places.map((key) => key === null ? [] : this.window(key));
    const inside = new Set(windows.flat()), clusters = this.clusters(head, query, inside);
    const kinds = this.kinds(inside, clusters);
    let top = -Infinity, best = 0;
    for (let j = 0; j < this.keys; j++) if (logits[j] > top) top = logits[best = j];
    for (let n = 0; n < clusters.count; n++) if (clusters.left[n] > 0) top = Math.max(top, clusters.logits[n]);
    const exact = new Float32Array(this.keys), scram = new Float32Array(this.keys);
    let sum = 0, held = 0, routed = 0, far = 0;
    for (let j = 0; j < this.keys; j++) {
      sum += exact[j] = Math.exp(factor * (logits[j] - top));
      if (kinds[j] === WINDOW) held += exact[j];
      if (kinds[j] === ROUTED) routed += exact[j];
    }
    const each = new Float32Array(clusters.count), whole = new Float32Array(clusters.count);
    for (let n = 0; n < clusters.count; n++) {
      if (clusters.left[n] <= 0) continue;
      const raised = Math.min(factor * factor * clusters.spread * clusters.spreads[n], MOST_RAISED) / 2;
      each[n] = Math.exp(factor * (clusters.logits[n] - top) + raised);
      far += whole[n] = each[n] * clusters.left[n];
    }
    const total = held + routed + far || 1;
    for (let j = 0; j < this.keys; j++)
      scram[j] = kinds[j] ? exact[j] / total : far > 0 && clusters.label[j] >= 0 ? each[clusters.label[j]] / total : 0;
    const captured = held / sum, attended = (held + routed) / sum;
    for (let j = 0; j < this.keys; j++) exact[j] /= sum;
    for (let n = 0; n < clusters.count; n++) whole[n] /= total;
    const sumOf = (keys) => keys.reduce((all, key) => all + scram[key], 0);
    return {
      head, query, exact, scram, kinds, windows, captured, attended, best,
      windowWeight: held / total, routedWeight: routed / total, clusterWeight: far / total,
      routedClusters: clusters.routedClusters ?? 0, routedKeys: clusters.routedKeys ?? 0,
      error: this.error(head, exact, scram, kinds, whole, clusters, this.firstOrder(head, query, clusters, factor)),
      matches: places.map((key, n) => key === null ? null : {
        key, place: this.place(key), score: this.score(head, query, logits[key]), weight: scram[key],
        windowWeight: sumOf(windows[n]),
      }),
      bestScore: this.score(head, query, logits[best]),
    };
  }

  // What values inside clusters change with scores: the mean over all clusters, for each channel of the values.
  firstOrder(head, query, { slope, spread }, factor) {
    const width = this.about.value_channels[Math.floor(head / this.about.group)], found = new Float32Array(width);
    if (!slope) return found;
    const { step, channels } = this.about.heads[head], features = this.arrays[`q${head}`];
    for (let e = 0; e < channels; e++) {
      const own = factor * features[e * this.points + query] * step / (1 + factor * factor * spread);
      for (let c = 0; c < width; c++) found[c] += own * slope[e * width + c];
    }
    return found;
  }

  // |output - exact output|, over the root mean square of the exact outputs of the head.
  error(head, exact, scram, kinds, whole, clusters, firstOrder) {
    const group = Math.floor(head / this.about.group), values = this.arrays[`v${group}`];
    const { value_step: step } = this.about.heads[head], width = this.about.value_channels[group];
    const share = whole.reduce((all, one) => all + one, 0);
    let square = 0;
    for (let c = 0; c < width; c++) {
      let difference = 0;
      for (let j = 0, at = c * this.keys; j < this.keys; j++, at++)
        difference += ((kinds[j] ? scram[j] : 0) - exact[j]) * values[at];
      difference = difference * step + share * firstOrder[c];
      for (let n = 0; n < clusters.count; n++)
        difference += whole[n] * clusters.means[c * clusters.count + n] * clusters.meanStep;
      square += difference * difference;
    }
    return Math.sqrt(square) / this.about.rms[head];
  }
}

function windowOffsets(radius) {
  let found = [[]];
  for (const reach of radius) {
    const steps = Array.from({ length: 2 * reach + 1 }, (_, n) => n - reach);
    found = found.flatMap((start) => steps.map((step) => [...start, step]));
  }
  return found;
}

// Coordinates of a point, and its index from them.
function coordinates(grid, index) {
  const found = [];
  for (let axis = grid.length - 1, rest = index; axis >= 0; axis--) {
    found.unshift(rest % grid[axis]);
    rest = Math.floor(rest / grid[axis]);
  }
  return found;
}

function flatIndex(place, grid) { return place.reduce((index, at, axis) => index * grid[axis] + at, 0); }
