"use strict";
// Charts by uPlot, each in a box whose width it follows; drawn again in other colours.
(() => {
  const { el, count, number, token } = mmr;
  const FONT = "12px system-ui, sans-serif";
  const charts = new Set();
  const WHOLE = (mmr.WHOLE = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3)));

  mmr.axis = (options) => ({
    stroke: token("muted"),
    grid: { stroke: token("grid"), width: 1 },
    ticks: { stroke: token("grid"), size: 4 },
    font: FONT,
    gap: 4,
    ...options,
  });

  // One unit for all labels of an axis, and digits enough that no two are alike.
  mmr.labels = (plot, values, axis, space, step) => {
    const largest = Math.max(...values.map((value) => Math.abs(value ?? 0)));
    const units = [[1e9, 1e9, " G"], [1e6, 1e6, " M"], [1e4, 1e3, " k"]];
    const [, unit, letter] = units.find(([from]) => largest >= from) ?? [1, 1, ""];
    let decimals = step ? 0 : 2;
    if (step) {
      const scaled = () => (step / unit) * 10 ** decimals;
      while (decimals < 6 && Math.abs(scaled() - Math.round(scaled())) > 1e-6) decimals++;
    }
    const format = new Intl.NumberFormat("en", { maximumFractionDigits: decimals });
    return values.map((value) => {
      if (value == null) return "";
      if (value !== 0 && largest < 1e-3) return value.toExponential(1);
      if (value !== 0 && largest >= 1e13) return value.toExponential(2).replace("e+", "e");
      return format.format(value / unit) + (value ? letter : "");
    });
  };

  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      for (const chart of charts) {
        const width = target.clientWidth;
        if (chart.box !== target || !chart.plot || !width) continue;
        if (Math.abs(chart.plot.width - width) > 1) {
          chart.plot.setSize({ width, height: chart.plot.height });
        }
      }
    }
  });

  // Where the mouse is. A chart that is drawn again below it, as of a buffer that is being
  // written, has its cursor and its text again, once all is in its place.
  let mouse = null;
  addEventListener("mousemove", ({ clientX, clientY }) => (mouse = { clientX, clientY }), true);
  document.addEventListener("mouseleave", () => (mouse = null));

  function point({ plot }) {
    if (!mouse || !plot?.over.isConnected) return;
    const { left, top, right, bottom } = plot.over.getBoundingClientRect();
    const { clientX: x, clientY: y } = mouse;
    if (x < left || x > right || y < top || y > bottom) return;
    if (plot.over.contains(document.elementFromPoint(x, y))) plot.setCursor({ left: x - left, top: y - top });
  }

  mmr.chart = (box, height, make, label) => {
    box.classList.add("plot");
    if (label) {
      box.setAttribute("role", "img");
      box.setAttribute("aria-label", label);
    }
    const chart = {
      box,
      plot: null,
      draw() {
        this.plot?.destroy();
        box.replaceChildren();
        const { options, data } = make();
        const size = { width: Math.max(120, box.clientWidth), height };
        this.plot = new uPlot({ ...size, legend: { show: false }, ...options }, data, box);
        for (const canvas of this.plot.root.querySelectorAll("canvas")) {
          canvas.setAttribute("aria-hidden", "true");
        }
        requestAnimationFrame(() => point(this));
      },
    };
    charts.add(chart);
    chart.draw();
    watcher.observe(box);
    return chart;
  };

  function drop(chart) {
    chart.plot?.destroy();
    watcher.unobserve(chart.box);
    charts.delete(chart);
  }

  mmr.redrawCharts = () => {
    for (const chart of [...charts]) {
      if (chart.box.isConnected) chart.draw();
      else drop(chart);
    }
  };

  mmr.dropCharts = () => {
    for (const chart of [...charts]) if (!chart.box.isConnected) drop(chart);
  };

  // A box beside the cursor with the text of the point below it.
  mmr.tip = (textOf, attributes = {}) => {
    let tip;
    return {
      hooks: {
        init: (plot) => {
          tip = el("div", { class: "tip", hidden: true, ...attributes });
          plot.over.append(tip);
        },
        setCursor: (plot) => {
          const { idx, left } = plot.cursor;
          const text = idx == null || left < 0 ? null : textOf(plot, idx);
          tip.hidden = !text;
          if (!text) return;
          tip.textContent = text;
          const onLeft = left > plot.over.clientWidth / 2;
          tip.style.left = onLeft ? "" : `${left + 12}px`;
          tip.style.right = onLeft ? `${plot.over.clientWidth - left + 12}px` : "";
          tip.style.top = "6px";
        },
      },
    };
  };

  function limitsOf(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
      if (value == null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return [0, 1];
    return rangeOf(low, high);
  }

  // An axis over two values, with a margin. Of large numbers that are nearly equal it is
  // wide enough to have ticks: a step of the axis must not be lost in rounding.
  function rangeOf(low, high) {
    const largest = Math.max(Math.abs(low), Math.abs(high));
    const margin = low === high ? Math.max(1, largest * 1e-3) : Math.max((high - low) * 0.06, largest * 1e-12);
    return [low - margin, high + margin];
  }
  mmr.limitsOf = limitsOf;

  // One point an episode, and a moving mean. Episodes of several environments end at equal
  // positions, where uPlot finds one index only: the y range is taken from the data here,
  // and of the mean only the last value of each position is drawn.
  mmr.scatter = (box, height, series) => {
    const { x, y, unit, label, xlabel, pick, colour = "s0" } = series;
    const limits = limitsOf(y);
    const steps = series.whole ? { incrs: WHOLE } : {};
    const mean = series.mean.map((value, i) => (x[i] === x[i + 1] ? null : value));
    return mmr.chart(
      box,
      height,
      () => {
        const stroke = token(colour);
        const size = Math.max(2.5, Math.min(7, 260 / Math.sqrt(x.length)));
        const points = (plot) => {
          const { ctx } = plot;
          const radius = (size * devicePixelRatio) / 2;
          ctx.save();
          ctx.fillStyle = stroke;
          ctx.globalAlpha = (x.length > 500 ? 0.4 : 0.6) + (mmr.isDark() ? 0.2 : 0);
          ctx.beginPath();
          plot.data[1].forEach((value, i) => {
            if (value == null) return;
            const left = plot.valToPos(plot.data[0][i], "x", true);
            const top = plot.valToPos(value, "y", true);
            ctx.moveTo(left + radius, top);
            ctx.arc(left, top, radius, 0, 7);
          });
          ctx.fill();
          ctx.restore();
          return null;
        };
        const textOf = (plot, i) => {
          const average = plot.data[2][i];
          const more = average == null ? "" : `, mean ${number(average)}`;
          return `${unit} ${number(plot.data[1][i])}${more} at ${count(plot.data[0][i])}`;
        };
        const clicks = {
          hooks: {
            ready: (plot) => {
              if (!pick) return;
              plot.over.style.cursor = "pointer";
              plot.over.addEventListener("click", () => {
                if (plot.cursor.idx != null) pick(plot.cursor.idx);
              });
            },
          },
        };
        return {
          data: [x, y, mean],
          options: {
            scales: { x: { time: false }, y: { range: () => limits } },
            axes: [
              mmr.axis({ values: mmr.labels, incrs: WHOLE, label: xlabel, labelSize: 18, labelFont: FONT, size: 26 }),
              mmr.axis({ values: mmr.labels, size: 52, ...steps }),
            ],
            series: [
              {},
              { paths: points, points: { show: false } },
              { stroke: token("text"), width: 2, points: { show: false }, spanGaps: true },
            ],
            cursor: {
              y: false,
              points: { size: 9, stroke, fill: token("surface") },
              drag: { x: false, y: false },
            },
            plugins: [mmr.tip(textOf), clicks],
          },
        };
      },
      label,
    );
  };

  // Path of a curve of whole numbers: each is as wide as the way to the next point, and half
  // a step left of it, so that the playhead of a step stands in its middle. The last one
  // ends at a step of its own. Down to the series with the lowest values, if there is one, is
  // a fill.
  mmr.steps = (lowestAt, end) => (plot, index, from, to) => {
    const [xs, highs, lows] = [plot.data[0], plot.data[index], plot.data[lowestAt]];
    const left = (i) => plot.valToPos((xs[i] ?? end()) - 0.5, "x", true);
    const top = (value) => plot.valToPos(value, "y", true);
    const stroke = new Path2D();
    const fill = lows ? new Path2D() : null;
    for (let i = from; i <= to; i++) {
      if (highs[i] == null) continue;
      const [begin, stop, y] = [left(i), left(i + 1), top(highs[i])];
      if (i === from || highs[i - 1] == null) stroke.moveTo(begin, y);
      else stroke.lineTo(begin, y);
      stroke.lineTo(stop, y);
      fill?.rect(begin, y, stop - begin, top(lows[i]) - y);
    }
    return { stroke, fill, clip: null, band: null, gaps: null, flags: 1 };
  };

  // A value between two gaps has no line: it is a point.
  mmr.lone = (colour) => ({
    show: true,
    size: 4,
    fill: colour,
    filter: (plot, index) => {
      const values = plot.data[index];
      return values.flatMap((value, i) => (value != null && values[i - 1] == null && values[i + 1] == null ? [i] : []));
    },
  });

  // A histogram between edges; of several series the bars stand behind each other.
  mmr.bars = (box, height, histogram) => {
    const { edges, label, log, brush } = histogram;
    const all = histogram.series ?? [{ counts: histogram.counts, colour: histogram.colour }];
    return mmr.chart(
      box,
      height,
      () => {
        const length = edges.length - 1;
        const middles = Array.from({ length }, (_, i) => (log ? i : (edges[i] + edges[i + 1]) / 2));
        const most = Math.max(1, ...all.flatMap((each) => each.counts));
        const width = edges[length] - edges[0];
        const isWide = width > 1e-12 * Math.max(Math.abs(edges[0]), Math.abs(edges[length]));
        const limits = isWide ? [edges[0], edges[length]] : rangeOf(edges[0], edges[length]);
        // Bins of whole numbers end between two of them.
        const half = edges.every((edge) => Math.abs(edge % 1) === 0.5);
        const first = (i) => (half ? Math.ceil(edges[i]) : edges[i]);
        const last = (i) => (half ? Math.floor(edges[i + 1]) : edges[i + 1]);
        const ends = [first(0), (edges[0] + edges[length]) / 2, last(length - 1)];
        // As many digits as tell the ends of the axis apart.
        const digits = Math.min(15, 3 + Math.max(0, Math.log10(Math.abs(edges[length] / width) || 1)));
        const tidy = (value) => number(Math.abs(value) < width / 500 ? 0 : +value.toPrecision(digits));
        const xAxis = log
          ? { values: (plot, values) => values.map((v) => (Number.isInteger(v) && edges[v] != null ? number(+edges[v].toPrecision(2)) : "")) }
          : brush
            ? { values: mmr.labels, ...(half ? { incrs: WHOLE } : {}) }
            : { splits: () => ends, values: (plot, values) => values.map(tidy) };
        const textOf = (plot, i) => {
          const counts = all.map((each) => (each.name ? `${each.name} ${count(each.counts[i])}` : count(each.counts[i])));
          const range = first(i) === last(i) ? number(first(i)) : `${number(first(i))} to ${number(last(i))}`;
          return `${range}: ${counts.join(", ")}`;
        };
        return {
          // An outline has gaps where there is nothing.
          data: [middles, ...all.map((each, i) => (i ? each.counts.map((n) => n || null) : each.counts))],
          options: {
            scales: {
              x: { time: false, range: log ? [-0.5, length - 0.5] : limits },
              y: { range: [0, most * 1.06] },
            },
            axes: [
              mmr.axis({ size: 26, ...xAxis }),
              mmr.axis({
                values: mmr.labels,
                size: 46,
                splits: (plot, axis, low, high) => [0, Math.round(high / 1.06)],
              }),
            ],
            series: [
              {},
              ...all.map((each, i) => ({
                // The first series is filled, another one is an outline before it.
                ...(i ? { stroke: token(each.colour), width: 2 } : { fill: token(each.colour) + (all.length > 1 ? "66" : ""), width: 0 }),
                paths: uPlot.paths.bars({ size: [0.94, 100], gap: 0 }),
                points: { show: false },
              })),
            ],
            cursor: {
              y: false,
              points: { show: false },
              drag: { x: Boolean(brush), y: false, setScale: false },
            },
            select: { show: Boolean(brush) },
            plugins: [mmr.tip(textOf)],
            hooks: brush
              ? {
                  setSelect: [
                    (plot) => {
                      const { left, width: wide } = plot.select;
                      if (wide > 2) brush(plot.posToVal(left, "x"), plot.posToVal(left + wide, "x"));
                    },
                  ],
                }
              : {},
          },
        };
      },
      label,
    );
  };

  // Single values with their counts, as a list that can be read.
  mmr.barList = (items, colour) => {
    const most = Math.max(1, ...items.map(([, n]) => n));
    const sum = items.reduce((total, [, n]) => total + n, 0) || 1;
    const rows = items.map(([name, n, own]) =>
      el(
        "div",
        { role: "listitem", class: "bar-row" },
        el("span", {}, name),
        el(
          "span",
          { class: "track", "aria-hidden": "true" },
          n
            ? el("span", {
                class: "fill",
                css: { width: `${(100 * n) / most}%`, background: `var(--${own ?? colour})` },
              })
            : null,
        ),
        el(
          "span",
          { class: "num" },
          `${count(n)} `,
          mmr.muted(n ? mmr.share(n / sum) : ""),
        ),
      ),
    );
    return el("div", { class: "bars", role: "list" }, rows);
  };
})();
