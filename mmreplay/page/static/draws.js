"use strict";
// What a sampler draws: 256 steps with frames, probabilities, weights and ages.
(() => {
  const { el, card, count, number, share, key } = mmr;

  mmr.screens.draws = async (main, query, isCurrent) => {
    const app = mmr.app;
    const id = app.id;
    const overview = await app.overview(id);
    const saved = mmr.isSaved() ? await mmr.savedEpisodes(id) : null;
    if (!isCurrent()) return;
    const image = mmr.imageOf(overview);
    const initial = query.get("sampler") || app.sampler || (overview.priorities ? "PrioritizedSampler(alpha=0.6)" : "UniformSampler()");
    let seed = 0;
    let stopped = false;

    const text = el("input", { type: "text", id: "sampler", class: "mono", value: initial, spellcheck: "false", disabled: mmr.isSaved(), maxLength: 300 });
    const error = el("p", { class: "error", role: "alert", hidden: true });
    const result = el("div", { class: "wide-grid" });
    const draw = (event) => {
      event?.preventDefault();
      load(event ? seed + 1 : seed);
    };
    main.replaceChildren(
      el("div", { class: "title" }, el("h1", {}, "What is drawn"), mmr.muted("256 steps; nothing is written, no priority changes")),
      el(
        "section",
        { class: "card", "aria-label": "Sampler" },
        el(
          "form",
          { class: "filters", on: { submit: draw } },
          mmr.field("Sampler", text, "field wide-field"),
          el("button", { class: "btn main", type: "submit", disabled: mmr.isSaved() }, "Draw again"),
        ),
        error,
      ),
      result,
    );

    let turn = 0;
    async function load(wanted) {
      const own = ++turn;
      result.setAttribute("aria-busy", "true");
      try {
        const answer = await mmr.json(mmr.path(id, "draws", { sampler: text.value, seed: String(wanted) }));
        if (stopped || own !== turn) return;
        seed = wanted;
        error.hidden = true;
        show(answer);
        if (!mmr.isSaved()) app.putAddress(`draws&sampler=${encodeURIComponent(text.value)}`);
      } catch (refused) {
        if (stopped || own !== turn) return;
        error.hidden = false;
        error.textContent = refused.message;
      }
      result.removeAttribute("aria-busy");
    }

    function show(answer) {
      const ages = el("div");
      const weights = el("div");
      const drawn = answer.positions.length;
      const distinct = new Set(answer.positions.map((p, i) => `${answer.env_ids[i]}:${p}`)).size;
      const total = answer.stored.reduce((sum, n) => sum + n, 0) || 1;
      // Both as shares: a batch has few rows beside the ring.
      const series = [
        { name: "stored", counts: answer.stored.map((n) => Math.round((n / total) * drawn * 100) / 100), colour: "s4" },
        { name: "drawn", counts: answer.drawn, colour: "s0" },
      ];
      const most = Math.max(...answer.probabilities);
      const alike = most - Math.min(...answer.probabilities) <= 1e-6 * most; // but for rounding
      const byAge = (a, b) => answer.ages[a] - answer.ages[b];
      const byProbability = (a, b) => answer.probabilities[b] - answer.probabilities[a];
      const order = answer.positions.map((_, i) => i).sort(alike ? byAge : byProbability);
      result.replaceChildren(
        card(
          "c7",
          "Age of drawn and stored steps",
          "steps since; stored ones scaled to 256",
          el("div", { class: "legend" }, key("stored", "s4"), key("drawn", "s0")),
          ages,
        ),
        card(
          "c5",
          "This batch",
          answer.seed == null ? "" : `seed ${answer.seed}${answer.own_seed ? ", the sampler's own" : ""}`,
          mmr.pairs([
            // Of a sampler of windows or episodes, such as "windows of 10 steps".
            [answer.form ? "starts" : "steps", `${count(drawn)}, ${count(distinct)} different`],
            ...(answer.form ? [["each of", answer.form]] : []),
            ["legal starts", `${count(answer.legal_starts)}, or ${count(answer.legal_starts_without_next)} with WithoutNext`],
            ["probability", range(answer.probabilities)],
            ["weight", range(answer.weights)],
            ["mean age", `${count(mmr.mean(answer.ages))} steps`],
            ["priorities", answer.priorities ? (overview.priorities ? "a copy of the stored ones" : `none are stored: ${answer.ranked ? "ties are ranked by position" : "all are equal"}`) : "not used"],
          ]),
          weights,
        ),
        card("", "Drawn steps", alike ? "all are equally probable; newest first" : "most probable first", tiles(answer, order)),
      );
      mmr.bars(ages, 190, { edges: answer.edges, series, label: "Histogram of the ages of drawn and stored steps" });
      if (range(answer.weights).includes(" to ")) weights.before(el("h3", {}, "Weights"));
      const low = Math.min(...answer.weights);
      const high = Math.max(...answer.weights);
      if (high > low) {
        const bins = 24;
        const edges = Array.from({ length: bins + 1 }, (_, i) => low + ((high - low) * i) / bins);
        const counts = new Array(bins).fill(0);
        for (const weight of answer.weights) counts[Math.min(bins - 1, Math.floor(((weight - low) / (high - low)) * bins))]++;
        mmr.bars(weights, 110, { edges, counts, colour: "s3", label: "Histogram of weights" });
      }
      mmr.dropCharts();
    }

    function range(values) {
      const [low, high] = [number(Math.min(...values)), number(Math.max(...values))];
      return low === high ? low : `${low} to ${high}`;
    }

    function tiles(answer, order) {
      return el(
        "ul",
        { class: "tiles" },
        order.map((i) => {
          const env = answer.env_ids[i];
          const position = answer.positions[i];
          const name = `${env} : ${count(position)}`;
          const isSaved = !saved || saved.some((each) => each.env === env && each.begin <= position && position < each.stop);
          return el(
            "li",
            {},
            el(
              isSaved ? "a" : "span",
              isSaved ? { href: app.link(`e=${env}:${position}`) } : {},
              image && !mmr.isSaved() ? mmr.thumb(id, image.path, env, position) : null,
              el("span", { class: "mono" }, name),
            ),
            mmr.muted(`p ${number(answer.probabilities[i])}`, el("br"), `w ${number(answer.weights[i])}`),
          );
        }),
      );
    }

    app.leave = () => {
      stopped = true;
    };
    await load(seed);
  };
})();
