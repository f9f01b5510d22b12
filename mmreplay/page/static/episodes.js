"use strict";
// The table of episodes: a histogram to brush, filters, sorting, frames, check boxes.
(() => {
  const { el, count, number, short, plural } = mmr;
  const ROW_HEIGHT = 52;
  const TALLEST = 8_000_000; // Chromium has no taller elements: positions are scaled above.
  const PAGE_ROWS = 100;
  const MAX_LISTED_ENVS = 64;
  const KINDS = ["terminated", "truncated", "both", "broken off", "running", "unfinished"];

  // Ranges of rows that are selected, by the uuid of a buffer: another one may be made at
  // its path. [env, first, stop] by "env:begin" of an episode, or "env:first-stop" of some
  // of its steps.
  const selections = new Map();
  const selectionOf = ({ storage: { uuid } }) => {
    if (!selections.has(uuid)) selections.set(uuid, new Map());
    return selections.get(uuid);
  };
  mmr.selectionOf = selectionOf;

  mmr.selectionBox = () => el("section", { class: "card", hidden: true, "aria-label": "Selection" });

  const quoted = (text) => (/^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

  // What is selected as a file, and the command that takes it.
  let url = "";
  mmr.drawSelection = (box, overview, cleared = () => {}) => {
    const selected = selectionOf(overview);
    URL.revokeObjectURL(url);
    box.hidden = !selected.size;
    if (!selected.size) return;
    const rows = [...selected.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const value = { format: "mmreplay selection", version: 1, uuid: overview.storage.uuid, rows };
    const blob = new Blob([JSON.stringify(value)], { type: "application/json" });
    const name = "selection.json";
    const steps = rows.reduce((sum, [, first, stop]) => sum + stop - first, 0);
    const ranges = [...selected.keys()].filter((key) => key.includes("-")).length;
    const episodes = selected.size - ranges;
    const words = [episodes ? plural(episodes, "episode") : null, ranges ? plural(ranges, "range") : null];
    url = URL.createObjectURL(blob);
    const save = el("a", { class: "btn main", download: name, href: url }, `Save ${name}`);
    const clear = mmr.button("Clear", "Clear the selection", () => {
      selected.clear();
      cleared();
      mmr.drawSelection(box, overview, cleared);
    });
    const command = `mmreplay convert ${quoted(overview.storage.path)} selected.npz --select ${name}`;
    box.replaceChildren(
      el("header", {}, el("h2", {}, `${words.filter(Boolean).join(" and ")} selected`), el("span", { class: "note" }, plural(steps, "row"))),
      el("div", { class: "filters" }, save, clear, el("code", { class: "cmd" }, command)),
    );
  };

  // A saved page holds few episodes: they are sorted and filtered here.
  function savedTable(table, query) {
    const [low, high] = (query.ret ?? query.len ?? "-Infinity,Infinity").split(",").map(Number);
    const column = query.ret ? 3 : query.len ? 2 : null;
    const rows = table.rows.filter((row) => {
      if (query.env && row[0] !== Number(query.env)) return false;
      if (query.end && row[4] !== query.end) return false;
      if (query.whole && (row[5] || KINDS.indexOf(row[4]) > 2)) return false;
      return column == null || (row[column] >= low && row[column] <= high);
    });
    const by = { env: 0, begin: 1, length: 2, return: 3, end: 4, age: 6 }[query.sort];
    const sign = query.desc === "1" ? -1 : 1;
    // What is not known comes last, in either order.
    const known = (row) => (by === 4 ? KINDS.indexOf(row[4]) : (row[by] ?? sign * Infinity));
    rows.sort((a, b) => sign * (known(a) - known(b)) || 0);
    return { ...table, rows, total: rows.length, histogram: table.histograms[query.hist] };
  }

  async function readPage(id, query, number_) {
    if (mmr.isSaved()) {
      const table = savedTable(await mmr.json(`/api/b/${id}/episodes`), query);
      const first = number_ * PAGE_ROWS;
      return { ...table, rows: table.rows.slice(first, first + PAGE_ROWS) };
    }
    const paging = { offset: number_ * PAGE_ROWS, limit: PAGE_ROWS };
    return mmr.json(mmr.path(id, "episodes", { ...query, ...paging }));
  }

  mmr.screens.episodes = async (main, address, isCurrent) => {
    const app = mmr.app;
    const id = app.id;
    const overview = await app.overview(id);
    if (!isCurrent()) return;
    const image = mmr.imageOf(overview);
    const query = { sort: "age", desc: "0", hist: "return" };
    const selected = selectionOf(overview);
    const pages = new Map();
    const drawn = new Map();
    let total = 0;
    let all = 0;
    let stopped = false;

    const narrow = innerWidth < 640;
    const columns = [
      [null, el("span", { class: "off" }, "Select"), ""],
      ["begin", narrow ? "pos" : "position", ""],
      ["length", "Length", "num"],
      ["return", "Return", "num"],
      ["end", "End", ""],
      ["age", "Steps since", "num wide"],
      ...(image ? [[null, "First, middle, last", "pictures"]] : []),
    ];
    const plain = image ? "" : " plain";
    const note = el("span", { class: "note", role: "status" });
    const space = el("div", { class: "space", role: "presentation" });
    const list = el("div", { class: "list", role: "rowgroup", tabindex: "0", "aria-label": "Episodes" }, space);
    const head = el("div", { class: `ehead${plain}`, role: "row", "aria-rowindex": "1" });
    const table = el("div", { role: "table", "aria-label": "Episodes" }, el("div", { role: "rowgroup" }, head), list);
    const histogramBox = el("div");
    const exportBox = mmr.selectionBox();

    const drawExport = () =>
      mmr.drawSelection(exportBox, overview, () => {
        for (const { node } of drawn.values()) node.querySelector("input").checked = false;
      });

    const setMeasure = () => change({ hist: measure.value, len: null, ret: null });
    const measure = mmr.select({ id: "measure" }, setMeasure, [["return", "returns"], ["length", "lengths"]]);
    const keepEnv = () => env.checkValidity() && change({ env: env.value || null });
    const env = overview.num_envs > MAX_LISTED_ENVS
      ? el("input", { type: "number", id: "env", min: "0", max: String(overview.num_envs - 1), placeholder: "all", on: { change: keepEnv } })
      : mmr.select({ id: "env" }, keepEnv, [["", "all"], ...Array.from({ length: overview.num_envs }, (_, i) => [i, i])]);
    const kinds = KINDS.filter((kind, i) => i < 4 || (i === 4) === app.isLive(id));
    const keepEnd = () => change({ end: end.value || null });
    const end = mmr.select({ id: "end" }, keepEnd, [["", "any"], ...kinds.map((kind) => [kind, kind])]);
    const whole = mmr.toggle({ class: "btn" }, false, (on) => change({ whole: on ? "1" : null }), "Whole ones only");
    // What is dragged over the histogram, for keys.
    const limit = (name) => el("input", { type: "number", id: name, step: "any", on: { change: keepRange } });
    const lowest = limit("lowest");
    const highest = limit("highest");
    function keepRange() {
      const [low, high] = [lowest, highest].map((each) => each.value);
      const name = query.hist === "return" ? "ret" : "len";
      change({ len: null, ret: null, [name]: low || high ? `${low || -1e300},${high || 1e300}` : null });
    }
    const range = el("button", {
      class: "btn", type: "button", hidden: true,
      on: { click: () => change({ len: null, ret: null }) },
    });

    main.replaceChildren(
      el("div", { class: "title" }, el("h1", {}, "Episodes"), note),
      el(
        "section",
        { class: "card", "aria-label": "Filters" },
        el(
          "div",
          { class: "filters" },
          mmr.field("Histogram of", measure),
          mmr.field("Environment", env),
          mmr.field("End", end),
          whole,
          range,
          el("span", { class: "grow" }),
          el(
            "span",
            { class: "pair" },
            el("span", { class: "muted desk" }, "Drag over the bars, or keep"),
            mmr.field("from", lowest),
            mmr.field("to", highest),
          ),
        ),
        histogramBox,
      ),
      el("section", { class: "card", "aria-label": "Table" }, table),
      exportBox,
    );

    function change(changes) {
      for (const [name, value] of Object.entries(changes)) {
        if (value == null) delete query[name];
        else query[name] = value;
      }
      load();
    }

    function sorter(key, text) {
      const sorted = key === query.sort;
      const sort = () => {
        const first = key === "length" || key === "return" ? "1" : "0";
        change({ sort: key, desc: sorted ? (query.desc === "1" ? "0" : "1") : first });
      };
      const arrow = sorted ? (query.desc === "1" ? " ↓" : " ↑") : "";
      return el("button", { type: "button", "data-sort": key, on: { click: sort } }, text, arrow);
    }

    function drawHead() {
      const focused = head.contains(document.activeElement) ? document.activeElement.dataset.sort : null;
      head.replaceChildren(
        ...columns.map(([key, text, className]) => {
          const sorted = key && (key === query.sort || (key === "begin" && query.sort === "env"));
          const direction = query.desc === "1" ? "descending" : "ascending";
          const cell = { class: className, role: "columnheader" };
          if (sorted) cell["aria-sort"] = direction;
          if (key === "begin") return el("span", cell, sorter("env", "Env"), " : ", sorter(key, text));
          return el("span", cell, key ? sorter(key, text) : text);
        }),
      );
      if (focused) head.querySelector(`[data-sort="${focused}"]`)?.focus();
    }

    function page(number_) {
      if (!pages.has(number_)) {
        const reading = readPage(id, query, number_);
        reading.catch(() => pages.get(number_) === reading && pages.delete(number_));
        pages.set(number_, reading);
      }
      return pages.get(number_);
    }

    // Each query has a turn: answers of one before are left. While returns are read, the
    // same query is asked again and again, and rows that are drawn keep their elements.
    const POLL_MS = 2000;
    let turn = 0;
    let timer = 0;
    async function load(again = false) {
      const own = ++turn;
      clearTimeout(timer);
      pages.clear();
      if (!again) {
        drawHead();
        drawRange();
        list.scrollTop = 0;
      }
      try {
        const table_ = await page(0);
        if (stopped || own !== turn) return;
        if (!again) clearRows();
        // What is read again by itself is not spoken.
        note.setAttribute("aria-live", again ? "off" : "polite");
        showTable(table_);
        await draw();
        if (table_.done < 1 && !stopped && own === turn) timer = setTimeout(load, POLL_MS, true);
      } catch (error) {
        if (stopped || own !== turn) return;
        if (again) {
          // The rows stay; the next answer may be there again.
          note.textContent = error.message;
          timer = setTimeout(load, POLL_MS, true);
        } else showRefusal(error);
      }
    }

    // While a buffer is written, the table is read again where nobody reads it: at its top,
    // without the focus in it. Elsewhere rows would move away under the reader.
    let version = app.states[id]?.version;
    let written = 0;
    let began = performance.now();
    let took = 0;
    let follower = 0;
    function follow(state) {
      const { version: newest, head } = state ?? {};
      if (follower || head == null || (newest === version && head <= written)) return;
      follower = setTimeout(async () => {
        follower = 0;
        const isUsed = list.scrollTop || list.contains(document.activeElement) || histogramBox.matches(":active");
        if (!isUsed) {
          version = app.states[id]?.version;
          began = performance.now();
          await load(true);
          took = performance.now() - began;
        } else began = performance.now();
        if (!stopped) follow(app.states[id]);
      }, Math.max(0, Math.max(POLL_MS, 10 * took) - (performance.now() - began)));
    }

    function clearRows() {
      for (const { node } of drawn.values()) node.remove();
      drawn.clear();
    }

    function showTable(table_) {
      total = table_.total;
      written = table_.written;
      all = table_.all;
      note.textContent = noteOf(table_);
      space.style.height = `${Math.min(total * ROW_HEIGHT, TALLEST)}px`;
      table.setAttribute("aria-rowcount", String(total + 1));
      drawHistogram(table_);
      const text = all ? "No episode fits these filters." : "No episode yet: one is listed as soon as its first step is added.";
      showWords(total ? null : text);
    }

    // In the place of the rows.
    function showWords(...content) {
      space.querySelector(".empty")?.remove();
      if (content[0] == null) return;
      clearRows();
      space.append(el("p", { class: "empty", role: "row" }, el("span", { role: "cell" }, content)));
    }

    function showRefusal(error) {
      total = all = 0;
      note.textContent = "";
      space.style.height = "";
      table.setAttribute("aria-rowcount", "1");
      histogramBox.replaceChildren();
      drawnHistogram = "";
      showWords(error.message, " ", mmr.button("Try again", "Try again", () => load(), "btn small"));
    }

    function noteOf(table_) {
      const shown = total === all ? count(all) : `${count(total)} of ${count(all)}`;
      const saved = mmr.isSaved() ? ", the saved ones; the histogram counts all" : "";
      if (table_.done >= 1) return shown + saved;
      return `${shown}; returns are being read: ${Math.floor(100 * table_.done)} %`;
    }

    function drawRange() {
      const limits = query.ret ?? query.len;
      range.hidden = !limits;
      const [low, high] = (limits ?? ",").split(",").map((each) => (Math.abs(Number(each)) < 1e300 ? each : ""));
      lowest.value = low && +(+low).toPrecision(6);
      highest.value = high && +(+high).toPrecision(6);
      if (!limits) return;
      const what = query.ret ? "Return" : "Length";
      const text = low && high ? `${what} ${number(+low)} to ${number(+high)}` : low ? `${what} from ${number(+low)}` : `${what} up to ${number(+high)}`;
      range.textContent = `${text} ✕`;
      range.setAttribute("aria-label", `Remove the filter ${text}`);
    }

    let drawnHistogram = "";
    function drawHistogram({ histogram }) {
      const text = query.hist + JSON.stringify(histogram);
      if (text === drawnHistogram) return;
      drawnHistogram = text;
      const box = el("div");
      histogramBox.replaceChildren(box);
      if (!histogram.counts.length) return;
      mmr.bars(box, 96, {
        ...histogram,
        colour: "s0",
        label: `Histogram of episode ${query.hist}s`,
        brush: mmr.isSaved() ? null : (low, high) => {
          const name = query.hist === "return" ? "ret" : "len";
          setTimeout(() => change({ [name]: `${low},${high}` }));
        },
      });
    }

    // Only rows in view are in the page; those that stay keep their element, and so the
    // focus.
    let drawing = false;
    let again = false;
    async function draw() {
      if (drawing) {
        again = true;
        return;
      }
      drawing = true;
      try {
        if (total) await drawRows();
      } catch (error) {
        if (!stopped) note.textContent = error.message;
      }
      drawing = false;
      if (again && !stopped) {
        again = false;
        await draw();
      }
    }

    // Of the row at the top of the view: rows, as a fraction.
    function scale() {
      const full = total * ROW_HEIGHT;
      const tall = Math.min(full, TALLEST);
      const height = list.clientHeight;
      return tall > height ? (full - height) / (tall - height) : 1;
    }

    async function drawRows() {
      const own = turn;
      const top = list.scrollTop * scale();
      const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - 2);
      const stop = Math.min(total, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 5);
      const rows = [];
      for (let n = Math.floor(first / PAGE_ROWS); n <= Math.floor((stop - 1) / PAGE_ROWS); n++) {
        const { rows: some } = await page(n);
        if (stopped || own !== turn) return;
        some.forEach((row, i) => {
          const at = n * PAGE_ROWS + i;
          if (at >= first && at < stop) rows.push([at, row]);
        });
      }
      const wanted = new Map(rows);
      for (const [at, { node }] of drawn) {
        if (wanted.has(at)) continue;
        if (node.contains(document.activeElement)) {
          // Out of view it still has the focus, from which arrows go on.
          const y = list.scrollTop + (at * ROW_HEIGHT - top);
          const most = Math.min(total * ROW_HEIGHT, TALLEST) - ROW_HEIGHT;
          node.style.top = `${Math.max(0, Math.min(most, y))}px`;
          continue;
        }
        node.remove();
        drawn.delete(at);
      }
      for (const [at, row] of rows) {
        const y = `${list.scrollTop + (at * ROW_HEIGHT - top)}px`;
        const old = drawn.get(at);
        if (old && String(old.row) === String(row)) {
          old.node.style.top = y;
          continue;
        }
        // Another episode, or the same with its return: what had the focus has it again.
        const node = rowElement(at, row, y);
        const focused = old?.node.contains(document.activeElement) ? (document.activeElement.matches("input") ? "input" : ".mono") : null;
        if (old) old.node.replaceWith(node);
        else space.append(node);
        drawn.set(at, { node, row });
        if (focused) node.querySelector(focused)?.focus({ preventScroll: true });
      }
    }

    function rowElement(at, row, y) {
      const [envId, begin, length, value, kind, missingStart, age] = row;
      const key = `${envId}:${begin}`;
      const name = `${envId} : ${count(begin)}`;
      const box = el("input", {
        type: "checkbox", checked: selected.has(key), tabIndex: -1,
        "aria-label": `Select episode ${name}`,
        on: {
          change: () => {
            if (box.checked) selected.set(key, [envId, begin, row[7] ?? begin + length]);
            else selected.delete(key);
            drawExport();
          },
        },
      });
      const link = mmr.canOpen(id, envId, begin)
        ? el("a", { href: app.link(`e=${key}`), class: "mono", tabIndex: -1 }, name)
        : el("span", { class: "mono", tabIndex: -1 }, name);
      const cells = [
        ["pick-row", box],
        ["", link],
        ["num", (missingStart ? "≥ " : "") + count(length)],
        ["num", number(value)],
        ["", el("span", { class: "tag" }, missingStart ? `${kind}, no start` : kind)],
        ["num wide muted", count(age)],
      ];
      const node = el(
        "div",
        { class: `erow${plain}`, role: "row", "aria-rowindex": String(at + 2), css: { top: y }, "data-row": String(at) },
        cells.map(([className, content]) => el("span", { class: className, role: "cell" }, content)),
      );
      if (image) {
        const positions = [begin, begin + (length >> 1), begin + length - 1];
        const thumbs = positions.map((position) => mmr.thumb(id, image.path, envId, position, begin));
        node.append(el("span", { class: "thumbs", role: "cell" }, thumbs));
      }
      return node;
    }

    // The table is one tab stop: arrows move, Enter opens, S selects.
    let current = 0;
    async function moveTo(at) {
      current = Math.max(0, Math.min(total - 1, at));
      const top = list.scrollTop * scale();
      const y = current * ROW_HEIGHT;
      if (y < top) list.scrollTop = y / scale();
      else if (y + ROW_HEIGHT > top + list.clientHeight) {
        list.scrollTop = (y + ROW_HEIGHT - list.clientHeight) / scale();
      }
      await draw();
      const link = drawn.get(current)?.node.querySelector(".mono");
      link?.focus({ preventScroll: true });
    }
    list.addEventListener("keydown", (event) => {
      const rows = Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
      const row = event.target.closest?.(".erow");
      if (row) current = Number(row.dataset.row);
      const steps = { ArrowDown: row ? 1 : 0, ArrowUp: -1, PageDown: rows, PageUp: -rows };
      if (event.key in steps) moveTo(current + steps[event.key]);
      else if (event.key === "Home") moveTo(0);
      else if (event.key === "End") moveTo(total - 1);
      else if (event.key === "Enter" && !row) moveTo(current).then(() => drawn.get(current)?.node.querySelector(".mono").click());
      else if (event.key.toLowerCase() === "s") drawn.get(current)?.node.querySelector("input").click();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    list.addEventListener("scroll", () => draw(), { passive: true });

    app.leave = () => {
      stopped = true;
      clearTimeout(timer);
      clearTimeout(follower);
    };
    app.onstate = follow;
    drawExport();
    await load();
  };
})();
