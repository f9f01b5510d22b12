"use strict";
// Requests of the page, always to its own host. A saved page has their answers in
// data-NNN.js, which call mmr.saved before anything is asked.
window.mmr = { screens: {} };
(() => {
  const store = new Map();

  mmr.RESTARTED = "The server was started again. Open the address that mmreplay view printed.";

  class Refused extends Error {
    constructor(text, status) {
      super(text);
      this.status = status;
    }
  }

  function normalized(key) {
    const url = new URL(key, "http://page");
    url.searchParams.sort();
    return url.pathname + url.search;
  }

  mmr.saved = (key, type, base64) => store.set(normalized(key), base64);
  mmr.isSaved = () => store.size > 0;

  function bytesOf(path) {
    const base64 = store.get(normalized(path));
    if (base64 === undefined) {
      throw new Refused("This is not in the saved page.", 404);
    }
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  }

  // What was answered is shown again where the folder was removed since.
  const MAX_KEPT_NBYTES = 64 << 20;
  const kept = new Map();
  let keptNbytes = 0;

  function keep(path, body) {
    keptNbytes += body.byteLength - (kept.get(path)?.byteLength ?? 0);
    kept.delete(path);
    kept.set(path, body);
    for (const [oldest, { byteLength }] of kept) {
      if (keptNbytes <= MAX_KEPT_NBYTES) break;
      kept.delete(oldest);
      keptNbytes -= byteLength;
    }
    return body;
  }

  // The body of an answer.
  async function request(path) {
    const response = await fetch(path).catch(() => {
      throw new Refused("mmreplay view has ended. Start it again, and open the address that it prints.", 0);
    });
    if (response.ok) return keep(path, await response.arrayBuffer());
    if (response.status === 403) throw new Refused(mmr.RESTARTED, 403);
    const body = await response.json().catch(() => ({}));
    if (body.removed && kept.has(path)) return kept.get(path);
    if (body.removed) throw new Refused("Its folder was removed before this was read. What was looked at before is still shown.", response.status);
    throw new Refused(body.error ?? `The server answered ${response.status}.`, response.status);
  }

  const textOf = async (path) =>
    new TextDecoder().decode(mmr.isSaved() ? bytesOf(path) : await request(path));

  mmr.json = async (path) => {
    return JSON.parse(await textOf(path));
  };

  // JSON in which whole numbers of 16 digits and more stay texts: a number would round them.
  mmr.exactJson = async (path) => {
    const text = await textOf(path);
    const exact = text.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, (token) =>
      /^-?\d{16,}$/.test(token) ? `"${token}"` : token,
    );
    return JSON.parse(exact);
  };

  const isSavedEpisode = (id, env, begin) =>
    store.has(normalized(`/api/b/${id}/episode?env=${env}&at=${begin}`));

  // The episodes of a saved page, environment by environment: a table may list more.
  mmr.savedEpisodes = async (id) => {
    const { rows } = await mmr.json(`/api/b/${id}/episodes`);
    return rows
      .map(([env, begin, length, , , , , stop]) => ({ env, begin, stop: stop ?? begin + length }))
      .filter(({ env, begin }) => isSavedEpisode(id, env, begin))
      .sort((a, b) => a.env - b.env || a.begin - b.begin);
  };
  mmr.canOpen = (id, env, begin) => !mmr.isSaved() || isSavedEpisode(id, env, begin);

  // A binary answer: MMRV, length of the head, head as JSON, arrays.
  mmr.binary = async (path) => {
    const body = mmr.isSaved()
      ? bytesOf(path).buffer
      : await request(path);
    const view = new DataView(body);
    if (body.byteLength < 8 || view.getUint32(0) !== 0x4d4d5256) {
      throw new Refused("The server sent something else than an answer.", 0);
    }
    const length = view.getUint32(4, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 8, length)));
    return { head, body, start: 8 + length };
  };

  mmr.path = (id, what, query = {}) => {
    const text = new URLSearchParams(query).toString();
    return `/api/b/${id}/${what}${text ? `?${text}` : ""}`;
  };
})();
