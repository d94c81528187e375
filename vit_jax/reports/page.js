'use strict';
// Charts of a report, drawn by uPlot: their cursors, zoom and hidden lines are
// linked. Also tables that a click on a heading sorts.
(() => {
  const charts = JSON.parse(document.getElementById('charts').textContent);
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name);

  // Runs and splits keep their color in all charts. A line that is alone in the
  // chart of its name has the first color.
  const names = new Set();
  for (const {title, lines} of charts) {
    for (const name in lines) if (name !== title) names.add(name);
  }
  const colors = new Map([...names].map((name, i) => [name, i]));
  const line = (name) => {
    const i = colors.get(name) ?? 0;
    const dash = [[], [8, 4], [2, 4]][Math.floor(i / 10) % 3];
    return {
      label: name, stroke: css(`--c${i % 10}`), width: 1.8, dash,
      spanGaps: true, value: (_, value) => show(value),
    };
  };

  const show = (value) => {
    if (value == null) return '–';
    const size = Math.abs(value);
    const isLong = value !== 0 && (size < 1e-3 || size >= 1e7);
    if (isLong) return value.toExponential(2);
    const digits = {maximumSignificantDigits: 4};
    return value.toLocaleString('en', size < 1e4 ? digits : {});
  };

  // Index of the value of a line that is nearest to an index.
  const nearest = (chart, line, index) => {
    const values = chart.data[line];
    for (let away = 0; away < values.length; away++) {
      if (values[index - away] != null) return index - away;
      if (values[index + away] != null) return index + away;
    }
    return index;
  };
  const sameLine = (chart, other, i) => {
    if (i == null) return i;
    return chart.series.findIndex((x) => x.label === other.series[i].label);
  };

  const draw = (chart, holder, log) => {
    const axis = {stroke: css('--muted'), grid: {stroke: css('--grid')}};
    const whole = [...Array(10).keys()].flatMap((i) =>
      [1, 2, 5].map((x) => x * 10 ** i));
    const lines = Object.values(chart.lines);
    const most = Math.max(0, ...lines.flatMap((x) => x[2] ?? []));
    const range = (_, low, high) =>
      uPlot.rangeNum(low - most, high + most, 0.1, true);
    // The band of one standard deviation around the mean over seeds.
    const band = (made, i) => {
      const [steps, mean, std] = lines[i - 1], {ctx, bbox} = made;
      if (!std) return;
      const at = (sign) => steps.map((step, j) => [
        made.valToPos(step, 'x', true),
        made.valToPos(mean[j] + sign * std[j], 'y', true)]);
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.beginPath();
      for (const [x, y] of [...at(1), ...at(-1).reverse()]) ctx.lineTo(x, y);
      ctx.globalAlpha = 0.2;
      ctx.fillStyle = made.series[i].stroke(made, i);
      ctx.fill();
      ctx.restore();
    };
    const options = {
      width: holder.clientWidth,
      height: 220,
      scales: {
        x: {time: false},
        y: most && !log ? {range} : {distr: log ? 3 : 1},
      },
      axes: [{...axis, incrs: whole}, {...axis, size: 68, values: (_, ticks) =>
        ticks.map((x) => x === null ? '' : show(x))}],
      series: [
        {label: 'step', value: (_, step) => show(step)},
        ...Object.keys(chart.lines).map(line),
      ],
      hooks: {drawSeries: [band]},
      cursor: {
        sync: {
          key: 'step', setSeries: true, scales: ['x', null],
          match: [(a, b) => a === b, (a, b) => a === b, sameLine],
        },
        dataIdx: nearest,
        focus: {prox: 24},
      },
      focus: {alpha: 0.3},
    };
    return new uPlot(options, uPlot.join(lines.map((x) => x.slice(0, 2))), holder);
  };

  const add = (chart) => {
    const group = document.querySelector(`[data-group="${CSS.escape(chart.group)}"]`);
    const figure = document.createElement('figure');
    const caption = document.createElement('figcaption');
    const holder = document.createElement('div');
    caption.append(chart.title);
    figure.append(caption, holder);
    group.append(figure);
    let {log} = chart, made = draw(chart, holder, log);
    if (Object.values(chart.lines).every(([, y]) => Math.min(...y) > 0)) {
      const button = document.createElement('button');
      button.textContent = 'log';
      button.setAttribute('aria-pressed', log);
      button.onclick = () => {
        log = !log;
        button.setAttribute('aria-pressed', log);
        made.destroy();
        made = draw(chart, holder, log);
      };
      caption.append(button);
    }
    new ResizeObserver(() => {
      made.setSize({width: holder.clientWidth, height: 220});
    }).observe(holder);
  };
  charts.forEach(add);

  // Sort by numbers such as 1,234 or 56.7%, else as texts; empty cells last.
  const sortable = (table) => {
    const [body] = table.tBodies, headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const text = (row) => row.cells[column].textContent.trim();
      const number = (row) => Number(text(row).replace(/[,%]/g, ''));
      heading.onclick = () => {
        const up = heading.getAttribute('aria-sort') === 'descending';
        for (const each of headings) each.removeAttribute('aria-sort');
        heading.setAttribute('aria-sort', up ? 'ascending' : 'descending');
        const order = (a, b) => {
          if (!text(a) || !text(b)) return !text(a) - !text(b);
          const by = number(a) - number(b) ||
            text(a).localeCompare(text(b), 'en', {numeric: true});
          return up ? by : -by;
        };
        body.append(...[...body.rows].sort(order));
      };
    });
  };
  document.querySelectorAll('table.sortable').forEach(sortable);
})();
