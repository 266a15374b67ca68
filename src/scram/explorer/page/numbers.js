// Figures in words: the line on top, the notes, the numbers of one query, the legend.

function percent(share, digits = 1) { return `${(100 * share).toFixed(digits)} %`; }

function compact(x, digits = 3) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 0.001 && size < 1e5 ? String(Number(x.toPrecision(digits))) : x.toExponential(1).replace("e-", "e−");
}

function ordinal(n) { return n === 2 ? "second" : n === 3 ? "third" : `${n}th`; }

function gridWords(side) { return side.grid.join(" × "); }

function qualityWords(about) {
  const { quality, clusters, matches, routed_keys: routed } = about;
  const windows = `The windows hold ${percent(quality.mass)} of the exact attention`;
  const held = matches && routed ? `${windows}, windows and routed keys ${percent(quality.attended)}. ` :
    matches ? `${windows}. ` : routed ? `Routed keys hold ${percent(quality.attended)} of the exact attention. ` : "";
  return `Output error ${percent(quality.output)}` +
    `${clusters ? `, with ${clusters} clusters for all other keys` : ", with nothing for the other keys"}. ` +
    `${held}Of single queries: median ${percent(quality.median)} off, 95th percentile ${percent(quality.p95)}.`;
}

function noteWords(about) {
  const notes = [], both = about.panes === 2 ?
    `${about.queries.whole.join(" × ")} queries and ${gridWords(about.keys)} keys` :
    `${gridWords(about.keys)} points, which are queries and keys`;
  const plural = about.heads.length > 1 ? `${about.heads.length} heads, ` : "";
  const windows = about.matches ?
    `windows of radius ${[...new Set(about.radius)].join(", ")}, ${about.sweeps} sweeps` : "no search and no windows";
  notes.push(`${both}; ${plural}score “${about.score}”, scale ${compact(about.scale)}, ${windows}. ` +
    `The figures above compare ${about.quality.queries} queries of each head with exact attention. The output error is ` +
    "the norm of all differences over that of the exact outputs; the error of a query is relative to the root mean " +
    "square of the head’s exact outputs.");
  if (about.routed_keys) {
    notes.push(`Routed keys: all queries of a tile, ${about.tile.join(" × ")} of them, attend one by one all keys of ` +
      `the clusters whose means would be most wrong for the tile, at most ${about.routed_keys} keys. A key of a ` +
      "window is shown as such. Another scale does not change what is routed.");
  }
  if (about.thinned) {
    const { stride, queries, keys } = about.thinned;
    notes.push(`Thinned: every ${ordinal(stride)} point of each axis is kept, of ${queries.join(" × ")} queries and ` +
      `${keys.join(" × ")} keys. All figures are those of the thinned grids; on the whole ones they differ.`);
  }
  if (about.queries.stride > 1) {
    notes.push(`To fit this file, every ${ordinal(about.queries.stride)} query of each axis can be chosen; all were ` +
      "computed and all keys are attended.");
  }
  notes.push(...about.notes);
  const kept = about.channels.join(", "), values = about.value_channels.join(", ");
  notes.push(`Features are rounded and turned, ${kept} channels of ${about.width}; they give scores to about ` +
    `${compact(about.score_error)}. A map computed here has ${percent(about.map_error)} of its weight in ` +
    `another place than exact attention. Values are kept to ${percent(about.values_kept, 2)} of their variance, in ` +
    `${values} channels.`);
  if (about.early_matches < about.matches) notes.push("Earlier sweeps show the best match of each query only.");
  if (about.matches) {
    notes.push("Where queries show the place of their best match, keys go from blue on the left to yellow on the " +
      "right, and from dark at the top to light at the bottom.");
  }
  if (about.queries.grid.length === 1) notes.push("The sequence is broken into lines.");
  if (about.queries.grid.length > 2) notes.push("Slices of the first axes stand below each other.");
  const parts = [...about.matches ? ["windows"] : [], ...about.routed_keys ? ["routed keys"] : [],
    ...about.clusters ? ["clusters"] : []];
  const mass = "Captured mass is the share of a query’s exact attention that lies in its windows. ";
  notes.push(`${about.matches ? mass : ""}The weights of ${parts.join(", ")} are SCRAM’s own, and make 100 %.`);
  notes.push(`Written by SCRAM ${about.scram}. Everything is in this file; it loads nothing and sends nothing.`);
  return notes;
}

// Coordinates on the grid as it was before queries were thinned.
function coordinatesOf(side, index) {
  return coordinates(side.grid, index).map((at) => at * (side.stride ?? 1)).join(", ");
}

function numberRows(about, found) {
  const { matches, routed_keys: routed, clusters } = about;
  const rows = [["Place (row, column)", coordinatesOf(about.queries, found.query)]];
  if (matches) rows.push(["Captured mass", percent(found.captured)]);
  if (routed) rows.push([matches ? "Captured with routed keys" : "Captured by routed keys", percent(found.attended)]);
  if (matches) rows.push(["Weight of the windows", percent(found.windowWeight)]);
  if (routed) rows.push(["Weight of routed keys", percent(found.routedWeight)]);
  if (clusters) rows.push(["Weight of the clusters", percent(found.clusterWeight)]);
  if (routed) rows.push(["Routed keys, clusters", `${found.routedKeys}, ${found.routedClusters}`]);
  rows.push(["Error of this query", percent(found.error)]);
  const match = found.matches.some((one) => one && one.key === found.best);
  const kind = { [WINDOW]: ", in a window", [ROUTED]: ", routed" }[found.kinds[found.best]] ?? ", not found";
  const where = match ? "" : kind;
  rows.push([`Best key of all${where}`, coordinatesOf(about.keys, found.best)]);
  rows.push(["Its score", compact(found.bestScore)]);
  return rows;
}

// The radius of windows along rows and columns of the picture.
function screenReach(about) { return [about.radius.at(-2) ?? 0, about.radius.at(-1)]; }

function showNumbers(about, found, pane) {
  const list = document.getElementById("numbers");
  list.replaceChildren(...numberRows(about, found).flatMap(([name, value]) => [
    Object.assign(document.createElement("dt"), { textContent: name }),
    Object.assign(document.createElement("dd"), { textContent: value }),
  ]));
  const reach = Math.max(...about.radius) + 5, body = document.querySelector("#matches tbody");
  body.replaceChildren(...found.matches.map((one, n) => {
    const line = document.createElement("tr"), cells = one === null ? [n + 1, "", "none", "", ""] :
      [n + 1, "", coordinatesOf(about.keys, one.key), compact(one.score), percent(one.windowWeight)];
    line.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    if (one !== null) {
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Keys around match ${n + 1}`);
      line.children[1].append(canvas);
      pane.closeUp(canvas, ...one.place, reach, screenReach(about));
    }
    return line;
  }));
}

function sentence(about, found) {
  const first = found.matches.find((one) => one !== null), { matches, routed_keys: routed } = about;
  const match = first ? `best match ${coordinatesOf(about.keys, first.key)}, score ${compact(first.score)}; ` :
    matches ? "no match; " : "";
  const held = [...matches ? [`windows hold ${percent(found.captured)}`] : [],
    ...routed ? [`${matches ? "with " : ""}${found.routedKeys} routed keys ${matches ? "" : "hold "}` +
      percent(found.attended)] : []];
  return `Query ${coordinatesOf(about.queries, found.query)}: ${match}` +
    `${held.length ? `${held.join(", ")} of the exact attention; ` : ""}error of this query ${percent(found.error)}.`;
}

function legendTicks(most) {
  return Array.from({ length: DECADES + 1 }, (_, n) => compact(most * 10 ** (n - DECADES), 2));
}

function showLegend(most, map) {
  document.getElementById("ramp").style.background = `linear-gradient(to right, ${hexes(map).join(", ")})`;
  const ticks = legendTicks(most);
  document.getElementById("ticks").replaceChildren(...ticks.map((text, n) =>
    Object.assign(document.createElement("span"), { textContent: n ? text : `≤ ${text}` })));
  document.getElementById("legend").setAttribute("aria-label",
    `Colors: weight of one key, logarithmic, from ${ticks[0]} or less to ${ticks[DECADES]}`);
}

// What squares, the color of routed keys and soft colors are, with counts.
function showKinds(about, found, state) {
  const shown = state.view === "scram", keys = `${found.routedKeys} keys of ${found.routedClusters} clusters`;
  const words = { windows: "Windows", routed: `Routed: ${keys}`, soft: "Clusters’ part", tile: "Tile of the query" };
  const visible = { windows: about.matches > 0, routed: shown && about.routed_keys > 0 && state.routed,
    soft: shown && about.clusters > 0 && state.clusters, tile: about.routed_keys > 0 && about.tile.length === 2 };
  for (const item of document.querySelectorAll("#kinds [data-kind]")) {
    item.hidden = !visible[item.dataset.kind];
    item.querySelector("span").textContent = words[item.dataset.kind];
  }
}
