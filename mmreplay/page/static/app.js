"use strict";
// The frame around the screens: addresses, state, colours, keys.
(() => {
  const { el, number } = mmr;
  const main = document.getElementById("main");
  const nav = document.getElementById("nav");
  const picker = document.getElementById("buffer");
  const pill = document.getElementById("state");
  const theme = document.getElementById("theme");
  const keys = document.getElementById("keys");
  const WORDS = {
    live: "Live", gone: "Writer gone", closed: "Not being written",
    unreadable: "Cannot be read", removed: "Removed", lost: "No answer from the server",
    saved: "Saved page",
  };
  const TITLES = { overview: "Overview", episodes: "Episodes", draws: "Draws", compare: "Compare" };

  const app = (mmr.app = {
    buffers: [], // as the server listed them
    states: {}, // the newest state by number
    id: 0,
    sampler: "",
    alpha: null,
    settings: null,
    leave: null, // what ends the present screen
    keys: null, // what the present screen does with a key; returns whether it did
    onstate: null,
    recolour: null, // what draws by itself in other colours
    player: null,
    shown: null, // the address of the screen that is drawn
  });

  app.isLive = (id = app.id) => app.states[id]?.state === "live";
  const isRemoved = (id) => app.states[id]?.state === "removed";

  app.link = (parts, id = app.id) => `#${parts}${id ? `&b=${id}` : ""}`;

  // An overview is kept until the next one, or as long as the buffer has the same version.
  const overviews = new Map();
  app.overview = async (id, fresh = false) => {
    const version = app.states[id]?.version;
    const { alpha } = app;
    const known = overviews.get(id);
    const same = known && known.alpha === alpha && (known.version === version || isRemoved(id));
    if (!fresh && same) return known.value;
    const query = alpha == null || mmr.isSaved() ? {} : { alpha: String(alpha) };
    const value = await mmr.json(mmr.path(id, "overview", query));
    overviews.set(id, { version, alpha, value });
    if (app.states[id]) app.states[id].starts ??= value.starts;
    return value;
  };

  function address() {
    const text = location.hash.slice(1);
    const query = new URLSearchParams(text);
    const first = text.split("&")[0];
    const screen = query.has("e") ? "episode" : Object.hasOwn(TITLES, first) ? first : "overview";
    return { id: Number(query.get("b") ?? 0), screen, query };
  }

  // Each address has a turn. A screen whose answers come after the next one's turn has begun
  // draws nothing and registers nothing.
  let turn = 0;
  async function show() {
    const { id, screen, query } = address();
    const own = ++turn;
    const isCurrent = () => own === turn;
    const { hash } = location;
    known = hash;
    app.leave?.();
    app.leave = app.keys = app.onstate = app.recolour = app.player = null;
    isRefused = false;
    app.id = id;
    picker.value = String(id);
    showState();
    showTabs(screen);
    const buffer = app.buffers[id];
    main.replaceChildren(waiting());
    main.setAttribute("aria-busy", "true");
    try {
      if (!buffer) throw new Error("There is no such buffer on this page.");
      const first = hash.slice(1).split("&")[0];
      if (first && !first.includes("=") && !Object.hasOwn(TITLES, first)) throw new Error(`There is no screen “${first}”.`);
      const state = app.states[id];
      if (state?.state === "unreadable") main.replaceChildren(unreadable(state));
      else await mmr.screens[screen](main, query, isCurrent);
    } catch (error) {
      if (isCurrent()) {
        main.replaceChildren(refused(error));
        isRefused = true;
      }
    }
    if (!isCurrent()) return;
    mmr.dropCharts();
    main.removeAttribute("aria-busy");
    showBanner();
    showTabs(screen);
    // What had the focus is gone with the screen before: keys go on in this one.
    if (app.shown && document.activeElement === document.body) main.focus({ preventScroll: true });
    app.shown = hash;
    document.title = `${buffer?.name ?? "mmreplay"} · ${TITLES[screen] ?? "Episode"} · mmreplay`;
  }
  app.refresh = show;

  // A screen puts what it shows into the address. Where another address was followed, whose
  // event is still to come, that one stays.
  let known = location.hash;
  app.putAddress = (parts) => {
    if (location.hash !== known) return;
    history.replaceState(null, "", app.link(parts));
    known = location.hash;
  };

  function waiting() {
    return el("div", { class: "card" }, el("p", { class: "muted" }, "Reading…"), el("div", { class: "skeleton" }));
  }

  const again = () =>
    el("p", {}, mmr.button("Try again", "Try again", () => show()), " ", el("a", { class: "btn", href: app.link("episodes") }, "All episodes"));

  function unreadable(state) {
    return el(
      "div",
      { class: "card empty" },
      el("h1", {}, "This buffer cannot be read"),
      el("p", {}, state.text),
      el("p", {}, "What is proven of it can be restored: ", el("code", {}, state.repair)),
      again(),
    );
  }

  // Above whatever screen is shown, as long as the folder is not at its path.
  let isRefused = false;
  function showBanner() {
    const state = app.states[app.id];
    const text = app.restarted ? mmr.RESTARTED : isRemoved(app.id)
      ? isRefused ? "The folder was removed." : "The folder was removed; what is shown is the last state."
      : state?.moved ? state.text : "";
    const banner = document.getElementById("banner");
    if (banner?.textContent === text) return;
    banner?.remove();
    if (text) main.prepend(el("div", { id: "banner", class: "banner bad", role: "status" }, text));
  }

  function refused(error) {
    return el("div", { class: "card empty" }, el("h1", {}, "This cannot be shown"), el("p", {}, error.message), again());
  }

  // A state says how many steps can be drawn, once an overview was made.
  const hasStart = (state) => (state.starts ?? state.rows) > 0;

  // Tabs only where they can work: a step to draw, a second buffer.
  function tabs() {
    const state = app.states[app.id] ?? {};
    const readable = state.state !== "unreadable";
    return Object.keys(TITLES).filter((screen) => {
      if (screen === "draws") return readable && hasStart(state) && (!mmr.isSaved() || app.sampler);
      if (screen === "compare") return app.buffers.length > 1;
      return true;
    });
  }

  function showTabs(screen) {
    const current = screen === "episode" ? "episodes" : screen;
    const wanted = tabs();
    const have = [...nav.children].map((tab) => tab.dataset.screen);
    if (wanted.join() !== have.join()) {
      nav.replaceChildren(...wanted.map((name) => el("a", { "data-screen": name }, TITLES[name])));
    }
    for (const tab of nav.children) {
      tab.setAttribute("href", app.link(tab.dataset.screen));
      if (tab.dataset.screen === current) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
  }

  function showState() {
    const state = app.states[app.id];
    if (!state) return;
    const kind = mmr.isSaved() ? "saved" : app.lost ? "lost" : state.state;
    const rate = kind === "live" && state.rate != null ? `, ${number(+state.rate.toPrecision(3))} steps/s` : "";
    pill.className = `pill ${kind}`;
    // The rate is no news to be spoken twice a second.
    const [word, speed] = pill.firstChild.children;
    pill.hidden = false;
    if (word.textContent !== WORDS[kind]) word.textContent = WORDS[kind];
    if (speed.textContent !== rate) speed.textContent = rate;
  }

  function takeStates(states) {
    for (const state of states) {
      const before = app.states[state.id]?.state;
      // Frames of a folder that was removed have the addresses that they had.
      if (state.state === "removed") state.version ??= app.states[state.id]?.version;
      app.states[state.id] = state;
      // A buffer that became readable, or ceased to be, has another screen. Of one whose
      // folder was removed, the screen stays.
      const changed = before && before !== state.state && state.state !== "removed";
      const notable = state.state === "unreadable" || ["unreadable", "removed"].includes(before);
      if (changed && notable && state.id === app.id) show();
    }
    showState();
    showBanner();
    showTabs(address().screen);
    app.onstate?.(app.states[app.id]);
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    theme.setAttribute("aria-pressed", String(name === "dark"));
    theme.textContent = name === "dark" ? "☀" : "☾";
    mmr.redrawCharts();
    app.recolour?.();
  }

  function switchTheme() {
    const name = mmr.isDark() ? "light" : "dark";
    try {
      localStorage.setItem("mmreplay-theme", name);
    } catch {
      // Storage is switched off: the choice lasts as long as the page.
    }
    setTheme(name);
  }

  const KEYS = [
    ["Space", "Play, pause"],
    ["← →", "One step back, forward; ten with Shift"],
    ["Home End", "First, last step"],
    ["R Shift+R", "Next, previous reward other than 0"],
    ["E", "The end of the episode, then of the next one"],
    ["N P", "Next, previous episode"],
    ["+ −", "Faster, slower"],
    ["X Z", "Zoom in at the playhead, show all of the episode"],
    ["S", "Select the steps in view"],
    ["↑ ↓ Enter S", "In the table: rows, open, select"],
    ["T", "Dark or light"],
    ["?", "This list"],
  ];
  // Each tab has its key, whichever others are there.
  const keyOf = (screen) => String(Object.keys(TITLES).indexOf(screen) + 1);
  function help() {
    const have = tabs();
    const screens = [have.map(keyOf).join(" "), `Screens: ${have.join(", ")}`];
    keys.replaceChildren(
      el("h1", { id: "keys-title" }, "Keys"),
      el(
        "div",
        { class: "keys" },
        [screens, ...KEYS].flatMap(([names, text]) => [
          el("span", {}, names.split(" ").flatMap((name) => [el("kbd", {}, name), " "])),
          el("span", {}, text),
        ]),
      ),
      el("form", { method: "dialog" }, el("button", { class: "btn main" }, "Close")),
    );
    keys.showModal();
  }

  theme.addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", help);
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  picker.addEventListener("change", () => {
    const { screen } = address();
    location.hash = app.link(Object.hasOwn(TITLES, screen) ? screen : "overview", Number(picker.value));
  });

  function isTyping(element) {
    if (["SELECT", "TEXTAREA"].includes(element.tagName)) return true;
    return element.tagName === "INPUT" && !["range", "checkbox"].includes(element.type);
  }

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || keys.open || isTyping(event.target)) return;
    const screen = tabs().find((name) => keyOf(name) === event.key);
    if (event.key === "?") help();
    else if (event.key.toLowerCase() === "t") switchTheme();
    else if (screen) location.hash = app.link(screen);
    else if (!app.keys?.(event)) return;
    event.preventDefault();
  });

  async function start() {
    setTheme(document.documentElement.dataset.theme);
    main.replaceChildren(waiting());
    try {
      const answer = await mmr.json("/api/buffers");
      app.buffers = answer.buffers;
      app.sampler = answer.sampler;
      for (const state of answer.buffers) app.states[state.id] = state;
      if (mmr.isSaved()) app.settings = await mmr.json("settings");
    } catch (error) {
      main.replaceChildren(refused(error));
      return;
    }
    picker.replaceChildren(...app.buffers.map((each) => el("option", { value: String(each.id) }, each.name)));
    picker.hidden = app.buffers.length < 2;
    if (picker.hidden) picker.after(el("span", { class: "name" }, app.buffers[0]?.name ?? ""));
    addEventListener("hashchange", show);
    await show();
    if (mmr.isSaved()) return;
    listen();
    addEventListener("pagehide", stopListening);
    addEventListener("pageshow", listen);
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible") listen();
      else stopListening();
    });
  }

  // A browser has six connections to a host. Tabs that are hidden, and pages that are kept
  // for the back button, give theirs back: else the seventh tab would wait for ever.
  let stream = null;
  function listen() {
    const wanted = document.visibilityState === "visible";
    if (!wanted || stream) return;
    stream = new EventSource("/api/live");
    stream.addEventListener("state", (event) => {
      app.lost = false;
      takeStates(JSON.parse(event.data));
    });
    stream.addEventListener("error", () => {
      app.lost = true;
      showState();
      // A stream that was refused is not tried again.
      if (stream?.readyState !== EventSource.CLOSED) return;
      mmr.json("/api/buffers").catch((refused_) => {
        app.restarted = refused_.status === 403;
        showBanner();
      });
    });
  }
  function stopListening() {
    stream?.close();
    stream = null;
  }

  start();
})();
