"use strict";
// The first screen: figures, what stands out, returns; then everything else.
(() => {
  const { el, card, count, number, short, size, share, plural, nothing, pairs } = mmr;
  const MARKS = { problem: ["!", "Problem"], look: ["?", "Look"], fine: ["✓", "Fine"] };
  const REFRESH_MS = 2000;
  const FIRST_MS = 300; // until a buffer that was empty is read again
  const HEIGHT = 170;

  mmr.screens.overview = async (main, query, isCurrent) => {
    const app = mmr.app;
    const id = app.id;
    const overview = await app.overview(id);
    if (!isCurrent()) return;
    draw(main, overview);
    follow(main, id, overview);
  };

  // The number of steps follows each event; the rest is read again at most every 2 s, and
  // for a tenth of the time at most: the writer's machine has more to do.
  function follow(main, id, first) {
    const app = mmr.app;
    let shown = first;
    let version = app.states[id]?.version;
    let read = performance.now();
    let timer = 0;
    let took = 0;

    const isCurrent = () => app.onstate === take;
    // A number that is being typed is not replaced.
    const isTyped = () => {
      const { activeElement: input } = document;
      return main.contains(input) && input.matches("input") && input.value !== input.defaultValue;
    };

    function take(state) {
      if (state?.head == null) return;
      showSteps(main, shown, state);
      if (timer || (state.version === version && state.head <= shown.written)) return;
      const pause = shown.rows ? Math.max(REFRESH_MS, 10 * took) : FIRST_MS;
      timer = setTimeout(refresh, Math.max(0, pause - (performance.now() - read)));
    }

    async function refresh() {
      version = app.states[id]?.version;
      read = performance.now();
      try {
        if (document.visibilityState === "visible" && !isTyped()) {
          const overview = await app.overview(id, true);
          took = performance.now() - read;
          if (!isCurrent() || isTyped()) return;
          const focused = main.contains(document.activeElement) ? document.activeElement.id : "";
          const { scrollY } = window;
          draw(main, overview);
          shown = overview;
          mmr.dropCharts();
          scrollTo(0, scrollY);
          if (focused) focusAgain(document.getElementById(focused));
        }
      } catch {
        // The state says why.
      } finally {
        timer = 0;
        if (isCurrent()) take(app.states[id]);
      }
    }

    app.onstate = take;
  }

  // What a finding leads to has the focus without a place among the tab stops.
  function focusAgain(element) {
    element?.focus({ preventScroll: true });
    if (!element || element === document.activeElement) return;
    element.setAttribute("tabindex", "-1");
    element.focus({ preventScroll: true });
  }

  function draw(main, overview) {
    const state = mmr.app.states[mmr.app.id] ?? {};
    if (!overview.rows) {
      main.replaceChildren(empty(overview, state), fields(overview), storage(overview));
      return;
    }
    // Charts are drawn once their boxes are in the page and have a width.
    const later = [];
    const checks = findings(overview);
    const returns = episodeReturns(overview, later, checks);
    // Actions stand in the row of the three cards before, or have a row of their own.
    const narrow = !ofRole(overview, "action").length || isScalarAction(overview);
    const third = narrow ? "c3" : "c4";
    main.replaceChildren(
      title(overview),
      figures(overview),
      checks,
      returns,
      episodeLengths(overview, third, later),
      ends(overview, third),
      rewards(overview, third, later),
      actions(overview, narrow ? "c3" : "", later),
      ...priorities(overview, later),
      fields(overview),
      storage(overview),
    );
    for (const drawChart of later) drawChart();
  }

  function empty(overview, state) {
    const live = state.state === "live";
    const sentence = live
      ? "A writer has this buffer open. The page fills as soon as it adds a step."
      : "Nothing was added to this buffer so far, and no writer has it open.";
    const envs = overview.num_envs;
    const each = envs === 1 ? "" : ` in each of ${count(envs)} environments`;
    return el(
      "div",
      { class: "card empty" },
      el("h1", {}, "No step yet"),
      el("p", {}, sentence),
      el("p", {}, `Capacity: ${count(overview.capacity)} rows${each}.`),
    );
  }

  function title(overview) {
    const { storage: facts, num_envs: envs } = overview;
    return el(
      "div",
      { class: "title" },
      el("h1", {}, mmr.app.states[mmr.app.id]?.name ?? facts.path),
      el(
        "span",
        { class: "muted" },
        `${plural(envs, "environment")}, ${facts.layout}, autoreset ${facts.autoreset}`,
      ),
    );
  }

  function figures(overview) {
    const { returns, lengths, ends: kinds, storage: facts } = overview;
    const returnNote = returns.count >= 8
      ? `newest quarter; oldest ${number(+returns.oldest.toPrecision(3))}`
      : returns.count
        ? `mean of ${plural(returns.count, "episode")}`
        : "no whole episode yet";
    const mean = ({ newest, average }, n) => (n ? number(+(n >= 8 ? newest : average).toPrecision(4)) : "–");
    const rows = [
      ["Steps", ...stepsText(overview, mmr.app.states[mmr.app.id])],
      ["Episodes", short(overview.episodes.count), "episodes", `${count(kinds.running)} unfinished`],
      ["Mean return", mean(returns, returns.count), "return", returnNote],
      ["Mean length", mean(lengths, lengths.y.length), "length", lengths.y.length >= 8 ? "newest quarter" : "steps"],
      facts.disk
        ? ["On disk", size(facts.disk.allocated), "disk", `${facts.engine}${facts.codec ? `, ${facts.codec}` : ""}`]
        : ["On disk", "–", "disk", facts.engine],
      facts.commit?.time
        ? [
            "Last commit",
            `${mmr.ago(Date.now() / 1000 - facts.commit.time)} ago`,
            "commit",
            facts.commit.behind > 0 ? `${count(facts.commit.behind)} rows since` : "nothing since",
          ]
        : ["Last commit", "none yet", "commit", ""],
    ];
    return el(
      "dl",
      { class: "facts", "aria-label": "In short" },
      rows.map(([name, value, key, note]) =>
        el("div", {}, el("dt", {}, name), el("dd", { "data-fact": key }, value, el("small", {}, note))),
      ),
    );
  }

  // Of a buffer that is being written, the number is exact: it is seen to grow.
  function stepsText(overview, state) {
    const live = state?.state === "live";
    // The state may be older than the overview by an event.
    const written = Math.max(state?.head ?? 0, overview.written);
    const rows = Math.max(state?.rows ?? 0, overview.rows);
    const steps = overview.steps + rows - overview.rows;
    const capacity = overview.capacity * overview.num_envs;
    const laps = written / capacity;
    return [
      live && steps < 1e7 ? count(steps) : short(steps),
      "steps",
      laps > 1.01
        ? `newest of ${short(written)} rows, ${laps.toFixed(1)} laps`
        : `${short(rows)} of ${short(capacity)} rows, ${share(rows / capacity)} full`,
    ];
  }

  function showSteps(main, overview, state) {
    const fact = main.querySelector('[data-fact="steps"]');
    if (!fact || !overview.rows) return;
    const [value, , note] = stepsText(overview, state);
    fact.firstChild.data = value;
    fact.lastChild.textContent = note;
  }

  function mark(level) {
    const [letter, word] = MARKS[level];
    return el("span", { class: `mark ${level}`, role: "img", "aria-label": word }, letter);
  }

  let fineOpen = null; // as the reader left it

  function findings(overview) {
    const found = overview.checks.filter((check) => check.level !== "fine");
    const fine = overview.checks.filter((check) => check.level === "fine");
    const item = (check) =>
      el(
        "li",
        { "data-check": check.id },
        mark(check.level),
        el("b", {}, check.title),
        el("p", {}, check.text),
        el(
          "a",
          {
            id: `show:${check.id}`,
            href: mmr.app.link("overview"),
            "aria-label": `Show: ${check.title}`,
            on: {
              click: (event) => {
                event.preventDefault();
                jump(check.to);
              },
            },
          },
          "Show",
        ),
      );
    const calm = (check) =>
      el("li", { "data-check": check.id }, mark("fine"), el("span", {}, el("b", {}, check.title), " ", mmr.muted(check.text)));
    const sample = overview.sample;
    const note = plural(overview.checks.length, "check")
      + (sample.whole ? "" : `, from a sample of ${count(sample.rows)} steps`);
    return card(
      "c5",
      "What stands out",
      note,
      found.length
        ? el("ul", { class: "checks" }, found.map(item))
        : el("p", { class: "calmest" }, mark("fine"), el("b", {}, "Nothing stands out.")),
      fine.length
        ? el(
            "details",
            { open: fineOpen ?? found.length < 3 },
            el("summary", { id: "fine", on: { click: (event) => (fineOpen = !event.target.parentElement.open) } }, `${plural(fine.length, "check")} without a finding`),
            el("ul", { class: "checks calm" }, fine.map(calm)),
          )
        : null,
    );
  }

  function jump(to) {
    if (to === "episodes") {
      location.hash = mmr.app.link("episodes");
      return;
    }
    const target = document.getElementById(to);
    if (!target) return;
    target.scrollIntoView({ behavior: mmr.calm() ? "auto" : "smooth", block: "center" });
    target.setAttribute("tabindex", "-1");
    target.focus({ preventScroll: true });
  }

  const openEpisode = (series) => (i) => {
    const [env, begin] = [series.env_ids[i], series.begin[i]];
    if (mmr.canOpen(mmr.app.id, env, begin)) location.hash = mmr.app.link(`e=${env}:${begin}`);
  };

  function legend(window) {
    const line = el("span", { class: "swatch", css: { "border-color": "var(--text)" } });
    return el(
      "div",
      { class: "legend" },
      mmr.key("one episode", "s0"),
      window > 1 ? el("span", { class: "key" }, line, `mean of ${count(window)}`) : null,
    );
  }

  function episodeReturns(overview, later, checks) {
    const { returns } = overview;
    const known = returns.y.some((value) => value != null);
    const box = el("div");
    const left = returns.total - returns.count;
    let note = plural(returns.count, "episode");
    if (left > 0 && returns.total > 20000) {
      note = `newest ${count(returns.count)} of ${short(returns.total)} episodes`;
    } else if (left > 0) {
      note = `${plural(returns.count, "whole episode")}; ${count(left)} not whole`;
    }
    if (known) {
      later.push(() => {
        const height = innerWidth < 1000 ? 220 : Math.max(240, Math.min(1000, checks.clientHeight - 76));
        mmr.scatter(box, height, {
          x: returns.x, y: returns.y, mean: returns.mean, unit: "return",
          whole: returns.y.every((value) => value == null || Number.isInteger(value)),
          label: `Returns of ${plural(returns.count, "episode")}, mean ${number(returns.average)}`,
          xlabel: "position of the episode's end",
          pick: openEpisode(returns),
        });
      });
    }
    return el(
      "section",
      { class: "card c7", id: "returns" },
      el(
        "header",
        {},
        el("h2", {}, "Episode returns"),
        el("span", { class: "note" }, note),
        el("span", { class: "grow" }),
        known ? legend(returns.window) : null,
      ),
      known ? box : nothing("No episode has ended yet, or there is no scalar reward."),
    );
  }

  function section(className, id, name, note, ...children) {
    const it = card(className, name, note, ...children);
    it.id = id;
    return it;
  }

  function episodeLengths(overview, className, later) {
    const { lengths } = overview;
    const box = el("div");
    if (lengths.y.length) {
      later.push(() =>
        mmr.scatter(box, 190, {
          x: lengths.x, y: lengths.y, mean: lengths.mean, unit: "length", colour: "s2", whole: true,
          label: `Lengths of ${plural(lengths.y.length, "episode")}, mean ${number(lengths.average)}`,
          pick: openEpisode(lengths),
        }),
      );
    }
    const content = lengths.y.length ? box : nothing("No episode has ended yet.");
    return section(className, "lengths", "Episode lengths", "steps", content);
  }

  function ends(overview, className) {
    const kinds = overview.ends;
    const total = kinds.terminated + kinds.truncated + kinds.both + kinds["broken off"];
    const items = [
      ["Terminated", kinds.terminated, "s5"],
      ["Truncated", kinds.truncated, "s4"],
      ...(kinds.both ? [["Both at once", kinds.both, "s3"]] : []),
      ["Broken off", kinds["broken off"], "s1"],
    ];
    const running = kinds.running
      ? el("p", { class: "muted" }, `${plural(kinds.running, "episode")} ${mmr.app.isLive() ? "without an end so far" : "unfinished: no writer goes on with them"}.`)
      : null;
    return section(className, "ends", "How episodes end", `${count(total)} ended`, mmr.barList(items), running);
  }

  function isScalarAction(overview) {
    const all = Object.values(overview.histograms).filter((each) => each.role === "action");
    return all.length === 1 && all[0].all === 1;
  }

  function histogram(component, colour, height, later) {
    if (component.values) {
      return mmr.barList(component.values.map((value, i) => [number(value), component.counts[i]]), colour);
    }
    if (!component.counts.length) return nothing("No finite value.");
    const box = el("div");
    const { edges } = component;
    const label = `Histogram of ${component.name}, from ${number(edges[0])} to ${number(edges.at(-1))}`;
    later.push(() => mmr.bars(box, height, { ...component, colour, label }));
    return box;
  }

  const ofRole = (overview, role) =>
    Object.entries(overview.histograms).filter(([, each]) => each.role === role);

  // Of all steps no number: the figure above counts on while a writer adds steps.
  const rowsNote = (each) => `${each.varies ? "lengths in " : ""}${each.whole ? "all steps" : `${count(each.rows)} steps, a sample`}`;

  function rewards(overview, className, later) {
    const [found] = ofRole(overview, "reward");
    if (!found) {
      return section(className, "rewards", "Rewards", "", nothing("This buffer has no reward field."));
    }
    const [, facts] = found;
    const content = facts.all === 1
      ? histogram(facts.components[0], "s0", HEIGHT, later)
      : smalls([found], later);
    return section(className, "rewards", "Rewards", rowsNote(facts), content);
  }

  // As many in each row, at most six.
  function smalls(found, later) {
    const number_ = found.reduce((sum, [, facts]) => sum + facts.components.length, 0);
    const columns = Math.ceil(number_ / Math.ceil(number_ / 6));
    return el(
      "div",
      { class: "smalls", css: { "--columns": String(columns) } },
      found.flatMap(([path, facts]) =>
        facts.components.map((component) =>
          el("div", {}, el("h3", {}, component.name), histogram(component, `s${mmr.slot(path)}`, 110, later)),
        ),
      ),
    );
  }

  function actions(overview, className, later) {
    const found = ofRole(overview, "action");
    if (!found.length) {
      return section(className, "actions", "Actions", "", nothing("This buffer has no action field."));
    }
    const [path, facts] = found[0];
    const some = facts.all > 8 ? `8 of ${count(facts.all)} components, ` : "";
    const content = className
      ? histogram(facts.components[0], `s${mmr.slot(path)}`, HEIGHT, later)
      : smalls(found, later);
    return section(className, "actions", "Actions", some + rowsNote(facts), content);
  }

  function priorities(overview, later) {
    const facts = overview.priorities;
    if (!facts) return [];
    const box = el("div");
    if (facts.counts.length) {
      const label = `Histogram of ${count(facts.rows)} priorities`;
      later.push(() => mmr.bars(box, HEIGHT, { ...facts, log: facts.counts.length > 1, colour: "s3", label }));
    }
    const some = facts.rows < facts.steps ? `${share(facts.rows / facts.steps)} of ` : "";
    const note = `column “${facts.name}”, ${some}${facts.whole ? "all steps" : `${count(facts.steps)} steps, a sample`}; logarithmic`;
    const alpha = el("input", {
      type: "number", id: "alpha", min: "0", max: "4", step: "0.1", value: String(facts.alpha),
      disabled: mmr.isSaved(),
      on: {
        change: () => {
          const value = Math.min(4, Math.max(0, Number(alpha.value) || 0));
          mmr.app.alpha = value;
          mmr.app.refresh();
        },
      },
    });
    const rows = [
      ["Top 1 % of rows", `${share(facts.top_share)} of the mass`],
      ["Effective sample size", `${share(facts.effective)} of the rows`],
      ["Most frequent priority", `${share(facts.common_share)} of the rows`],
      ["Lowest", number(facts.low)],
      ["Highest", number(facts.high)],
    ];
    return [
      section("c8", "priorities", "Priorities", note, box),
      card(
        "c4",
        "What they do",
        `with alpha ${number(facts.alpha)}`,
        mmr.field("alpha", alpha),
        pairs(rows),
      ),
    ];
  }

  function fields(overview) {
    const total = overview.fields.reduce((sum, field) => sum + field.row_nbytes, 0) || 1;
    const mean = overview.fields.some((field) => field.varies) ? ", mean of the values looked at" : "";
    const heads = ["Name", "Type", "Shape", "Role", "Lowest", "Highest", "Bytes a row", "Share"];
    const row = (field) => {
      const bad = field.nan || field.infinite
        ? el("span", { class: "tag bad" }, `${count(field.nan + field.infinite)} not finite`)
        : null;
      return el(
        "tr",
        { id: `field:${field.path}` },
        el("th", { scope: "row", class: "mono" }, field.path),
        el("td", { class: "mono" }, field.dtype),
        el("td", { class: "mono shape" }, field.shape.length ? field.shape.join(" × ") : "scalar"),
        el("td", {}, field.role ? el("span", { class: "tag role" }, field.role) : "", " ", bad),
        el("td", { class: "num" }, field.low_text ?? limit(field, field.low)),
        el("td", { class: "num" }, field.high_text ?? limit(field, field.high)),
        el("td", { class: "num" }, count(field.row_nbytes)),
        el("td", { class: "num" }, share(field.row_nbytes / total)),
      );
    };
    const table = el(
      "table",
      {},
      el("thead", {}, el("tr", {}, heads.map((name, i) => el("th", { scope: "col", class: i > 3 ? "num" : "" }, name)))),
      el("tbody", {}, overview.fields.map(row)),
    );
    const scroll = el("div", { class: "scroll", id: "scroll", tabindex: "0", role: "region", "aria-label": "Fields" }, table);
    return section("c8", "fields", "Fields", `${size(total)} a row${mean}`, scroll);
  }

  const limit = (field, value) => {
    if (value == null) return number(value);
    if (field.dtype === "bool") return value ? "true" : "false";
    return number(value) + (field.varies ? " long" : "");
  };

  function storage(overview) {
    const facts = overview.storage;
    const rows = [
      ["engine", `${facts.engine}${facts.codec ? `, ${facts.codec}` : ""}`],
      ["layout", facts.layout],
      ["capacity", `${count(overview.capacity)} rows × ${count(overview.num_envs)}`],
      ["laps", overview.laps.toFixed(2)],
      ["generation", count(facts.generation)],
      ["created", facts.created.replace("T", " ").replace("Z", " UTC")],
      // Of a sparse file; small ones take whole blocks, which are more than their bytes.
      ...(facts.disk ? [["on disk", size(facts.disk.allocated) + (facts.disk.allocated < facts.disk.apparent ? ` of ${size(facts.disk.apparent)}` : "")]] : []),
      ...(facts.heap ? [["heap", facts.heap]] : []),
      ["next unknown", plural(facts.never_drawn, "step")],
      ["opening", facts.opening],
      ["path", facts.path],
    ];
    return section("c4", "storage", "Storage", "", pairs(rows));
  }
})();
