"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("curve"), tip = document.getElementById("tip");
  const MIB = 1 << 20, left = 60, right = 12, top = 22, bottom = 34;
  const {planned, plain} = data;
  const end = Math.max(planned.x.at(-1), plain.x.at(-1)) || 1;
  const sum = (series, i) => series.bytes.reduce((total, row) => total + row[i], 0);
  const totals = [planned, plain].map(s => s.labels.map((_, i) => sum(s, i)));
  let view = [0, end], drag = null, hover = null;

  const color = name => getComputedStyle(canvas.closest(".cp")).getPropertyValue(name).trim();
  const size = () => [canvas.clientWidth, canvas.clientHeight];
  const toX = share => left + (share - view[0]) / (view[1] - view[0]) * (size()[0] - left - right);
  const toShare = x => view[0] + (x - left) / (size()[0] - left - right) * (view[1] - view[0]);

  function stepAt(series, share) {           // the last step that starts at or before `share`
    let low = 0, high = series.labels.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (series.x[middle] <= share) low = middle; else high = middle - 1;
    }
    return low;
  }

  function highest() {                       // of what is in view
    let most = 1;
    [planned, plain].forEach((series, k) => {
      for (let i = stepAt(series, view[0]); i <= stepAt(series, view[1]); i++) most = Math.max(most, totals[k][i]);
    });
    return 1.2 * most;
  }

  // For each column of pixels the highest step in it, so that no peak is lost at any zoom.
  function columns(series, total, width) {
    const found = [];
    for (let x = 0; x < width; x++) {
      const from = toShare(left + x), to = toShare(left + x + 1);
      if (from > series.x.at(-1)) break;
      let best = stepAt(series, from);
      for (let i = best + 1; i < series.labels.length && series.x[i] < to; i++) if (total[i] > total[best]) best = i;
      found.push(best);
    }
    return found;
  }

  function draw() {
    const [width, height] = size(), ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.font = "11px system-ui, sans-serif";
    const most = highest(), toY = bytes => height - bottom - bytes / most * (height - top - bottom);
    grid(c, width, height, most, toY);
    const inner = width - left - right;
    columns(planned, totals[0], inner).forEach((step, x) => {
      let below = 0;
      planned.bytes.forEach((row, k) => {
        c.fillStyle = data.colors[k];
        c.fillRect(left + x, toY(below + row[step]), 1.05, toY(below) - toY(below + row[step]));
        below += row[step];
      });
    });
    c.strokeStyle = color("--plain");
    c.setLineDash([4, 2]);
    c.beginPath();
    columns(plain, totals[1], inner).forEach((step, x) => c.lineTo(left + x, toY(totals[1][step])));
    c.stroke();
    c.setLineDash([]);
    c.fillStyle = color("--soft");
    data.regions.forEach(([from, to]) => {
      const x = Math.max(left, toX(from)), until = Math.min(width - right, toX(to));
      if (until > x) c.fillRect(x, height - bottom + 1, Math.max(0.5, until - x - 1), 4);
    });
    marks(c, width, height, toY);
  }

  function grid(c, width, height, most, toY) {
    const unit = round(most / MIB / 8);
    c.strokeStyle = color("--line");
    c.fillStyle = color("--soft");
    c.textAlign = "right";
    for (let v = 0; v * MIB <= most; v += unit) {
      line(c, left, toY(v * MIB), width - right, toY(v * MIB));
      c.fillText(+v.toPrecision(6), left - 6, toY(v * MIB) + 4);
    }
    c.fillText("MiB", left - 6, 12);
    c.textAlign = "center";
    const across = round((view[1] - view[0]) / 7);
    for (let k = Math.ceil(view[0] / across - 1e-9); k * across <= view[1]; k++) {
      c.fillText(+(k * across).toPrecision(6), Math.min(toX(k * across), width - right - 8), height - 19);
    }
    c.fillText("shares of the plain step's cost", (left + width) / 2, height - 4);
  }

  function round(least) {                    // the next of 1, 2, 5, 10, 20, ...
    const power = 10 ** Math.floor(Math.log10(least));
    return power * ([1, 2, 5].find(f => f * power >= least) || 10);
  }

  function marks(c, width, height, toY) {
    const at = toX(planned.x[planned.backward]);
    c.fillStyle = color("--soft");
    c.strokeStyle = color("--soft");
    if (at > left && at < width - right) {
      c.setLineDash([1, 3]);
      line(c, at, top, at, height - bottom);
      c.setLineDash([]);
      c.textAlign = "right";
      if (at - left > 50) c.fillText("forward", at - 5, 13);
      c.textAlign = "left";
      if (width - at > 70) c.fillText("backward", at + 5, 13);
    }
    if (data.budget !== null && toY(data.budget) > top) {
      c.strokeStyle = color("--budget");
      line(c, left, toY(data.budget), width - right, toY(data.budget));
    }
    const step = data.peak, x = toX((planned.x[step] + planned.x[step + 1]) / 2);
    if (x >= left && x <= width - right) peak(c, step, x, toY(totals[0][step]), width);
    if (hover !== null) {
      c.strokeStyle = color("--ink");
      line(c, hover, top, hover, height - bottom);
    }
    if (drag !== null && hover !== null) {
      c.fillStyle = "#8885";
      c.fillRect(Math.min(drag, hover), top, Math.abs(hover - drag), height - top - bottom);
    }
  }

  // Named in the room above all curves, so that the name hides none of them.
  function peak(c, step, x, y, width) {
    const late = x > (width + left) / 2, room = (late ? x - left : width - right - x) - 8;
    const head = `peak ${mib(totals[0][step])} at `;
    let name = planned.labels[step], cut = "";
    while (name.length > 4 && c.measureText(head + cut + name).width > room) [cut, name] = ["…", name.slice(1)];
    c.fillStyle = c.strokeStyle = color("--budget");
    c.lineWidth = 0.7;
    line(c, x, top + 4, x, y);
    c.beginPath();
    c.arc(x, y, 4, 0, 7);
    c.fill();
    c.textAlign = late ? "right" : "left";
    c.lineWidth = 3;
    c.strokeStyle = color("--back");
    c.strokeText(head + cut + name, x + (late ? -6 : 6), top + 12);
    c.lineWidth = 1;
    c.fillStyle = color("--ink");
    c.fillText(head + cut + name, x + (late ? -6 : 6), top + 12);
  }

  function line(c, x1, y1, x2, y2) {
    c.beginPath();
    c.moveTo(x1, y1);
    c.lineTo(x2, y2);
    c.stroke();
  }

  const mib = bytes => `${(bytes / MIB).toLocaleString("en", {minimumFractionDigits: 1, maximumFractionDigits: 2})} MiB`;

  function show(x, y) {
    const share = Math.min(Math.max(toShare(x), 0), end), step = stepAt(planned, Math.min(share, planned.x.at(-1)));
    const lines = [[`${planned.labels[step]}${step >= planned.backward ? " (backward)" : " (forward)"}`, mib(totals[0][step])]];
    data.categories.forEach((name, k) => lines.push([name, mib(planned.bytes[k][step])]));
    if (share <= plain.x.at(-1)) lines.push(["plain step here", mib(totals[1][stepAt(plain, share)])]);
    tip.replaceChildren(...lines.map(([name, value], i) => {
      const row = document.createElement("div");
      row.textContent = `${name}: ${value}`;
      if (i === 0) row.style.fontWeight = "600";
      return row;
    }));
    tip.style.display = "block";
    tip.style.left = `${Math.max(0, x > size()[0] / 2 ? x - tip.offsetWidth - 14 : x + 14)}px`;
    tip.style.top = `${Math.max(0, Math.min(y - 20, size()[1] - tip.offsetHeight))}px`;
  }

  function zoom(from, to) {
    const least = end / 1e5;
    from = Math.max(0, from);
    to = Math.min(end, to);
    if (to - from >= least) view = [from, to];
    draw();
  }

  canvas.addEventListener("pointermove", event => {
    hover = Math.min(Math.max(event.offsetX, left), size()[0] - right);
    draw();
    show(hover, event.offsetY);
  });
  canvas.addEventListener("pointerleave", () => { hover = drag = null; tip.style.display = "none"; draw(); });
  canvas.addEventListener("pointerdown", event => { drag = Math.max(event.offsetX, left); });
  canvas.addEventListener("pointerup", event => {
    const [from, to] = [drag, event.offsetX].sort((a, b) => a - b);
    drag = null;
    if (to - from > 5) zoom(toShare(from), toShare(to)); else draw();
  });
  canvas.addEventListener("dblclick", () => { view = [0, end]; draw(); });
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const middle = toShare(Math.max(event.offsetX, left)), factor = Math.exp(event.deltaY / 400);
    zoom(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
  }, {passive: false});
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
