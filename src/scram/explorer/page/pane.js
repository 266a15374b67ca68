// A canvas that shows a grid: its picture, a layer of weights over it, marks; zoom and pan.

class Pane {
  constructor(canvas, side) {
    this.canvas = canvas;
    this.columns = side.width;
    this.rows = Math.ceil(side.points / side.width);
    this.points = side.points;
    this.ground = layer(this.columns, this.rows);
    this.weights = layer(this.columns, this.rows);
    this.veil = 0;
    this.marks = [];
    this.fit();
    canvas.style.aspectRatio = `${this.columns} / ${this.rows}`;
  }

  fit() { this.view = { zoom: 1, x: this.columns / 2, y: this.rows / 2 }; }

  // Pixels of the screen for a point, and those of the grid's upper left corner.
  frame() {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.round(this.canvas.clientWidth * ratio), height = Math.round(this.canvas.clientHeight * ratio);
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const unit = Math.min(width / this.columns, height / this.rows) * this.view.zoom;
    const half = (extent, size, at) => {
      const reach = extent / 2 / unit; // keeps the grid in the middle, or its border at the canvas's
      return 2 * reach >= size ? size / 2 : Math.min(Math.max(at, reach), size - reach);
    };
    this.view.x = half(width, this.columns, this.view.x);
    this.view.y = half(height, this.rows, this.view.y);
    return { unit, ratio, left: width / 2 - this.view.x * unit, top: height / 2 - this.view.y * unit, width, height };
  }

  // The point under a position of the mouse, null outside.
  at(event) {
    const box = this.canvas.getBoundingClientRect(), { unit, ratio, left, top } = this.frame();
    const column = Math.floor(((event.clientX - box.left) * ratio - left) / unit);
    const row = Math.floor(((event.clientY - box.top) * ratio - top) / unit);
    const index = row * this.columns + column;
    const inside = column >= 0 && row >= 0 && column < this.columns && row < this.rows && index < this.points;
    return inside ? index : null;
  }

  // Zoom by a factor about a position on the screen; 0 shows all. Whether anything changed.
  zoomBy(factor, event = null) {
    const before = this.view.zoom;
    if (!factor) this.fit();
    else {
      const zoom = Math.min(64, Math.max(1, before * factor));
      if (event) {
        const box = this.canvas.getBoundingClientRect(), { unit, ratio, left, top } = this.frame();
        const x = ((event.clientX - box.left) * ratio - left) / unit;
        const y = ((event.clientY - box.top) * ratio - top) / unit;
        this.view.x = x + (this.view.x - x) * before / zoom;
        this.view.y = y + (this.view.y - y) * before / zoom;
      }
      this.view.zoom = zoom;
    }
    return this.view.zoom !== before;
  }

  panBy(x, y) {
    const { unit, ratio } = this.frame();
    this.view.x -= x * ratio / unit;
    this.view.y -= y * ratio / unit;
  }

  // Brings a point into view.
  reveal(row, column) {
    const { unit, width, height } = this.frame();
    const near = (at, extent, point) => {
      const reach = extent / 2 / unit;
      return Math.min(Math.max(at, point + 1.5 - reach), point - 0.5 + reach);
    };
    this.view.x = near(this.view.x, width, column);
    this.view.y = near(this.view.y, height, row);
  }

  draw(context = this.canvas.getContext("2d"), frame = this.frame(), marks = this.marks) {
    const { unit, left, top, width, height } = frame, style = getComputedStyle(document.documentElement);
    context.fillStyle = style.getPropertyValue("--raised");
    context.fillRect(0, 0, width, height);
    context.imageSmoothingEnabled = false;
    const place = [left, top, this.columns * unit, this.rows * unit];
    context.drawImage(this.ground.canvas, ...place);
    if (this.veil) {
      context.fillStyle = `rgb(${style.getPropertyValue("--veil")} / ${this.veil})`;
      context.fillRect(...place);
      context.drawImage(this.weights.canvas, ...place);
    }
    for (const mark of marks) drawMark(context, mark, frame);
  }

  // A part of the picture around a match, with its window alone, on a small canvas.
  closeUp(canvas, row, column, reach, window_) {
    const side = 2 * reach + 1, ratio = window.devicePixelRatio || 1, size = Math.round(48 * ratio);
    Object.assign(canvas, { width: size, height: size });
    const unit = size / side;
    this.draw(canvas.getContext("2d"),
      { unit, ratio, left: (reach - column) * unit, top: (reach - row) * unit, width: size, height: size },
      [{ row, column, reach: window_, label: " " }]);
  }
}

function layer(columns, rows) {
  const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  const context = canvas.getContext("2d");
  return { canvas, image: context.createImageData(columns, rows), show() { context.putImageData(this.image, 0, 0); } };
}

// A ring around the query, the outline of a window with its number, or that of the query's tile.
function drawMark(context, mark, frame) {
  if (mark.tile) drawTile(context, mark, frame);
  else drawPlace(context, mark, frame);
}

function drawTile(context, { tile, color }, { unit, ratio, left, top }) {
  const place = [left + tile.left * unit, top + tile.top * unit];
  const size = [(tile.right - tile.left) * unit, (tile.bottom - tile.top) * unit];
  for (const [ink, thick] of [["#000", 5], ["#fff", 3.6], [color, 1.6]]) {
    context.strokeStyle = ink;
    context.lineWidth = thick * ratio;
    context.strokeRect(...place, ...size);
  }
}

function drawPlace(context, { row, column, reach, label }, { unit, ratio, left, top, width }) {
  const x = left + (column + 0.5) * unit, y = top + (row + 0.5) * unit, lines = [["#000", 3.4], ["#fff", 1.6]];
  for (const [color, thick] of lines) {
    context.strokeStyle = color;
    context.lineWidth = thick * ratio;
    context.beginPath();
    if (label) {
      const half = [0, 1].map((axis) => Math.max((reach[axis] + 0.5) * unit, 2 * ratio) + 1.5 * ratio);
      context.rect(x - half[1], y - half[0], 2 * half[1], 2 * half[0]);
    } else {
      context.arc(x, y, Math.max(unit, 7 * ratio), 0, 2 * Math.PI);
      context.moveTo(x - 2 * ratio, y);
      context.lineTo(x + 2 * ratio, y);
      context.moveTo(x, y - 2 * ratio);
      context.lineTo(x, y + 2 * ratio);
    }
    context.stroke();
  }
  if (!label || unit * (2 * reach[0] + 1) > 40 * ratio) return;
  context.font = `600 ${13 * ratio}px system-ui, sans-serif`;
  context.textBaseline = "bottom";
  const aside = Math.max((reach[1] + 0.5) * unit, 2 * ratio) + 3 * ratio, turned = x + aside + 12 * ratio > width;
  const at = [turned ? x - aside : x + aside, y - 2 * ratio];
  context.textAlign = turned ? "right" : "left";
  context.lineJoin = "round";
  context.strokeStyle = "#000";
  context.lineWidth = 3 * ratio;
  context.strokeText(label, ...at);
  context.fillStyle = "#fff";
  context.fillText(label, ...at);
}
