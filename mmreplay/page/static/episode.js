"use strict";
// One episode: frames and curves on one playhead.
(() => {
  const { el, count, number, plural, button, token } = mmr;
  const SPEEDS = [1, 2, 5, 10, 20, 30, 60];
  const COMPONENTS = 8;
  const VALUES_ROWS = 256;
  const VALUES_PAUSE_MS = 80;
  const MAX_CURVES = 12;
  const MAX_CURVE_NBYTES = 1 << 16;
  const WORDS = {
    terminated: "terminated", truncated: "truncated", both: "terminated and truncated",
    running: "no end so far", unfinished: "unfinished, no writer goes on", "broken off": "broken off",
  };
  const ORDER_OF_COLUMNS = ["mean", "highest", "lowest"];
  const ORDER = ["reward", "action", "terminated", "truncated"];

  // How the curves of a buffer were arranged by hand: it holds for its other episodes too.
  const arrangements = new Map();
  // At first the first fields are drawn; the others are switched on one by one.
  function arrangementOf(id, fields) {
    const paths = fields.map((each) => each.path);
    const known = arrangements.get(id);
    if (known && known.groups.flat().sort().join() === [...paths].sort().join()) return known;
    const made = { groups: paths.map((path) => [path]), off: new Set(paths.slice(MAX_CURVES)) };
    arrangements.set(id, made);
    return made;
  }

  // Which step of an episode is shown, which steps are in view, and whether it plays.
  class Playhead {
    static ADDRESS_MS = 250;

    // `moved` draws a step and takes the direction, `settled` writes it into the address,
    // `turned` shows whether it plays, and `ready` says whether a step's frame is read.
    constructor(last, asked, { moved, settled, turned, ready }) {
      Object.assign(this, { last, moved, settled, turned, ready });
      this.step = this.within(asked || 0);
      this.playing = this.stopped = false;
      this.speed = 20;
      this.timer = this.before = this.owed = 0;
      this.lookAtAll();
    }

    within(step) {
      return Math.max(0, Math.min(this.last, step));
    }

    move(to, direction = 0) {
      const target = this.within(to);
      const way = direction || Math.sign(target - this.step) || 1;
      this.step = target;
      this.moved(way);
      clearTimeout(this.timer);
      this.timer = setTimeout(() => {
        if (!this.stopped) this.settled();
      }, Playhead.ADDRESS_MS);
    }

    toggle() {
      this.playing = !this.playing;
      this.turned();
      if (!this.playing) return;
      if (this.step === this.last) this.move(0);
      this.before = performance.now();
      this.owed = 0;
      requestAnimationFrame((now) => this.run(now));
    }

    run(now) {
      if (!this.playing || this.stopped) return;
      this.owed += ((now - this.before) * this.speed) / 1000;
      this.before = now;
      const whole = Math.floor(this.owed);
      // A frame that is still being read is waited for, up to a second.
      if (whole && (this.ready(this.step) || this.owed > this.speed)) {
        this.owed -= whole;
        this.move(this.step + whole, 1);
        if (this.step === this.last) {
          this.toggle();
          return;
        }
      }
      requestAnimationFrame((next) => this.run(next));
    }

    // The next speed of a list, in a direction.
    turnSpeed(speeds, way) {
      const to = speeds.indexOf(this.speed) + way;
      this.speed = speeds[Math.max(0, Math.min(speeds.length - 1, to))];
    }

    lookAt(low, high) {
      const first = Math.max(0, Math.floor(low));
      this.view = [first, Math.max(1, Math.min(this.last, Math.max(Math.ceil(high), first + 2)))];
    }

    lookAtAll() {
      this.view = [0, Math.max(1, this.last)];
    }

    seesAll() {
      return this.view[0] === 0 && this.view[1] >= this.last;
    }

    // Half of the steps in view, around the step.
    nearer() {
      const quarter = Math.max(1, (this.view[1] - this.view[0]) / 4);
      const low = Math.max(0, Math.min(this.step - quarter, this.last - 2 * quarter));
      return [low, low + 2 * quarter];
    }

    stop() {
      this.stopped = true;
      this.playing = false;
      clearTimeout(this.timer);
    }
  }

  mmr.screens.episode = async (main, query, isCurrent) => {
    const app = mmr.app;
    const id = app.id;
    const [env, at] = query.get("e").split(":").map(Number);
    if (!(env >= 0 && at >= 0)) throw new Error(`e=${query.get("e")} is no episode. An address such as #e=0:120 has an environment and a position.`);
    const overview = await app.overview(id);
    // A saved page holds some episodes, each by its first position: others are no neighbours.
    const saved = mmr.isSaved() ? (await mmr.savedEpisodes(id)).filter((each) => each.env === env) : null;
    const asking = saved?.find((each) => each.begin <= at && at < each.stop)?.begin ?? at;
    let episode = await mmr.json(mmr.path(id, "episode", { env: String(env), at: String(asking) }));
    if (!isCurrent()) return;
    const { begin } = episode;
    let head = app.states[id]?.head;
    let { end } = episode;
    let previous = saved ? saved.findLast((each) => each.begin < begin)?.begin : episode.previous;
    let next = saved ? saved.find((each) => each.begin > begin)?.begin : episode.next;
    let length = end - begin;
    const lastStep = () => Math.max(0, length - 1);
    const fieldOf = new Map(overview.fields.map((each) => [each.path, each]));
    const images = overview.fields.filter((field) => field.image);
    // From a draw, the playhead stands on the step that was drawn.
    const at_ = query.get("t");
    const asked = at_ === "end" ? lastStep() : at_ == null ? at - begin : Number(at_);
    const playhead = new Playhead(lastStep(), asked, {
      moved: showStep,
      settled: () => app.putAddress(`e=${env}:${begin}&t=${playhead.step}`),
      turned: () => (play.textContent = playhead.playing ? "❚❚ Pause" : "▶ Play"),
      ready: (step) => !reel || reel.get(step),
    });
    const plots = [];
    const curves = [];
    const roleRank = (each) => ["reward", "action", "observation"].indexOf(each.role) + 1 || 9;
    const others = overview.fields.filter((each) => !each.image && !["terminated", "truncated"].includes(each.role));
    const drawable = others
      .filter((each) => each.nbytes <= MAX_CURVE_NBYTES)
      .sort((a, b) => roleRank(a) - roleRank(b));
    const wide = others.filter((each) => each.nbytes > MAX_CURVE_NBYTES);
    const arrangement = arrangementOf(id, drawable);

    const canvas = el("canvas", { width: 1, height: 1, role: "img", "aria-label": "Frame at the playhead" });
    const wait = el("span", { class: "wait", hidden: true }, "reading");
    const time = el("span", { class: "time" });
    const ticks = el("canvas", { "aria-hidden": "true" });
    const slider = el("input", { type: "range", id: "step", min: "0", max: String(playhead.last), step: "1", "aria-label": "Step" });
    const values = el("dl", { class: "now", "aria-label": "Values at this step" });
    const chartBox = el("div");
    const exportBox = mmr.selectionBox();
    const scale = mmr.muted();
    const rewardsNote = el("span", { class: "muted", role: "status", "data-note": "rewards" });
    const play = button("▶ Play", "Play or pause (Space)", () => playhead.toggle(), "btn main");
    const setSpeed = () => (playhead.speed = Number(rate.value));
    const rate = mmr.select({ id: "speed" }, setSpeed, SPEEDS.map((each) => [each, `${each}/s`]), playhead.speed);
    const nextReward = button("◆ Next reward", "Next reward other than 0 (R)", () => toReward(1));
    let field = images.find((each) => each.path === query.get("image")) ?? images[0];
    let reel = field ? new mmr.Reel(id, field, env, begin, end) : null;
    const setImage = () => {
      field = images.find((each) => each.path === lens.value);
      reel = new mmr.Reel(id, field, env, begin, end);
      shown = -1;
      playhead.move(playhead.step);
    };
    const lens = mmr.select({ id: "image" }, setImage, images.map(({ path }) => [path, path]), field?.path);

    draw();

    function draw() {
      main.replaceChildren(
        heading(),
        el(
          "section",
          { class: "card c5 stage", "aria-label": "Player" },
          images.length ? el("div", { class: "screen" }, canvas, wait) : null,
          el("div", { class: "scrub" }, ticks, slider),
          el(
            "div",
            { class: "transport" },
            button("|◀", "First step (Home)", () => playhead.move(0)),
            button("◀", "One step back (←)", () => playhead.move(playhead.step - 1)),
            play,
            button("▶", "One step forward (→)", () => playhead.move(playhead.step + 1)),
            button("▶|", "Last step (End)", () => playhead.move(playhead.last)),
            nextReward,
            time,
          ),
          el(
            "div",
            { class: "transport" },
            mmr.field("Speed", rate),
            images.length > 1 ? mmr.field("Image", lens) : null,
            scale,
            rewardsNote,
          ),
          el("h2", {}, "At this step"),
          values,
        ),
        el(
          "section",
          { class: "card c7", "aria-label": "Curves" },
          drawable.length ? drawCurvesHead() : mmr.nothing("No field can be drawn as a curve."),
          chartBox,
          wide.map((each) =>
            mmr.nothing(`${each.path} is not drawn: a row of it has ${mmr.size(each.nbytes)}, a curve is read of ${mmr.size(MAX_CURVE_NBYTES)} at most.`),
          ),
        ),
        exportBox,
      );
    }

    function heading() {
      const badge = (text) => el("span", { class: "quick" }, text);
      let returned = null;
      if (episode.rewards) {
        const bad = episode.nonfinite ? `return not finite: ${plural(episode.nonfinite, "reward")}` : "return not known";
        returned = badge(episode.return == null ? bad : `return ${number(episode.return)}`);
      }
      const neighbour = (to, text, label) =>
        to == null
          ? el("button", { class: "btn", type: "button", disabled: true, "aria-label": label }, text)
          : el("a", { class: "btn", href: app.link(`e=${env}:${to}`), "aria-label": label }, text);
      return el(
        "div",
        { class: "title" },
        el("h1", {}, `Episode ${count(episode.number + 1)} of ${count(episode.count)}`),
        badge(plural(length, "step")),
        returned,
        badge(WORDS[episode.kind] ?? episode.kind),
        mmr.muted(`environment ${env}, positions ${count(episode.begin)} to ${count(end - 1)}, `, el("span", { id: "age" }, ageText())),
        episode.missing_start ? el("span", { class: "tag" }, "its first steps were overwritten") : null,
        el("span", { class: "grow" }),
        el(
          "span",
          { class: "pair" },
          neighbour(previous, "← Previous", "← Previous episode (P)"),
          neighbour(next, "Next →", "Next → episode (N)"),
        ),
      );
    }

    function ageText() {
      const rateNow = app.states[id]?.rate;
      // It moves with the writer: environments are taken to go on together.
      const age = episode.age + Math.max(0, (app.states[id]?.head - head) / overview.num_envs || 0);
      const steps = `${plural(age, "step")} ago`;
      if (!rateNow || app.states[id]?.state !== "live") return steps;
      const seconds = (age * overview.num_envs) / rateNow;
      return `${steps}, about ${mmr.ago(seconds)} at ${number(+rateNow.toPrecision(3))} steps/s`;
    }

    // The step at the playhead.

    let shown = -1;
    function showStep(way) {
      slider.value = String(playhead.step);
      time.textContent = timeText();
      showFrame(way);
      showValues();
      for (const { plot } of plots) placePlayhead(plot);
    }
    function timeText() {
      return `${count(playhead.step)} / ${count(playhead.last)}`;
    }

    function showFrame(direction) {
      if (!reel) return;
      const own = reel;
      const put = (at_, frame) => {
        mmr.paint(canvas, frame);
        shown = at_;
        fit(frame);
        wait.hidden = at_ === playhead.step;
      };
      const known = reel.get(playhead.step);
      if (known && shown !== playhead.step) put(playhead.step, known);
      else if (!known) {
        wait.textContent = "reading";
        wait.hidden = false;
      }
      reel.want(playhead.step, direction, (at_, frame, error) => {
        if (playhead.stopped || own !== reel) return;
        if (frame) {
          if (shown !== at_) put(at_, frame);
        } else {
          wait.hidden = false;
          wait.textContent = error?.status === 410 ? "overwritten" : (error?.message ?? "not there");
        }
      });
    }

    // Whole-number zoom and hard pixels from 1.5 times on, smooth below.
    let fitted = "";
    function fit(frame) {
      const box = canvas.parentElement;
      const key = [frame.width, frame.height, box.clientWidth, field.path].join();
      if (key === fitted) return;
      fitted = key;
      const ratio = Math.min(box.clientWidth / frame.width, box.clientHeight / frame.height);
      const zoom = ratio >= 2 ? Math.floor(ratio) : ratio;
      canvas.style.width = `${frame.width * zoom}px`;
      canvas.style.height = `${frame.height * zoom}px`;
      canvas.classList.toggle("crisp", ratio >= 1.5);
      const { height, width, stack } = field.image;
      const stacked = stack > 1 ? `, newest of ${stack}` : "";
      const limits = frame.low == null ? "" : `, ${number(frame.low)} to ${number(frame.high)}`;
      scale.textContent = `${height} × ${width}${stacked}${limits}`;
    }

    // Values of the step, read in blocks: one request at a time, and while the playhead is
    // dragged not for each step, as frames come first.
    const rows = new Map();
    let reading = false;
    async function showValues() {
      if (rows.has(begin + playhead.step)) {
        drawValues(rows.get(begin + playhead.step));
        return;
      }
      if (reading) return;
      reading = true;
      try {
        while (!playhead.stopped && !rows.has(begin + playhead.step)) {
          const wanted = playhead.step;
          await readValues(begin + Math.floor(wanted / VALUES_ROWS) * VALUES_ROWS);
          if (rows.has(begin + playhead.step)) break;
          if (wanted === playhead.step) throw new Error("This step is not in the buffer any more.");
          await new Promise((resolve) => setTimeout(resolve, VALUES_PAUSE_MS));
        }
        if (!playhead.stopped) drawValues(rows.get(begin + playhead.step));
      } catch (error) {
        if (!playhead.stopped) values.replaceChildren(el("dt", {}, "values"), el("dd", {}, error.message));
      }
      reading = false;
    }

    async function readValues(first) {
      const query = { env: String(env), first: String(first), count: String(VALUES_ROWS) };
      const answer = await mmr.exactJson(mmr.path(id, "values", query));
      answer.flags.forEach((flags, i) => {
        const row = Object.entries(answer.values).map(([path, columns]) => [path, columns[i]]);
        rows.set(answer.first + i, Object.fromEntries(row));
      });
      while (rows.size > 16 * VALUES_ROWS) rows.delete(rows.keys().next().value);
    }

    function drawValues(row) {
      const rank = (path) => (ORDER.indexOf(fieldOf.get(path)?.role) + 1 || 9);
      const paths = Object.keys(row).sort((a, b) => rank(a) - rank(b));
      const seen = new Map(); // fields so far, by colour
      values.replaceChildren(
        ...paths.flatMap((path) => {
          const slot = mmr.slot(path);
          const before = seen.get(slot) ?? 0;
          seen.set(slot, before + 1);
          return [
            el("dt", {}, mmr.swatchOf(path, before), path),
            el("dd", { "data-value": path }, valueText(path, row[path])),
          ];
        }),
      );
      const reward = overview.fields.find((each) => each.role === "reward");
      const spoken = reward && row[reward.path] ? `, reward ${valueText(reward.path, row[reward.path])}` : "";
      slider.setAttribute("aria-valuetext", `step ${playhead.step} of ${playhead.last}${spoken}`);
    }

    function valueText(path, components) {
      if (typeof components === "string") return components; // of a value that varies
      const isWhole = fieldOf.get(path)?.integer;
      const one = (value) => {
        if (typeof value === "boolean") return value ? "yes" : "no";
        if (value == null) return "not finite";
        return isWhole ? mmr.exact(value) : number(value);
      };
      if (components.length === 1) return one(components[0]);
      return `[${components.map(one).join(", ")}${components.length === COMPONENTS ? ", …" : ""}]`;
    }

    // The first rewards other than 0 are listed; those after them are searched for.
    let listed = [];
    let isListed = true;
    function listRewards() {
      const { at: some, count: all } = episode.rewards ?? { at: [], count: 0 };
      listed = some.map((each) => each + episode.begin - begin);
      isListed = listed.length >= all;
      nextReward.hidden = !(0 < all && all < length);
    }
    let searching = 0;
    async function toReward(way) {
      const own = ++searching;
      const { step: from, last } = playhead;
      const behind = isListed || mmr.isSaved() ? last + 1 : listed.at(-1) + 1;
      const later = [Math.max(behind, way > 0 ? from + 1 : 0), way > 0 ? last + 1 : from];
      const inList = () => (way > 0 ? listed.find((each) => each > from) : listed.findLast((each) => each < from));
      try {
        const found = way > 0
          ? (inList() ?? (await findReward(...later, way)))
          : ((await findReward(...later, way)) ?? inList());
        if (own !== searching || from !== playhead.step || playhead.stopped) return;
        if (found != null) playhead.move(found);
        else if (way > 0 && !isListed && mmr.isSaved()) rewardsNote.textContent = "later rewards are not in the saved page";
      } catch (error) {
        if (!playhead.stopped) rewardsNote.textContent = error.message;
      }
    }

    // The first or last step of a range with a reward other than 0.
    async function findReward(first, stop, way) {
      if (first >= stop) return null;
      const query = { env: String(env), first: String(begin + first), stop: String(begin + stop), back: way < 0 ? "1" : "0" };
      const { at: found, rest: [low, high] } = await mmr.json(mmr.path(id, "reward", query));
      return found != null ? found - begin : findReward(low - begin, high - begin, way);
    }

    function drawTicks() {
      const width = ticks.clientWidth || 300;
      ticks.width = width * devicePixelRatio;
      ticks.height = 12 * devicePixelRatio;
      const context = ticks.getContext("2d");
      context.scale(devicePixelRatio, devicePixelRatio);
      context.fillStyle = token("s0");
      context.globalAlpha = 0.8;
      const { rewards } = episode;
      if (!rewards || rewards.count > length * 0.8) return;
      rewardsNote.textContent = isListed ? "" : `ticks: first ${count(listed.length)} of ${count(rewards.count)} rewards`;
      listed.forEach((each, i) => {
        const left = (each / Math.max(1, playhead.last)) * (width - 16) + 8;
        context.fillRect(left - 1, rewards.values[i] > 0 ? 0 : 6, 2, 6);
      });
    }

    slider.addEventListener("input", () => playhead.move(Number(slider.value)));

    // Curves.

    // The playhead over each chart; a click moves it, a double click shows all.
    const heads = new WeakMap();
    function placePlayhead(plot) {
      const head = heads.get(plot);
      const left = plot.valToPos(playhead.step, "x");
      head.hidden = !(left >= 0 && left <= plot.over.clientWidth);
      head.style.left = `${left}px`;
    }
    const playheadLine = {
      hooks: {
        init: (plot) => {
          const head = el("div", { class: "playhead" });
          heads.set(plot, head);
          plot.over.append(head);
        },
        draw: placePlayhead,
        ready: (plot) => {
          let from = 0;
          plot.over.addEventListener("pointerdown", (event) => (from = event.clientX));
          plot.over.addEventListener("click", (event) => {
            if (Math.abs(event.clientX - from) < 4) playhead.move(Math.round(plot.posToVal(plot.cursor.left, "x")));
          });
          plot.over.addEventListener("dblclick", showAll);
        },
      },
    };

    // A step is as wide as the distance to the next one: the first and the last are seen
    // whole.
    const limits = () => ({ min: playhead.view[0] - 0.5, max: playhead.view[1] + 0.5 });

    let zoomTimer = 0;
    function zoom(low, high) {
      playhead.lookAt(low, high);
      clearTimeout(zoomTimer);
      zoomTimer = setTimeout(() => {
        for (const curve of curves) curve.load();
      }, 60);
      for (const { plot } of plots) plot?.setScale("x", limits());
    }
    function zoomIn() {
      zoom(...playhead.nearer());
    }
    function showAll() {
      zoom(0, playhead.last);
    }

    // The steps in view, or the whole episode with its final row.
    function selectSteps() {
      const [first, until] = [begin + playhead.view[0], begin + playhead.view[1] + 1];
      const whole = first === begin && until >= end;
      const stop = whole ? end + (episode.final_row ? 1 : 0) : until;
      mmr.selectionOf(overview).set(whole ? `${env}:${begin}` : `${env}:${first}-${stop}`, [env, first, stop]);
      mmr.drawSelection(exportBox, overview);
    }

    // Charts are drawn group by group; fields that are switched off have none.
    let drawing = 0;
    async function drawCharts(focused = "") {
      const own = ++drawing;
      curves.length = plots.length = 0;
      chartBox.replaceChildren();
      for (const group of arrangement.groups) {
        const fields = group.filter((path) => !arrangement.off.has(path)).map((path) => drawable.find((each) => each.path === path));
        if (!fields.length) continue;
        await addChart(fields);
        if (playhead.stopped || own !== drawing) return;
      }
      mmr.dropCharts();
      chartBox.querySelector(`[data-group="${CSS.escape(focused)}"]`)?.focus();
    }

    function drawCurvesHead() {
      const fieldKey = ({ path }) => {
        const turn = (on) => {
          arrangement.off[on ? "delete" : "add"](path);
          drawCharts();
        };
        return mmr.toggle({ class: "key", "aria-label": `Show ${path}` }, !arrangement.off.has(path), turn, mmr.swatchOf(path), path);
      };
      const more = drawable.slice(MAX_CURVES);
      return el(
        "header",
        {},
        el("h2", {}, "Curves"),
        drawable.length > 1 ? el("div", { class: "legend", role: "group", "aria-label": "Fields" }, drawable.slice(0, MAX_CURVES).map(fieldKey)) : null,
        el("span", { class: "grow" }),
        el(
          "span",
          { class: "pair" },
          button("Zoom in", "Zoom in at the playhead (X); or drag over a curve", zoomIn, "btn small"),
          button("Show all", "Show all of the episode (Z); or double click", showAll, "btn small"),
          button("Select steps", "Select steps in view, to take them away (S)", selectSteps, "btn small"),
        ),
        more.length
          ? el(
              "details",
              { class: "alone" },
              el("summary", {}, plural(more.length, "more field")),
              el("div", { class: "legend", role: "group", "aria-label": "More fields" }, more.map(fieldKey)),
            )
          : null,
      );
    }

    // Fields that share a chart share its axes: they are drawn together or apart by hand.
    function grouping(fields) {
      const own = arrangement.groups.find((group) => group.includes(fields[0].path));
      const join = (path) => {
        const other = arrangement.groups.find((group) => group.includes(path));
        arrangement.groups.splice(arrangement.groups.indexOf(own), 1);
        other.push(...own);
        drawCharts(other[0]);
      };
      const split = () => {
        arrangement.groups.splice(arrangement.groups.indexOf(own), 1, ...own.map((path) => [path]));
        drawCharts(own[0]);
      };
      if (own.length > 1) {
        const it = button("Split", `Draw ${own.join(", ")} apart`, split, "btn small");
        it.dataset.group = own[0];
        return it;
      }
      const others = arrangement.groups.filter((group) => group !== own && !group.every((path) => arrangement.off.has(path)));
      if (!others.length) return null;
      const props = { class: "small", "data-group": own[0], "aria-label": `Draw ${own[0]} in the chart of` };
      const choices = others.map((group) => [group[0], group.join(" + ")]);
      return mmr.select(props, (event) => join(event.target.value), [["", "Group with…"], ...choices]);
    }

    async function addChart(fields) {
      const title = fields.map((each) => each.path).join(" + ");
      const several = fields.length > 1;
      const sticksOnly = fields.every((each) => each.role === "reward");
      const legend = el("div", { class: "legend", role: "group", "aria-label": `Components of ${title}` });
      const box = el("div");
      const remark = mmr.muted();
      const pagers = el("span", { class: "pair" });
      const from = new Map(fields.map((each) => [each.path, 0]));
      const hidden = new Set(); // names of components
      chartBox.append(
        el(
          "div",
          { class: "curve", "data-curve": title },
          el("header", {}, el("h3", {}, fields.map((each) => each.path + (each.varies ? " (length)" : "")).join(" + ")), grouping(fields), remark, pagers, el("span", { class: "grow" }), legend),
          box,
        ),
      );
      let data = null;
      let plot = null;
      curves.push({
        title,
        load,
        data: () => data,
        scale: () => [plot.plot.scales.x.min + 0.5, plot.plot.scales.x.max - 0.5],
      });

      async function load() {
        try {
          await read();
        } catch (error) {
          remark.textContent = error.message;
        }
      }

      function request(each) {
        const saved = mmr.isSaved();
        const buckets = saved
          ? app.settings.buckets
          : Math.max(64, Math.min(4096, Math.round(2 * (box.clientWidth || 600))));
        const [first, stop] = saved ? [begin, end] : [begin + playhead.view[0], Math.min(end, begin + playhead.view[1] + 1)];
        const low = from.get(each.path);
        return mmr.binary(
          mmr.path(id, "curve", {
            env: String(env), field: each.path, first: String(first), stop: String(stop),
            buckets: String(buckets), c0: String(low), c1: String(low + COMPONENTS),
          }),
        );
      }

      async function read() {
        const answers = await Promise.all(fields.map(request));
        if (playhead.stopped) return;
        const [{ head }] = answers;
        const { buckets, first, stop } = head;
        if (answers.some((each) => each.head.first !== first || each.head.stop !== stop)) {
          throw new Error("Steps were overwritten while they were read.");
        }
        const steps = stop - first;
        const plain = buckets === steps;
        const x = Array.from({ length: buckets }, (_, i) => first - begin + Math.floor((i * steps) / buckets));
        // Large numbers that lie close together come as distances from an offset. They are
        // drawn as distances if all of a chart are.
        const offsets = answers.flatMap(({ head: own }) => own.offsets ?? own.names.map(() => "0"));
        const base = offsets.every((offset) => Number(offset)) ? offsets[0] : "0";
        const lines = fields.flatMap((each, i) => {
          const { head: own, body, start } = answers[i];
          const order = fields.slice(0, i).filter((other) => other.role !== "reward").length;
          const column = (k, c) => {
            const values_ = new Float32Array(body, start + 4 * buckets * (k * own.components + c), buckets);
            const more = mmr.minus(own.offsets?.[c] ?? "0", base);
            return Array.from(values_, (value) => (Number.isNaN(value) ? null : value + more));
          };
          return own.names.map((name, c) => ({
            name, path: each.path, component: from.get(each.path) + c, order,
            integer: own.integer, sticks: each.role === "reward",
            lowest: column(0, c), highest: column(1, c), mean: column(2, c),
          }));
        });
        const same = data && data.plain === plain && data.lines.map((line) => line.name).join() === lines.map((line) => line.name).join();
        mmr.styles(lines).forEach((style, i) => (lines[i].style = style));
        data = { x, lines, plain, base, end: stop - begin };
        const nonfinite = answers.reduce((sum, each) => sum + each.head.nonfinite, 0);
        const means = lines.some((line) => !line.integer && !line.sticks);
        remark.textContent = [
          base === "0" ? "" : `above ${mmr.plus(base, 0)}`,
          nonfinite ? `${plural(nonfinite, "value")} not finite, drawn as gaps` : "",
          plain ? "" : `${means ? "mean, " : ""}lowest and highest of every ${count(Math.ceil(steps / buckets))} steps`,
        ].filter(Boolean).join("; ");
        pagers.replaceChildren(...fields.flatMap((each, order) => pager(each, answers[order].head.all)));
        if (same) {
          plot.plot.setData([x, ...columns()], false);
          plot.plot.setScale("x", limits());
        } else make();
      }

      const columns = () => ORDER_OF_COLUMNS.flatMap((which) => data.lines.map((line) => line[which]));

      function pager(each, all) {
        if (all <= COMPONENTS) return [];
        const low = from.get(each.path);
        const to = (next) => () => {
          from.set(each.path, next);
          load();
        };
        const back = button("‹", `Components before of ${each.path}`, to(Math.max(0, low - COMPONENTS)), "btn small");
        const on = button("›", `Components after of ${each.path}`, to(low + COMPONENTS), "btn small");
        back.disabled = low === 0;
        on.disabled = low + COMPONENTS >= all;
        const range = `${low} to ${Math.min(all, low + COMPONENTS) - 1} of ${count(all)}`;
        return [back, mmr.muted(several ? `${each.path} ${range}` : range), on];
      }

      function make() {
        drawLegend();
        if (plot) {
          plots.splice(plots.indexOf(plot), 1);
          plot.plot.destroy();
        }
        const inner = el("div");
        box.replaceChildren(inner);
        plot = mmr.chart(inner, several ? 200 : sticksOnly ? 110 : 140, options, `${title} over the steps of the episode`);
        plots.push(plot);
        mmr.dropCharts();
      }

      function drawLegend() {
        const key = (line, i) => {
          const { name, path } = line;
          const turn = (show) => {
            hidden[show ? "delete" : "add"](name);
            for (const k of [0, 1, 2]) plot.plot.setSeries(k * data.lines.length + i + 1, { show });
          };
          return mmr.toggle(
            { class: "key", "aria-label": `Show ${name}` }, !hidden.has(name), turn,
            mmr.swatch(line.style), several ? name : name.slice(path.length),
          );
        };
        legend.replaceChildren(...(data.lines.length > 1 ? data.lines.map(key) : []));
      }

      // The mean is a line, lowest and highest are a band. Of whole numbers lowest and
      // highest are steps; a reward is a stick.
      function options() {
        const n = data.lines.length;
        const isStepped = (line) => line.integer && !line.sticks;
        const seriesOf = (line, which, i) => {
          const { colour, dash } = mmr.series(line.style);
          const base = { show: !hidden.has(line.name), points: { show: false } };
          if (line.sticks) {
            if (which === "mean") return { ...base, stroke: "transparent", width: 0 };
            return { ...base, stroke: colour, fill: colour, width: 0, paths: uPlot.paths.bars({ size: [0.9, 4] }) };
          }
          if (isStepped(line)) {
            // Where each step is drawn, all three are the same.
            if (which === "mean" || (data.plain && which === "lowest")) return { ...base, paths: () => null };
            const lowest = which === "highest" && !data.plain ? 2 * n + i + 1 : null;
            return { ...base, stroke: colour, dash, width: 1.5, fill: `${colour}38`, paths: mmr.steps(lowest, () => data.end) };
          }
          if (which !== "mean") return { ...base, stroke: "transparent", width: 0 };
          return { ...base, stroke: colour, dash, width: 1.5, spanGaps: false, points: mmr.lone(colour) };
        };
        const bands = data.lines.flatMap((line, i) => {
          if (line.sticks || isStepped(line) || data.plain) return [];
          return [{ series: [n + i + 1, 2 * n + i + 1], fill: `${mmr.series(line.style).colour}38` }];
        });
        const hasSticks = data.lines.some((line) => line.sticks);
        const range = (plot_, low, high) => {
          if (low == null) return [0, 1];
          const [bottom, top] = mmr.limitsOf([low, high]);
          return hasSticks ? [Math.min(0, bottom), Math.max(0, top)] : [bottom, top];
        };
        return {
          data: [data.x, ...columns()],
          options: {
            scales: { x: { time: false, range: () => [limits().min, limits().max] }, y: { range } },
            axes: [
              mmr.axis({ size: 24, values: mmr.labels, incrs: mmr.WHOLE }),
              mmr.axis({ size: 52, values: mmr.labels, space: 22, ...(data.lines.every((line) => line.integer) ? { incrs: mmr.WHOLE } : {}) }),
            ],
            bands,
            series: [{}, ...ORDER_OF_COLUMNS.flatMap((which) => data.lines.map((line, i) => seriesOf(line, which, i)))],
            cursor: {
              sync: { key: "episode", setSeries: false },
              y: false,
              drag: { x: true, y: false, setScale: false },
              points: { show: false },
            },
            select: { show: true },
            hooks: {
              setSelect: [
                (plot_) => {
                  const { left, width } = plot_.select;
                  if (width <= 4) return;
                  zoom(...[left, left + width].map((at_) => Math.round(plot_.posToVal(at_, "x"))));
                  plot_.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
                },
              ],
            },
            plugins: [playheadLine, mmr.tip(tipText, { "data-tip": title })],
          },
        };
      }

      // Of a bucket: its steps, and for each component the mean, lowest and highest.
      function tipText(plot_, i) {
        const textOf = (value) => (data.base === "0" ? number(value) : mmr.plus(data.base, value));
        const lines = data.lines.filter((line) => !hidden.has(line.name));
        const label = (line) => {
          if (data.lines.length < 2) return "";
          return `${several ? line.name : line.name.slice(line.path.length)} `;
        };
        if (data.plain) {
          const values_ = lines.map((line) => `${several ? label(line) : ""}${line.mean[i] == null ? "gap" : textOf(line.mean[i])}`);
          return `${count(data.x[i])}: ${values_.join("  ")}`;
        }
        const until = (data.x[i + 1] ?? data.end) - 1;
        const texts = lines.map((line) => {
          if (line.mean[i] == null) return `${label(line)}gap`;
          return `${label(line)}${textOf(line.mean[i])}, ${textOf(line.lowest[i])} to ${textOf(line.highest[i])}`;
        });
        return [`${count(data.x[i])} to ${count(until)}: mean, lowest to highest`, ...texts].join("\n");
      }

      await load();
    }

    // An episode without an end grows while it is shown. Its first steps may be overwritten:
    // steps are counted from where it began at first.
    const PAUSE_MS = 2000;
    let grown = performance.now();
    let growth = 0;
    let took = 0;
    function follow(state) {
      const age = document.getElementById("age");
      if (age && age.textContent !== ageText()) age.textContent = ageText();
      if (growth || episode.kind !== "running" || !(state?.head > 0)) return;
      if (state.version === follow.version) return;
      growth = setTimeout(grow, Math.max(0, Math.max(PAUSE_MS, 10 * took) - (performance.now() - grown)));
    }
    async function grow() {
      follow.version = app.states[id]?.version;
      grown = performance.now();
      try {
        const newer = await mmr.json(mmr.path(id, "episode", { env: String(env), at: String(end - 1) }));
        if (playhead.stopped) return;
        await take(newer);
      } catch {
        // The state says why, or curves do.
      }
      took = performance.now() - grown;
      growth = 0;
      if (!playhead.stopped) follow(app.states[id]);
    }
    async function take(newer) {
      const all = playhead.seesAll();
      episode = newer;
      head = app.states[id]?.head;
      ({ end, previous, next } = newer);
      length = end - begin;
      playhead.last = lastStep();
      if (reel) reel.end = end;
      slider.max = String(playhead.last);
      time.textContent = timeText();
      const title = main.querySelector(".title");
      const focused = title.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
      title.replaceWith(heading());
      if (focused) main.querySelector(`.title [aria-label="${focused}"]`).focus();
      listRewards();
      drawTicks();
      if (!all) return;
      playhead.lookAtAll();
      await Promise.all(curves.map((curve) => curve.load()));
      for (const { plot } of plots) placePlayhead(plot);
    }

    // Keys.

    app.keys = (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const key = event.key.toLowerCase(); // also with Caps Lock
      const onButton = ["BUTTON", "A", "SUMMARY"].includes(event.target.tagName);
      if (way) playhead.move(playhead.step + way * (event.shiftKey ? 10 : 1));
      else if (event.key === "Home") playhead.move(0);
      else if (event.key === "End") playhead.move(playhead.last);
      else if (event.key === " " && !onButton) playhead.toggle();
      else if (key === "r") toReward(event.shiftKey ? -1 : 1);
      else if (key === "e" && playhead.step < playhead.last) playhead.move(playhead.last);
      else if (key === "e" && next != null) location.hash = app.link(`e=${env}:${next}&t=end`);
      else if (key === "n" && next != null) location.hash = app.link(`e=${env}:${next}`);
      else if (key === "p" && previous != null) location.hash = app.link(`e=${env}:${previous}`);
      else if (event.key === "+" || event.key === "-") {
        playhead.turnSpeed(SPEEDS, event.key === "+" ? 1 : -1);
        rate.value = String(playhead.speed);
      } else if (key === "z") showAll();
      else if (key === "x") zoomIn();
      else if (key === "s") selectSteps();
      else return false;
      return true;
    };
    app.leave = () => {
      playhead.stop();
      clearTimeout(growth);
    };
    app.onstate = follow;
    app.recolour = drawTicks;
    // For tests that measure how fast frames are shown.
    app.player = { move: (to) => playhead.move(to), shown: () => shown, curves: () => curves, zoom };

    mmr.drawSelection(exportBox, overview);
    follow.version = app.states[id]?.version;
    listRewards();
    playhead.move(playhead.step);
    drawTicks();
    await drawCharts();
  };
})();
