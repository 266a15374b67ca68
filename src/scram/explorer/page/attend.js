// Attention of one query: over the windows and clusters as SCRAM has it, and over all keys.

class Model {
  constructor(about, arrays) {
    this.about = about;
    this.arrays = arrays;
    this.heads = about.heads.length;
    this.points = about.queries.points;
    this.keys = about.keys.points;
    this.offsets = windowOffsets(about.radius);
    this.logits = new Float32Array(this.keys);
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

  // Keys of the first `count` matches after `sweep` sweeps, best first; null for none.
  matches(head, query, sweep, count) {
    const { sweeps, matches, early_matches: early } = this.about, planes = this.arrays.matches;
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

  // Clusters as a query sees them: how many keys are left outside the windows, and scaled scores.
  clusters(head, query, inWindows) {
    const { about, arrays } = this, count = about.clusters;
    if (!count) return { count: 0 };
    const share = about.heads.length / about.cluster_heads, own = Math.floor(head / share);
    const { step, channels } = about.heads[head], centers = arrays[`centers${own}`];
    const left = arrays.sizes.slice(own * count, (own + 1) * count), label = arrays.label.subarray(own * this.keys);
    for (const key of inWindows) if (label[key] >= 0) left[label[key]] -= 1;
    const logits = new Float32Array(count), features = arrays[`q${head}`];
    for (let n = 0; n < count; n++)
      for (let c = 0; c < channels; c++)
        logits[n] += features[c * this.points + query] * step * centers[n * channels + c];
    const gains = arrays.gains ? arrays.gains.subarray(head * count, (head + 1) * count) : null;
    return { count, left, logits, gains, label, means: arrays[`means${own}`] };
  }

  // Everything about one query; `factor` multiplies the scale.
  attend(head, query, { sweep, count, factor = 1 }) {
    const logits = this.scores(head, query), places = this.matches(head, query, sweep, count);
    const windows = places.map((key) => key === null ? [] : this.window(key));
    const inside = new Set(windows.flat()), clusters = this.clusters(head, query, inside);
    let top = -Infinity, best = 0;
    for (let j = 0; j < this.keys; j++) if (logits[j] > top) top = logits[best = j];
    for (let n = 0; n < clusters.count; n++) if (clusters.left[n] > 0) top = Math.max(top, clusters.logits[n]);
    const exact = new Float32Array(this.keys), scram = new Float32Array(this.keys);
    let sum = 0, held = 0, far = 0;
    for (let j = 0; j < this.keys; j++) sum += exact[j] = Math.exp(factor * (logits[j] - top));
    for (const key of inside) held += exact[key];
    const each = new Float32Array(clusters.count), whole = new Float32Array(clusters.count);
    for (let n = 0; n < clusters.count; n++) {
      if (clusters.left[n] <= 0) continue;
      each[n] = Math.exp(factor * (clusters.logits[n] - top)) * (clusters.gains ? clusters.gains[n] : 1);
      far += whole[n] = each[n] * clusters.left[n];
    }
    const total = held + far || 1;
    for (let j = 0; far > 0 && j < this.keys; j++)
      if (clusters.label[j] >= 0) scram[j] = each[clusters.label[j]] / total;
    for (const key of inside) scram[key] = exact[key] / total;
    const captured = held / sum;
    for (let j = 0; j < this.keys; j++) exact[j] /= sum;
    for (let n = 0; n < clusters.count; n++) whole[n] /= total;
    const sumOf = (keys) => keys.reduce((all, key) => all + scram[key], 0);
    return {
      head, query, exact, scram, inside, windows, captured, best,
      windowWeight: held / total, clusterWeight: far / total,
      error: this.error(head, exact, scram, inside, whole, clusters),
      matches: places.map((key, n) => key === null ? null : {
        key, place: this.place(key), score: this.score(head, query, logits[key]), weight: scram[key],
        windowWeight: sumOf(windows[n]),
      }),
      bestScore: this.score(head, query, logits[best]),
    };
  }

  // |output - exact output|, over the root mean square of the exact outputs of the head.
  error(head, exact, scram, inside, whole, clusters) {
    const group = Math.floor(head / this.about.group), values = this.arrays[`v${group}`];
    const { value_step: step } = this.about.heads[head], width = this.about.value_channels[group];
    let square = 0;
    for (let c = 0; c < width; c++) {
      let difference = 0;
      for (let j = 0, at = c * this.keys; j < this.keys; j++, at++) difference -= exact[j] * values[at];
      for (const key of inside) difference += scram[key] * values[c * this.keys + key];
      difference *= step;
      for (let n = 0; n < clusters.count; n++) difference += whole[n] * clusters.means[n * width + c];
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
