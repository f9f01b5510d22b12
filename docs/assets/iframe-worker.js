/* Search in pages that are opened as files.
 *
 * The theme searches in a Web Worker, and browsers start no worker from file://. There
 * this class takes the place of Worker: it runs the same script in a hidden frame.
 */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === this.scope) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        }
      });
      // A message is delivered once the script has been loaded.
      this.loaded = new Promise((resolve) => {
        window.addEventListener("load", resolve, { once: true });
        frame.addEventListener("load", resolve, { once: true });
      });
      const page = frame.contentDocument;
      page.open();
      page.write(
        "<script>" +
          "self.postMessage = (data) => parent.postMessage(data, '*');" +
          "self.importScripts = (...urls) => Promise.all(urls.map((url) =>" +
          "  new Promise((done) => {" +
          "    const script = document.createElement('script');" +
          "    script.src = url; script.onload = done;" +
          "    document.head.appendChild(script);" +
          "  })));" +
          "</scr" + "ipt><script src='" + url + "'></scr" + "ipt>"
      );
      page.close();
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.scope.dispatchEvent(new MessageEvent("message", { data: data }))
      );
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
