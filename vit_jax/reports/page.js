'use strict';
// Curves of a report: hover, arrow keys, zoom and hidden series are linked.
// Also tables that a click on a heading sorts.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const PAD = {left: 52, right: 14, top: 10, bottom: 24};
  const MOST_ROWS = 20; // of a tooltip
  const charts = [], hidden = new Set(), colors = new Map();
  let zoom = null; // [first, last] step that is shown; null: all
  let here = null; // step that the pointer or the keyboard is at

  const svg = (name, attributes = {}, parent = null, text = null) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  // Children are elements or text; text is never read as HTML.
  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    made.append(...children);
    return made;
  };
  const button = (attributes, onclick, ...children) => {
    const all = {type: 'button', ...attributes};
    const made = element('button', all, ...children);
    made.onclick = onclick;
    return made;
  };

  // Runs and splits keep their color in all charts.
  const color = (name) => {
    const i = colors.get(name) || 0;
    const dash = ['', '6 3', '2 3'][Math.floor(i / 10) % 3];
    return {stroke: `var(--c${i % 10})`, dash};
  };

  const show = (value) => {
    if (value === null || value === undefined) return '–';
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e7)) {
      return value.toExponential(3);
    }
    if (Number.isInteger(value) || size >= 1e4) {
      return Math.round(value).toLocaleString('en');
    }
    return String(+value.toPrecision(4));
  };
  const short = (value) => {
    const size = Math.abs(value);
    for (const [unit, text] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
      if (size >= unit && size >= 1e4) {
        return +(value / unit).toPrecision(4) + text;
      }
    }
    return String(+value.toPrecision(4));
  };

  const extent = (values) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  };
  const ticks = (low, high, count) => {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 2.5, 5, 10].find((x) => x * power >= rough);
    const found = [];
    let i = Math.ceil(low / step - 1e-9);
    for (; i * step <= high + 1e-9 * step; i++) found.push(i * step);
    return found;
  };
  const logTicks = (low, high) => {
    const found = [];
    for (let i = Math.floor(Math.log10(low)); 10 ** i <= high; i++) {
      found.push(...[1, 2, 5].map((x) => x * 10 ** i));
    }
    const inside = found.filter((x) => low <= x && x <= high);
    const powers = inside.filter((x) => Math.abs(Math.log10(x) % 1) < 1e-9);
    const chosen = powers.length >= 3 ? powers : inside;
    const every = Math.ceil(chosen.length / 6);
    return chosen.filter((_, i) => i % every === 0);
  };
  // Index of the value of a sorted array that is nearest to x.
  const nearest = (array, x) => {
    let low = 0, high = array.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (array[middle] < x) low = middle;
      else high = middle;
    }
    return Math.abs(array[low] - x) <= Math.abs(array[high] - x) ? low : high;
  };

  class Chart {
    constructor(spec, parent) {
      Object.assign(this, spec); // title, series, log
      const what = `${this.title} by step. Arrow keys show the values.`;
      this.svg = svg('svg', {tabindex: 0, role: 'img', 'aria-label': what});
      const caption = element('figcaption');
      caption.append(element('span', {}, this.title), ...this.logButton());
      this.outputs = new Map();
      const names = this.series.map((s) => s.name);
      const own = data.shared ? [] : [legend(names, this.outputs)];
      parent.append(
        element('figure', {class: 'chart'}, caption, this.svg, ...own));
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    logButton() {
      const values = this.series.flatMap((s) => s.y);
      const [low] = extent(values.filter((y) => y !== null));
      if (!(low > 0)) return [];
      const made = button({
        class: 'toggle', 'aria-pressed': !!this.log, title: 'Logarithmic axis',
      }, () => {
        this.log = !this.log;
        made.setAttribute('aria-pressed', this.log);
        this.draw();
      }, 'log');
      return [made];
    }

    visible() {
      return this.series.filter((s) => !hidden.has(s.name));
    }

    // First and last step on the x axis. Runs of a study differ in length.
    range() {
      if (zoom) return zoom;
      const own = extent(this.visible().flatMap((s) => s.x));
      return data.shared && own[0] <= own[1] ? own : data.steps;
    }

    draw() {
      const width = this.svg.clientWidth, height = this.svg.clientHeight;
      if (!width) return;
      this.scale(width, height);
      this.svg.replaceChildren();
      this.axes(width, height);
      const id = `clip${charts.indexOf(this)}`;
      svg('rect', {
        x: PAD.left - 3, y: 0, height,
        width: Math.max(0, width - PAD.left - PAD.right + 6),
      }, svg('clipPath', {id}, this.svg));
      const curves = svg('g', {'clip-path': `url(#${id})`}, this.svg);
      for (const series of this.visible()) this.curve(series, curves);
      this.marks = svg('g', {}, this.svg);
      this.mark();
    }

    // Set this.x, this.y: value -> pixel, and this.step: pixel -> step.
    scale(width, height) {
      const [left, right] = this.range();
      const isShown = (x) => left <= x && x <= right;
      const values = this.visible().flatMap(({x, y, low = [], high = []}) =>
        [y, low, high].flatMap((line) =>
          line.filter((value, i) => value !== null && isShown(x[i]))));
      let [low, high] = extent(values);
      if (low > high) [low, high] = [1, 2]; // nothing is shown
      if (low === high) {
        const room = this.log ? low / 2 : Math.abs(low) * 0.1 || 1;
        [low, high] = [low - room, high + room];
      }
      this.bounds = [low, high];
      const bend = this.log ? Math.log : (y) => y;
      const room = (bend(high) - bend(low)) * 0.04;
      const [from, to] = [bend(low) - room, bend(high) + room];
      const across = width - PAD.left - PAD.right;
      const steps = (right - left) || 1;
      const bottom = height - PAD.bottom;
      this.x = (step) => PAD.left + (step - left) / steps * across;
      this.step = (px) => left + (px - PAD.left) / across * steps;
      this.y = (y) =>
        bottom - (bend(y) - from) / (to - from) * (bottom - PAD.top);
    }

    axes(width, height) {
      const x1 = PAD.left, x2 = width - PAD.right, under = height - 7;
      const levels = this.log ? logTicks : (low, high) => ticks(low, high, 6);
      for (const value of levels(...this.bounds)) {
        const y = this.y(value);
        const place = {x: x1 - 7, y: y + 4, 'text-anchor': 'end'};
        svg('line', {class: 'grid', x1, x2, y1: y, y2: y}, this.svg);
        svg('text', place, this.svg, short(value));
      }
      const [left, right] = this.range();
      const count = Math.max(2, Math.floor(width / 90));
      for (const step of ticks(left, Math.max(right, left + 1), count)) {
        const place = {x: this.x(step), y: under, 'text-anchor': 'middle'};
        svg('text', place, this.svg, short(step));
      }
      const corner = {x: x1 - 7, y: under, 'text-anchor': 'end'};
      svg('text', corner, this.svg, 'step');
      const bottom = height - PAD.bottom;
      svg('line', {class: 'axis', x1, x2, y1: bottom, y2: bottom}, this.svg);
    }

    curve(series, parent) {
      const {x, y, low, high, name} = series, {stroke, dash} = color(name);
      const point = (i, line) =>
        `${this.x(x[i]).toFixed(1)} ${this.y(line[i]).toFixed(1)}`;
      const indices = [...x.keys()];
      if (low) {
        const there = indices.filter(
          (i) => low[i] !== null && high[i] !== null);
        const edge = there.map((i) => point(i, high));
        edge.push(...there.reverse().map((i) => point(i, low)));
        const d = `M${edge.join('L')}Z`, style = `fill:${stroke}`;
        if (edge.length > 2) svg('path', {class: 'band', d, style}, parent);
      }
      let d = '', pen = 'M';
      for (const i of indices) {
        if (y[i] !== null) d += pen + point(i, y);
        pen = y[i] === null ? 'M' : 'L';
      }
      const style = `stroke:${stroke}`;
      svg('path', {class: 'curve', d, style, 'stroke-dasharray': dash}, parent);
      const [left, right] = this.range();
      const inside = indices.filter(
        (i) => y[i] !== null && left <= x[i] && x[i] <= right);
      if (inside.length > 30) return;
      for (const i of inside) this.dot(series, i, 2.5, parent);
    }

    dot({x, y, name}, i, r, parent) {
      const place = {cx: this.x(x[i]), cy: this.y(y[i]), r};
      const style = `fill:${color(name).stroke}`;
      svg('circle', {class: 'dot', style, ...place}, parent);
    }

    // [{series, i}]: the point of each visible series nearest to a step.
    points(step) {
      return this.visible()
        .filter((series) => series.x.length)
        .map((series) => ({series, i: nearest(series.x, step)}))
        .filter(({series, i}) => series.y[i] !== null);
    }

    // Draw the line at the current step, and write values into the legend.
    mark() {
      if (!this.marks) return;
      this.marks.replaceChildren();
      for (const output of this.outputs.values()) output.textContent = '';
      const [left, right] = this.range();
      if (here === null || here < left || here > right) return;
      const x = this.x(here), y2 = this.svg.clientHeight - PAD.bottom;
      svg('line', {class: 'cross', x1: x, x2: x, y1: PAD.top, y2}, this.marks);
      for (const {series, i} of this.points(here)) {
        const isShown = left <= series.x[i] && series.x[i] <= right;
        if (isShown) this.dot(series, i, 4, this.marks);
        const output = this.outputs.get(series.name);
        if (output) output.textContent = show(series.y[i]);
      }
    }

    // Rows of the tooltip; many are sorted, best first.
    rows(step) {
      const rows = this.points(step).map(({series, i}) => {
        const {low, high} = series, has = low && low[i] !== null;
        const range = has ? ` [${show(low[i])}, ${show(high[i])}]` : '';
        return {name: series.name, value: series.y[i], at: series.x[i], range};
      });
      return rows.length > 4 ? rows.sort((a, b) => b.value - a.value) : rows;
    }

    listen() {
      const target = this.svg;
      const left = () => target.getBoundingClientRect().left;
      const snap = (event) => {
        const step = this.step(event.clientX - left());
        const found = this.points(step).map(({series, i}) => series.x[i]);
        const nearer = (a, b) =>
          Math.abs(a - step) <= Math.abs(b - step) ? a : b;
        return found.length ? found.reduce(nearer) : null;
      };
      const leave = () => { moveTo(null); tooltip(null); };
      let begin = null, box = null; // of a drag
      target.onpointerdown = (event) => {
        if (event.pointerType === 'touch' || event.button) return;
        begin = event.clientX;
        target.setPointerCapture(event.pointerId);
      };
      target.onpointermove = (event) => {
        if (begin !== null && Math.abs(event.clientX - begin) > 4) {
          const height = target.clientHeight - PAD.top - PAD.bottom;
          box = box || svg('rect', {class: 'zoom', y: PAD.top, height}, target);
          box.setAttribute('x', Math.min(begin, event.clientX) - left());
          box.setAttribute('width', Math.abs(event.clientX - begin));
        }
        const step = snap(event);
        moveTo(step);
        tooltip(this, step, event.clientX, event.clientY);
      };
      target.onpointerup = (event) => {
        if (box) {
          const ends = [begin, event.clientX].map((x) => this.step(x - left()));
          const [first, last] = this.range();
          zoomTo([Math.max(Math.min(...ends), first),
                  Math.min(Math.max(...ends), last)]);
        }
        begin = box = null;
      };
      target.onpointerleave = leave;
      target.onpointercancel = () => { begin = box = null; leave(); };
      target.onblur = leave;
      target.ondblclick = () => zoomTo(null);
      target.onkeydown = (event) => this.key(event);
    }

    key(event) {
      if (event.key === 'Escape') {
        moveTo(null);
        tooltip(null);
        zoomTo(null);
        return;
      }
      const ways = {
        ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity,
      };
      const way = ways[event.key];
      if (!way) return;
      event.preventDefault();
      const [left, right] = this.range();
      const all = new Set(this.visible().flatMap((s) => s.x));
      const steps = [...all].filter((x) => left <= x && x <= right);
      if (!steps.length) return;
      steps.sort((a, b) => a - b);
      const outside = way > 0 ? -1 : steps.length;
      const from = here === null ? outside : nearest(steps, here);
      const to = Math.min(steps.length - 1, Math.max(0, from + way));
      const step = steps[to];
      moveTo(step);
      const place = this.svg.getBoundingClientRect();
      tooltip(this, step, place.left + this.x(step), place.top + 30);
      const said = this.rows(step).map((r) => `${r.name} ${show(r.value)}`);
      document.getElementById('live').textContent =
        `step ${show(step)}: ${said.join(', ')}`;
    }
  }

  const moveTo = (step) => {
    here = step;
    for (const chart of charts) chart.mark();
  };
  const reset = document.getElementById('reset');
  const zoomTo = (range) => {
    zoom = range && range[1] > range[0] ? range : null;
    reset.hidden = !zoom;
    for (const chart of charts) chart.draw();
  };

  const swatch = (name) => {
    const {stroke, dash} = color(name);
    const style = `border-color:${stroke}`;
    const line = dash ? ';border-top-style:dashed' : '';
    return element('i', {class: 'swatch', style: style + line});
  };
  const tip = element('div', {id: 'tip'});
  const tooltip = (chart, step = null, x = 0, y = 0) => {
    const rows = chart && step !== null ? chart.rows(step) : [];
    tip.style.display = rows.length ? 'block' : 'none';
    if (!rows.length) return;
    const table = element('table');
    for (const {name, value, at, range} of rows.slice(0, MOST_ROWS)) {
      table.append(element('tr', {},
        element('td', {}, swatch(name)),
        element('td', {}, name),
        element('td', {class: 'number'}, show(value) + range),
        element('td', {class: 'muted'}, at === step ? '' : `at ${show(at)}`)));
    }
    tip.replaceChildren(element('strong', {}, `step ${show(step)}`), table);
    const more = rows.length - MOST_ROWS;
    if (more > 0) tip.append(element('div', {class: 'muted'}, `${more} more`));
    const {offsetWidth: width, offsetHeight: height} = tip;
    const fits = x + 16 + width <= innerWidth;
    const top = Math.min(y + 12, innerHeight - height - 4);
    tip.style.left = `${Math.max(4, fits ? x + 16 : x - 16 - width)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  };

  // A list of buttons that hide series in all charts.
  const legend = (names, outputs) => {
    const list = element('ul', {class: 'legend'});
    for (const name of names) {
      const output = element('output');
      outputs.set(name, output);
      const made = button({
        'aria-pressed': true, 'data-series': name, title: 'Show or hide',
      }, () => toggle([name], hidden.has(name)), swatch(name), name, output);
      list.append(element('li', {}, made));
    }
    return list;
  };
  const toggle = (names, on) => {
    for (const name of names) {
      if (on) hidden.delete(name);
      else hidden.add(name);
    }
    for (const made of document.querySelectorAll('[data-series]')) {
      made.setAttribute('aria-pressed', !hidden.has(made.dataset.series));
    }
    for (const chart of charts) chart.draw();
  };

  const sortable = (table) => {
    const [body] = table.tBodies, {cells} = table.tHead.rows[0];
    [...cells].forEach((cell, column) => {
      const value = (row) => {
        const {dataset, textContent} = row.cells[column];
        return dataset.value ?? textContent;
      };
      const sort = () => {
        const up = cell.getAttribute('aria-sort') === 'descending';
        for (const other of cells) other.removeAttribute('aria-sort');
        cell.setAttribute('aria-sort', up ? 'ascending' : 'descending');
        const order = (one, other) => {
          const [a, b] = [value(one), value(other)];
          if (a === '' || b === '') return (a === '') - (b === ''); // last
          const by = isNaN(a) || isNaN(b) ? a.localeCompare(b, 'en') : a - b;
          return up ? by : -by;
        };
        body.append(...[...body.rows].sort(order));
      };
      cell.append(button({}, sort, ...cell.childNodes));
    });
  };

  // A series that is alone in the chart of its name keeps the first color.
  const names = new Set();
  for (const {title, series} of data.charts) {
    for (const {name} of series) if (name !== title) names.add(name);
  }
  [...names].forEach((name, i) => colors.set(name, i));
  const shared = document.getElementById('shared');
  if (shared) {
    const all = [...names];
    shared.append(
      button({class: 'toggle'}, () => toggle(all, true), 'all'), ' ',
      button({class: 'toggle'}, () => toggle(all, false), 'none'),
      legend(all, new Map()));
  }
  if (reset) reset.onclick = () => zoomTo(null);
  document.body.append(tip);
  for (const holder of document.querySelectorAll('[data-charts]')) {
    const group = holder.dataset.charts;
    for (const spec of data.charts.filter((c) => c.group === group)) {
      charts.push(new Chart(spec, holder));
    }
  }
  document.querySelectorAll('table.sortable').forEach(sortable);
})();
