// State, controls and events: one state, shown anew after every change.

const GROUNDS = {
  picture: "their picture", rebuilt: "the picture at their best match", places: "where their best match is",
  features: "their features",
};

class Explorer {
  constructor(about, arrays) {
    this.about = about;
    this.model = new Model(about, arrays);
    this.arrays = arrays;
    this.form = document.getElementById("controls");
    const middle = Math.floor(about.queries.points / about.queries.width / 2) * about.queries.width;
    this.state = {
      query: Math.min(middle + Math.floor(about.queries.width / 2), about.queries.points - 1), head: 0,
      sweep: about.sweeps, count: about.matches, scale: 0, view: "scram", clusters: true, routed: true,
      held: false,
      ground: about.pictures ? "picture" : "features", map: "viridis", theme: "auto",
    };
    this.panes = { keys: new Pane(document.getElementById("keys"), about.keys) };
    const { keys } = this.panes, two = about.panes === 2;
    this.panes.queries = two ? new Pane(document.getElementById("queries"), about.queries) : keys;
    this.panes.keys.veil = 0.45;
    this.painted = {};
    this.setUp();
    this.readHash();
    this.update();
  }

  get columns() { return this.about.queries.width; }
  get keyColors() { return this.arrays.picture_keys ?? this.arrays.picture_queries; }

  get routedColor() { return getComputedStyle(document.documentElement).getPropertyValue("--routed").trim(); }

  /* A page that shows this one in a frame can make the frame as high as it needs to be. */
  tellHeight() {
    if (parent === window) return;
    document.documentElement.classList.add("framed");
    new ResizeObserver(() => parent.postMessage({ scramExplorerHeight: document.body.offsetHeight }, "*"))
      .observe(document.body);
  }

  setUp() {
    const { about, form } = this, one = about.panes === 1;
    this.tellHeight();
    document.getElementById("panes").dataset.panes = about.panes;
    document.getElementById("queries").closest("section").hidden = one;
    document.getElementById("keys-name").textContent = "Keys: where the query attends";
    document.querySelector(".skip").hash = one ? "keys" : "queries";
    document.getElementById("quality").textContent = qualityWords(about);
    document.getElementById("note-list").replaceChildren(...noteWords(about).map((text) =>
      Object.assign(document.createElement("li"), { textContent: text })));
    form.head.replaceChildren(...about.heads.map((_, n) => new Option(n, n)));
    form.count.max = about.matches;
    form.sweep.max = about.sweeps;
    const possible = { picture: about.pictures, rebuilt: about.pictures && about.matches, places: about.matches,
      features: true };
    const grounds = Object.keys(GROUNDS).filter((name) => possible[name]);
    form.ground.replaceChildren(...grounds.map((name) => new Option(GROUNDS[name], name)));
    form.clusters.closest("label").hidden = !about.clusters;
    form.routed.closest("label").hidden = !about.routed_keys;
    document.getElementById("matches").hidden = !about.matches;
    const hide = (name, hidden) => { form.querySelector(`[data-for="${name}"]`).hidden = hidden; };
    hide("head", about.heads.length === 1);
    hide("count", about.matches < 2);
    hide("sweep", about.sweeps === 0);
    form.addEventListener("input", () => this.readControls());
    form.addEventListener("submit", (event) => event.preventDefault());
    document.getElementById("png").addEventListener("click", () => this.savePng());
    document.getElementById("link").addEventListener("click", () => this.copyLink());
    for (const button of document.querySelectorAll("[data-zoom]"))
      button.addEventListener("click", () => {
        this.panes[button.dataset.zoom].zoomBy(Number(button.dataset.by));
        this.draw();
      });
    for (const name of one ? ["keys"] : ["queries", "keys"]) this.listen(name);
    window.addEventListener("resize", () => this.draw());
    window.addEventListener("hashchange", () => { if (this.readHash()) this.update(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.update());
  }

  // Mouse, touch and keyboard of one pane. Two fingers zoom and pan; a mouse pans while its button is down.
  listen(name) {
    const pane = this.panes[name], canvas = pane.canvas, picks = name === "queries" || this.about.panes === 1;
    const fingers = new Map();
    let moved = 0;
    const pick = (event) => {
      const index = pane.at(event), query = index === null ? null : this.model.queryAt(index);
      if (picks && query !== null && query !== this.state.query) this.change({ query });
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, event);
      moved = 0;
      if (event.pointerType !== "mouse" && fingers.size === 1) pick(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (before === undefined) {
        if (event.pointerType === "mouse" && !this.state.held) pick(event);
        return;
      }
      const step = [event.clientX - before.clientX, event.clientY - before.clientY];
      moved += Math.hypot(...step);
      if (fingers.size === 2) {
        const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
        const apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
        pane.zoomBy(apart(event) / Math.max(apart(before), 1), other);
        pane.panBy(step[0] / 2, step[1] / 2);
        this.draw();
      } else if (event.pointerType === "mouse" || !picks) {
        pane.panBy(...step);
        this.draw();
      } else pick(event);
      fingers.set(event.pointerId, event);
    });
    const up = (event) => {
      fingers.delete(event.pointerId);
      if (event.type === "pointerup" && event.pointerType === "mouse" && moved < 4 && picks) {
        pick(event);
        this.change({ held: !this.state.held });
      }
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("wheel", (event) => {
      if (!pane.zoomBy(2 ** (-event.deltaY / 240), event)) return; // at the end of the range the page scrolls
      event.preventDefault();
      this.draw();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event, pane));
  }

  key(event, pane) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? 10 : 1, zoom = { "+": 2, "=": 2, "-": 0.5, "_": 0.5, "0": 0 }[event.key];
    const step = { ArrowLeft: [0, -by], ArrowRight: [0, by], ArrowUp: [-by, 0], ArrowDown: [by, 0] }[event.key];
    if (step) {
      const { points } = this.about.queries, rows = Math.ceil(points / this.columns);
      const within = (x, most) => Math.min(Math.max(x, 0), most - 1);
      const row = within(Math.floor(this.state.query / this.columns) + step[0], rows);
      const column = within(this.state.query % this.columns + step[1], this.columns);
      const query = Math.min(row * this.columns + column, points - 1);
      this.panes.queries.reveal(...this.model.placeOf(query));
      this.change({ query, held: true });
    } else if (zoom !== undefined) {
      pane.zoomBy(zoom);
      this.draw();
    } else if (event.key === "e" || event.key === "E") {
      this.change({ view: this.state.view === "exact" ? "scram" : "exact" });
    } else if (event.key === "Enter" || event.key === " ") {
      this.change({ held: !this.state.held });
    } else return;
    event.preventDefault();
  }

  change(changes) {
    Object.assign(this.state, changes);
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => { this.asked = 0; this.update(); });
  }

  readControls() {
    const { form } = this, number = (name) => Number(form[name].value);
    this.change({
      head: number("head"), count: number("count"), sweep: number("sweep"), scale: number("scale"),
      view: form.view.value, clusters: form.clusters.checked, routed: form.routed.checked, ground: form.ground.value,
      map: form.map.value, theme: form.theme.value,
    });
  }

  writeControls() {
    const { form, state, about } = this;
    const names = ["head", "count", "sweep", "scale", "view", "ground", "map", "theme"];
    for (const name of names) form[name].value = state[name];
    for (const name of ["clusters", "routed"]) {
      form[name].checked = state[name];
      form[name].disabled = state.view === "exact";
    }
    const say = (name, text) => { form.querySelector(`[data-for="${name}"] output`).textContent = text; };
    const kept = state.sweep === about.sweeps ? about.matches : about.early_matches;
    say("count", `${Math.min(state.count, kept)} of ${about.matches}`);
    const share = about.matches ? about.quality.sweeps[state.sweep][state.head] : 0;
    say("sweep", `${state.sweep} of ${about.sweeps}: ${percent(share, 0)} held`);
    say("scale", `${compact(about.scale * 2 ** state.scale)}${state.scale ? "" : " (own)"}`);
    form.scale.setAttribute("aria-valuetext", compact(about.scale * 2 ** state.scale));
  }

  // Computes what changed, and shows it.
  update() {
    const { state, about, panes } = this;
    const system = matchMedia("(prefers-color-scheme: dark)").matches;
    const dark = state.theme === "dark" || (state.theme === "auto" && system);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.writeControls();
    const { sweep, count } = state;
    this.found = this.model.attend(state.head, state.query, { sweep, count, factor: 2 ** state.scale });
    this.paint();
    const reach = screenReach(about);
    const marks = this.found.matches.flatMap((one, n) => one === null ? [] :
      [{ row: one.place[0], column: one.place[1], reach, label: String(n + 1) }]);
    const [row, column] = this.model.placeOf(state.query), tile = this.model.tileFrame(state.query);
    const own = [...tile ? [{ tile, color: this.routedColor }] : [], { row, column }];
    panes.keys.marks = about.panes === 1 ? [...marks, ...own] : marks;
    if (about.panes === 2) panes.queries.marks = own;
    this.draw();
    showKinds(about, this.found, state);
    showNumbers(about, this.found, panes.keys);
    const held = state.held ? " (held)" : "", one = about.panes === 1;
    document.getElementById(one ? "keys-name" : "queries-name").textContent = `Queries${one ? " and keys" : ""}${held}`;
    const words = sentence(about, this.found);
    panes.keys.canvas.setAttribute("aria-label", `Map of the keys. ${words}`);
    panes.queries.canvas.setAttribute("aria-label", `Picture of the queries. ${words}`);
    clearTimeout(this.saying);
    this.saying = setTimeout(() => { document.getElementById("live").textContent = words; this.writeHash(); }, 300);
  }

  paint() {
    const { state, about, arrays, panes, found } = this, colors = table(state.map);
    const weights = found.matches.map((one) => one ? one.weight : 0);
    const most = this.most = Math.max(found.exact[found.best], ...weights, 1e-30);
    const view = state.view === "exact" ? [found.exact, null] : [found.scram, found.kinds];
    const routed = state.routed ? rgb(this.routedColor) : null;
    paintWeights(panes.keys.weights.image, view[0], most, colors, view[1], state.clusters, routed);
    panes.keys.weights.show();
    showLegend(most, state.map);
    const key = `${state.ground} ${state.head} ${state.sweep}`;
    if (this.painted.key === key) return;
    this.painted.key = key;
    const group = Math.floor(state.head / about.group), own = state.ground === "features" || !about.pictures;
    if (own) paintPlanes(panes.keys.ground.image, arrays[`k${group}`], about.keys.points, about.channels[group], true);
    else paintPlanes(panes.keys.ground.image, this.keyColors, about.keys.points, 3, false);
    paintGray(panes.keys.ground.image);
    panes.keys.ground.show();
    const image = panes.queries.ground.image;
    if (state.ground === "rebuilt" || state.ground === "places") this.paintMatches(image);
    else if (about.panes === 1) return;
    else if (state.ground === "features")
      paintPlanes(image, arrays[`q${state.head}`], about.queries.points, about.channels[group], true);
    else paintPlanes(image, arrays.picture_queries, about.queries.points, 3, false);
    panes.queries.ground.show();
  }

  // Every query in the color of its best match, or of that one's place.
  paintMatches(image) {
    const { state, about } = this, source = this.keyColors, keys = about.keys.points;
    const rows = Math.ceil(keys / about.keys.width);
    for (let n = 0; n < this.panes.queries.points; n++) {
      const [match] = this.model.matches(state.head, this.model.queryAt(n), state.sweep, 1);
      const color = match === null ? [128, 128, 128] :
        state.ground === "rebuilt" ? [0, 1, 2].map((c) => source[c * keys + match]) :
        placeColor(...this.model.place(match), rows, about.keys.width);
      image.data.set([...color, 255], 4 * n);
    }
  }

  draw() {
    for (const pane of new Set(Object.values(this.panes))) pane.draw();
    clearTimeout(this.storing);
    this.storing = setTimeout(() => this.writeHash(), 300);
  }

  // The view as the part of the address behind #, and back.
  hash() {
    const { state, panes } = this, views = Object.entries(panes).filter(([, pane]) => pane.view.zoom > 1);
    const short = (x) => Number(x.toFixed(2));
    const words = Object.entries(state).map(([name, value]) => `${name}=${value}`);
    const zooms = views.map(([name, { view }]) => `zoom-${name}=${[view.zoom, view.x, view.y].map(short).join(",")}`);
    return `#${[...words, ...zooms].join("&")}`;
  }

  writeHash() {
    this.written = this.hash();
    try { history.replaceState(null, "", this.written); } catch { /* inside a frame there is no address */ }
  }

  readHash() {
    if (!location.hash.includes("=") || location.hash === this.written) return false;
    const given = new URLSearchParams(location.hash.slice(1)), { about, state } = this;
    const most = { query: about.queries.points - 1, head: about.heads.length - 1, sweep: about.sweeps };
    most.count = about.matches;
    const words = { view: ["scram", "exact"], map: Object.keys(MAPS), theme: ["auto", "light", "dark"],
      ground: [...this.form.ground.options].map((one) => one.value) };
    for (const [name, value] of given) {
      const number = Number(value);
      if (name in most && Number.isInteger(number) && number >= 0 && number <= most[name]) state[name] = number;
      if (name === "scale" && Math.abs(number) <= 3) state.scale = number;
      if (words[name]?.includes(value)) state[name] = value;
      if (["clusters", "routed", "held"].includes(name)) state[name] = value === "true";
      const pane = name.startsWith("zoom-") ? this.panes[name.slice(5)] : null, view = value.split(",").map(Number);
      if (pane && view.length === 3 && view.every(Number.isFinite))
        pane.view = { zoom: Math.min(64, Math.max(1, view[0])), x: view[1], y: view[2] };
    }
    state.count = Math.max(1, state.count);
    return true;
  }

  async copyLink() {
    this.writeHash();
    const button = document.getElementById("link"), link = location.href.split("#")[0] + this.written;
    try {
      await navigator.clipboard.writeText(link);
      button.textContent = "Link copied";
    } catch {
      button.textContent = "The address bar holds the link";
    }
    setTimeout(() => { button.textContent = "Copy link to this view"; }, 2000);
  }

  // Both panes, the legend and a line of words as one picture.
  picture() {
    const panes = [...new Set([this.panes.queries, this.panes.keys])], gap = 16;
    const style = getComputedStyle(document.documentElement);
    const frames = panes.map((pane) => pane.frame()), ratio = frames[0].ratio, foot = 84 * ratio;
    const width = frames.reduce((sum, one) => sum + one.width + gap, gap);
    const height = Math.max(...frames.map((one) => one.height));
    const canvas = Object.assign(document.createElement("canvas"), { width, height: height + 2 * gap + foot });
    const context = canvas.getContext("2d");
    context.fillStyle = style.getPropertyValue("--ground");
    context.fillRect(0, 0, canvas.width, canvas.height);
    let left = gap;
    for (const [n, pane] of panes.entries()) {
      pane.draw();
      context.drawImage(pane.canvas, left, gap);
      left += frames[n].width + gap;
    }
    const ramp = context.createLinearGradient(gap, 0, width - gap, 0), colors = hexes(this.state.map);
    colors.forEach((color, n) => ramp.addColorStop(n / (colors.length - 1), color));
    context.fillStyle = ramp;
    context.fillRect(gap, height + 2 * gap, width - 2 * gap, 10 * ratio);
    context.fillStyle = style.getPropertyValue("--ink");
    context.font = `${13 * ratio}px system-ui, sans-serif`;
    const ticks = legendTicks(this.most), line = (n) => height + 2 * gap + (10 + 18 * n) * ratio;
    for (const [n, text] of ticks.entries()) {
      context.textAlign = n === 0 ? "left" : n === DECADES ? "right" : "center";
      context.fillText(text, gap + n / DECADES * (width - 2 * gap), line(1));
    }
    context.textAlign = "left";
    const shown = this.state.view === "exact" ? "exact attention" : "SCRAM";
    const marked = this.about.routed_keys && this.state.routed && this.state.view === "scram";
    const first = `${this.about.title}: ${shown}. Colors: weight of one key.`;
    context.fillText(first, gap, line(2.2), width - 2 * gap);
    if (marked) {
      const at = gap + Math.min(context.measureText(`${first} `).width, width - 2 * gap);
      context.fillStyle = this.routedColor;
      context.fillRect(at, line(2.2) - 10 * ratio, 11 * ratio, 11 * ratio);
      context.fillStyle = style.getPropertyValue("--ink");
      context.fillText("routed keys", at + 15 * ratio, line(2.2));
    }
    context.fillText(sentence(this.about, this.found), gap, line(3.3), width - 2 * gap);
    return canvas;
  }

  savePng() {
    this.picture().toBlob((blob) => {
      const address = URL.createObjectURL(blob), name = `attention-${this.state.query}.png`;
      Object.assign(document.createElement("a"), { href: address, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
    });
  }
}

(async () => {
  const about = JSON.parse(document.getElementById("about").textContent), data = document.getElementById("data");
  try {
    const arrays = await arraysOf(about, data.textContent);
    data.remove();
    window.explorer = new Explorer(about, arrays);
  } catch (error) {
    document.getElementById("quality").textContent = `This browser cannot show the page: ${error.message}`;
    throw error;
  }
  document.documentElement.dataset.ready = "yes";
})();
