"use strict";
// Two buffers on the same axes; what differs in their schemas comes first.
(() => {
  const { el, card, count, number, nothing, key } = mmr;

  mmr.screens.compare = async (main, query) => {
    const app = mmr.app;
    const id = app.id;
    const others = app.buffers.filter((buffer) => buffer.id !== id);
    if (!others.length) throw new Error("There is one buffer on this page. Start mmreplay view with two paths.");
    const wanted = Number(query.get("c") ?? others[0].id);
    const other = others.find((buffer) => buffer.id === wanted) ?? others[0];
    let stopped = false;

    const note = el("span", { class: "muted", role: "status" });
    const go = () => (location.hash = app.link(`compare&c=${choose.value}`));
    const choose = mmr.select({ id: "other" }, go, others.map((buffer) => [buffer.id, buffer.name]), other.id);
    const content = el("div", { class: "wide-grid" });
    main.replaceChildren(
      el("div", { class: "title" }, el("h1", {}, "Compare"), mmr.field("with", choose), note),
      content,
    );

    async function load() {
      const answer = await mmr.json(mmr.path(id, "compare", { c: String(other.id) }));
      if (stopped) return;
      note.textContent = answer.done < 1 ? `returns are being read: ${Math.floor(100 * answer.done)} %` : "";
      show(answer);
      if (answer.done < 1) setTimeout(() => stopped || load().catch((error) => (note.textContent = error.message)), 2000);
    }

    function show(answer) {
      const [first, second] = answer.names;
      const later = [];
      // No card stands alone beside an empty place.
      const odd = answer.histograms.length % 2;
      const cards = answer.histograms.map((each, number_) => {
        const box = el("div");
        const sums = each.counts.map((counts) => counts.reduce((sum, n) => sum + n, 0));
        if (each.values) {
          const rows = each.values.map((value, i) =>
            el(
              "tr",
              {},
              el("th", { scope: "row", class: "mono" }, number(value)),
              each.counts.map((counts, k) => el("td", { class: "num" }, `${count(counts[i])} (${mmr.share(sums[k] ? counts[i] / sums[k] : 0)})`)),
            ),
          );
          const head = el("tr", {}, ["value", first, second].map((name, i) => el("th", { scope: "col", class: i ? "num" : "" }, name)));
          box.append(el("table", { class: "names" }, el("thead", {}, head), el("tbody", {}, rows)));
        } else {
          // Shares in percent: the buffers may hold different numbers of rows.
          const series = each.counts.map((counts, k) => ({
            name: answer.names[k],
            counts: counts.map((n) => (sums[k] ? +((100 * n) / sums[k]).toFixed(2) : 0)),
            colour: k ? "s1" : "s0",
          }));
          later.push(() => mmr.bars(box, 170, { edges: each.edges, series, label: `Histograms of ${each.name} of both buffers, in percent` }));
        }
        const noteText = `${count(sums[0])} and ${count(sums[1])}${each.role === "episode" ? " whole ones" : ""}${each.values ? "" : "; in percent"}`;
        return card(odd && number_ === answer.histograms.length - 1 ? "" : "c6", each.role === "episode" ? `Episode ${each.name}s` : each.name, noteText, box);
      });
      const differences = answer.schema.length
        ? el("ul", { class: "plain-list" }, answer.schema.map((sentence) => el("li", {}, sentence)))
        : nothing("The schemas are the same.");
      content.replaceChildren(
        card("", "Differences of the schemas", answer.schema.length ? count(answer.schema.length) : "", differences),
        el("div", { class: "legend" }, key(first, "s0"), key(second, "s1")),
        ...(cards.length ? cards : [nothing("There is nothing that both buffers have.")]),
      );
      for (const draw of later) draw();
      mmr.dropCharts();
    }

    app.leave = () => {
      stopped = true;
    };
    await load();
  };
})();
