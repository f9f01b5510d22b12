"use strict";
// Frames: raw uint8 from the server, painted without a codec.
(() => {
  const { el } = mmr;

  mmr.paint = (canvas, frame) => {
    const { width, height, channels, data } = frame;
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const context = canvas.getContext("2d", { alpha: false });
    const image = context.createImageData(width, height);
    const out = new Uint32Array(image.data.buffer);
    const count = width * height;
    if (channels === 1) {
      for (let i = 0; i < count; i++) {
        const value = data[i];
        out[i] = 0xff000000 | (value << 16) | (value << 8) | value;
      }
    } else {
      for (let i = 0, k = 0; i < count; i++, k += 3) {
        out[i] = 0xff000000 | (data[k + 2] << 16) | (data[k + 1] << 8) | data[k];
      }
    }
    context.putImageData(image, 0, 0);
  };

  function framesOf({ head, body, start }) {
    const [, height, width, channels] = head.shape;
    const nbytes = height * width * channels;
    return head.at.map(([env, position], i) => ({
      env, position, width, height, channels, low: head.low, high: head.high,
      data: new Uint8Array(body, start + i * nbytes, nbytes),
    }));
  }

  // The generation and cut rows that a version begins with: frames of these never change.
  const frozen = (id) => {
    const version = mmr.app.states[id]?.version;
    return version ? { v: version.split(".").slice(0, 2).join(".") } : {};
  };

  async function readFrames(id, query) {
    return framesOf(await mmr.binary(mmr.path(id, "frames", query)));
  }

  // A saved page has frames in blocks that begin with the episode.
  async function readBlock(id, field, env, begin, position) {
    const { frames, side } = mmr.app.settings;
    const first = begin + Math.floor((position - begin) / frames) * frames;
    return readFrames(id, { field, env, first, count: frames, side });
  }

  // Small frames of the table: asked for together, 90 at a time.
  const MAX_THUMBS = 1500;
  const thumbs = new Map();
  let pending = [];
  let timer = 0;

  mmr.thumb = (id, field, env, position, begin = position) => {
    const canvas = el("canvas", { width: 1, height: 1, "aria-hidden": "true" });
    const key = `${id}/${field}/${env}:${position}/${frozen(id).v}`;
    const known = thumbs.get(key);
    if (known) mmr.paint(canvas, known);
    else {
      pending.push({ id, field, env, position, begin, key, canvas });
      timer ||= setTimeout(readThumbs, 30);
    }
    return canvas;
  };

  async function readThumbs() {
    timer = 0;
    const batch = pending.splice(0, 90);
    if (pending.length) timer = setTimeout(readThumbs, 30);
    const groups = new Map();
    for (const wish of batch) {
      const key = `${wish.id}/${wish.field}`;
      groups.set(key, [...(groups.get(key) ?? []), wish]);
    }
    for (const wishes of groups.values()) {
      try {
        await fillThumbs(wishes);
      } catch {
        // The rows left the ring: the boxes stay grey.
      }
    }
    while (thumbs.size > MAX_THUMBS) thumbs.delete(thumbs.keys().next().value);
  }

  async function fillThumbs(wishes) {
    const [{ id, field }] = wishes;
    let found = [];
    if (mmr.isSaved()) {
      for (const wish of wishes) {
        found.push(...(await readBlock(id, field, wish.env, wish.begin, wish.position)));
      }
    } else {
      const at = wishes.map((wish) => `${wish.env}:${wish.position}`).join(",");
      found = await readFrames(id, { field, side: 84, at, ...frozen(id) });
    }
    const byRow = new Map(found.map((frame) => [`${frame.env}:${frame.position}`, frame]));
    for (const wish of wishes) {
      const frame = byRow.get(`${wish.env}:${wish.position}`);
      if (!frame) continue;
      thumbs.set(wish.key, frame);
      mmr.paint(wish.canvas, frame);
    }
  }

  // Frames of one episode. One request at a time, and the newest wish is next. Every frame
  // that arrives for a wish is shown, also where a newer wish waits: a playhead that is
  // dragged without a pause still shows frames. Neighbours are read when nothing waits and
  // the playhead moves step by step: those of a jump would delay the next one.
  const NEAR = 8;
  class Reel {
    constructor(id, field, env, begin, end) {
      Object.assign(this, { id, field: field.path, env, begin, end });
      const { height, width, channels } = field.image;
      const nbytes = height * width * (field.dtype === "uint8" ? channels : 3);
      this.perRequest = Math.max(1, Math.min(48, Math.floor((2 << 20) / nbytes)));
      this.mostFrames = Math.max(64, Math.floor((96 << 20) / nbytes));
      this.frames = new Map();
      this.busy = false;
      this.wish = null;
    }

    get(step) {
      return this.frames.get(this.begin + step);
    }

    async want(step, direction, show) {
      const near = Math.abs(step - (this.last ?? step)) <= NEAR;
      this.last = step;
      this.wish = { step, direction, show, near };
      if (this.busy) return;
      this.busy = true;
      try {
        while (this.wish) {
          const wish = this.wish;
          this.wish = null;
          if (!this.get(wish.step)) await this.read(this.begin + wish.step, 1);
          wish.show(wish.step, this.get(wish.step));
          if (this.wish || !wish.near) continue;
          const missing = this.nextMissing(wish.step, wish.direction);
          if (missing == null) continue;
          const back = wish.direction < 0;
          const room = back ? missing - this.begin + 1 : this.end - missing;
          const count = Math.min(this.perRequest, room);
          await this.read(back ? missing - count + 1 : missing, count);
        }
      } catch (error) {
        show(step, null, error);
      }
      this.busy = false;
    }

    async read(first, count) {
      const found = mmr.isSaved()
        ? await readBlock(this.id, this.field, this.env, this.begin, first)
        : await readFrames(this.id, {
            field: this.field, env: this.env, first, count, ...frozen(this.id),
          });
      for (const frame of found) {
        this.frames.delete(frame.position);
        this.frames.set(frame.position, frame);
      }
      while (this.frames.size > this.mostFrames) {
        this.frames.delete(this.frames.keys().next().value);
      }
    }

    nextMissing(step, direction) {
      if (!direction) return null;
      for (let i = 1; i <= this.perRequest; i++) {
        const position = this.begin + step + Math.sign(direction) * i;
        if (position < this.begin || position >= this.end) return null;
        if (!this.frames.has(position)) return position;
      }
      return null;
    }
  }
  mmr.Reel = Reel;
})();
