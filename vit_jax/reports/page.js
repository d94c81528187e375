'use strict';
// Curves of a report: hover, arrow keys, zoom and hidden series are linked.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const PAD = {left: 52, right: 14, top: 10, bottom: 24};
  const charts = [], hidden = new Set(), colors = new Map();
  let zoom = null; // [first, last] step that is shown; null: all

  const svg = (name, attributes = {}, parent) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (parent) parent.append(made);
    return made;
  };
  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    made.append(...children);
    return made;
  };
  // Runs and splits keep their color in all charts.
  const color = (name) => {
    const i = colors.get(name) || 0;
    return {stroke: `var(--c${i % 10})`, dash: ['', '6 3', '2 3'][(i / 10 | 0) % 3]};
  };
  const show = (value) => {
    if (value === null || value === undefined) return '–';
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
    if (Number.isInteger(value) || size >= 1e4) return value.toLocaleString('en', {maximumFractionDigits: 0});
    return String(+value.toPrecision(4));
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(4) + 'G';
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + 'M';
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + 'k';
    if (value !== 0 && size < 1e-3) return String(+value.toPrecision(3)).replace(/e([+-])0?/, 'e$1');
    return String(+value.toPrecision(4));
  };
  const ticks = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find((x) => x * power >= rough) * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
    return found;
  };
  const logTicks = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
      for (const x of [1, 2, 5]) found.push(x * 10 ** power);
    }
    const inside = found.filter((x) => low <= x && x <= high);
    const decades = inside.filter((x) => Math.abs(Math.log10(x) % 1) < 1e-9);
    const chosen = decades.length >= 3 ? decades : inside;
    const every = Math.ceil(chosen.length / 6);
    return chosen.filter((_, i) => i % every === 0);
  };
  // Index of the point of a sorted array that is nearest to x.
  const nearest = (array, x) => {
    let low = 0, high = array.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (array[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(array[low] - x) <= Math.abs(array[high] - x) ? low : high;
  };

  class Chart {
    constructor(spec, parent) {
      Object.assign(this, spec);
      this.svg = svg('svg', {tabindex: 0, role: 'img'});
      this.svg.setAttribute('aria-label', `Curves of ${this.title}. Arrow keys move through the steps.`);
      const caption = element('figcaption', {}, element('span', {}, this.title));
      const values = this.series.flatMap((s) => s.y).filter((y) => y !== null);
      if (Math.min(...this.extent(values)) > 0) {
        const button = element('button', {class: 'toggle', type: 'button', 'aria-pressed': !!this.log, title: 'Logarithmic y axis'}, 'log');
        button.onclick = () => {
          this.log = !this.log;
          button.setAttribute('aria-pressed', this.log);
          this.draw();
        };
        caption.append(button);
      }
      parent.append(element('figure', {class: 'chart'}, caption, this.svg));
      this.outputs = new Map();
      if (!data.shared) this.svg.after(legend(this.series.map((s) => s.name), this.outputs));
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    extent(values) {
      let low = Infinity, high = -Infinity;
      for (const value of values) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
      return [low, high];
    }

    visible() {
      return this.series.filter((s) => !hidden.has(s.name));
    }

    // First and last step on the x axis. Runs of a study differ in length.
    range() {
      if (zoom) return zoom;
      const own = this.extent(this.visible().flatMap((s) => s.x));
      return data.shared && own[0] <= own[1] ? own : data.steps;
    }

    draw() {
      const width = this.svg.clientWidth, height = this.svg.clientHeight;
      if (!width) return;
      const [left, right] = this.range();
      const top = PAD.top, bottom = height - PAD.bottom;
      const values = this.visible().flatMap((s) => s.y.concat(s.low || [], s.high || [])
        .filter((y, i) => y !== null && left <= s.x[i % s.x.length] && s.x[i % s.x.length] <= right));
      let [low, high] = this.extent(values);
      if (low > high) [low, high] = [0, 1];
      if (low === high) {
        const room = this.log ? 0 : Math.abs(low) * 0.1 || 1;
        [low, high] = this.log ? [low / 2, high * 2] : [low - room, high + room];
      }
      const bend = this.log ? Math.log : (y) => y;
      const room = (bend(high) - bend(low)) * 0.04;
      const [from, to] = [bend(low) - room, bend(high) + room];
      this.x = (step) => PAD.left + (step - left) / ((right - left) || 1) * (width - PAD.left - PAD.right);
      this.y = (y) => bottom - (bend(y) - from) / (to - from) * (bottom - top);
      this.step = (px) => left + (px - PAD.left) / (width - PAD.left - PAD.right) * (right - left);

      this.svg.replaceChildren();
      const id = `clip${charts.indexOf(this)}`;
      const clip = svg('clipPath', {id}, this.svg);
      svg('rect', {x: PAD.left - 3, y: 0, width: Math.max(0, width - PAD.left - PAD.right + 6), height}, clip);
      for (const y of this.log ? logTicks(low, high) : ticks(low, high, 6)) {
        svg('line', {class: 'grid', x1: PAD.left, x2: width - PAD.right, y1: this.y(y), y2: this.y(y)}, this.svg);
        svg('text', {x: PAD.left - 7, y: this.y(y) + 4, 'text-anchor': 'end'}, this.svg).textContent = short(y);
      }
      for (const x of ticks(left, right || 1, Math.max(2, width / 90 | 0))) {
        svg('text', {x: this.x(x), y: height - 7, 'text-anchor': 'middle'}, this.svg).textContent = short(x);
      }
      svg('text', {x: PAD.left - 7, y: height - 7, 'text-anchor': 'end'}, this.svg).textContent = 'step';
      svg('line', {class: 'axis', x1: PAD.left, x2: width - PAD.right, y1: bottom, y2: bottom}, this.svg);
      const curves = svg('g', {'clip-path': `url(#${id})`}, this.svg);
      for (const series of this.visible()) this.curve(series, curves, left, right);
      this.marks = svg('g', {}, this.svg);
      this.mark(Chart.at);
    }

    curve(series, parent, left, right) {
      const {stroke, dash} = color(series.name);
      const point = (i, y) => `${this.x(series.x[i]).toFixed(1)} ${this.y(y[i]).toFixed(1)}`;
      const indices = series.x.map((_, i) => i);
      if (series.low) {
        const there = indices.filter((i) => series.low[i] !== null && series.high[i] !== null);
        const edge = there.map((i) => point(i, series.high)).concat(there.reverse().map((i) => point(i, series.low)));
        if (edge.length > 2) svg('path', {class: 'band', d: `M${edge.join('L')}Z`, style: `fill:${stroke}`}, parent);
      }
      let path = '', pen = 'M';
      for (const i of indices) {
        if (series.y[i] === null) pen = 'M';
        else { path += pen + point(i, series.y); pen = 'L'; }
      }
      svg('path', {class: 'curve', d: path, style: `stroke:${stroke}`, 'stroke-dasharray': dash}, parent);
      const inside = indices.filter((i) => series.y[i] !== null && left <= series.x[i] && series.x[i] <= right);
      if (inside.length > 30) return;
      for (const i of inside) this.dot(series, i, 2.5, parent);
    }

    dot(series, i, r, parent) {
      svg('circle', {class: 'dot', cx: this.x(series.x[i]), cy: this.y(series.y[i]), r, style: `fill:${color(series.name).stroke}`}, parent);
    }

    // [{series, i}] of the points nearest to a step.
    points(step) {
      return this.visible().map((series) => ({series, i: nearest(series.x, step)}))
        .filter(({series, i}) => series.x.length && series.y[i] !== null);
    }

    mark(step) {
      if (!this.marks) return;
      this.marks.replaceChildren();
      for (const output of this.outputs.values()) output.textContent = '';
      const [left, right] = this.range();
      if (step === null || step < left || step > right) return;
      const bottom = this.svg.clientHeight - PAD.bottom;
      svg('line', {class: 'cross', x1: this.x(step), x2: this.x(step), y1: PAD.top, y2: bottom}, this.marks);
      for (const {series, i} of this.points(step)) {
        if (left <= series.x[i] && series.x[i] <= right) this.dot(series, i, 4, this.marks);
        const output = this.outputs.get(series.name);
        if (output) output.textContent = show(series.y[i]);
      }
    }

    // Rows of the tooltip: [series name, value, step if it is another one].
    rows(step) {
      const rows = this.points(step).map(({series, i}) => ({
        name: series.name, value: series.y[i], at: series.x[i],
        range: series.low && series.low[i] !== null ? ` [${show(series.low[i])}, ${show(series.high[i])}]` : '',
      }));
      return rows.length > 4 ? rows.sort((a, b) => b.value - a.value) : rows;
    }

    listen() {
      const target = this.svg;
      const snap = (event) => {
        const step = this.step(event.clientX - target.getBoundingClientRect().left);
        const found = this.points(step).map(({series, i}) => series.x[i]);
        return found.length ? found.reduce((a, b) => Math.abs(a - step) <= Math.abs(b - step) ? a : b) : null;
      };
      let begin = null, box = null;
      target.onpointerdown = (event) => {
        if (event.pointerType === 'touch' || event.button) return;
        begin = event.clientX;
        target.setPointerCapture(event.pointerId);
      };
      target.onpointermove = (event) => {
        const offset = target.getBoundingClientRect().left;
        if (begin !== null && Math.abs(event.clientX - begin) > 4) {
          box = box || svg('rect', {class: 'zoom', y: PAD.top, height: target.clientHeight - PAD.top - PAD.bottom}, target);
          box.setAttribute('x', Math.min(begin, event.clientX) - offset);
          box.setAttribute('width', Math.abs(event.clientX - begin));
        }
        const step = snap(event);
        moveTo(step);
        tooltip(this, step, event.clientX, event.clientY);
      };
      target.onpointerup = (event) => {
        if (box) {
          const offset = target.getBoundingClientRect().left;
          const ends = [begin, event.clientX].map((px) => this.step(px - offset)).sort((a, b) => a - b);
          const [first, last] = this.range();
          zoomTo([Math.max(ends[0], first), Math.min(ends[1], last)]);
        }
        begin = box = null;
      };
      target.onpointerleave = () => { moveTo(null); tooltip(null); };
      target.onpointercancel = () => { begin = box = null; moveTo(null); tooltip(null); };
      target.ondblclick = () => zoomTo(null);
      target.onblur = () => { moveTo(null); tooltip(null); };
      target.onkeydown = (event) => {
        if (event.key === 'Escape') { moveTo(null); tooltip(null); zoomTo(null); return; }
        const way = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
        if (!way) return;
        event.preventDefault();
        const steps = [...new Set(this.visible().flatMap((s) => s.x))].sort((a, b) => a - b);
        if (!steps.length) return;
        const here = Chart.at === null ? (way > 0 ? -1 : steps.length) : nearest(steps, Chart.at);
        const step = steps[Math.min(steps.length - 1, Math.max(0, here + way))];
        moveTo(step);
        const place = target.getBoundingClientRect();
        tooltip(this, step, place.left + this.x(step), place.top + 30);
        const text = this.rows(step).map((r) => `${r.name} ${show(r.value)}`).join(', ');
        document.getElementById('live').textContent = `step ${show(step)}: ${text}`;
      };
    }
  }
  Chart.at = null;

  const moveTo = (step) => {
    Chart.at = step;
    for (const chart of charts) chart.mark(step);
  };
  const zoomTo = (range) => {
    zoom = range && range[1] > range[0] ? range : null;
    const reset = document.getElementById('reset');
    if (reset) reset.hidden = !zoom;
    for (const chart of charts) chart.draw();
  };

  const tip = element('div', {id: 'tip'});
  const tooltip = (chart, step, x, y) => {
    const rows = chart && step !== null ? chart.rows(step) : [];
    tip.style.display = rows.length ? 'block' : 'none';
    if (!rows.length) return;
    const table = element('table');
    for (const {name, value, at, range} of rows.slice(0, 20)) {
      const {stroke} = color(name);
      table.append(element('tr', {},
        element('td', {}, element('i', {class: 'swatch', style: `border-color:${stroke}`})),
        element('td', {}, name),
        element('td', {class: 'number'}, show(value) + range),
        element('td', {class: 'muted'}, at === step ? '' : `at ${show(at)}`)));
    }
    const more = rows.length > 20 ? [element('div', {class: 'muted'}, `and ${rows.length - 20} more`)] : [];
    tip.replaceChildren(element('strong', {}, `step ${show(step)}`), table, ...more);
    const {offsetWidth, offsetHeight} = tip;
    tip.style.left = `${Math.max(4, x + 16 + offsetWidth > innerWidth ? x - 16 - offsetWidth : x + 16)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - offsetHeight - 4))}px`;
  };

  // A list of buttons that hide series in all charts.
  const legend = (names, outputs) => {
    const list = element('ul', {class: 'legend'});
    for (const name of names) {
      const {stroke, dash} = color(name);
      const style = `border-color:${stroke}` + (dash ? ';border-top-style:dashed' : '');
      const output = element('output');
      const button = element('button', {type: 'button', 'aria-pressed': !hidden.has(name), 'data-series': name, title: 'Show or hide'},
        element('i', {class: 'swatch', style}), name, output);
      button.onclick = () => toggle([name], hidden.has(name));
      outputs.set(name, output);
      list.append(element('li', {}, button));
    }
    return list;
  };
  const toggle = (names, on) => {
    for (const name of names) on ? hidden.delete(name) : hidden.add(name);
    for (const button of document.querySelectorAll('[data-series]')) {
      button.setAttribute('aria-pressed', !hidden.has(button.dataset.series));
    }
    for (const chart of charts) chart.draw();
  };

  const names = [...new Set(data.charts.flatMap((c) => c.series.map((s) => s.name)))];
  const shared = names.filter((n) => data.charts.some((c) => c.title !== n && c.series.some((s) => s.name === n)));
  shared.forEach((name, i) => colors.set(name, i));
  const place = document.getElementById('shared');
  if (data.shared && place) {
    for (const [text, on] of [['all', true], ['none', false]]) {
      const button = element('button', {class: 'toggle', type: 'button'}, text);
      button.onclick = () => toggle(names, on);
      place.append(button, ' ');
    }
    place.append(legend(names, new Map()));
  }
  const reset = document.getElementById('reset');
  if (reset) reset.onclick = () => zoomTo(null);
  document.body.append(tip);
  for (const holder of document.querySelectorAll('[data-charts]')) {
    for (const spec of data.charts.filter((c) => c.group === holder.dataset.charts)) {
      charts.push(new Chart(spec, holder));
    }
  }

  // Tables that can be sorted by a click on a heading.
  for (const table of document.querySelectorAll('table.sortable')) {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = element('button', {type: 'button'}, ...cell.childNodes);
      cell.append(button);
      button.onclick = () => {
        const down = cell.getAttribute('aria-sort') === 'descending';
        for (const other of cell.parentNode.cells) other.removeAttribute('aria-sort');
        cell.setAttribute('aria-sort', down ? 'ascending' : 'descending');
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const order = (a, b) => {
          const [p, q] = [key(a), key(b)];
          if (p === '' || q === '') return (p === '') - (q === '');
          const by = isNaN(p) || isNaN(q) ? p.localeCompare(q, 'en', {numeric: true}) : p - q;
          return down ? by : -by;
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
      };
    });
  }
})();
